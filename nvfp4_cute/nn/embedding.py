"""An embedding with a block-scaled table: it gathers stored rows, and one launch dequantizes them."""

from typing import Literal

import torch

from nvfp4_cute.formats.block_format import ATOM_ROWS, ATOM_SHAPE, NVFP4, BlockFormat, as_format
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.nn.state import KeepsBits, keeping_dtype
from nvfp4_cute.operands.rules import check_tensors
from nvfp4_cute.ops.dequantize import dequantize
from nvfp4_cute.ops.quantize import quantize

ID_DTYPES = (torch.int32, torch.int64)


class QuantizedEmbedding(KeepsBits):
    """``torch.nn.Embedding`` with a table in NVFP4, MXFP4 or MXFP8, for inference. There is no backward pass.

    A table in NVFP4 may share its tensors with a QuantizedLinear whose weights are tied to it.

    State dict:
        weight: data of the table, [V, bytes of K].
        weight_scale: its block scales, blocked.
        weight_global_scale: float32, where the format has one.

    Moving the module to a device moves all of it; ``.to(dtype)`` changes the dtype of the rows that it returns.

    Args:
        table: [V, K], in a format with 8-bit scales.
        dtype: dtype of the returned rows.
        backend: see ``dequantize``.

    Example:
        >>> embedding = QuantizedEmbedding.from_embedding(torch.nn.Embedding(100, 64))
        >>> embedding(torch.tensor([[3, 5]])).shape
        torch.Size([1, 2, 64])

    Raises:
        TypeError: ``table`` is not block-scaled.
        ValueError: ``table`` is not a matrix, or has float32 scales.
    """

    FACTORS = ("weight_global_scale",)

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor | None

    def __init__(
        self, table: BlockScaledTensor, *, dtype: torch.dtype = torch.bfloat16, backend: str = "auto"
    ):
        super().__init__()
        if not isinstance(table, BlockScaledTensor):
            raise TypeError(
                f"table is a {type(table).__name__}; pass a BlockScaledTensor: quantize(table), or call "
                "QuantizedEmbedding.from_embedding(embedding)"
            )
        if len(table.shape) != 2 or table.format.scale.bits != 8:
            raise ValueError(
                f"table has shape {tuple(table.shape)} and format {table.format.name}; an embedding has [V, K] of NVFP4, MXFP4 "
                "or MXFP8"
            )
        self.num_embeddings, self.embedding_dim = table.shape
        self.format, self.dtype, self.backend = table.format, dtype, backend
        stored = table.with_scale_layout("blocked")
        self.register_buffer("weight", stored.data)
        self.register_buffer("weight_scale", stored.scale)
        self.register_buffer("weight_global_scale", stored.global_scale)

    @classmethod
    def from_embedding(
        cls, embedding: torch.nn.Embedding, format: BlockFormat | str = NVFP4, *, backend: str = "auto"
    ) -> "QuantizedEmbedding":
        """Makes a module with the quantized table of ``embedding``, on its device and with its dtype.

        Raises:
            TypeError: ``format`` is unknown, or ``embedding`` is not exactly a torch.nn.Embedding (a derived class may compute
                something else).
            ValueError: ``embedding`` has ``max_norm``, which changes the rows that it returns, or K is not a multiple of the
                block.
        """
        format = as_format("format", format)
        reason = reason_against(embedding)
        if reason is not None:
            raise reason
        table = embedding.weight.detach()
        scale: Literal["auto"] | None = "auto" if format.has_global_scale else None
        return cls(quantize(table, format=format, global_scale=scale), dtype=table.dtype, backend=backend)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows ``ids`` of the table, [..., K] in ``dtype``.

        Args:
            ids: integers [...] from 0 to V - 1.

        Raises:
            TypeError: ``ids`` has another dtype.
            IndexError: on the CPU, an id is out of range.
        """
        check_tensors({"ids": ids})
        if ids.dtype not in ID_DTYPES:
            raise TypeError(
                f"ids has dtype {ids.dtype}; expected rows of the table in int32 or int64: pass ids.long()"
            )
        flat = ids.reshape(-1)
        rows = dequantize(self._gathered(flat), self.dtype, backend=self.backend)
        return rows.view(*ids.shape, self.embedding_dim)

    @property
    def table(self) -> BlockScaledTensor:
        """Returns the whole table, [V, K], without a copy."""
        shape = (self.num_embeddings, self.embedding_dim)
        return BlockScaledTensor(
            self.weight, self.weight_scale, self.weight_global_scale, shape, format=self.format
        )

    def _gathered(self, ids: torch.Tensor) -> BlockScaledTensor:
        """Gathers rows as stored, with row-major scales."""
        data = self.weight.view(torch.uint8).index_select(0, ids).view(self.weight.dtype)
        row_groups, rows_of_group, _ = ATOM_SHAPE
        scale = self.weight_scale.view(torch.uint8)
        # Scales of an atom are indexed [row % 32, row % 128 // 32, block % 4] (``formats.scale_layout``).
        chosen = scale[ids // ATOM_ROWS, :, ids % row_groups, ids // row_groups % rows_of_group]
        blocks = self.format.num_k_blocks(self.embedding_dim)
        chosen = chosen.flatten(1)[:, :blocks].contiguous().view(self.weight_scale.dtype)
        shape = (ids.shape[0], self.embedding_dim)
        return BlockScaledTensor(
            data, chosen, self.weight_global_scale, shape, "rowmajor", format=self.format
        )

    def extra_repr(self) -> str:
        """Shows sizes and format."""
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format.name}, dtype={self.dtype}"

    def _apply(self, fn, recurse=True):
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return super()._apply(keeping_dtype(fn), recurse)


def reason_against(embedding: torch.nn.Module) -> Exception | None:
    """Returns the error for a module that QuantizedEmbedding cannot replace, or None."""
    if type(embedding) is not torch.nn.Embedding:
        return TypeError(
            f"embedding is a {type(embedding).__name__}, which may scale or change rows; pass a torch.nn.Embedding itself"
        )
    if embedding.max_norm is not None:
        return ValueError(f"embedding has max_norm={embedding.max_norm}, which changes rows; set it to None")
    return None
