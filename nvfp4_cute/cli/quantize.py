"""`nvfp4-cute quantize`: a 16-bit checkpoint to a quantized one, in the layout of a tool."""

import argparse
import sys
from pathlib import Path

from nvfp4_cute.cli.verbs import Verbs, add_verb

EXAMPLES = """\
examples:
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt          NVFP4, activations of 4 bits, calibrated on a text
  nvfp4-cute quantize MODEL --out DIR --format nvfp4a16 --search    weights only, every block's scale of least error
  nvfp4-cute quantize MODEL --out DIR --format mxfp8 --layout compressed-tensors
  nvfp4-cute quantize MODEL --out DIR --format nvfp4a16 --keep "*.down_proj"    some layers stay in 16 bits

MODEL is a folder of config.json and safetensors files, one tensor an expert. --calibrate needs transformers (pip install
"nvfp4-cute[models]"); weights alone do not. Output layers, embeddings and routers stay as they are.
"""
FORMATS = ("nvfp4", "nvfp4a16", "mxfp4", "mxfp8")
LAYOUTS = ("modelopt", "compressed-tensors")


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its options."""
    text = "Quantize the weights of a checkpoint and write one that ModelOpt's or compressed-tensors' readers take, and ours."
    parser = add_verb(verbs, "quantize", text, EXAMPLES)
    parser.add_argument("model", type=Path, help="folder of a 16-bit model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--format", choices=FORMATS, default="nvfp4", help="default nvfp4: 4-bit activations, too"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="modelopt", help="default modelopt")
    parser.add_argument("--calibrate", metavar="TEXT", help='a text file, or "random" for random tokens')
    parser.add_argument(
        "--search", action="store_true", help="of several scales a block, that of least squared error"
    )
    parser.add_argument("--keep", nargs="+", default=[], metavar="PATTERN", help="layers to leave in 16 bits")
    parser.add_argument("--device", default="cpu", help="where to calibrate and to round; default cpu")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate if asked for, quantize, and say what was done."""
    from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint

    seen = _calibrated(args) if args.calibrate else None
    done = quantize_checkpoint(
        args.model, args.out, format=args.format, layout=args.layout, seen=seen, search=args.search, keep=args.keep,
        device=args.device,
    )  # fmt: skip
    print(
        f"{args.out}: {done.layers} layers in {args.format}, {done.bytes_before / 1e9:.3f} GB to {done.bytes_after / 1e9:.3f} "
        f"GB; relative error of the weights {done.error:.4f}"
    )
    if done.left_out:
        reasons: dict[str, list[str]] = {}
        for name, reason in done.left_out.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            print(
                f"left out {reason}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            )
    if done.unreached:
        print(
            f"no token reached {len(done.unreached)} projections of experts, such as {done.unreached[0]}: their activations "
            "have the largest scale of their layer; calibrate on more text",
            file=sys.stderr,
        )
    return 0


def _calibrated(args: argparse.Namespace):
    import torch

    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            '--calibrate runs the model with transformers: pip install "nvfp4-cute[models]"'
        ) from error
    from nvfp4_cute.models.quantizing.calibrate import largest_inputs, samples

    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, device_map=args.device
    ).eval()
    return largest_inputs(
        model, samples(args.model, args.calibrate, model.config.get_text_config().vocab_size)
    )
