"""Weights dequantized to 16 bits and kept next to the 4-bit ones, for products of many rows where memory allows both."""

from typing import Any

import torch

from nvfp4_cute import private_api
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.compile.cache import is_planning
from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.ops.dequantize import dequantize

# Smallest number of rows that kept 16-bit weights multiply. Fewer rows are bound by the bytes of the weights.
KEPT_ROWS = 256


class Decoded:
    """The dequantized weights of a layer, computed on first use and again after their sources change.

    Holds references to the source tensors. Detects replaced tensors by identity and written ones by torch's version counter.
    """

    def __init__(self) -> None:
        self.values: torch.Tensor | None = None
        self._made_of: tuple[Any, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Stores nothing, so copies start empty."""
        return {"values": None, "_made_of": ()}

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return 0 if self.values is None else self.values.nbytes

    def of(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        factor: torch.Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Returns [N, K] in ``dtype``, times ``factor`` and rounded once; None where torch counts no writes (inference mode).

        Args:
            data: uint8 [N, K/2].
            scale: float8_e4m3fn, blocked.
            factor: float32, one element or one per row [N].
            shape: (N, K).
            dtype: dtype of the result.
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
            self.values = None  # frees the old values before it makes new ones
            self.values, self._made_of = decode(data, scale, factor, shape, dtype), (*parts, *now)
        return self.values


def decode(
    data: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Dequantizes weights; arguments and result are those of ``Decoded.of``."""
    if factor.numel() == 1:
        return dequantize(NVFP4Tensor(data, scale, factor.reshape(()), shape), dtype)
    return (dequantize(NVFP4Tensor(data, scale, None, shape)) * factor[:, None]).to(dtype)


def decoded_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Computes ``x @ W^T + bias`` with dequantized weights in torch, which adds the bias to 16-bit results in its own launch.

    Args:
        x: [M, K], 16 bits.
        weight: [N, K] in the dtype of ``x``.
        bias: [N] of any float dtype, or None.
        out_dtype: the dtype of ``x``, or another one to which the result is converted before the bias is added.
    """
    if is_planning():
        return x.new_empty((len(x), len(weight)), dtype=out_dtype)
    if bias is None or out_dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(out_dtype)
    return torch.nn.functional.linear(x, weight).to(out_dtype).add_(bias)


def is_for_kept(rows: int, is_cuda: bool) -> bool:
    """Returns whether kept weights multiply this many rows now. Traced or captured graphs dequantize without keeping."""
    if private_api.is_traced() or rows < KEPT_ROWS or is_batch_invariant():
        return False
    return not (is_cuda and torch.cuda.is_current_stream_capturing())
