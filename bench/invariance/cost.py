"""Times batch-invariant mode against the default: dense products and layers of experts, CUDA graphs with a cold L2."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nvfp4_cute import gemm, moe, quantize, route, set_batch_invariant
from nvfp4_cute.compile.cache import planning
from nvfp4_cute.compile.parallel import load_all
from nvfp4_cute.tuning.stopwatch import measure

ROUNDS = 20
DENSE = ((14336, 4096), (28672, 8192), (4096, 14336), (4096, 4096), (6144, 5120))  # [N, K]
DENSE_ROWS = (1, 8, 16, 32, 64, 128, 512, 2048)
LAYERS = {  # experts, top k, hidden size, width
    "DeepSeek slice": (64, 8, 7168, 2048), "GLM-4.5-Air": (128, 8, 4096, 1408), "gpt-oss-20b": (32, 4, 2880, 2880),
    "Mixtral": (8, 2, 4096, 14336), "Qwen3-30B-A3B": (128, 8, 2048, 768), "Qwen3-Next": (512, 10, 2048, 512),
}  # fmt: skip
LAYER_TOKENS = (1, 8, 32, 128, 512, 2048)
SIZES = (DENSE, DENSE_ROWS, LAYERS, LAYER_TOKENS)


@dataclass(frozen=True)
class Cell:
    """One computation to time in both modes.

    Attributes:
        name: what is computed.
        rows: rows or tokens.
        scheme: "W4A16" or "W4A4".
        call: computes it.
    """

    name: str
    rows: int
    scheme: str
    call: Callable[[], Any]


@dataclass(frozen=True)
class Cost:
    """Median times of a cell in us: ``free_us`` without batch-invariant mode, ``fixed_us`` in it."""

    name: str
    rows: int
    scheme: str
    free_us: float
    fixed_us: float

    @property
    def factor(self) -> float:
        """Time in the mode, divided by the time without it."""
        return self.fixed_us / self.free_us


def groups_of_cells(device: str, sizes: Any = SIZES) -> Iterator[list[Cell]]:
    """Yields the cells of one matrix or layer after the other, so that only its weights exist at a time.

    Args:
        device: where tensors are.
        sizes: matrices, their numbers of rows, layers, and their numbers of tokens; see ``SIZES``.
    """
    dense, dense_rows, layers, tokens = sizes
    weight = lambda *shape: quantize(torch.randn(*shape, device=device, dtype=torch.bfloat16))
    for n, k in dense:
        w, cells = weight(n, k), []
        for rows in dense_rows:
            x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
            q = quantize(x)
            cells += [
                Cell(f"{n} x {k}", rows, "W4A16", partial(gemm, x, w)),
                Cell(f"{n} x {k}", rows, "W4A4", partial(gemm, q, w)),
            ]
        yield cells
    for name, (experts, top_k, hidden, width) in layers.items():
        w13, w2 = weight(experts, 2 * width, hidden), weight(experts, hidden, width)
        cells = []
        for count in tokens:
            x = torch.randn(count, hidden, device=device, dtype=torch.bfloat16)
            chosen = route(torch.randn(count, experts, device=device), top_k)
            for scheme, rows in (("W4A16", "16bit"), ("W4A4", "nvfp4")):
                call = partial(moe, x, *chosen, w13, w2, activations=rows)
                cells.append(Cell(name, count, scheme, call))
        yield cells


def in_mode(cell: Cell, enabled: bool) -> Any:
    """Computes a cell, in batch-invariant mode if ``enabled``."""
    with set_batch_invariant(enabled):
        return cell.call()


def compile_all(device: str, jobs: int | None = None, sizes: Any = SIZES) -> int:
    """Compiles the kernels of all cells in parallel; returns their number."""
    with planning() as keys:
        for cells in groups_of_cells(device, sizes):
            for cell in cells:
                for enabled in (False, True):
                    in_mode(cell, enabled)
    return load_all(keys, jobs=jobs)


def timed(cells: list[Cell], end: float, rounds: int = ROUNDS) -> Iterator[Cost]:
    """Yields the costs of cells, until ``end`` on the monotonic clock."""
    for cell in cells:
        if time.monotonic() > end:
            return
        calls = {
            name: lambda _, cell=cell, enabled=enabled: in_mode(cell, enabled)
            for name, enabled in (("free", False), ("fixed", True))
        }
        found = measure(calls, 1, rounds=rounds)
        yield Cost(cell.name, cell.rows, cell.scheme, found["free"].median, found["fixed"].median)


def table(costs: list[Cost]) -> str:
    """Returns factors as a Markdown table: a line per matrix or layer, a column per number of rows."""
    lines = []
    for scheme in ("W4A16", "W4A4"):
        for names in ([n for n in _names(costs) if " x " in n], [n for n in _names(costs) if " x " not in n]):
            of = {(c.name, c.rows): c for c in costs if c.scheme == scheme and c.name in names}
            rows = sorted({rows for _, rows in of})
            if not rows:
                continue
            lines += [f"| {scheme} | {' | '.join(map(str, rows))} |", f"|---|{'---|' * len(rows)}"]
            for name in names:
                shown = [f"{of[name, r].factor:.2f}" if (name, r) in of else "-" for r in rows]
                lines.append(f"| {name} | {' | '.join(shown)} |")
            lines.append("")
    if costs:
        worst = max(costs, key=lambda cost: cost.factor)
        above = sum(cost.factor > 1.1 for cost in costs)
        lines.append(
            f"Worst: {worst.name}, {worst.rows} rows, {worst.scheme}: {worst.factor:.2f} "
            f"({worst.free_us:.1f} -> {worst.fixed_us:.1f} us). {above} of {len(costs)} cells cost more than 10 %."
        )
    return "\n".join(lines)


def _names(costs: list[Cost]) -> list[str]:
    return list(dict.fromkeys(cost.name for cost in costs))
