"""Answers of vLLM, in one process with one engine, by batch size and by whether prompts are computed in chunks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nvfp4_cute import env, set_batch_invariant
from nvfp4_cute.bench.invariance.answers import BATCHES, CHUNK, LONGEST, TOKENS, Answer

Mode = Literal["on", "layers off", "off"]
"""``VLLM_BATCH_INVARIANT=1``; the same with this package's layers outside of the mode; neither."""
CPU = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
GPU = {"dtype": "bfloat16", "kv_cache_memory_bytes": 3 << 29, "gpu_memory_utilization": 0.02}
GRAPHS = {
    "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]
}  # fmt: skip
ROWS = 8192  # rows of a step without chunks, more than all prompts of a batch have


class Engine:
    """One engine of vLLM.

    Args:
        folder: checkpoint.
        mode: see ``Mode``.
        options: options of ``LLM``, in addition to those of every engine here.
        device: "cuda" or "cpu".
        eager: whether no CUDA graphs are captured. Otherwise decoding steps replay graphs, and prompts run eagerly.
        tokens: length of answers.
    """

    def __init__(
        self,
        folder: Path,
        mode: Mode,
        options: Mapping[str, Any],
        *,
        device: str = "cuda",
        eager: bool = False,
        tokens: int = TOKENS,
    ):
        env.set_for_engine(
            {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_PLUGINS": "nvfp4_cute",
                "VLLM_BATCH_INVARIANT": str(int(mode != "off")),
            }  # fmt: skip
        )
        from vllm import LLM
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        if mode == "layers off":  # the plug-in has switched the mode on, and no longer reads the variable
            set_batch_invariant(False)
        usual: dict[str, Any] = dict(
            skip_tokenizer_init=True, max_model_len=LONGEST + tokens + 16, max_num_seqs=max(BATCHES),
            max_num_batched_tokens=ROWS, enable_prefix_caching=False, seed=0, enforce_eager=eager or device == "cpu",
        )  # fmt: skip
        if device == "cpu":
            usual |= CPU
        else:
            usual |= GPU
            if not eager:
                usual["compilation_config"] = GRAPHS
        self.tokens = tokens
        self.engine: Any = LLM(str(folder), **usual | dict(options))

    @property
    def core(self) -> Any:
        """The engine's core, in this process."""
        return self.engine.llm_engine.engine_core.engine_core

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.engine.llm_engine.vllm_config.model_config.get_vocab_size()

    def answer(self, prompts: list[list[int]], is_chunked: bool) -> list[Answer]:
        """Returns greedy answers to all prompts, which the scheduler runs as one batch."""
        from vllm import SamplingParams

        self.core.scheduler.max_num_scheduled_tokens = CHUNK if is_chunked else ROWS
        greedy = SamplingParams(
            temperature=0, max_tokens=self.tokens, logprobs=0, detokenize=False, ignore_eos=True
        )
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [one.outputs[0] for one in self.engine.generate(given, greedy, use_tqdm=False)]
        return [
            Answer(
                tuple(one.token_ids),
                tuple(step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)),
            )
            for one in outputs
        ]

    def close(self) -> None:
        """Ends the engine."""
        self.engine.llm_engine.engine_core.shutdown()


def dummy_options() -> dict[str, Any]:
    """Makes vLLM's dummy loader fill weights with random values of useful size; returns options of ``LLM`` that use it."""
    import vllm.model_executor.model_loader.dummy_loader as dummy_loader

    from nvfp4_cute.bench.vllm.engine import load_weights

    dummy_loader.DummyModelLoader.load_weights = load_weights
    return {"load_format": "dummy"}
