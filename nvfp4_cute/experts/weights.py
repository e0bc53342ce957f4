"""Weights of all experts, and the factors of their products."""

from dataclasses import dataclass, field
from typing import Any

import torch

from nvfp4_cute.formats.block_format import NVFP4, BlockFormat
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.formats.exact_fp8 import mxfp4_for_fp8
from nvfp4_cute.launch_table import INTERLEAVE
from nvfp4_cute.operands.rules import check_choice
from nvfp4_cute.ops.quantize import quantize

LINE_BYTES = 128
# Rows of the gate, and rows of up, in each turn.
TURN_ROWS = INTERLEAVE["interleaved_32_gate_first"]
# Largest padding, as a fraction of a row, that is added so that the next row begins a cache line.
MOST_PADDING = 1 / 8


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Weights of E experts, [E, N, K]. A BlockScaledTensor of that shape can be used instead.

    Attributes:
        data: uint8 [E, N, K/2] for 4-bit formats; float8 or int8 [E, N, K] for 8-bit ones.
        scale: blocked [E, rn, rk, 32, 4, 4]: float8_e4m3fn for NVFP4, float8_e8m0fnu for MX formats, uint8 for MXFP4_FP8.
            Row-major float32 for FP8_128x128 and INT8.
        global_scale: float32 factor by which dequantizing multiplies: one element, [E], or [E, 2] where the two halves of gated
            weights have their own. None means 1, as for MX formats.
        format: format of the weights; ``moe`` says which rows multiply it.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    # A factory, because dynamo of torch 2.11 accepts no objects as defaults.
    format: BlockFormat = field(default_factory=lambda: NVFP4)

    @classmethod
    def quantize(cls, weights: torch.Tensor, format: BlockFormat = NVFP4) -> "ExpertWeights":
        """Quantizes [E, N, K] of any float dtype. NVFP4: each expert's global scale is its amax / 2688.

        Rows of the result begin cache lines where :func:`in_whole_lines` pads them.
        """
        made = quantize(weights, format=format, global_scale="per_batch" if format.has_global_scale else None)
        return cls(in_whole_lines(made.data), made.scale, made.global_scale, format)

    def for_fp8(self) -> "ExpertWeights":
        """Copies MXFP4 weights into MXFP4_FP8. Raises what ``mxfp4_for_fp8`` raises."""
        whole = BlockScaledTensor(self.data, self.scale, None, self.shape, "blocked", format=self.format)
        made = mxfp4_for_fp8(whole)
        return ExpertWeights(made.data, made.scale, None, made.format)

    def in_turns(self, layout: str = "concatenated") -> "ExpertWeights":
        """Copies weights of gate and up into the layout "interleaved_32_gate_first", which one launch multiplies for every width.

        One launch cannot multiply "interleaved" rows, and "concatenated" halves only if each has a multiple of 128 rows.
        The function :func:`in_turns` copies biases into this order.

        Args:
            layout: layout of the weights, "concatenated" or "interleaved".

        Raises ValueError if scales are not in blocks, or gate and up do not have a multiple of 32 rows each.
        """
        if self.format.scale_layout != "blocked":
            raise ValueError(f"{self.format.title} has row-major scales; its rows stay in their layout")
        n = self.shape[1]
        # Row 32 j + i of an atom has place (i, j) in [E, rn, rk, 32, 4, ...].
        by_row = self.scale.view(torch.uint8).view(*self.scale.shape[:5], -1).permute(0, 1, 4, 3, 2, 5)
        rows = by_row.flatten(1, 3)
        rows = torch.cat([in_turns(rows[:, :n], layout), rows[:, n:]], 1)
        scale = rows.view(by_row.shape).permute(0, 1, 4, 3, 2, 5).contiguous()
        return ExpertWeights(
            in_whole_lines(in_turns(self.data, layout)),
            scale.view(self.scale.dtype).view(self.scale.shape),
            self.global_scale,
            self.format,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, n, row_bytes = self.data.shape
        return experts, n, self.format.elements(row_bytes)


def in_turns(rows: torch.Tensor, layout: str = "concatenated") -> torch.Tensor:
    """Copies rows of gate and up, [E, 2 N, ...], such as biases, so that 32 rows of the gate and 32 rows of up alternate.

    layout: layout of ``rows``, "concatenated" or "interleaved".
    """
    check_choice("layout", layout, ("concatenated", "interleaved"))
    n = rows.shape[1] // 2
    if rows.shape[1] % (2 * TURN_ROWS):
        raise ValueError(f"{rows.shape[1]} rows; gate and up need a multiple of {TURN_ROWS} rows each")
    halves = (rows[:, ::2], rows[:, 1::2]) if layout == "interleaved" else (rows[:, :n], rows[:, n:])
    turns = [half.unflatten(1, (-1, TURN_ROWS)) for half in halves]
    return torch.stack(turns, 2).flatten(1, 3)


def in_whole_lines(data: torch.Tensor) -> torch.Tensor:
    """Returns weights [E, N, bytes] whose rows begin cache lines of L2, copied if necessary with up to an eighth more memory.

    Rows that would need more padding are left alone. For gpt-oss-20b's rows of 1440 bytes, at a distance of 1536, an H100 takes
    8 to 11 % less time for both products (``bench/notes``).
    """
    length = data.shape[-1]
    pitch = -(-length // LINE_BYTES) * LINE_BYTES
    if not data.numel() or data.stride(-2) % LINE_BYTES == 0 or pitch - length > MOST_PADDING * length:
        return data
    padded = data.new_zeros((*data.shape[:-1], pitch))
    padded[..., :length] = data
    return padded[..., :length]


def per_expert(factor: Any, experts: int, device: torch.device) -> torch.Tensor | None:
    """Converts a factor of all experts, or one per expert, to float32 [experts], without a launch if it is that.

    None stays None.
    """
    if factor is None:
        return None
    factor = torch.as_tensor(factor, dtype=torch.float32, device=device).reshape(-1)
    if factor.numel() not in (1, experts):
        raise ValueError(
            f"a factor of {factor.numel()} elements; expected one, or one for each of {experts} experts"
        )
    return factor.contiguous() if len(factor) == experts else factor.expand(experts).contiguous()


def product_factors(
    weights: Any, input_scale: torch.Tensor | None, experts: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the factors of the two halves of a product, float32 [E] each (the same tensor if equal), or None.

    Args:
        weights: ExpertWeights or BlockScaledTensor.
        input_scale: global scale of the rows that they multiply: one element, [E], or None.
        experts: E.
    """
    device, given = weights.data.device, weights.global_scale
    scale = per_expert(input_scale, experts, device)
    if given is None:
        return scale, scale
    if given.ndim == 2:
        halves = [given[:, i].float().contiguous() for i in (0, 1)]
        first, second = (half if scale is None else half * scale for half in halves)
        return first, second
    factor = per_expert(given, experts, device)
    factor = factor if scale is None or factor is None else factor * scale
    return factor, factor
