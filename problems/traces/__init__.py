"""Problems in the schema of FlashInfer-Bench and SOL-ExecBench, one folder each: spec, reference, kernel."""
