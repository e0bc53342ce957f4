"""Greedy tokens of a checkpoint through vLLM on the CPU. As a program for several ranks: vllm_tokens.py FOLDER RANKS."""

import contextlib
import json
import os
import sys

from token_checks import PROMPTS, TOKENS

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "nvfp4_cute",
    "HF_HUB_OFFLINE": "1",
}


@contextlib.contextmanager
def engine(folder, ranks=1, **options):
    """Returns a vLLM engine for a checkpoint, in float32, where logits have no ties."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    llm = LLM(
        str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
        max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=16 << 20, tensor_parallel_size=ranks, **options,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def tokens(llm, **options):
    """Returns the tokens that follow PROMPTS. ``options``: of ``generate``."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": list(p)} for p in PROMPTS], greedy, use_tqdm=False, **options
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def model_of(llm):
    """Returns the torch.nn.Module that an engine of one process runs."""
    return runner_of(llm).model


def runner_of(llm):
    """Returns the model runner of an engine of one process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


if __name__ == "__main__":
    with engine(sys.argv[1], int(sys.argv[2])) as llm:
        print("tokens", json.dumps(tokens(llm)))
