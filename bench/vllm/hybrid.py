"""A hybrid of Mamba, attention and experts, quantized by ``--recipe nemotron``: vLLM against transformers and the reference.

    python -m nvfp4_cute.bench.vllm.hybrid --out FOLDER

This command makes a small model with random weights, quantizes it in both layouts, and serves it with the plug-in. It compares
every call of a quantized layer with the reference, for the same rows. It judges vLLM's tokens by the float32 logits of
transformers after the same tokens. On a GPU, it also judges the tokens that transformers chooses in bfloat16: rounded rows change
the choice among experts with close scores, so two correct programs in 16 bits differ in about every fifth token.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute import env
from nvfp4_cute.models.checkpoints import Checkpoint
from nvfp4_cute.models.layers import experts_module, linear_module

# Result, rows, and for experts ids and weights of each call, by name of the layer in the checkpoint.
Calls = dict[str, list[tuple[torch.Tensor, ...]]]
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
"""Largest difference of logits by which vLLM's token may miss the highest one in float32.

The two add up in different orders. FP8 rows then round some values to a neighbour.
"""
LAYER_TOLERANCE = 0.01
"""Largest relative error of a layer's call. Rounding to 16 bits causes errors of 0.002 to 0.005."""
WORSE = 3.0
"""Largest ratio of the mean differences from the highest logit: of vLLM's tokens in 16 bits, and of transformers' in 16 bits."""


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
    """Returns vLLM's greedy tokens after ``PROMPTS``, the class that computes each kind of layer, and errors of layers.

    "layers" has the largest relative error of each quantized layer (``layer_errors``).
    """
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
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    calls = recorded(model)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], greedy, use_tqdm=False)
    computed = {
        name.rpartition(".")[2]: type(module.quant_method).__name__
        for name, module in model.named_modules()
        if hasattr(module, "quant_method")
    }
    quantization = llm.llm_engine.vllm_config.model_config.quantization
    llm.llm_engine.engine_core.shutdown()
    return {
        "quantization": quantization, "computed": computed, "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "layers": layer_errors(folder, calls),
    }  # fmt: skip


def recorded(model: torch.nn.Module) -> Calls:
    """Records all later calls of layers of vLLM, by name of the layer in the checkpoint."""
    calls: Calls = {}
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if not hasattr(method, "apply"):
            continue
        own = calls[name.replace("model.layers.", "backbone.layers.").removesuffix(".routed_experts")] = []
        method.apply = _recording(method.apply, own)
    return calls


def _recording(apply: Callable[..., Any], calls: list[tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    def record(layer: Any, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        y = apply(layer, x, *rest, **named)
        routes = [named[key] for key in ("topk_ids", "topk_weights") if key in named]
        calls.append(tuple(t.detach().float().cpu() for t in (y, x, *routes)))
        return y

    return record


def layer_errors(folder: Path, calls: Calls) -> dict[str, float]:
    """Returns the largest relative error of each quantized layer, from what the reference computes for the same rows."""
    checkpoint = Checkpoint(folder)
    errors: dict[str, float] = {}
    for name, own in calls.items():
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        if name in checkpoint.linears:
            module: Any = linear_module(checkpoint.linear(name), None, **options)
        elif name in checkpoint.experts:
            experts = checkpoint.read_experts(name)
            module = experts_module(experts, checkpoint.experts_config.activation, **options)
        else:
            continue
        for y, x, *routes in own:
            routes[:1] = [ids.long() for ids in routes[:1]]
            expected = module(x, *routes).double()
            error = float((y.double() - expected).norm() / expected.norm())
            errors[name] = max(errors.get(name, 0.0), error) if error == error else error
    return errors


def judged(folder: Path, tokens: list[list[int]], device: str) -> dict[str, Any]:
    """Judges tokens by the logits of transformers in float32 after the same tokens.

    Returns:
        "equal": number of tokens with the highest logit; "of": number of tokens; "missed" and "mean": largest and mean difference
        of a token's logit from the highest one; "spread": standard deviation of logits; on a GPU also "transformers": the same
        of the tokens that transformers chooses there in bfloat16.
    """
    logits = _logits(folder, tokens, "cpu")
    found = _missed(logits, [torch.tensor(answer) for answer in tokens])
    found["spread"] = max(float(one.std()) for one in logits)
    if device != "cpu":
        found["transformers"] = _missed(logits, [one.argmax(1) for one in _logits(folder, tokens, device)])
    return found


def _logits(folder: Path, tokens: list[list[int]], device: str) -> list[torch.Tensor]:
    """Returns transformers' logits from which each of the tokens is chosen: in float32 on the CPU, in bfloat16 on a GPU."""
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
    found = []
    for prompt, answer in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=device)
        with torch.no_grad():
            found.append(model(ids).logits[0, len(prompt) - 1 : -1].float().cpu())
    return found


def _missed(logits: list[torch.Tensor], chosen: list[torch.Tensor]) -> dict[str, Any]:
    pairs = zip(logits, chosen, strict=True)
    away = torch.cat([one.amax(1) - one.gather(1, answer.unsqueeze(1))[:, 0] for one, answer in pairs])
    equal = int((away == 0).sum())
    return {"equal": equal, "of": len(away), "missed": float(away.max()), "mean": float(away.mean())}


def is_right(found: dict[str, Any]) -> bool:
    """Returns whether all layers and tokens of a run are as close as rounding explains."""
    other = found.get("transformers")
    is_close = (
        found["missed"] <= TOLERANCE if other is None else found["mean"] <= WORSE * other["mean"] + 0.01
    )
    layers = found["layers"]
    has_layers = bool(layers) or found["quantization"] is None
    return is_close and has_layers and all(error <= LAYER_TOLERANCE for error in layers.values())


def main() -> int:
    """Returns 1 if vLLM fails, or if layers or tokens are further away than rounding explains."""
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
        return serve(args.serve, args.out, args.device)
    make_hybrid(args.out / "source", CPU_BLOCKS if args.device == "cpu" else BLOCKS)
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--out",
        str(args.out),
        "--device",
        args.device,
        "--serve",
    ]
    found: dict[str, Any] = {}
    # "source" has 16-bit weights, and shows how far vLLM and transformers agree without quantization.
    running = {layout: subprocess.Popen([*command, layout]) for layout in ("source", *LAYOUTS)}
    codes = [process.wait() for process in running.values()]
    for layout in running:
        file = args.out / f"{layout}.json"
        found[layout] = json.loads(file.read_text()) if file.exists() else {"error": "vLLM failed"}
    (args.out / "hybrid.json").write_text(json.dumps(found, indent=1))
    return int(any(codes))


def serve(layout: str, out: Path, device: str) -> int:
    """Quantizes, serves and judges one checkpoint. Prints and writes each result as soon as it is known."""
    folder, file = out / layout, out / f"{layout}.json"
    if layout != "source":
        quantize_hybrid(out / "source", folder, layout)
    found = served(folder, device)
    file.write_text(json.dumps(found))
    print(f"{layout}: {layers_described(found)}; {found['computed']}", flush=True)
    found |= judged(folder, found["tokens"], device)
    file.write_text(json.dumps(found))
    print(f"{layout}: {described(found)}", flush=True)
    os._exit(int(not is_right(found)))  # vLLM's threads would keep the process


def layers_described(one: dict[str, Any]) -> str:
    """Returns how far layers are from the reference."""
    layers: dict[str, float] = one["layers"]
    worst = max(layers, key=layers.__getitem__, default="none")
    return f"{len(layers)} layers, relative error at most {layers.get(worst, 0.0):.4f} ({worst})"


def described(one: dict[str, Any]) -> str:
    """Returns how far tokens are from transformers."""
    tokens = lambda found: (
        f"{found['equal']} of {found['of']} with the highest logit, "
        f"missed by at most {found['missed']:.3f}, mean {found['mean']:.4f}"
    )
    text = f"tokens of vLLM: {tokens(one)} (logits spread {one['spread']:.2f})"
    if "transformers" in one:
        text += f"; of transformers in bfloat16: {tokens(one['transformers'])}"
    return text


if __name__ == "__main__":
    sys.exit(main())
