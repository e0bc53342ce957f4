"""Draws random batches and compares their rows, bit for bit, with the same rows computed alone.

A draw is one call with a random number of rows, in random order and random groups. Known rows were computed alone before.
Every known row of a batch is compared, on the device.
"""

import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvfp4_cute import (
    ActivationFormat,
    GateUp,
    QuantizedLinear,
    UnsupportedProblem,
    dual_gemm,
    gemm,
    gemv,
    grouped_dual_gemm,
    grouped_gemm,
    grouped_quantize,
    int4_tensor,
    moe,
    mxfp4_for_fp8,
    quantize,
    route,
    set_batch_invariant,
)

POOL, KNOWN = 256, 32  # rows that batches are drawn from; the first ones are known
GROUPS = 3
Sizes = Sequence[int]
Run = Callable[[torch.Tensor, Sizes], torch.Tensor]
"""(rows of the pool [M], rows per group) -> results [M, ...]."""
PAIRS = {
    "NVFP4 x NVFP4": ("nvfp4", "nvfp4"), "NVFP4 per row x NVFP4": ("per_row", "nvfp4"), "16 bits x NVFP4": (None, "nvfp4"),
    "16 bits x MXFP4": (None, "mxfp4"), "MXFP4 x MXFP4": ("mxfp4", "mxfp4"), "MXFP8 x MXFP8": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "FP8 1x128 x 128x128": ("fp8_1x128", "fp8_128x128"), "INT8 x INT8": ("int8", "int8"), "FP8 x MXFP4": ("fp8_1xk", "mxfp4_fp8"),
    "16 bits x int4": (None, "int4"), "16 bits x FP8": (None, "fp8_128x128"), "16 bits x MXFP8": (None, "mxfp8_e4m3"),
    "16 bits x INT8": (None, "int8"), "MXFP8 x MXFP4": ("mxfp8_e4m3", "mxfp4"), "e5m2 x e4m3": ("mxfp8_e5m2", "mxfp8_e4m3"),
    "NVFP4 4over6 x NVFP4": ("four_over_six", "nvfp4"),
}  # fmt: skip
MAIN = tuple(PAIRS)[:3]  # pairs drawn in all FORMS; the others are drawn in FEW_FORMS
FORMS = ("gemm", "ragged", "list", "masked", "batched", "dual", "ragged dual", "quantized", "float32")
FEW_FORMS = ("gemm", "ragged")
LAYERS = ("16bit", "nvfp4", "per_row", "fp8", "int8")


@dataclass(frozen=True)
class Sizing:
    """Sizes of problems.

    Attributes:
        n, k: sizes of the weights of products.
        rows: largest number of rows per batch.
        experts, top_k: experts per layer and per token.
        hidden, width: sizes of an expert.
    """

    n: int = 512
    k: int = 2048
    rows: int = 4096
    experts: int = 32
    hidden: int = 1024
    width: int = 512
    top_k: int = 4


SMALL = Sizing(128, 256, 20, 4, 128, 128, 2)


@dataclass
class Case:
    """One operation with its formats and form, and rows to draw from.

    Attributes:
        name: names operation, formats and form.
        run: computes a batch.
        groups: number of groups.
        is_even: whether all groups have equally many rows.
        most: largest number of rows per batch.
    """

    name: str
    run: Run
    groups: int = 1
    is_even: bool = False
    most: int = 4096


@dataclass
class Found:
    """Result of the draws of a case.

    Attributes:
        name: name of the case.
        draws: number of batches.
        compared: number of rows compared.
        wrong: rows with a different bit.
        refused: why the operation refuses the case; "" if it does not.
        seconds: time including compilation.
    """

    name: str
    draws: int = 0
    compared: int = 0
    wrong: int = 0
    refused: str = ""
    seconds: float = 0.0


def normal(device: str, seed: int, *shape: int) -> torch.Tensor:
    """Returns normal values; blocks of 16 have magnitudes of 2^-6 to 2^6, so that sums are not exact in float32."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device=device)
    exponents = torch.randint(-6, 7, (*shape[:-1], shape[-1] // 16), generator=generator, device=device)
    return (x * (2.0**exponents).repeat_interleave(16, -1)).bfloat16()


def quantized(x: torch.Tensor, format: str | None) -> Any:
    """Returns ``x`` in a format of ``PAIRS``."""
    if format is None:
        return x
    if format == "per_row":
        return quantize(x, global_scale="per_row")
    if format == "four_over_six":
        return quantize(x, method="four_over_six")
    if format == "mxfp4_fp8":
        return mxfp4_for_fp8(quantize(x, format="mxfp4"))
    if format == "int4":
        scale = x.float().unflatten(-1, (-1, 128)).abs().amax(-1) / 7
        codes = (x.float() / scale.repeat_interleave(128, -1)).round().clamp(-8, 7) + 8
        return int4_tensor(codes.to(torch.uint8), scale.bfloat16())
    return quantize(x, format=format)


def grouped(x: torch.Tensor, ends: torch.Tensor, format: str | None) -> Any:
    """Returns ragged groups of rows in a format of ``PAIRS``."""
    if format == "per_row":
        return grouped_quantize(x, ends, global_scale="per_row")
    if format == "four_over_six":
        return grouped_quantize(x, ends, method="four_over_six")
    if format is None or format.startswith(("fp8", "int8")):
        return quantized(x, format)
    return grouped_quantize(x, ends, format=format)


def cases(device: str, sizing: Sizing, backend: str = "auto") -> Iterator[Callable[[], Case]]:
    """Yields functions that make the cases, the most important ones first."""
    for pair in PAIRS:
        for form in FORMS if pair in MAIN else FEW_FORMS:
            if form != "quantized" or PAIRS[pair][0] is not None:
                yield lambda pair=pair, form=form: product(pair, form, device, sizing, backend)  # type: ignore[misc]
        if pair == MAIN[-1]:
            for rows in LAYERS:
                yield lambda rows=rows: layer(rows, device, sizing, backend)  # type: ignore[misc]
            yield lambda: linear("16bit", device, sizing, backend)
            yield lambda: linear("nvfp4_per_row", device, sizing, backend)
            yield lambda: vectors(device, sizing, backend)


def product(pair: str, form: str, device: str, sizing: Sizing, backend: str = "auto") -> Case:
    """Makes a case of a product, with weights of one matrix or of ``GROUPS``."""
    a_format, b_format = PAIRS[pair]
    x = normal(device, 1, POOL, sizing.k)
    shape = (
        (sizing.n, sizing.k)
        if form in ("gemm", "dual", "quantized", "float32")
        else (GROUPS, sizing.n, sizing.k)
    )
    w, up = (quantized(normal(device, seed, *shape), b_format) for seed in (2, 3))
    how: dict[str, Any] = {"backend": backend}
    ends = lambda sizes: torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32)
    name = f"{form}, {pair}"

    def rows(index: torch.Tensor) -> Any:
        return quantized(x[index], a_format)

    def masked(index: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        padded = torch.cat([_padded(part, max(sizes)) for part in index.split(list(sizes))])
        a = quantized(x[padded].view(GROUPS, max(sizes), -1), a_format)
        counts = torch.tensor(sizes, dtype=torch.int32, device=device)
        y = grouped_gemm(a, w, masked_m=counts, **how)
        return torch.cat([y[group, :size] for group, size in enumerate(sizes)])

    def listed(index: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        parts = [(part, group) for group, part in enumerate(index.split(list(sizes))) if len(part)]
        return torch.cat(
            grouped_gemm([rows(part) for part, _ in parts], [w[group] for _, group in parts], **how)
        )

    def batched(index: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        a = x[index].view(GROUPS, sizes[0], -1)
        a = a.permute(1, 2, 0) if a_format is None else quantized(a, a_format)
        return gemm(a, w, **how).permute(2, 0, 1).flatten(0, 1)

    def ragged(index: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        return grouped_gemm(grouped(x[index], ends(sizes), a_format), w, ends(sizes), **how)

    def ragged_dual(index: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        return grouped_dual_gemm(grouped(x[index], ends(sizes), a_format), GateUp(w, up), ends(sizes), **how)

    def into_nvfp4(index: torch.Tensor, _: Sizes) -> torch.Tensor:
        return gemm(rows(index), w, out_dtype="nvfp4", out_global_scale=64.0, **how).dequantize()

    run: Run = {
        "gemm": lambda index, _: gemm(rows(index), w, **how),
        "float32": lambda index, _: gemm(rows(index), w, out_dtype=torch.float32, **how),
        "dual": lambda index, _: dual_gemm(rows(index), GateUp(w, up), **how),
        "quantized": into_nvfp4, "ragged": ragged, "ragged dual": ragged_dual, "list": listed, "masked": masked,
        "batched": batched,
    }[form]  # fmt: skip
    return Case(name, run, 1 if len(shape) == 2 else GROUPS, form == "batched", sizing.rows)


def _padded(index: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([index, index.new_zeros(rows - len(index))])


def layer(rows: str, device: str, sizing: Sizing, backend: str = "auto") -> Case:
    """Makes a case of ``moe``: every token of the pool has its experts."""
    experts, hidden, width = sizing.experts, sizing.hidden, sizing.width
    formats = {"fp8": "fp8_128x128", "int8": "int8"}
    w13, w2 = (
        quantized(normal(device, seed, experts, *shape) / 64, formats.get(rows, "nvfp4"))
        for seed, shape in ((2, (2 * width, hidden)), (3, (hidden, width)))
    )
    logits = torch.randn(POOL, experts, generator=torch.Generator(device).manual_seed(4), device=device)
    x, (ids, weights) = normal(device, 1, POOL, hidden), route(logits, sizing.top_k, backend=backend)
    how: Any = ActivationFormat("nvfp4", "per_row") if rows == "per_row" else rows

    def run(index: torch.Tensor, _: Sizes) -> torch.Tensor:
        return moe(x[index], ids[index], weights[index], w13, w2, activations=how, backend=backend)

    return Case(f"moe, {rows} rows", run, most=sizing.rows)


def linear(activations: Any, device: str, sizing: Sizing, backend: str = "auto") -> Case:
    """Makes a case of QuantizedLinear with a bias."""
    plain = torch.nn.Linear(sizing.k, sizing.n, device=device, dtype=torch.bfloat16)
    made = QuantizedLinear.from_linear(plain, activations=activations, backend=backend)
    x = normal(device, 1, POOL, sizing.k)
    return Case(f"QuantizedLinear, {activations}", lambda index, _: made(x[index]), most=sizing.rows)


def vectors(device: str, sizing: Sizing, backend: str = "auto") -> Case:
    """Makes a case of gemv: vectors of a batch, each with its matrix."""
    x, w = normal(device, 1, POOL, 1, sizing.k), normal(device, 2, POOL, sizing.n, sizing.k)

    def run(index: torch.Tensor, _: Sizes) -> torch.Tensor:
        return gemv(quantize(w[index]), quantize(x[index]), backend=backend).T

    return Case("gemv of a batch", run, most=min(sizing.rows, 64))


def draw_rows(dice: random.Random, case: Case) -> tuple[list[int], list[int]]:
    """Returns rows of the pool, at least one of them known, and the number of rows per group."""
    count = max(1, int(case.most ** dice.random()))
    if case.is_even:
        count = max(count // case.groups, 1) * case.groups
    known = dice.choice((1.0, 0.5, KNOWN / POOL))
    index = [dice.randrange(KNOWN) if dice.random() < known else dice.randrange(POOL) for _ in range(count)]
    index[dice.randrange(count)] = dice.randrange(KNOWN)
    if case.is_even:
        return index, [count // case.groups] * case.groups
    ends = sorted(dice.choice((0, count, dice.randint(0, count))) for _ in range(case.groups - 1))
    return index, [end - begin for begin, end in zip([0, *ends], [*ends, count], strict=True)]


def alone(case: Case, device: str) -> torch.Tensor:
    """Returns results of known rows, each computed alone: [KNOWN, groups, ...]."""
    results = []
    for row in range(KNOWN):
        if case.is_even:
            results.append(case.run(torch.tensor([row] * case.groups, device=device), [1] * case.groups))
            continue
        one = torch.tensor([row], device=device)
        sizes = [[int(group == own) for group in range(case.groups)] for own in range(case.groups)]
        results.append(torch.cat([case.run(one, size) for size in sizes]))
    return torch.stack(results)


def draw(make: Callable[[], Case], draws: int, device: str, end: float = float("inf")) -> Found:
    """Draws batches of a case in batch-invariant mode, until ``end`` on the monotonic clock at the latest."""
    begun = time.monotonic()
    case = make()
    found = Found(case.name)
    dice = random.Random(case.name)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    with set_batch_invariant():
        try:
            expected = bits(alone(case, device))
        except UnsupportedProblem as error:
            found.refused = str(error)
            return found
        while found.draws < draws and time.monotonic() < end:
            index, sizes = draw_rows(dice, case)
            of_group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
            rows = torch.tensor(index, device=device)
            result = bits(case.run(rows, sizes))
            is_known = rows < KNOWN
            differs = (result != expected[rows.clamp(max=KNOWN - 1), of_group]).flatten(1).any(1)
            wrong += (differs & is_known).sum()
            found.draws += 1
            found.compared += sum(row < KNOWN for row in index)
    found.wrong, found.seconds = int(wrong), time.monotonic() - begun
    return found


def sizing_of(device: str) -> Sizing:
    """Returns sizes for a GPU, or small ones for the CPU."""
    return Sizing() if device == "cuda" else SMALL


def draw_numbered(work: tuple[int, int, str, float]) -> Found:
    """Draws one case: its number, draws, device, end. Errors count as one wrong row. A process of a pool calls this."""
    number, draws, device, end = work
    make = list(cases(device, sizing_of(device)))[number]
    if time.monotonic() > end:
        return Found(f"case {number}")
    try:
        return draw(make, draws, device, end)
    except Exception as error:
        traceback.print_exc()
        return Found(f"case {number}", wrong=1, refused=f"{type(error).__name__}: {error}"[:300])


def bits(x: torch.Tensor) -> torch.Tensor:
    """Returns the bits of floats as integers."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])
