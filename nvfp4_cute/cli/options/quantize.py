"""Options of `nvfp4-cute quantize`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt          NVFP4 weights and activations, calibrated on a text
  nvfp4-cute quantize MODEL --out DIR --format nvfp4a16 --method search    weights only, with the scale of least error per block
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt --method gptq    later weights compensate the errors of earlier ones
  nvfp4-cute quantize MODEL --out DIR --generate 64 --method gptq --device cuda    on texts that the model writes itself
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt --method gptq --distill 8    then trains scales and norms
  nvfp4-cute quantize MODEL --out DIR --format mxfp4 --rotate 128    weights are rotated first, so no channel stands out
  nvfp4-cute quantize MODEL --out DIR --format mxfp8 --layout compressed-tensors
  nvfp4-cute quantize MODEL --out DIR --format nvfp4a16 --keep "*.down_proj"    some layers stay in 16 bits
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt --budget 4.75    layers with the largest loss get more bits
  nvfp4-cute quantize MODEL --out DIR --calibrate text.txt --report report.md    the loss of each layer, experts without tokens
  nvfp4-cute quantize MODEL --out DIR --recipe nemotron    formats by type of layer, also for hybrid Mamba models
  nvfp4-cute quantize MODEL --out DIR --lm-head nvfp4 --embedding mxfp8    also the output layer and the embedding

MODEL is a folder of config.json and safetensors files, one tensor per expert. --calibrate and --generate need transformers
(pip install "nvfp4-cute[models]"); quantizing weights alone does not. Routers are never quantized, and output layers
and embeddings only with their options.
"""


FORMATS = ("nvfp4", "nvfp4a16", "mxfp4", "mxfp8", "int4", "fp8")


RECIPES = ("nemotron",)


METHODS = ("nearest", "four_over_six", "search", "gptq")


LAYOUTS = ("modelopt", "compressed-tensors")


UNREACHED = ("refuse", "largest", "median")


LAYER_FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8", "16bit")


def add_parser(verbs: Verbs) -> None:
    """Adds `quantize` and its options."""
    text = "Quantize the weights of a checkpoint, and write a checkpoint in the layout of ModelOpt or compressed-tensors."
    parser = add_verb(verbs, "quantize", text, EXAMPLES)
    parser.add_argument(
        "model", type=Path, help="folder of a 16-bit model, or the name of a downloaded hub model"
    )
    parser.add_argument("--out", type=types.output_folder, required=True, help="folder to write")
    parser.add_argument(
        "--format", choices=FORMATS, default="nvfp4", help="default nvfp4: 4-bit weights and activations"
    )
    parser.add_argument(
        "--recipe", choices=RECIPES,
        help="formats by type of layer, instead of --format; nemotron: experts and output layer in NVFP4 with 16-bit "
        "activations, attention in 16 bits, the rest (Mamba, shared experts, dense MLPs) in FP8",
    )  # fmt: skip
    parser.add_argument("--layout", choices=LAYOUTS, help="default modelopt; for int4 compressed-tensors")
    parser.add_argument("--calibrate", metavar="TEXT", help='a text file, or "random" for random tokens')
    parser.add_argument(
        "--generate", type=types.whole, default=0, metavar="TEXTS",
        help="calibrate on this many texts of 512 tokens that the 16-bit model writes, after those of --calibrate or alone",
    )  # fmt: skip
    parser.add_argument(
        "--method", choices=METHODS, default="nearest",
        help="nearest (the default): scales from the largest values; four_over_six: the better of those and 1.5 times as large "
        "ones, per block; search: the scale of least squared error out of several, per block; gptq: later weights compensate "
        "errors on the calibration text, one block of the model after another",
    )  # fmt: skip
    parser.add_argument(
        "--distill", type=types.whole, default=0, metavar="PASSES",
        help="after --method gptq: passes over the text that train norms and NVFP4 scales of each block of the model against the "
        "output of the 16-bit model, such as 8",
    )  # fmt: skip
    parser.add_argument(
        "--rotate", type=types.positive, metavar="BLOCK",
        help="first rotate the residual stream and the heads by random Hadamard matrices of this many channels, such as 16 or "
        "128; other weights undo it, so nothing is added at run time, but embedding and output layer are no longer tied",
    )  # fmt: skip
    parser.add_argument("--keep", nargs="+", default=[], metavar="PATTERN", help="layers to leave in 16 bits")
    parser.add_argument(
        "--budget", type=float, metavar="BITS",
        help="mean bits per weight: the layers with the largest loss on the calibration text get MXFP8 or stay in 16 bits",
    )  # fmt: skip
    parser.add_argument(
        "--unreached", choices=UNREACHED, default="refuse",
        help="for experts that no token of the text reached: refuse (the default) writes nothing; largest, median: use that of "
        "the activation scales of the layer's other experts, and name these experts in calibration.json",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=types.output_file, metavar="FILE",
        help="write a page on every layer, with tokens, errors, lost and clipped blocks and a verdict, and a picture next to it",
    )  # fmt: skip
    for option, what in (("--lm-head", "output layer"), ("--embedding", "embedding")):
        parser.add_argument(
            option, choices=LAYER_FORMATS, metavar="FORMAT",
            help=f"weights of the {what}: {', '.join(LAYER_FORMATS)} (the default); if the model ties both layers, one option "
            "sets both",
        )  # fmt: skip
    parser.add_argument(
        "--device", type=types.device, default="cpu", help="device that calibrates and rounds; default cpu"
    )
    parser.set_defaults(run=lazily("quantize"))
