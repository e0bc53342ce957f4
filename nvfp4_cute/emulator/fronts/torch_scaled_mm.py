"""torch._scaled_mm for tensors on the virtual GPU: exact products, summed in float64 and rounded once to the output.

No CPU build of torch multiplies fp4 or block-scaled operands, but scripts use the function as their reference.
"""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK_OF_SCALE = {torch.float8_e4m3fn: 16, torch.float8_e8m0fnu: 32}
"""Elements along K that share a scale of this dtype (torch's convention for blocked scales)."""


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Computes (scale_a * a) @ (scale_b * b) + bias, rounded once.

    Args:
        a: [M, K], K-major; fp8, or packed fp4 [M, K/2].
        b: [K, N] (fp4: [K/2, N]), K-major: a transposed view.
        scale_a, scale_b: float32 of shape [], [1], [M, 1] and [1, N], or any shape that divides the operand's shape
            evenly; or e4m3 (blocks of 16 along K) or e8m0 (blocks of 32) in the 128x4 blocked layout, any shape.
        bias: [N].
        scale_result: scalar factor of the result.
        use_fast_accum: ignored, because the sums are exact enough.

    Raises:
        ValueError: a scale does not fit its operand.
    """
    left = scaled_rows(a, scale_a)
    right = scaled_rows(
        b.t(), scale_b.t() if scale_b.ndim == 2 and scale_b.dtype == torch.float32 else scale_b
    )
    result = left @ right.t()
    if bias is not None:
        result = result + bias.double()
    if scale_result is not None:
        result = result * scale_result.double()
    return result.to(out_dtype or a.dtype)


def scaled_rows(operand: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[rows, K] float64: values times scales, float32 or blocked.

    Raises:
        ValueError: a scale does not fit its operand.
    """
    values = decode(operand)
    if scale.dtype == torch.float32:
        return values * _spread(scale, values.shape)
    if scale.dtype not in BLOCK_OF_SCALE:
        raise ValueError(f"scales of {scale.dtype}; they are float32, float8_e4m3fn, or float8_e8m0fnu")
    block = BLOCK_OF_SCALE[scale.dtype]
    rows, k = values.shape
    factors = _unblocked(scale.float().double(), rows, -(-k // block))
    return values * factors.repeat_interleave(block, dim=1)[:, :k]


def scaled_blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[rows, K] float64 times row-major block scales [rows, K / block].

    Raises:
        ValueError: the scales do not fit.
    """
    block = BLOCK_OF_SCALE.get(scale.dtype)
    if block is None or tuple(scale.shape) != (values.shape[0], -(-values.shape[1] // block)):
        raise ValueError(
            f"row-major {scale.dtype} scales {tuple(scale.shape)} for values {tuple(values.shape)}"
        )
    factors = scale.float().double().repeat_interleave(block, dim=1)
    return values * factors[:, : values.shape[1]]


def decode(operand: torch.Tensor) -> torch.Tensor:
    """Values of fp8, packed fp4 or wider elements, [rows, K] float64."""
    if operand.dtype != torch.float4_e2m1fn_x2:
        return operand.float().double()
    codes = operand.view(torch.uint8)
    # Two values per byte, the low nibble first.
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    return table[nibbles]


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A [rows', K'] float32 scale repeated over [rows, K]."""
    scale = scale.double()
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.ndim != 2 or any(-(-n // s) * s < n or s > n for n, s in zip(shape, scale.shape, strict=True)):
        raise ValueError(f"scale of shape {tuple(scale.shape)} for an operand of shape {tuple(shape)}")
    for axis, extent in enumerate(shape):
        scale = scale.repeat_interleave(-(-extent // scale.shape[axis]), dim=axis).narrow(axis, 0, extent)
    return scale


def _unblocked(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Row-major [rows, columns] of scales in blocks of 128 rows x 4 columns, each stored as 32 x 4 x 4."""
    row_blocks, column_blocks = -(-rows // 128), -(-columns // 4)
    if scale.numel() != row_blocks * column_blocks * 512:
        raise ValueError(
            f"{scale.numel()} blocked scales for {rows} x {columns}; expected {row_blocks * column_blocks * 512} "
            "(rows padded to 128, columns to 4)"
        )
    tiles = scale.reshape(row_blocks, column_blocks, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(row_blocks * 128, column_blocks * 4)[:rows, :columns]
