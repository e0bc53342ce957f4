"""Weights decoded to 16 bits and kept beside the 4-bit ones: for products of many rows, where there is memory for both."""

from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.ops.dequantize import dequantize

# Rows from which a product of 16-bit weights is chosen where they are kept: fewer are bound by the bytes of the weights.
KEPT_ROWS = 256


class Decoded:
    """The decoded weights of a layer, made when they are first asked for, and anew once what they are made of has changed.

    It holds the tensors that it decoded: others in their place are told by identity, written ones by torch's count of writes.
    """

    def __init__(self) -> None:
        self.values: torch.Tensor | None = None
        self._made_of: tuple[Any, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of it is stored or copied."""
        return {"values": None, "_made_of": ()}

    @property
    def nbytes(self) -> int:
        """That are taken now."""
        return 0 if self.values is None else self.values.nbytes

    def of(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        factor: torch.Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """[N, K] of ``dtype``, rounded once with ``factor``; None where writes are not counted, as in inference mode.

        Args:
            data: uint8 [N, K/2]. scale: float8_e4m3fn, blocked. factor: float32, one, or one a row [N].
        """
        parts = (data, scale, factor)
        if any(part.is_inference() for part in parts):
            return None
        now = (dtype, *(part._version for part in parts))
        known = self._made_of
        if (
            self.values is None
            or known[3:] != now
            or any(a is not b for a, b in zip(parts, known, strict=False))
        ):
            self.values = None  # before there are two of them
            self.values, self._made_of = decode(data, scale, factor, shape, dtype), (*parts, *now)
        return self.values


def decode(
    data: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Arguments and result as of ``Decoded.of``."""
    if factor.numel() == 1:
        return dequantize(NVFP4Tensor(data, scale, factor.reshape(()), shape), dtype)
    return (dequantize(NVFP4Tensor(data, scale, None, shape)) * factor[:, None]).to(dtype)


def is_for_kept(rows: int, is_cuda: bool) -> bool:
    """Whether so many rows are multiplied by kept weights now: a graph that is traced or captured decodes what it finds."""
    if private_api.is_traced() or rows < KEPT_ROWS:
        return False
    return not (is_cuda and torch.cuda.is_current_stream_capturing())
