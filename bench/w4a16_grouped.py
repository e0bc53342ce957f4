"""Weight-only grouped GEMMs beside NVFP4 x NVFP4 ones and torch's bf16, measured on the GPU of this machine.

    python -m nvfp4_cute.bench.w4a16_grouped [--only experts dense] [--tokens 1 32 512] [--json TIMES.json]

Both products of an MoE layer for four models, gate and up (with the activation) and down, from 1 to 2,048 tokens, and matrices of
weights with so many rows: every config that might be right is measured, on a cold L2 and from CUDA graphs, checked against
products of decoded weights, and reported beside the chosen one. Kernels are compiled first, in many processes.
"""

import argparse
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute import backends
from nvfp4_cute.bench.moe import MODELS, TOKENS
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.weight_only_keys import WeightOnlyKey
from nvfp4_cute.errors import ConfigError
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.gpus.targets import gpu_of
from nvfp4_cute.launch.weight_only import WeightOnlyTask
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.ops.parts import gemm, grouped_dual_gemm, grouped_gemm
from nvfp4_cute.planning.arch import sm90_weight_only as planning
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Form, Gate, GroupedProblem
from nvfp4_cute.reference import expand_operand
from nvfp4_cute.terminal import text_table
from nvfp4_cute.tuning.stopwatch import EMPTY, measure

DENSE = ((4096, 4096), (4096, 14336), (28672, 8192), (6144, 5120))
ROWS = (16, 32, 64, 128, 512, 2048)
SEED = 3
# Kernels differ from decoded bf16 products by their roundings to bf16: of both about 2^-9 of the largest.
TOLERANCE = 2.0**-7
SILU = Gate("silu", None, "separate")
# Sizes of tiles to try: those around the rows of a group.
NEIGHBOURS = 1


@dataclass(frozen=True)
class Point:
    """One product: rows of every group, N and K; ``is_dual``: of gate and up, N rows each."""

    name: str
    rows: tuple[int, ...]
    n: int
    k: int
    is_dual: bool = False

    @property
    def gate(self) -> Gate | None:
        """Of a dual GEMM."""
        return SILU if self.is_dual else None

    @property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """(m, n, k) of every group."""
        return tuple((rows, self.n, self.k) for rows in self.rows)


def points(kinds: Iterable[str], tokens: Iterable[int], rows: Iterable[int]) -> Iterator[Point]:
    """All that are measured."""
    if "experts" in kinds:
        for name, model in MODELS.items():
            for count in tokens:
                routed = routed_rows(count, model.experts, model.top_k)
                yield Point(f"{name} gate_up {count}", routed, model.width, model.hidden, True)
                yield Point(f"{name} down {count}", routed, model.hidden, model.width)
    if "dense" in kinds:
        for n, k in DENSE:
            for m in rows:
                yield Point(f"dense {n}x{k} {m}", (m,), n, k)


def routed_rows(tokens: int, experts: int, top: int) -> tuple[int, ...]:
    """Rows of every expert where each token chooses some by chance."""
    draw = random.Random(SEED)
    chosen = Counter(e for _ in range(tokens) for e in draw.sample(range(experts), top))
    return tuple(chosen[expert] for expert in range(experts))


def tried(point: Point, chosen: KernelConfig) -> list[KernelConfig]:
    """The chosen config, and others with tiles of about as many tokens as groups have."""
    live = sorted(rows for rows in point.rows if rows)
    middle, most = live[len(live) // 2], live[-1]
    sizes = planning.TOKEN_CHOICES
    wanted = {at for rows in (middle, most) for at in around(sizes, rows)}
    others = [c for c in planning.candidates(1 + point.is_dual) if c.work_tile_mnk[0] in wanted]
    return [chosen, *(c for c in others if c != chosen)]


def around(sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The least size that holds so many rows, and its neighbours."""
    place = next((i for i, size in enumerate(sizes) if size >= rows), len(sizes) - 1)
    return sizes[max(place - NEIGHBOURS, 0) : place + NEIGHBOURS + 1]


@dataclass(frozen=True, eq=False)
class Operands:
    """Operands of a point on the GPU: bf16 rows, the same quantized, NVFP4 weights [G, N, K/2] of one or two products."""

    x: torch.Tensor
    packed: torch.Tensor
    packed_scale: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]
    offs: torch.Tensor

    @classmethod
    def of(cls, point: Point) -> "Operands":
        """Random ones."""
        groups, rows, k = len(point.rows), sum(point.rows), point.k
        generator = torch.Generator("cuda").manual_seed(SEED)

        def codes(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=generator)

        def scales(row_blocks: int) -> torch.Tensor:
            return codes(0x30, 0x40, row_blocks * NVFP4.atom_row_bytes(k))

        weights = tuple(codes(0, 256, groups, point.n, NVFP4.row_bytes(k)) for _ in range(1 + point.is_dual))
        return cls(
            torch.randn(rows, k, device="cuda", generator=generator).bfloat16(),
            codes(0, 256, rows, NVFP4.row_bytes(k)),
            scales(rows // 128 + groups),
            weights,
            tuple(scales(groups * -(-point.n // 128)).view(groups, -1) for _ in weights),
            torch.tensor(point.rows, device="cuda").cumsum(0).to(torch.int32),
        )

    def task(self, point: Point, config: KernelConfig | None) -> WeightOnlyTask:
        """The weight-only launch."""
        out = torch.empty(1, len(self.x), point.n, dtype=torch.bfloat16, device="cuda")
        form: Form = "ragged" if len(point.rows) > 1 else "list"
        groups = len(point.rows)
        b, *second = (
            (Operand(w, scale, NVFP4, point.n, point.k, groups),)
            for w, scale in zip(self.weights, self.scales, strict=True)
        )
        offs = self.offs if form == "ragged" else None
        operands = GroupedOperands(
            (), b, (out,), None, *second, sizes=offs, activations=(self.x.unsqueeze(0),)
        )
        activation = SILU.activation if point.is_dual else None
        problem = GroupedProblem(point.sizes, form, torch.bfloat16, activation=activation)
        return WeightOnlyTask(problem, operands, config, gpu_of(torch.device("cuda")))

    def peers(self, point: Point) -> dict[str, Any]:
        """What else computes it, on operands of their own."""
        calls: dict[str, Any] = {}
        if len(point.rows) == 1:
            w, s = self.weights[0][0], self.scales[0][0]
            scale = self.packed_scale[: NVFP4.scale_bytes(len(self.x), point.k)]
            calls["W4A4"] = partial(gemm, self.packed, w, scale, s)
            if len(self.x) <= 64:
                calls["W4A16, mma.sync"] = partial(gemm, self.x, w, None, s)
            dense = torch.randn(point.n, point.k, device="cuda").bfloat16()
            calls["torch bf16"] = partial(torch.matmul, self.x, dense.T)
            return calls
        if point.is_dual:
            calls["W4A4"] = partial(
                grouped_dual_gemm, self.packed, *self.weights, self.packed_scale, *self.scales, offs=self.offs
            )
        else:
            calls["W4A4"] = partial(
                grouped_gemm, self.packed, *self.weights, self.packed_scale, *self.scales, self.offs
            )
        dense = torch.randn(len(point.rows), len(self.weights) * point.n, point.k, device="cuda").bfloat16()
        calls["torch bf16"] = partial(torch._grouped_mm, self.x, dense.transpose(1, 2), offs=self.offs)
        return calls


def check(point: Point, operands: Operands, out: torch.Tensor) -> None:
    """Raises RuntimeError where the results of the largest group are not those of decoded weights."""
    group = max(range(len(point.rows)), key=point.rows.__getitem__)
    end = int(operands.offs[group])
    rows = slice(end - point.rows[group], end)
    products = [
        operands.x[rows].float() @ expand_operand(w[group], s[group], "blocked").float().T
        for w, s in zip(operands.weights, operands.scales, strict=True)
    ]
    expected = products[0]
    if point.is_dual:
        expected = torch.nn.functional.silu(products[0]) * products[1]
    error = (out[rows].float() - expected).abs().max() / expected.abs().max()
    if not error <= TOLERANCE:
        raise RuntimeError(f"{point.name}: differs by {error:.3g} of the largest result")


def compile_one(key: WeightOnlyKey) -> None:
    """Fill the cache on disk."""
    get_kernel(key)


def measure_point(point: Point, rounds: int) -> dict[str, Any]:
    """Times of all contenders in us, without an empty interval's, which is told besides."""
    operands = Operands.of(point)
    chosen = operands.task(point, None).chosen
    tasks = {config: operands.task(point, config) for config in tried(point, chosen)}
    for config, task in tasks.items():
        task.out[0].fill_(float("nan"))
        backends.run_task("cuda", task)
        try:
            check(point, operands, task.out[0][0])
        except RuntimeError as error:
            raise RuntimeError(f"{config.to_name()}: {error}") from error
    calls = {
        config.to_name(): lambda _, task=task: backends.run_task("cuda", task)
        for config, task in tasks.items()
    }
    calls |= {name: lambda _, call=call: call() for name, call in operands.peers(point).items()}
    times = {name: sample.median for name, sample in measure(calls, 1, rounds=rounds).items()}
    return {
        "point": point.name,
        "rows": point.rows,
        "n": point.n,
        "k": point.k,
        "is_dual": point.is_dual,
        "chosen": chosen.to_name(),
        "empty": times.pop(EMPTY),
        "us": times,
    }


def keys_of(found: Iterable[Point], arch: str, num_sms: int) -> set[WeightOnlyKey]:
    """What has to be compiled."""
    keys = set()
    for point in found:
        form = "ragged" if len(point.rows) > 1 else "list"
        chosen = planning.choose(point.sizes, num_sms, 1 + point.is_dual, form == "ragged")
        for config in tried(point, replace(chosen, num_cta=None)):
            try:
                keys.add(
                    WeightOnlyKey(
                        arch, config, 1, torch.bfloat16, torch.bfloat16, False, form, point.gate
                    ).validated()
                )
            except ConfigError:
                continue
    return keys


def main() -> None:
    """Compile, measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("experts", "dense")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="what (default: both)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a layer")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of matrices")
    parser.add_argument("--rounds", type=int, default=20, help="times each is measured")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    parser.add_argument("--json", type=Path, help="where to keep all times")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures on a GPU, and there is none")
    gpu = gpu_of(torch.device("cuda"))
    found = [*points(arguments.only, arguments.tokens, arguments.rows)]
    keys = keys_of(found, gpu.arch, gpu.num_sms)
    print(f"{torch.cuda.get_device_name()}: {len(found)} points, {len(keys)} kernels to compile", flush=True)
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        pool.map(compile_one, sorted(keys, key=WeightOnlyKey.to_name), chunksize=1)
    kept = []
    for point in found:
        try:
            kept.append(measure_point(point, arguments.rounds))
        except RuntimeError as error:
            print(f"{point.name}: {error}", flush=True)
            continue
        torch.cuda.empty_cache()
        print(line(kept[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(kept))
    print(report(kept))


def line(result: dict[str, Any]) -> str:
    """Of one point, while the others are still to come."""
    best, us = best_of(result)
    return f"{result['point']}: {us:.1f} us with {best}, {result['us'][result['chosen']]:.1f} with the chosen {result['chosen']}"


def best_of(result: dict[str, Any]) -> tuple[str, float]:
    """The fastest weight-only config and its time."""
    ours = {name: us for name, us in result["us"].items() if name.startswith("t1") or name.startswith("t6")}
    return min(ours.items(), key=lambda item: item[1])


def report(kept: list[dict[str, Any]]) -> str:
    """A row a point."""
    names = ("W4A4", "W4A16, mma.sync", "torch bf16")
    rows = []
    for result in kept:
        best, us = best_of(result)
        others = [f"{result['us'][name]:.1f}" if name in result["us"] else "-" for name in names]
        rows.append([result["point"], f"{result['us'][result['chosen']]:.1f}", f"{us:.1f}", best, *others])
    return text_table(["point", "chosen us", "best us", "best config", *(f"{n} us" for n in names)], rows)


if __name__ == "__main__":
    main()
