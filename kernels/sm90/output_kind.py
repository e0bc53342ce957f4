"""What an element of the output is made of."""

from dataclasses import dataclass

from nvfp4_cute.arch.sm90 import TILE_WEIGHTS


@dataclass(frozen=True)
class OutputKind:
    """What is written.

    Attributes:
        dtype: of the elements; Float4E2M1FN stands for NVFP4.
        activation: of a dual GEMM's first product (``common.activation``); None where there is one product.
        weight_layout: how the rows of a dual GEMM's weights lie: in two operands, or interleaved in one.
    """

    dtype: type
    activation: str | None
    weight_layout: str

    @property
    def num_products(self) -> int:
        """Products that an element combines: those of rows g and g + 8 of a lane's MMAs where there are two."""
        return 1 if self.activation is None else 2

    @property
    def num_b(self) -> int:
        """Operands with weights."""
        return self.num_products if self.weight_layout == "separate" else 1

    @property
    def tile_columns(self) -> int:
        """Columns of the output in a work tile."""
        return TILE_WEIGHTS // self.num_products

    @property
    def group_columns(self) -> int:
        """Those of one of its two warpgroups."""
        return self.tile_columns // 2
