"""Random NVFP4 operands of a case on a device, and the bf16 tensors that hold the same values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.codecs import encode_e4m3
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.reference import expand_operand

MAX_SETS = 8


@dataclass(frozen=True)
class Operands:
    """One input set: a list entry a group, groups without rows included. A dual GEMM has a second B."""

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    a_scale: tuple[torch.Tensor, ...]
    b_scale: tuple[torch.Tensor, ...]
    out: tuple[torch.Tensor, ...]
    b2: tuple[torch.Tensor, ...] = ()
    b2_scale: tuple[torch.Tensor, ...] = ()

    @cached_property
    def bf16(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A [M, K] and B [N, K] of every group, bfloat16; the values are exact (at most 6 significant bits)."""
        return _bf16(self.a, self.a_scale), _bf16(self.b, self.b_scale)

    @cached_property
    def bf16_b2(self) -> list[torch.Tensor]:
        """The second B of every group in the same way."""
        return _bf16(self.b2, self.b2_scale)


def _bf16(data: Sequence[torch.Tensor], scale: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [expand_operand(x, s, "blocked").to(torch.bfloat16) for x, s in zip(data, scale, strict=True)]


def make_operands(case: Case, device: torch.device, seed: int) -> Operands:
    """Every bit pattern of e2m1, and scales from 0.5 to 2: random data, never zeros."""
    generator = torch.Generator(device).manual_seed(seed)

    def values(rows: int, k: int) -> torch.Tensor:
        return torch.randint(
            0, 256, (rows, NVFP4.row_bytes(k)), dtype=torch.uint8, device=device, generator=generator
        )

    def scales(rows: int, k: int) -> torch.Tensor:
        shape = NVFP4.padded_scale_shape(rows, k)
        return to_blocked(encode_e4m3(0.5 + 1.5 * torch.rand(shape, device=device, generator=generator)))

    sizes = case.sizes
    return Operands(
        a=tuple(values(m, k) for m, _, k in sizes),
        b=tuple(values(n, k) for _, n, k in sizes),
        a_scale=tuple(scales(m, k) for m, _, k in sizes),
        b_scale=tuple(scales(n, k) for _, n, k in sizes),
        out=tuple(torch.full((m, n), torch.nan, dtype=torch.float16, device=device) for m, n, _ in sizes),
        b2=tuple(values(n, k) for _, n, k in _second(case)),
        b2_scale=tuple(scales(n, k) for _, n, k in _second(case)),
    )


def empty_operands(case: Case) -> Operands:
    """Operands on the CPU that hold no data: for models, which ask where tensors lie and not what is in them."""
    sizes = case.sizes
    values = lambda rows, k: torch.empty((rows, NVFP4.row_bytes(k)), dtype=torch.uint8)
    scales = lambda rows, k: torch.empty(NVFP4.scale_shape(rows, k), dtype=torch.uint8)
    return Operands(
        a=tuple(values(m, k) for m, _, k in sizes),
        b=tuple(values(n, k) for _, n, k in sizes),
        a_scale=tuple(scales(m, k) for m, _, k in sizes),
        b_scale=tuple(scales(n, k) for _, n, k in sizes),
        out=tuple(torch.empty((m, n), dtype=torch.float16) for m, n, _ in sizes),
        b2=tuple(values(n, k) for _, n, k in _second(case)),
        b2_scale=tuple(scales(n, k) for _, n, k in _second(case)),
    )


def _second(case: Case) -> tuple[tuple[int, int, int], ...]:
    """Sizes of the groups that have a second B."""
    return case.sizes if case.operation == "dual_gemm" else ()


def make_sets(case: Case, device: torch.device) -> Sequence[Operands]:
    """As many input sets as exceed twice the L2 together, at most ``MAX_SETS``, at least 2."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(MAX_SETS, max(2, ceil(2 * l2_bytes / case.work.bytes)))
    return [make_operands(case, device, seed) for seed in range(count)]
