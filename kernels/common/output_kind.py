"""Compile-time kind of an output: dtype, layout and activation."""

from dataclasses import dataclass

from nvfp4_cute.formats.block_format import BlockFormat


@dataclass(frozen=True)
class OutputKind:
    """Kind of the output.

    Attributes:
        dtype: dtype of the elements, or the format of quantized results.
        m_major: whether columns rather than rows are contiguous.
        activation: activation of a dual GEMM's first product (``activation``); None for one product.
        weight_layout: layout of a dual GEMM's weights: two operands, or interleaved in one.
    """

    dtype: type | BlockFormat
    m_major: bool
    activation: str | None
    weight_layout: str

    @property
    def num_products(self) -> int:
        """Products per output element: 1, or 2 in a dual GEMM."""
        return 1 if self.activation is None else 2

    @property
    def num_b(self) -> int:
        """Operands that hold the weights: 1, or 2 for separate weights of a dual GEMM."""
        return self.num_products if self.weight_layout == "separate" else 1

    @property
    def is_quantized(self) -> bool:
        """Whether results are quantized to elements and block scales."""
        return isinstance(self.dtype, BlockFormat)
