"""What is computed: sizes and types of a grouped problem. ``operands.grouped`` checks what callers pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from nvfp4_cute.formats import block_format
from nvfp4_cute.formats.block_format import TMA_ALIGN_BYTES as TMA_ALIGN_BYTES
from nvfp4_cute.formats.block_format import BlockFormat

INT32_MAX = 2**31 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NVFP4: Literal["nvfp4"] = "nvfp4"
MXName = Literal["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"]
ResultName = Literal["nvfp4", MXName]
FP8Name = Literal["fp8_1x128"]
QuantizedName = Literal["nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "fp8_1x128"]
OutDtype = torch.dtype | QuantizedName
# Formats of quantized results, by what ``out_dtype`` calls them; the last one is of products of such rows alone.
RESULT_FORMATS: dict[Any, BlockFormat] = {
    name: block_format.FORMATS[name] for name in (*get_args(ResultName), *get_args(FP8Name))
}
Form = Literal["list", "ragged", "masked", "batched"]
Activation = Literal["silu", "gelu_tanh", "relu2", "swiglu_oai"]
# How a kernel finds a dual GEMM's weights: two operands, or one that has rows of both in turn.
WeightLayout = Literal["separate", "interleaved_64_up_first", "interleaved_32_gate_first"]
# How a caller may pass them: halves of one operand are two for a kernel.
DualWeights = Literal["separate", "concatenated", "interleaved_64_up_first", "interleaved_32_gate_first"]
# Rows after which an interleaved layout repeats itself.
PERIODS = {"interleaved_64_up_first": 128, "interleaved_32_gate_first": 64}


def gemm_bytes(
    m: int,
    n: int,
    k: int,
    out_itemsize: int,
    *,
    num_b: int = 1,
    a_format: BlockFormat = block_format.NVFP4,
    b_format: BlockFormat = block_format.NVFP4,
) -> int:
    """Bytes of one GEMM in memory: A, ``num_b`` B operands and their scales once, C (M, N) once."""
    return a_format.nbytes(m, k) + num_b * b_format.nbytes(n, k) + m * n * out_itemsize


def result_format(dtype: Any) -> BlockFormat | None:
    """The format of results of this ``out_dtype``; None of a dtype of torch, and of what no result has."""
    return RESULT_FORMATS.get(dtype)


def out_bytes(m: int, n: int, dtype: OutDtype) -> int:
    """Bytes of C (M, N): of quantized results, elements and the scales of their blocks."""
    return m * n * dtype.itemsize if isinstance(dtype, torch.dtype) else RESULT_FORMATS[dtype].nbytes(m, n)


def dtype_name(dtype: OutDtype) -> str:
    """For messages and names of kernels: without ``torch.``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class GroupedProblem:
    """Sizes and types of a grouped GEMM; holds no data and says nothing about tiles.

    Attributes:
        sizes: (m, n, k) of every group, in elements; m or n may be 0.
        form: how the operands arrive: a list with an entry a group, ragged with offsets, masked, or batched: all groups
            of one size, at equal distances in memory.
        out_dtype: dtype of C; of quantized results with their scales the name of their format.
        has_alpha: whether group g's result is multiplied by ``alpha[g]``.
        out_m_major: whether columns of C are contiguous, not rows.
        activation: of a dual GEMM: C = activation(A @ B1^T) * (A @ B2^T); None where there is one product.
        weight_layout: of a dual GEMM. Where interleaved, n counts the rows of both, and C has n / 2 columns.
        limit: of a dual GEMM: A @ B1^T is cut to at most that, A @ B2^T to that on both sides; None leaves them.
        is_chain: whether every group's A is the result of the group before: layers, all of one size.
        early_weights: whether the launch right before wrote neither the groups' sizes nor any ``b``.
        a_format, b_format: what the bytes of A, and of every ``b``, stand for.
        bias_dtype: of what is added to every column of C; None where nothing is.
    """

    sizes: tuple[tuple[int, int, int], ...]
    form: Form = "list"
    out_dtype: OutDtype = torch.bfloat16
    has_alpha: bool = False
    out_m_major: bool = False
    activation: Activation | None = None
    weight_layout: WeightLayout = "separate"
    limit: float | None = None
    is_chain: bool = False
    early_weights: bool = False
    a_format: BlockFormat = block_format.NVFP4
    b_format: BlockFormat = block_format.NVFP4
    bias_dtype: torch.dtype | None = None

    @property
    def out_format(self) -> BlockFormat | None:
        """Of quantized results; None of others."""
        return result_format(self.out_dtype)

    @property
    def gate(self) -> "Gate | None":
        """Of a dual GEMM; None where there is one product."""
        return None if self.activation is None else Gate(self.activation, self.limit, self.weight_layout)

    @property
    def num_b(self) -> int:
        """Operands ``b`` that every group's ``a`` is multiplied by."""
        return num_weights(self.activation is not None, self.weight_layout)

    def out_columns(self, n: int) -> int:
        """Columns of C of a group whose ``b`` has ``n`` rows."""
        return n if self.weight_layout == "separate" else n // 2

    @property
    def num_groups(self) -> int:
        """Groups, empty ones included."""
        return len(self.sizes)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the real rows: 2*M*N*K over all groups and operands ``b``."""
        return sum(2 * m * n * k * self.num_b for m, n, k in self.sizes)

    @property
    def bytes(self) -> int:
        """Least traffic in bytes: A, B and both scales read once, C written once; no padding is counted."""
        formats = {"a_format": self.a_format, "b_format": self.b_format}
        read = sum(gemm_bytes(m, n, k, 0, num_b=self.num_b, **formats) for m, n, k in self.sizes)
        return read + sum(out_bytes(m, self.out_columns(n), self.out_dtype) for m, n, _ in self.sizes)

    def __str__(self) -> str:
        """One line: form, sizes, output dtype, operations, bytes."""
        shapes = " ".join(f"{m}x{n}x{k}" for m, n, k in self.sizes)
        alpha = ", alpha" if self.has_alpha else ""
        dual = "" if self.activation is None else f"dual ({self.activation}), "
        pair = self.a_format, self.b_format
        formats = "" if pair == (block_format.NVFP4, block_format.NVFP4) else f" of {pair[0]} x {pair[1]}"
        return (
            f"{dual}{self.form} of {self.num_groups} groups (MxNxK {shapes}){formats} -> {dtype_name(self.out_dtype)}{alpha}"
            f": {self.flops / 1e9:.3g} GFLOP, {self.bytes / 1e6:.3g} MB"
        )


def check_limit(limit: Any) -> None:
    """Raises ValueError unless a gate can be cut to it: a positive number of float32, infinity among them, or None."""
    if limit is None:
        return
    if not isinstance(limit, int | float) or not (0 < limit <= FLOAT32_MAX or limit == math.inf):
        raise ValueError(f"limit={limit!r:.20} is not a positive number of float32; pass None for no limit")


def check_early_weights(early_weights: Any) -> None:
    """Raises TypeError unless the promise is made or not."""
    if not isinstance(early_weights, bool):
        raise TypeError(
            f"early_weights={early_weights!r} is no bool; pass True where the launch before wrote no weights, else False"
        )


@dataclass(frozen=True)
class Gate:
    """What makes a GEMM dual: as the attributes of :class:`GroupedProblem` of these names."""

    activation: Activation
    limit: float | None
    weight_layout: Any

    @classmethod
    def checked(cls, activation: Any, limit: Any, weight_layout: Any, second: tuple[Any, Any]) -> "Gate":
        """Raises ValueError or TypeError where an argument is none of its values, or the weights do not fit the layout.

        Args:
            second: ``b2`` and ``b2_scale``, each None where it was not given.
        """
        for name, value, choices in (
            ("activation", activation, get_args(Activation)),
            ("weight_layout", weight_layout, get_args(DualWeights)),
        ):
            if value not in choices:
                names = ", ".join(f'"{choice}"' for choice in choices)
                raise ValueError(f"{name}={value!r} is unknown; use one of {names}")
        check_limit(limit)
        is_separate = weight_layout == "separate"
        if any((part is not None) != is_separate for part in second):
            fix = "pass b2 and b2_scale" if is_separate else "b1 holds both; pass None for b2 and b2_scale"
            raise TypeError(f"weight_layout={weight_layout!r}: {fix}")
        return cls(activation, limit, weight_layout)

    @property
    def is_interleaved(self) -> bool:
        """Whether one operand holds the rows of both products in turns."""
        return self.weight_layout in PERIODS

    def check_rows(self, label: str, n: int) -> None:
        """Raises ValueError where ``n`` rows of weights are not whole periods of the layout."""
        if self.weight_layout == "concatenated":
            concatenated_rows(label, n)
        period = PERIODS.get(self.weight_layout, 1)
        if n % period:
            raise ValueError(
                f"{label} has {n} rows; weight_layout={self.weight_layout!r} has whole periods of {period}: pad both "
                "products' rows"
            )


def num_weights(has_gate: bool, weight_layout: DualWeights) -> int:
    """Operands ``b`` of a kernel: two of a dual GEMM whose weights are not interleaved in one; halves of one operand are two."""
    return 2 if has_gate and weight_layout in ("separate", "concatenated") else 1


def concatenated_rows(label: str, rows: int) -> int:
    """Rows of each half of concatenated weights. Raises ValueError where the halves' scales share a block."""
    if rows % 256:
        raise ValueError(
            f'{label} has {rows} rows; weight_layout="concatenated" takes two halves whose scale blocks of 128 rows are '
            "their own: a multiple of 256 rows; pad both products' rows"
        )
    return rows // 2


def new_quantized_data(
    shape: Sequence[int], device: torch.device, format: BlockFormat = block_format.NVFP4
) -> torch.Tensor:
    """Uninitialised uint8 data of quantized results ``[..., N]``, rows a multiple of 16 bytes apart as operands have them."""
    *rows, n = shape
    data = torch.empty((*rows, format.pitch_bytes(n)), dtype=torch.uint8, device=device)
    return data[..., : format.row_bytes(n)]


def new_quantized_scale(
    lead: Sequence[int], n: int, device: torch.device, format: BlockFormat = block_format.NVFP4
) -> torch.Tensor:
    """Uninitialised scales of quantized results ``[..., M, N]``, ``lead`` without N: uint8 [..., rm, rn, 32, 4, 4], or where they
    have rows float32 [..., M, N/128]."""
    *batches, rows = lead
    shape = (*batches, *format.scale_shape(rows, n))
    return torch.empty(shape, dtype=result_scale_dtype(format), device=device)


def result_scale_dtype(format: BlockFormat) -> torch.dtype:
    """Of the scales of new results: bytes, or where they have rows what they are."""
    return torch.uint8 if format.scale_layout == "blocked" else format.scale_dtypes[0]
