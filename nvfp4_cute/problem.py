"""Sizes and types of a grouped problem. ``operands.grouped`` checks what callers pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from nvfp4_cute.activation import check_limit, parse
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.formats import block_format
from nvfp4_cute.formats.block_format import TMA_ALIGN_BYTES as TMA_ALIGN_BYTES
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch_table import INTERLEAVE

INT32_MAX = 2**31 - 1
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NVFP4: Literal["nvfp4"] = "nvfp4"
MXName = Literal["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"]
ResultName = Literal["nvfp4", "nvfp4_four_over_six", MXName]
FP8Name = Literal["fp8_1x128"]
QuantizedName = Literal["nvfp4", "nvfp4_four_over_six", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "fp8_1x128"]
OutDtype = torch.dtype | QuantizedName
# Format of quantized results by its name in ``out_dtype``. The last one requires operands of that format.
RESULT_FORMATS: dict[Any, BlockFormat] = {
    name: block_format.format_named(name) for name in (*get_args(ResultName), *get_args(FP8Name))
}
Form = Literal["list", "ragged", "masked", "batched", "routed"]
# Text of a function of ``activation.Activation``, without the limit.
Activation = str
# Layouts of a dual GEMM's weights in a kernel: two operands, or one with alternating rows of both.
WeightLayout = Literal["separate", "interleaved_64_up_first", "interleaved_32_gate_first"]
# Layouts that callers may pass; halves of one operand are two operands to a kernel.
DualWeights = Literal["separate", "concatenated", "interleaved_64_up_first", "interleaved_32_gate_first"]
# Number of rows after which an interleaved layout repeats.
PERIODS = {layout: 2 * rows for layout, rows in INTERLEAVE.items()}


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
    """Returns the bytes of one GEMM in memory: A, ``num_b`` B operands and their scales once, C (M, N) once."""
    return a_format.nbytes(m, k) + num_b * b_format.nbytes(n, k) + m * n * out_itemsize


def result_format(dtype: Any) -> BlockFormat | None:
    """Returns the format for this ``out_dtype``; None for a torch dtype or an unknown value."""
    return RESULT_FORMATS.get(dtype)


def out_bytes(m: int, n: int, dtype: OutDtype) -> int:
    """Returns the bytes of C (M, N), including block scales of quantized results."""
    return m * n * dtype.itemsize if isinstance(dtype, torch.dtype) else RESULT_FORMATS[dtype].nbytes(m, n)


def dtype_name(dtype: OutDtype) -> str:
    """Returns the name without ``torch.``, for messages and names of kernels."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class GroupedProblem:
    """Sizes and types of a grouped GEMM, without data and without tiles.

    Attributes:
        sizes: (m, n, k) of every group, in elements; m or n may be 0.
        form: form of the operands: a list with one entry per group, ragged with offsets, masked, or batched: all groups have
            one size and equal distances in memory; or routed: every group has one row, and an id on the device selects its
            weights.
        out_dtype: dtype of C; for quantized results with their scales, the name of their format.
        has_alpha: whether ``alpha[g]`` multiplies group g's result.
        out_m_major: whether columns of C are contiguous instead of rows.
        activation: for a dual GEMM, C = activation(A @ B1^T) * (A @ B2^T); None for a single product.
        weight_layout: for a dual GEMM. If interleaved, n counts the rows of both, and C has n / 2 columns.
        limit: for a dual GEMM: clamps A @ B1^T to at most ``limit`` and A @ B2^T to [-limit, limit]; None does not clamp.
        is_chain: whether every group's A is the result of the previous group: layers of one size.
        early_weights: whether the previous launch wrote neither the groups' sizes nor any ``b``.
        a_format, b_format: formats of A and of every ``b``.
        bias_dtype: dtype of the bias added to every column of C, in a dual GEMM of both products; None without a bias.
        has_row_scales: whether A has a global scale per row, a factor of the row's results.
        batch_invariant: whether sums over K have one order for any number of rows. Default: what the call asks for
            (``batch_invariance``).
        is_dense: whether the problem is a product of ``gemm``, all of whose rows meet the same weights.
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
    has_row_scales: bool = field(default=False, repr=False)
    batch_invariant: bool = field(default_factory=is_batch_invariant, repr=False)
    is_dense: bool = field(default=False, repr=False)

    @property
    def out_format(self) -> BlockFormat | None:
        """Format of quantized results; None for other results."""
        return result_format(self.out_dtype)

    @property
    def num_more_addresses(self) -> int:
        """Addresses per group besides those of operands and results: of scales of results, and of global scales per row."""
        return (self.out_format is not None) + self.has_row_scales

    @property
    def gate(self) -> "Gate | None":
        """Activation and weight layout of a dual GEMM; None for a single product."""
        return None if self.activation is None else Gate(self.activation, self.limit, self.weight_layout)

    @property
    def num_b(self) -> int:
        """Number of operands ``b`` by which every group's ``a`` is multiplied."""
        return num_weights(self.activation is not None, self.weight_layout)

    def out_columns(self, n: int) -> int:
        """Returns the columns of C for a group whose ``b`` has ``n`` rows."""
        return n if self.weight_layout == "separate" else n // 2

    @property
    def num_groups(self) -> int:
        """Number of groups, including empty ones."""
        return len(self.sizes)

    @property
    def flops(self) -> int:
        """Multiplications and additions for the real rows: 2*M*N*K over all groups and operands ``b``."""
        return sum(2 * m * n * k * self.num_b for m, n, k in self.sizes)

    @property
    def bytes(self) -> int:
        """Smallest traffic in bytes: A, B and both scales read once, C written once, without padding."""
        formats = {"a_format": self.a_format, "b_format": self.b_format}
        read = sum(gemm_bytes(m, n, k, 0, num_b=self.num_b, **formats) for m, n, k in self.sizes)
        return read + sum(out_bytes(m, self.out_columns(n), self.out_dtype) for m, n, _ in self.sizes)

    def __str__(self) -> str:
        """Describes the problem in one line: form, sizes, output dtype, operations, bytes."""
        shapes = " ".join(f"{m}x{n}x{k}" for m, n, k in self.sizes)
        alpha = ", alpha" if self.has_alpha else ""
        dual = "" if self.activation is None else f"dual ({self.activation}), "
        pair = self.a_format, self.b_format
        formats = "" if pair == (block_format.NVFP4, block_format.NVFP4) else f" of {pair[0]} x {pair[1]}"
        return (
            f"{dual}{self.form} of {self.num_groups} groups (MxNxK {shapes}){formats} -> {dtype_name(self.out_dtype)}{alpha}"
            f": {self.flops / 1e9:.3g} GFLOP, {self.bytes / 1e6:.3g} MB"
        )


def check_early_weights(early_weights: Any) -> None:
    """Raises TypeError unless ``early_weights`` is a bool."""
    if not isinstance(early_weights, bool):
        raise TypeError(
            f"early_weights={early_weights!r} is not a bool; pass True if the previous launch wrote no weights, else False"
        )


@dataclass(frozen=True)
class Gate:
    """The options that make a GEMM dual; see the attributes of :class:`GroupedProblem` with these names."""

    activation: Activation
    limit: float | None
    weight_layout: Any

    @classmethod
    def checked(cls, activation: Any, limit: Any, weight_layout: Any, second: tuple[Any, Any]) -> "Gate":
        """Makes a gate. Raises ValueError or TypeError for unknown values, and for weights that do not fit the layout.

        Args:
            second: ``b2`` and ``b2_scale``, None each if not given.
        """
        function = parse(activation).function
        if weight_layout not in get_args(DualWeights):
            names = ", ".join(f'"{choice}"' for choice in get_args(DualWeights))
            raise ValueError(f"weight_layout={weight_layout!r} is unknown; use one of {names}")
        check_limit(limit)
        is_separate = weight_layout == "separate"
        if any((part is not None) != is_separate for part in second):
            fix = "pass b2 and b2_scale" if is_separate else "b1 holds both; pass None for b2 and b2_scale"
            raise TypeError(f"weight_layout={weight_layout!r}: {fix}")
        return cls(function, limit, weight_layout)

    @property
    def is_interleaved(self) -> bool:
        """Whether one operand holds the rows of both products alternately."""
        return self.weight_layout in PERIODS

    def check_rows(self, label: str, n: int) -> None:
        """Raises ValueError unless ``n`` rows of weights are whole periods of the layout."""
        if self.weight_layout == "concatenated":
            concatenated_rows(label, n)
        period = PERIODS.get(self.weight_layout, 1)
        if n % period:
            raise ValueError(
                f"{label} has {n} rows; weight_layout={self.weight_layout!r} has whole periods of {period}: pad both "
                "products' rows"
            )


def num_weights(has_gate: bool, weight_layout: DualWeights) -> int:
    """Returns a kernel's number of operands ``b``: two for a dual GEMM, also for halves of one operand, unless interleaved."""
    return 2 if has_gate and weight_layout in ("separate", "concatenated") else 1


def concatenated_rows(label: str, rows: int) -> int:
    """Returns the rows of each half of concatenated weights. Raises ValueError if the halves' scales share a block."""
    if rows % 256:
        raise ValueError(
            f'{label} has {rows} rows; weight_layout="concatenated" takes two halves whose scale blocks of 128 rows are '
            "their own: a multiple of 256 rows; pad both products' rows"
        )
    return rows // 2


def new_quantized_data(
    shape: Sequence[int], device: torch.device, format: BlockFormat = block_format.NVFP4
) -> torch.Tensor:
    """Allocates uint8 data for quantized results ``[..., N]``, with rows a multiple of 16 bytes apart, as operands need."""
    *rows, n = shape
    data = torch.empty((*rows, format.pitch_bytes(n)), dtype=torch.uint8, device=device)
    return data[..., : format.row_bytes(n)]


def new_quantized_scale(
    lead: Sequence[int], n: int, device: torch.device, format: BlockFormat = block_format.NVFP4
) -> torch.Tensor:
    """Allocates scales for quantized results ``[..., M, N]``; ``lead`` is the shape without N.

    Returns uint8 [..., rm, rn, 32, 4, 4], or float32 [..., M, N/128] for formats with row-major scales.
    """
    *batches, rows = lead
    shape = (*batches, *format.scale_shape(rows, n))
    return torch.empty(shape, dtype=result_scale_dtype(format), device=device)


def result_scale_dtype(format: BlockFormat) -> torch.dtype:
    """Returns the dtype of new scales: bytes, or the format's own dtype for row-major scales."""
    return torch.uint8 if format.scale_layout == "blocked" else format.scale_dtypes[0]
