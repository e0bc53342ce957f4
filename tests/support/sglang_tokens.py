"""Greedy tokens of a checkpoint through SGLang on the CPU: sglang_tokens.py FOLDER [NAME=VALUE of sglang.Engine ...]."""

import json
import os
import sys

from token_checks import PROMPTS, TOKENS

ENVIRONMENT = {
    "SGLANG_PLUGINS": "nvfp4_cute",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def main() -> None:
    """Prints "tokens" and the tokens that follow PROMPTS, in bfloat16, the only dtype that SGLang takes for every tool."""
    options = {name: json.loads(value) for name, value in (one.split("=") for one in sys.argv[2:])}
    os.environ.update(ENVIRONMENT)
    ranks, cores = options.get("tp_size", 1), os.cpu_count() or 1
    if ranks > 1:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(ranks))
    import sglang

    llm = sglang.Engine(
        model_path=sys.argv[1], dtype="bfloat16", device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        skip_tokenizer_init=True, disable_radix_cache=True, context_length=64, max_total_tokens=512, max_running_requests=8,
        log_level="warning", **options,
    )  # fmt: skip
    greedy = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answers = llm.generate(input_ids=[list(prompt) for prompt in PROMPTS], sampling_params=greedy)
    print("tokens", json.dumps([answer["output_ids"] for answer in answers]), flush=True)
    os._exit(0)  # SGLang's processes end with their parent


if __name__ == "__main__":
    main()
