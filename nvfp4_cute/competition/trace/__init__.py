"""Problems of FlashInfer-Bench and SOL-ExecBench: written from folders of sources, and evaluated by their rules."""
