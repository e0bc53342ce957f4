"""What an element of the output is made of."""

from dataclasses import dataclass

from nvfp4_cute.formats.block_format import BlockFormat


@dataclass(frozen=True)
class OutputKind:
    """What is written.

    Attributes:
        dtype: of the elements; the format of quantized ones.
        m_major: whether columns are contiguous, not rows.
        activation: of a dual GEMM's first product (``activation``); None where there is one product.
        weight_layout: how the rows of a dual GEMM's weights lie: in two operands, or interleaved in one.
    """

    dtype: type | BlockFormat
    m_major: bool
    activation: str | None
    weight_layout: str

    @property
    def num_products(self) -> int:
        """Products that an element combines."""
        return 1 if self.activation is None else 2

    @property
    def num_b(self) -> int:
        """Operands that have the products' weights."""
        return self.num_products if self.weight_layout == "separate" else 1

    @property
    def is_quantized(self) -> bool:
        """Whether results are elements and scales of blocks."""
        return isinstance(self.dtype, BlockFormat)
