"""Alternatives that users would call: torch in bf16, fp8, and NVFP4, on equal values.

A peer makes one call per input set. If torch has one call for all groups, that is a separate peer in addition to the
loop. Loops run inside a CUDA graph, without the host's cost of each call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import Operands
from nvfp4_cute.formats.block_format import NVFP4_PAIR

Run = Callable[[], None]
SCALED_MM_MULTIPLE = 16
"""torch._scaled_mm accepts N and K in multiples of this."""


@dataclass(frozen=True)
class Peer:
    """One way to compute a case.

    Attributes:
        name: name in tables.
        unsupported_reason: (case, compute capability) -> why it is unsupported, or None.
        prepare: returns a function that enqueues the computation of one input set; conversions happen here, untimed.
    """

    name: str
    unsupported_reason: Callable[[Case, tuple[int, int]], str | None]
    prepare: Callable[[Case, Operands], Run]


def _live(case: Case) -> list[int]:
    return [group for group, (m, n, _) in enumerate(case.sizes) if m and n]


def _single_product(case: Case, capability: tuple[int, int]) -> str | None:
    return f"{case.operation} is more than a product" if case.operation == "dual_gemm" else None


# ---- bf16 ------------------------------------------------------------------------------------------------------
def _bf16_loop(case: Case, operands: Operands) -> Run:
    a, b = operands.bf16
    products = [
        (a[g], b[g].T, torch.empty(case.sizes[g][:2], dtype=torch.bfloat16, device=a[g].device))
        for g in _live(case)
    ]

    def run() -> None:
        for x, y, out in products:
            torch.mm(x, y, out=out)

    return run


def _grouped_reason(case: Case, capability: tuple[int, int]) -> str | None:
    if len(case.sizes) == 1:
        return "one group"
    if not case.is_uniform:
        return "N or K differ from group to group"
    return _single_product(case, capability) or (None if capability[0] >= 9 else "needs sm_90 or newer")


def _bf16_grouped(case: Case, operands: Operands) -> Run:
    a, b = operands.bf16
    rows, weights = torch.cat(a), torch.stack(b).transpose(1, 2)
    ends = torch.tensor(list(accumulate(m for m, _, _ in case.sizes)), dtype=torch.int32, device=rows.device)

    def run() -> None:
        torch._grouped_mm(rows, weights, offs=ends)

    return run


# ---- scaled_mm -------------------------------------------------------------------------------------------------
def _scaled_reason(case: Case, capability: tuple[int, int], least: tuple[int, int], what: str) -> str | None:
    if capability < least:
        return f"no {what} tensor cores"
    odd = [(n, k) for _, n, k in case.sizes if n % SCALED_MM_MULTIPLE or k % SCALED_MM_MULTIPLE]
    return (
        f"N, K = {odd[0]}: not multiples of {SCALED_MM_MULTIPLE}"
        if odd
        else _single_product(case, capability)
    )


def _fp8_reason(case: Case, capability: tuple[int, int]) -> str | None:
    return _scaled_reason(case, capability, (8, 9), "fp8")


def _nvfp4_reason(case: Case, capability: tuple[int, int]) -> str | None:
    if case.formats != NVFP4_PAIR:
        return "operands of other formats"
    return _scaled_reason(case, capability, (10, 0), "NVFP4")


def _fp8_loop(case: Case, operands: Operands) -> Run:
    """Uses per-tensor scales of 1, the fastest form of torch; values are rounded to e4m3."""
    a, b = operands.bf16
    one = torch.ones((), device=operands.a[0].device)
    narrow = lambda x: x.to(torch.float8_e4m3fn)
    return _scaled_loop([(narrow(a[g]), narrow(b[g]).T, one, one) for g in _live(case)])


def _nvfp4_loop(case: Case, operands: Operands) -> Run:
    fp4, e4m3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    scale = lambda s: s.reshape(-1).view(e4m3)
    return _scaled_loop(
        [
            (
                operands.a[g].view(fp4),
                operands.b[g].view(fp4).T,
                scale(operands.a_scale[g]),
                scale(operands.b_scale[g]),
            )
            for g in _live(case)
        ]
    )


def _scaled_loop(products: Sequence[tuple[torch.Tensor, ...]]) -> Run:
    def run() -> None:
        for a, b, scale_a, scale_b in products:
            torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)

    return run


PEERS = (
    Peer("torch bf16 loop", _single_product, _bf16_loop),
    Peer("torch bf16 grouped_mm", _grouped_reason, _bf16_grouped),
    Peer("torch fp8 loop", _fp8_reason, _fp8_loop),
    Peer("torch NVFP4 loop", _nvfp4_reason, _nvfp4_loop),
)
