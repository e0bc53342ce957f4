"""A hybrid of Mamba, attention and experts, quantized by ``--recipe nemotron``: tokens of vLLM against transformers.

    python -m nvfp4_cute.bench.vllm.hybrid --out FOLDER

This command makes a small model with random weights, quantizes it in both layouts, and serves it with the plug-in. Transformers
then judges vLLM's tokens: each should have the highest logit after the same tokens, up to rounding.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute import env

LAYOUTS = ("modelopt", "compressed-tensors")
BLOCKS = ("mamba", "attention", "moe", "mamba", "moe")
# vLLM on the CPU refuses experts without a gate, which Nemotron-H has.
CPU_BLOCKS = ("mamba", "attention", "mlp", "mamba")
# N of every FP8 layer is a multiple of 16. vLLM 0.32 fails to load others on a GPU, because it sets an attribute of padded
# weights twice.
SIZES = {
    "vocab_size": 1024, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 256,
    "chunk_size": 64, "initializer_range": 0.08,
}  # fmt: skip
PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [9, 8, 7], [100, 50, 25, 12, 6, 3, 1, 200, 201], list(range(3, 90)))
TOKENS = 16
TOLERANCE = 0.5
"""Largest difference of logits by which vLLM's token may miss the highest one.

The two add up in different orders. FP8 rows then round some values to a neighbour, and experts with close scores swap places.
"""


def make_hybrid(folder: Path, blocks: tuple[str, ...] = BLOCKS, **changes: Any) -> Any:
    """Writes a Nemotron-H with random weights in bfloat16; returns the model.

    Args:
        folder: gets config.json and safetensors.
        blocks: types of layers.
        changes: entries of the config to replace.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("nemotron_h", layers_block_type=list(blocks), **(SIZES | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


def quantize_hybrid(source: Path, folder: Path, layout: str) -> Path:
    """Quantizes by type of layer, with ``nvfp4-cute quantize --recipe nemotron``; returns ``folder``."""
    command = ["quantize", str(source), "--out", str(folder), "--recipe", "nemotron", "--layout", layout]
    subprocess.run([sys.executable, "-m", "nvfp4_cute", *command], check=True)
    return folder


def served(folder: Path, device: str) -> dict[str, Any]:
    """Returns vLLM's greedy tokens after ``PROMPTS``, and the class that computes each kind of layer."""
    env.set_for_engine({
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "nvfp4_cute", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    })  # fmt: skip
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        str(folder), dtype="float32" if device == "cpu" else "bfloat16", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=128, max_num_seqs=8, max_num_batched_tokens=256, kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.02, enable_prefix_caching=False,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], greedy, use_tqdm=False)
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    computed = {
        name.rpartition(".")[2]: type(module.quant_method).__name__
        for name, module in model.named_modules()
        if hasattr(module, "quant_method")
    }
    quantization = llm.llm_engine.vllm_config.model_config.quantization
    llm.llm_engine.engine_core.shutdown()
    return {
        "quantization": quantization, "computed": computed, "tokens": [list(o.outputs[0].token_ids) for o in outputs]
    }  # fmt: skip


def judged(folder: Path, tokens: list[list[int]], device: str) -> dict[str, Any]:
    """Judges tokens by the logits of transformers after the same tokens.

    Returns:
        "equal": number of tokens with the highest logit; "of": number of tokens; "missed": largest difference of a token's logit
        from the highest one; "spread": standard deviation of logits.
    """
    from transformers import AutoModelForCausalLM

    from nvfp4_cute.models import transformers as ours

    options: dict[str, Any] = (
        {"dtype": torch.float32} if device == "cpu" else {"dtype": torch.bfloat16, "device_map": device}
    )
    is_quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    load: Any = ours.load if is_quantized else AutoModelForCausalLM.from_pretrained
    model = load(folder, **options)
    if device == "cpu":  # some loaders of transformers keep the file's dtype for tensors that they rename
        torch.nn.Module.float(model)
    equal, missed, spread = 0, 0.0, 0.0
    for prompt, answer in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1))[:, 0]
        equal += int((logits.argmax(1) == torch.tensor(answer)).sum())
        missed = max(missed, float((logits.amax(1) - chosen).max()))
        spread = max(spread, float(logits.std()))
    return {"equal": equal, "of": sum(map(len, tokens)), "missed": missed, "spread": spread}


def main() -> int:
    """Returns 1 if vLLM fails, or if a token of vLLM misses transformers' highest logit by more than ``TOLERANCE``."""
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4_cute.bench.vllm.hybrid", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder for models and hybrid.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--serve", metavar="LAYOUT", help=argparse.SUPPRESS
    )  # a process of its own per engine
    args = parser.parse_args()
    if args.serve:
        print("served", json.dumps(served(args.out / args.serve, args.device)), flush=True)
        os._exit(0)  # vLLM's threads would keep the process
    make_hybrid(args.out / "source", CPU_BLOCKS if args.device == "cpu" else BLOCKS)
    found: dict[str, Any] = {}
    code = 0
    for layout in ("source", *LAYOUTS):  # in 16 bits first: how far the two agree without quantization
        if layout != "source":
            quantize_hybrid(args.out / "source", args.out / layout, layout)
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            "--out",
            str(args.out),
            "--device",
            args.device,
            "--serve",
            layout,
        ]
        run = subprocess.run(command, capture_output=True, text=True)
        line = next((one for one in run.stdout.splitlines() if one.startswith("served ")), None)
        if line is None:
            print(f"{layout}: vLLM failed: {run.stderr[-3000:]}", flush=True)
            found[layout], code = {"error": run.stderr[-3000:]}, 1
        else:
            found[layout] = json.loads(line.removeprefix("served "))
            found[layout] |= judged(args.out / layout, found[layout]["tokens"], args.device)
            one = found[layout]
            code = max(code, int(one["missed"] > TOLERANCE))
            print(
                f"{layout}: {one['equal']} of {one['of']} tokens of vLLM have transformers' highest logit; the others miss it "
                f"by at most {one['missed']:.3f}, logits spread {one['spread']:.2f}; {one['computed']}", flush=True
            )  # fmt: skip
        (args.out / "hybrid.json").write_text(json.dumps(found, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
