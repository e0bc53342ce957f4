"""Options of `nvfp4-cute models`."""

from pathlib import Path

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute models inspect FOLDER                      the layers of a checkpoint, and which kernels would run them
  nvfp4-cute models bench qwen3-8b                      random weights with a real config: bf16 compared with NVFP4
  nvfp4-cute models bench qwen3-30b-a3b --batch 1 8 32 --json     several cases, as JSON
  nvfp4-cute models bench FOLDER --schemes nvfp4 --json    your own config.json, one scheme, as JSON
  nvfp4-cute models eval FOLDER --text FILE             KL divergence and perplexity of 4 bits compared with 16, errors by layer
  nvfp4-cute models eval FOLDER --text FILE --checkpoint QUANTIZED    the same for a checkpoint quantized from that model
  nvfp4-cute models judge FOLDER QUANTIZED --text FILE --report judge.md    two models on one page, with a picture
"""


SCHEMES = ("bf16", "16bit", "nvfp4")


BENCH_SCHEMES = ("bf16", "fp8", "16bit", "nvfp4", "auto", "all", "kept")


def add_parser(verbs: Verbs) -> None:
    """Adds `models`, its verbs and their options."""
    text = "Inspect checkpoints of quantized models, and measure whole models."
    parser = add_verb(verbs, "models", text, EXAMPLES)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    look = kinds.add_parser(
        "inspect", help="print the layers of a checkpoint, and which kernels would run them on which GPU"
    )
    look.add_argument(
        "folder", help="folder of config.json and safetensors files, or the name of a downloaded hub model"
    )
    look.add_argument("--json", action="store_true", help="print one JSON object")
    look.set_defaults(run=lazily("models", "run_inspect"))
    bench = kinds.add_parser(
        "bench", help="measure tokens per second of prefill and decode, compared with bf16"
    )
    bench.add_argument("model", nargs="+", help="name of a model, folder with config.json, or such a file")
    bench.add_argument(
        "--batch", nargs="+", type=types.positive, default=[1], help="number of sequences; default 1"
    )
    bench.add_argument(
        "--prompt", nargs="+", type=types.positive, default=[512], help="tokens per prompt; default 512"
    )
    bench.add_argument("--tokens", type=types.positive, default=128, help="tokens decoded; default 128")
    bench.add_argument(
        "--schemes", nargs="+", choices=BENCH_SCHEMES, default=["bf16", "fp8", "auto"],
        help="bf16, fp8: torch; nvfp4: weights and activations of 4 bits; 16bit: weights only; auto: as layers choose on this "
        "GPU; all: auto, with the output layer in NVFP4 and the embedding in MXFP8; kept: all, with decoded weights kept for "
        "many rows. Default: bf16 fp8 auto",
    )  # fmt: skip
    bench.add_argument(
        "--attention", nargs="+", default=[None],
        help="attention of transformers, or grouped_sdpa, which does not copy keys and values that heads share; default "
        "the model's",
    )  # fmt: skip
    bench.add_argument("--alone", action="store_true", help="fuse no layers")
    bench.add_argument("--layers", type=types.positive, help="use only this many layers of the model")
    bench.add_argument("--device", default="cuda", help="default cuda")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(run=lazily("models", "run_bench"))
    judge = kinds.add_parser("judge", help="measure how much two models differ on a text, on one page")
    judge.add_argument("first", type=Path, help="folder of a model, with its tokenizer")
    judge.add_argument("second", type=Path, help="folder of the other model")
    judge.add_argument("--text", required=True, help='a text file, or "random" for random tokens')
    judge.add_argument(
        "--tokens", type=types.positive, help="use at most this many tokens, rounded up to windows"
    )
    judge.add_argument(
        "--report", type=types.output_file, metavar="FILE", help="write a page, with a picture next to it"
    )
    judge.add_argument("--device", type=types.device, default="cpu", help="default cpu")
    judge.add_argument("--json", action="store_true", help="print one JSON object")
    judge.set_defaults(run=lazily("models", "run_judge"))
    evaluate = kinds.add_parser(
        "eval", help="measure KL divergence, perplexity and errors against the 16-bit model"
    )
    evaluate.add_argument("model", type=Path, help="folder of a 16-bit model, with its tokenizer")
    evaluate.add_argument("--text", required=True, help='a text file, or "random" for random tokens')
    evaluate.add_argument(
        "--checkpoint", nargs="+", type=Path, default=[], help="quantized checkpoints of the model"
    )
    evaluate.add_argument(
        "--schemes", nargs="+", choices=SCHEMES[1:],
        help="schemes to round the weights for this evaluation; default both, or none with --checkpoint",
    )  # fmt: skip
    evaluate.add_argument(
        "--calibrate", metavar="TEXT", help="also evaluate scales of activations from this text"
    )
    evaluate.add_argument(
        "--tokens",
        type=types.positive,
        help="use at most this many tokens of the text, rounded up to windows",
    )
    evaluate.add_argument("--device", type=types.device, default="cpu", help="default cpu")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    evaluate.set_defaults(run=lazily("models", "run_eval"))
