"""Options of `nvfp4-cute quantize`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt          NVFP4, activations of 4 bits, calibrated on a text
  nvfp4-cute quantize MODEL --out DIR --format nvfp4a16 --method search    weights only, every block's scale of least error
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt --method gptq    columns make up for each other's errors
  nvfp4-cute quantize MODEL --out DIR --format mxfp8 --layout compressed-tensors
  nvfp4-cute quantize MODEL --out DIR --format nvfp4a16 --keep "*.down_proj"    some layers stay in 16 bits
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt --budget 4.75    layers that lose most get more bits
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt --report report.md    what each layer lost, experts without tokens
  nvfp4-cute quantize MODEL --out DIR --recipe nemotron    a mixture by type of layer, also of hybrid Mamba models
  nvfp4-cute quantize MODEL --out DIR --lm-head nvfp4 --embedding mxfp8    the output layer and the embedding, too

MODEL is a folder of config.json and safetensors files, one tensor an expert. --calibrate needs transformers (pip install
"nvfp4-cute[models]"); weights alone do not. Routers stay as they are, and output layers and embeddings without their options.
"""


FORMATS = ("nvfp4", "nvfp4a16", "mxfp4", "mxfp8", "int4", "fp8")


RECIPES = ("nemotron",)


METHODS = ("nearest", "four_over_six", "search", "gptq")


LAYOUTS = ("modelopt", "compressed-tensors")


UNREACHED = ("refuse", "largest", "median")


LAYER_FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8", "16bit")


def add_parser(verbs: Verbs) -> None:
    """Adds `quantize` and its options."""
    text = "Quantize the weights of a checkpoint and write one that ModelOpt's or compressed-tensors' readers take, and ours."
    parser = add_verb(verbs, "quantize", text, EXAMPLES)
    parser.add_argument(
        "model", type=Path, help="folder of a 16-bit model, or its hub name where it is downloaded"
    )
    parser.add_argument("--out", type=types.output_folder, required=True, help="folder to write")
    parser.add_argument(
        "--format", choices=FORMATS, default="nvfp4", help="default nvfp4: 4-bit weights and activations"
    )
    parser.add_argument(
        "--recipe", choices=RECIPES,
        help="formats by type of layer, in place of --format; nemotron: experts and output layer in NVFP4 with 16-bit "
        "activations, attention in 16 bits, the rest (Mamba, shared experts, dense MLPs) in FP8",
    )  # fmt: skip
    parser.add_argument("--layout", choices=LAYOUTS, help="default modelopt; of int4 compressed-tensors")
    parser.add_argument("--calibrate", metavar="TEXT", help='a text file, or "random" for random tokens')
    parser.add_argument(
        "--method", choices=METHODS, default="nearest",
        help="nearest: scales of largest values (the default); four_over_six: those or 1.5 times as large ones, whichever lose "
        "less; search: of several scales a block, that of least squared error; gptq: errors are made up for on the calibration "
        "text, block after block of the model",
    )  # fmt: skip
    parser.add_argument("--keep", nargs="+", default=[], metavar="PATTERN", help="layers to leave in 16 bits")
    parser.add_argument(
        "--budget", type=float, metavar="BITS",
        help="mean bits a weight: layers that lose most on the calibration text get MXFP8 or stay in 16 bits",
    )  # fmt: skip
    parser.add_argument(
        "--unreached", choices=UNREACHED, default="refuse",
        help="experts that no token of the text reached: refuse (the default) writes nothing; largest, median: their activations "
        "have that scale of their layer's other experts, and calibration.json names them",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=types.output_file, metavar="FILE",
        help="write a page of every layer: tokens, errors, lost and cut blocks, a verdict; with a picture next to it",
    )  # fmt: skip
    for option, what in (("--lm-head", "output layer"), ("--embedding", "embedding")):
        parser.add_argument(
            option, choices=LAYER_FORMATS, metavar="FORMAT",
            help=f"weights of the {what}: {', '.join(LAYER_FORMATS)} (the default); of a model that ties it to the other, one "
            "option stands for both",
        )  # fmt: skip
    parser.add_argument(
        "--device", type=types.device, default="cpu", help="where to calibrate and to round; default cpu"
    )
    parser.set_defaults(run=lazily("quantize"))
