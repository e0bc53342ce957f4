"""Weight-only products modelled on GPUs that need not be present, in percent of their memory bandwidth.

    python -m nvfp4_cute.bench.weight_only_modelled [--results weight_only.json] [--target A100] [--jobs 8] [--save]

NVFP4 weights and bf16 rows: a dense product, and the first product of a layer of experts whose tokens chose them at
random. Each time is stored as soon as it is known, and is not modelled again. ``--save`` writes the page of
all stored times.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_cute.bench import modelled
from nvfp4_cute.bench.cases import Case, routed_rows
from nvfp4_cute.bench.moe import MODELS
from nvfp4_cute.gpus.targets import Target, lookup

PAGE = Path(__file__).parent / "results" / "weight_only_modelled.md"
STORED = PAGE.with_suffix(".json")
TARGETS = ("A100", "L40S", "RTX 4090", "RTX 5090", "GB10", "B200")
DENSE, EXPERTS = (4096, 14336), "qwen3-30b-a3b"
TOKENS = (1, 8)
Records = Mapping[str, dict[str, Any]]

HEAD = """# Weight-only products, modelled

Times in us of one product of bf16 rows and NVFP4 weights, with a cold L2 and results in bf16. "MB" is the least traffic: weights
and scales of the experts that have rows, the rows, and the results, once each. "% of memory" is that traffic over the time, in
percent of the memory bandwidth (the highest measured one, otherwise the specified one). Times include launch overhead, which
matters for small products. Nothing here is measured:
{error}.

`bench/results/h200_weight_only.json` has measured times of an H200.

Made by `python -m nvfp4_cute.bench.weight_only_modelled --save`, from `bench/results/weight_only_modelled.json`, which names the
sources that modelled each time.

| GPU | product | MB | us | TB/s | % of memory |
|---|---|---:|---:|---:|---:|
"""


def cases() -> list[Case]:
    """Returns the products: the dense ones first, because their modelling is faster."""
    (n, k), model = DENSE, MODELS[EXPERTS]
    dense = [
        Case("weight only", f"linear {n} x {k}", f"{m} rows", "w4a16", ((m, n, k),), out="bf16")
        for m in TOKENS
    ]
    experts = []
    for tokens in TOKENS:
        rows = routed_rows(tokens, model.experts, model.top_k)
        sizes = tuple((m, 2 * model.width, model.hidden) for m in rows)
        experts.append(
            Case("weight only", f"{EXPERTS} gate_up", f"{tokens} tokens", "w4a16", sizes, form="ragged", out="bf16")
        )  # fmt: skip
    return dense + experts


def page(known: Records) -> str:
    """Returns Markdown of all stored times."""
    rows = []
    for target in map(lookup, TARGETS):
        for case in cases():
            found = known.get(modelled.key_of(case, target), {}).get("time")
            if found is not None:
                rows.append(_row(case, target, found["us"]))
    return HEAD.format(error=modelled.stated_error()) + "\n".join(rows) + "\n"


def _row(case: Case, target: Target, us: float) -> str:
    nbytes = case.work.bytes
    share = nbytes / (us * 1e-6) / target.floor_bandwidth_bytes_per_s
    return (
        f"| {target.name} | {case.problem}, {case.name} | {nbytes / 1e6:.1f} | {us:.1f} | "
        f"{nbytes / us / 1e6:.2f} | {100 * share:.0f} |"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=STORED,
        metavar="FILE",
        help=f"file that stores times; default: bench/results/{STORED.name}",
    )
    parser.add_argument("--target", action="append", help=f"a GPU; default: {', '.join(TARGETS)}")
    parser.add_argument("--stored", action="store_true", help="model nothing that FILE lacks")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{PAGE.name}")
    options = parser.parse_args(arguments)
    names = () if options.stored else options.target or TARGETS
    pieces = [(case, lookup(name)) for case in cases() for name in names]
    known = modelled.records(
        pieces, jobs=options.jobs, results=options.results, label="weight-only products", longest_first=False
    )
    text = page(known)
    if options.save:
        PAGE.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
