"""Random operands of a case on a device, in its formats, and bf16 tensors with equal values."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch

from nvfp4_cute.bench.cases import Case
from nvfp4_cute.formats.block_format import NVFP4_PAIR, BlockFormat, Formats
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, quantized_tensor
from nvfp4_cute.formats.codecs import encode, encode_e4m3, encode_ue8m0
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.operands.whole import Parts
from nvfp4_cute.problem import new_quantized_data, new_quantized_scale
from nvfp4_cute.reference import expand_operand

MAX_SETS = 8


@dataclass(frozen=True)
class Operands:
    """One input set: one list entry per group, including groups without rows. A dual GEMM has a second B.

    ``formats``: formats of ``a`` and of every ``b``. ``out``: fp16 [M, N], or quantized results.
    """

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    a_scale: tuple[torch.Tensor, ...]
    b_scale: tuple[torch.Tensor, ...]
    out: tuple[torch.Tensor | BlockScaledTensor, ...]
    b2: tuple[torch.Tensor, ...] = ()
    b2_scale: tuple[torch.Tensor, ...] = ()
    formats: Formats = NVFP4_PAIR

    @cached_property
    def sides(self) -> tuple[Parts, ...]:
        """Returns ``a``, ``b`` and, of a dual GEMM, the second ``b``: lists with one tensor per group."""
        of_a, of_b = self.formats
        given = (self.a, self.a_scale, of_a), (self.b, self.b_scale, of_b), (self.b2, self.b2_scale, of_b)
        return tuple(Parts([*data], [*scale], format) for data, scale, format in given if data)

    def of_group(self, g: int) -> Iterator[Parts]:
        """Returns the sides of one group."""
        return (side._replace(data=side.data[g], scale=side.scale[g]) for side in self.sides)

    @cached_property
    def bf16(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns A [M, K] and B [N, K] of every group in bfloat16: exact (6 significant bits), except with fp32 scales."""
        return self.bf16_a, _bf16(self.b, self.b_scale, self.formats[1])

    @cached_property
    def bf16_a(self) -> list[torch.Tensor]:
        """Returns A of every group in bfloat16."""
        return _bf16(self.a, self.a_scale, self.formats[0])

    @cached_property
    def bf16_b2(self) -> list[torch.Tensor]:
        """Returns the second B of every group in bfloat16."""
        return _bf16(self.b2, self.b2_scale, self.formats[1])


def _bf16(
    data: Sequence[torch.Tensor], scale: Sequence[torch.Tensor], format: BlockFormat
) -> list[torch.Tensor]:
    return [
        expand_operand(x, s, format.scale_layout, format).to(torch.bfloat16)
        for x, s in zip(data, scale, strict=True)
    ]


def make_operands(case: Case, device: torch.device, seed: int) -> Operands:
    """Makes random operands, never zeros: every bit pattern of e2m1, or values from -6 to 6, and scales from 0.5 to 2."""
    generator = torch.Generator(device).manual_seed(seed)

    def values(rows: int, k: int, format: BlockFormat) -> torch.Tensor:
        if format.element.bits == 8:
            return encode(12 * torch.rand((rows, k), device=device, generator=generator) - 6, format.element)
        return torch.randint(
            0, 256, (rows, format.row_bytes(k)), dtype=torch.uint8, device=device, generator=generator
        )

    def scales(rows: int, k: int, format: BlockFormat) -> torch.Tensor:
        is_blocked = format.scale_layout == "blocked"
        shape = format.padded_scale_shape(rows, k) if is_blocked else format.scale_shape(rows, k)
        numbers = 0.5 + 1.5 * torch.rand(shape, device=device, generator=generator)
        if format.scale.bits == 32:
            return numbers
        is_power = format.scale.name == "ue8m0"
        return to_blocked(encode_ue8m0(numbers.log2().round().exp2()) if is_power else encode_e4m3(numbers))

    def result(m: int, n: int) -> torch.Tensor | BlockScaledTensor:
        if case.out_format is not None:
            return _quantized(m, n, case.out_format, device)
        return torch.full((m, n), torch.nan, dtype=case.out_dtype, device=device)

    return _operands(case, values, scales, result)


def _quantized(m: int, n: int, format: BlockFormat, device: torch.device) -> BlockScaledTensor:
    """Returns the target of a launch's quantized results."""
    data, scale = new_quantized_data((m, n), device, format), new_quantized_scale((m,), n, device, format)
    return quantized_tensor(data, scale, None, (m, n), format, format.scale_layout)


def empty_operands(case: Case) -> Operands:
    """Makes operands on the CPU without data, for models, which need only addresses."""
    return _operands(
        case,
        lambda rows, k, format: torch.empty((rows, format.row_bytes(k)), dtype=torch.uint8),
        lambda rows, k, format: torch.empty(format.scale_shape(rows, k), dtype=format.scale_dtypes[0]),
        lambda m, n: (
            torch.empty((m, n), dtype=case.out_dtype)
            if case.out_format is None
            else _quantized(m, n, case.out_format, torch.device("cpu"))
        ),
    )


def _operands(
    case: Case,
    values: Callable[[int, int, BlockFormat], torch.Tensor],
    scales: Callable[[int, int, BlockFormat], torch.Tensor],
    result: Callable[[int, int], torch.Tensor | BlockScaledTensor],
) -> Operands:
    sizes, (of_a, of_b) = case.sizes, case.formats
    return Operands(
        a=tuple(values(m, k, of_a) for m, _, k in sizes),
        b=tuple(values(n, k, of_b) for _, n, k in sizes),
        a_scale=tuple(scales(m, k, of_a) for m, _, k in sizes),
        b_scale=tuple(scales(n, k, of_b) for _, n, k in sizes),
        out=tuple(result(m, n) for m, n, _ in sizes),
        b2=tuple(values(n, k, of_b) for _, n, k in _second(case)),
        b2_scale=tuple(scales(n, k, of_b) for _, n, k in _second(case)),
        formats=case.formats,
    )


def _second(case: Case) -> tuple[tuple[int, int, int], ...]:
    """Returns sizes of the groups that have a second B."""
    return case.sizes if case.operation == "dual_gemm" else ()


def make_sets(case: Case, device: torch.device) -> Sequence[Operands]:
    """Makes input sets that together exceed twice the L2, at most ``MAX_SETS``, at least 2."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(MAX_SETS, max(2, ceil(2 * l2_bytes / case.work.bytes)))
    return [make_operands(case, device, seed) for seed in range(count)]
