"""Options of `nvfp4-cute trace`."""

from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli.verbs import Verbs, add_verb, lazily

EXAMPLES = """\
examples:
  nvfp4-cute trace nvfp4_group_gemm                        benchmark case 0 on a B200: time, and what it consists of
  nvfp4-cute trace nvfp4_group_gemm --case 3 -o t.json.gz  also a timeline for https://ui.perfetto.dev
  nvfp4-cute trace nvfp4_gemv --target h200                another problem and another GPU
  nvfp4-cute trace qwen3-30b-a3b --tokens 8 -o t.json      a layer of experts with its routing: launches in a CUDA graph
  nvfp4-cute trace linear-4096x4096 --tokens 32            QuantizedLinear: quantize and gemm

layers: those of `nvfp4-cute bench layers`.

Times are modelled, never measured. The emulator records the launch, executing one of several clusters with equal work, and
a model of the GPU replays the record. `nvfp4_cute.gpus.timing_figures` has the model's figures and their sources. For the
model's error, measured on an H200, see bench/results/timing_model.md.
"""


def add_parser(verbs: Verbs) -> None:
    """Adds `trace` and its options."""
    text = (
        "Model the time that this package takes for a benchmark case of a competition problem, or for a layer, print what took "
        "it (the critical path, and every warp role's stalls by cause), and write a timeline: a process for each SM, a row for "
        "each warp, TMA and tensor cores."
    )
    parser = add_verb(verbs, "trace", text, EXAMPLES)
    parser.add_argument("name", metavar="PROBLEM_OR_LAYER", help="a competition problem, or a layer")
    parser.add_argument("--case", type=types.whole, help="number of the problem's benchmark case (default 0)")
    parser.add_argument(
        "--tokens", type=types.positive, help="number of rows of the layer's input (default 1)"
    )
    parser.add_argument("--target", default="B200", metavar="GPU", help="default %(default)s")
    parser.add_argument(
        "-o", "--out", type=types.output_file, metavar="FILE", help="write the timeline (.json or .json.gz)"
    )
    parser.set_defaults(run=lazily("trace"))
