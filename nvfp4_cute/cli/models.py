"""`nvfp4-cute models`: what is in a checkpoint, what would run where, how fast whole models are, and how far from 16 bits."""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb
from nvfp4_cute.text_table import text_table

EXAMPLES = """\
examples:
  nvfp4-cute models inspect FOLDER                      what is in a checkpoint, and what would compute it
  nvfp4-cute models bench qwen3-8b                      random weights of a real config: bf16, and NVFP4 beside it
  nvfp4-cute models bench qwen3-30b-a3b --batch 8       eight sequences at once
  nvfp4-cute models bench FOLDER --ways nvfp4 --json    a config.json of yours, one way, for machines
  nvfp4-cute models eval FOLDER --text FILE             KL divergence and perplexity of 4 bits beside 16, error by layer
  nvfp4-cute models eval FOLDER --text FILE --checkpoint QUANTIZED    of a checkpoint that was made of it
"""
WAYS = ("bf16", "16bit", "nvfp4")
WORST_LAYERS = 3  # of each way, that are printed


def add_parser(verbs: Verbs) -> None:
    """Add the verb, its verbs and their options."""
    text = "Look into checkpoints of quantized models, and measure whole models."
    parser = add_verb(verbs, "models", text, EXAMPLES)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    look = kinds.add_parser("inspect", help="what is in a checkpoint, and what would compute it on which GPU")
    look.add_argument("folder", help="of config.json and safetensors files")
    look.add_argument("--json", action="store_true", help="one object, for machines")
    look.set_defaults(run=run_inspect)
    bench = kinds.add_parser("bench", help="tokens per second, prefill and decode, beside bf16")
    bench.add_argument("model", help="a name (--list), a folder with config.json, or such a file")
    bench.add_argument("--batch", type=types.positive, default=1, help="sequences at once; default 1")
    bench.add_argument("--prompt", type=types.positive, default=512, help="tokens of each; default 512")
    bench.add_argument("--tokens", type=types.positive, default=128, help="tokens decoded; default 128")
    bench.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS),
        help="bf16: torch; nvfp4: weights and activations of 4 bits; 16bit: weights only. Default: all",
    )  # fmt: skip
    bench.add_argument("--layers", type=types.positive, help="only so many layers of the model")
    bench.add_argument("--device", default="cuda", help="default cuda")
    bench.add_argument("--json", action="store_true", help="one object, for machines")
    bench.set_defaults(run=run_bench)
    evaluate = kinds.add_parser("eval", help="KL divergence, perplexity and errors beside the 16-bit model")
    evaluate.add_argument("model", type=Path, help="folder of a 16-bit model, with its tokenizer")
    evaluate.add_argument("--text", required=True, help='a text file, or "random" for random tokens')
    evaluate.add_argument(
        "--checkpoint", nargs="+", type=Path, default=[], help="quantized checkpoints of it"
    )
    evaluate.add_argument(
        "--ways", nargs="+", choices=WAYS[1:], help="weights rounded here; default both, or none with --checkpoint"
    )  # fmt: skip
    evaluate.add_argument(
        "--calibrate", metavar="TEXT", help="scales of activations of this text, beside those of each input"
    )
    evaluate.add_argument(
        "--tokens", type=types.positive, help="only so many windows' worth of the text, rounded up"
    )
    evaluate.add_argument("--device", default="cpu", help="default cpu")
    evaluate.add_argument("--json", action="store_true", help="one object, for machines")
    evaluate.set_defaults(run=run_eval)


def run_inspect(args: argparse.Namespace) -> int:
    """Print what is in a folder; 1 where the readers refuse a layer."""
    from nvfp4_cute.models.checkpoints import Checkpoint
    from nvfp4_cute.models.inspect import inspect, what_runs, where_it_runs

    found = inspect(Checkpoint(args.folder))
    if args.json:
        kinds = [k.as_dict() | ({"computed_by": what_runs(k)} if k.scheme else {}) for k in found.kinds]
        print(json.dumps(vars(found) | {"kinds": kinds}, indent=1))
        return bool(found.refusals)
    print(f"{args.folder}: {found.model_type}, {_size(found.nbytes)}, quantization by {found.tool}")
    rows = [
        (
            k.name, str(k.scheme) if k.scheme else k.dtype, str(k.count), k.shape, _size(k.nbytes),
            "" if k.scale_range is None else "{:.3g} to {:.3g}".format(*k.scale_range),
        )
        for k in found.kinds
    ]  # fmt: skip
    print(text_table(("layers", "format", "count", "size of one", "bytes", "global scales"), rows, left=2))
    quantized = [kind for kind in found.kinds if kind.scheme]
    if quantized:
        print("\ncomputed by:")
        ways = {what_runs(kind): None for kind in quantized}
        for way in ways:
            names = ", ".join(kind.name for kind in quantized if what_runs(kind) == way)
            print(f"  {way}: {names}")
        for archs, how in where_it_runs():
            print(f"  on {archs}: {how}")
    for kind in quantized:
        if kind.unequal:
            print(
                f"{kind.name}: gate and up have different global scales in {kind.unequal} layers; both are kept"
            )
    if found.kv_scales:
        print(f"{found.kv_scales} scales of an FP8 KV cache, which are read and not used")
    for refusal in found.refusals:
        print(f"refused: {refusal}")
    return bool(found.refusals)


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def run_bench(args: argparse.Namespace) -> int:
    """Measure, and print a table."""
    import torch

    from nvfp4_cute.models.random_model import config_of, random_model
    from nvfp4_cute.models.speed import measure

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print(
            "nvfp4-cute models bench: no GPU; --device cpu runs, slowly, with the reference", file=sys.stderr
        )
        return 1
    config = config_of(args.model)
    if args.layers:
        _cut(config, args.layers)
    speeds, left_out = [], []
    for way in args.ways:
        try:
            model = random_model(config, way, args.device)
            speeds.append(measure(model, way, batch=args.batch, prompt=args.prompt, tokens=args.tokens))
        except torch.cuda.OutOfMemoryError:
            left_out.append(f"{way}: does not fit the GPU's memory")
        model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    if args.json:
        result = {
            "model": args.model,
            "device": device,
            "torch": torch.__version__,
            "ways": [s.as_dict() for s in speeds],
        }
        print(json.dumps(result | {"left_out": left_out}, indent=1))
        return 0
    print(
        f"{args.model}, random weights, {device}: {args.batch} x {args.prompt} tokens, {args.tokens} decoded"
    )
    header = (
        "weights",
        "GB",
        "peak GB",
        "prefill ms",
        "prefill tok/s",
        "decode ms",
        "decode tok/s",
        "decode by",
    )
    rows = [
        (
            s.way, f"{s.weight_bytes / 1e9:.2f}", f"{s.peak_bytes / 1e9:.2f}", f"{1e3 * s.prefill_s:.2f}",
            f"{s.prefill_rate:.0f}", f"{1e3 * s.decode_s:.3f}", f"{s.decode_rate:.1f}", s.decode,
        )
        for s in speeds
    ]  # fmt: skip
    print(text_table(header, rows))
    for line in left_out:
        print(line)
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """Print how far quantized models are from the 16-bit one."""
    import torch

    from nvfp4_cute.models.accuracy import compare, quantized_copy
    from nvfp4_cute.models.quantizing.calibrate import SAMPLE_TOKENS, largest_inputs, samples

    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            'models eval runs models with transformers: pip install "nvfp4-cute[models]"'
        ) from error
    from nvfp4_cute.models.transformers import load

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": args.device}
    reference = AutoModelForCausalLM.from_pretrained(args.model, **options).eval()
    vocabulary = reference.config.get_text_config().vocab_size
    windows = [ids for ids in samples(args.model, args.text, vocabulary) if ids.shape[1] > 1]
    windows = windows[: -(-args.tokens // SAMPLE_TOKENS)] if args.tokens else windows
    ways: Any = (WAYS[1:] if not args.checkpoint else ()) if args.ways is None else args.ways
    makers: dict[str, Callable[[], Any]] = {way: partial(quantized_copy, reference, way) for way in ways}
    if args.calibrate:
        seen = largest_inputs(reference, samples(args.model, args.calibrate, vocabulary))
        makers["nvfp4, calibrated"] = partial(quantized_copy, reference, "nvfp4", seen)
    makers |= {str(folder): partial(load, str(folder), **options) for folder in args.checkpoint}
    found = {title: compare(reference, make(), windows, title) for title, make in makers.items()}
    if args.json:
        result = {"model": str(args.model), "text": args.text, "torch": torch.__version__}
        print(json.dumps(result | {"ways": {title: a.as_dict() for title, a in found.items()}}, indent=1))
        return 0
    first = next(iter(found.values()))
    print(
        f"{args.model}, {first.tokens} tokens of {args.text}: perplexity of 16 bits {first.reference_perplexity:.4g}"
    )
    header = ("weights", "perplexity", "of 16 bits", "KL, nats", "worst KL", "same choice")
    rows = [
        (
            title, f"{a.perplexity:.4g}", f"{100 * a.ratio:.2f} %", f"{a.kl:.4g}", f"{a.kl_worst:.3g}",
            f"{100 * a.same_choice:.1f} %",
        )
        for title, a in found.items()
    ]  # fmt: skip
    print(text_table(header, rows))
    for title, a in found.items():
        worst = sorted(a.layers.items(), key=lambda item: -item[1])[:WORST_LAYERS]
        print(
            f"{title}, largest errors of layers: " + ", ".join(f"{name} {error:.3f}" for name, error in worst)
        )
    return 0


def _cut(config, layers: int) -> None:
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
