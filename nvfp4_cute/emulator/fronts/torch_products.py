"""Matrix products of torch with GPU semantics: 16-bit operands summed in float32, `out_dtype`, groups.

CPU builds lack the forms that scripts use as references. These products are exact, summed in float32 or wider and
rounded once to the output.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvfp4_cute.emulator.fronts.torch_memory import tensors_in
from nvfp4_cute.emulator.fronts.torch_scaled_mm import decode, scaled_blocks, scaled_mm, scaled_rows

PRODUCTS = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("matmul", "mm", "bmm", "mv", "dot", "inner", "addmm", "baddbmm", "addmv")
) | {torch.einsum, torch.tensordot, torch.Tensor.__matmul__, torch.nn.functional.linear}
"""Matrix products. A GPU sums 16-bit operands in float32 and rounds once; a CPU may round partial sums."""

NARROW = (torch.float16, torch.bfloat16)


def in_float32(product: Callable) -> Callable:
    """Wraps a matrix product: widens 16-bit operands, and rounds the result once, to `out_dtype` if given."""

    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs = dict(kwargs)
        named = [value for value in (*args, kwargs.pop("out_dtype", None)) if isinstance(value, torch.dtype)]
        out = kwargs.pop("out", None)
        args = tuple(value for value in args if not isinstance(value, torch.dtype))
        narrow = [t.dtype for t in tensors_in((args, kwargs)) if t.dtype in NARROW]
        if not narrow and not named:
            return product(*args, **kwargs, **({} if out is None else {"out": out}))
        result = product(*_widened(args), **_widened(kwargs))
        if out is not None:
            return out.copy_(result)
        return result.to(named[0] if named else narrow[0])

    return run


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in NARROW else value
    if isinstance(value, list | tuple):
        return type(value)(map(_widened, value))
    return {k: _widened(v) for k, v in value.items()} if isinstance(value, dict) else value


# ---- scales described by recipes -------------------------------------------------------------------
def scaled_mm_v2(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """torch._scaled_mm_v2: `scaled_mm` with a list of scales per operand. Further scales multiply the complete operand.

    Args:
        a: [M, K].
        b: [K, N].
        scale_a, scale_b: block or row scales, then float32 global scales.
        recipe_a, recipe_b: ignored, because the scales' dtypes and shapes imply them.
        swizzle_a, swizzle_b: 0 for row-major scales, else the 128x4 blocked layout.

    Raises:
        ValueError: a scale does not fit its operand, or the contraction is over other dimensions.
    """
    if list(contraction_dim) not in ([], [1, 0], [-1, -2]):
        raise ValueError(f"contraction_dim {list(contraction_dim)}: only [M, K] @ [K, N] is modelled")
    left = _operand(a, scale_a, swizzle_a)
    right = _operand(b.t(), [_transposed(scale_b[0], b), *scale_b[1:]], swizzle_b)
    return _rounded(left @ right.t(), bias, out_dtype or torch.bfloat16)


def _operand(rows: torch.Tensor, scales: Sequence[torch.Tensor], swizzles: Sequence[int]) -> torch.Tensor:
    """[rows, K] float64: an operand times all of its scales."""
    blocked = bool(swizzles) and swizzles[0] != 0
    first = scales[0]
    if first.dtype == torch.float32 or blocked:
        values = scaled_rows(rows, first)
    else:
        values = scaled_blocks(decode(rows), first)
    for scale in scales[1:]:
        values = values * scale.double().reshape(1, 1)
    return values


def _transposed(scale: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns float32 scales of b [K, N], given in its order or in that of b.t(), in the order of b.t()."""
    if scale.dtype != torch.float32 or scale.ndim != 2 or scale.numel() == 1:
        return scale
    k, n = b.shape
    fits = scale.shape[0] <= n and scale.shape[1] <= k and scale.shape[0] in (n, -(-n // 128))
    return scale if fits and scale.shape[1] != n else scale.t()


def _rounded(result: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (result if bias is None else result + bias.double()).to(dtype)


# ---- groups ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Group:
    """One product of a grouped call: `a` [M, K], `b` [K, N]. `index`: its number. `rows`: scale rows of a and of b."""

    index: int
    a: torch.Tensor
    b: torch.Tensor


def _groups(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> Iterator[_Group]:
    """Yields the products of torch's grouped forms: ragged M, N or K with `offs` [groups] (inclusive ends), or batched."""
    if a.ndim == 3 and b.ndim == 3:
        yield from (_Group(i, a[i], b[i]) for i in range(a.shape[0]))
        return
    if offs is None:
        raise ValueError("grouped products of 2-dimensional operands need `offs`")
    packed = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    start = 0
    for i, end in enumerate(offs.tolist()):
        if a.ndim == 2 and b.ndim == 3:
            yield _Group(i, a[start:end], b[i])
        elif a.ndim == 3:
            yield _Group(i, a[i], b[:, start:end])
        else:
            part = slice(start // packed, end // packed)
            yield _Group(i, a[:, part], b[part])
        start = end


def _joined(a: torch.Tensor, b: torch.Tensor, results: list[torch.Tensor]) -> torch.Tensor:
    """Arranges results of groups like torch: concatenated rows or columns, or else stacked.

    Rows after the last group are zeros here; a GPU leaves them unchanged.
    """
    if a.ndim == b.ndim:
        return torch.stack(results)
    axis, total = (0, a.shape[0]) if a.ndim == 2 else (1, b.shape[1])
    found = torch.cat(results, dim=axis)
    shape = list(found.shape)
    shape[axis] = total
    whole = found.new_zeros(shape)
    whole.narrow(axis, 0, found.shape[axis]).copy_(found)
    return whole


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch._grouped_mm: 16-bit operands, [M, K] or [G, M, K] and [K, N] or [G, K, N], summed in float32.

    Raises:
        ValueError: `offs` is missing.
    """
    dtype = out_dtype or a.dtype
    return _joined(a, b, [_rounded(g.a.float() @ g.b.float(), bias, dtype) for g in _groups(a, b, offs)])


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """torch._scaled_grouped_mm: `scaled_grouped_mm_v2` with one scale per operand."""
    swizzle = [int(scale_a.dtype != torch.float32)]
    result = scaled_grouped_mm_v2(
        a, b, [scale_a], [], swizzle, [scale_b], [], swizzle, offs, bias, torch.float64
    )
    return _rounded(
        result if scale_result is None else result * scale_result.double(), None, out_dtype or torch.bfloat16
    )


def scaled_grouped_mm_v2(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """torch._scaled_grouped_mm_v2: grouped products of fp8 or fp4 operands with block or row scales.

    Args:
        a, b: shapes as for `grouped_mm`; fp8, or packed fp4 (offsets count elements).
        offs: inclusive ends, int32 [groups].
        scale_a, scale_b: float32, one per row or column, in the order of the groups; or block scales in the 128x4
            layout, the groups' scales one after the other, each padded to full tiles; then float32 global scales, one
            per group.

    Raises:
        ValueError: a scale does not fit its operand.
    """
    left = _ScaleParts(scale_a[0], a.ndim == 3)
    right = _ScaleParts(scale_b[0], b.ndim == 3)
    results = []
    for group in _groups(a, b, offs):
        values = []
        for rows, parts, scales in ((group.a, left, scale_a), (group.b.t(), right, scale_b)):
            one = scaled_rows(rows, parts.take(group.index, rows))
            values.append(one * _global(scales[1:], group.index))
        results.append(_rounded(values[0] @ values[1].t(), bias, out_dtype or torch.bfloat16))
    return _joined(a, b, results)


class _ScaleParts:
    """Scales of an operand, returned group by group."""

    def __init__(self, scale: torch.Tensor, batched: bool):
        self._scale, self._batched, self._taken = scale, batched, 0

    def take(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Returns the scales of a group's operand [rows, K], packed or not: float32 [rows, 1], or blocked."""
        scale = self._scale
        if scale.dtype == torch.float32:
            count = rows.shape[0]
            part = scale[index] if self._batched else scale.reshape(-1)[self._taken : self._taken + count]
            self._taken += count
            return part.reshape(-1, 1)
        if self._batched:
            return scale[index].reshape(-1)
        packed = 2 if rows.dtype == torch.float4_e2m1fn_x2 else 1
        block = 16 if scale.dtype == torch.float8_e4m3fn else 32
        blocks = -(-rows.shape[1] * packed // block)
        count = -(-rows.shape[0] // 128) * 128 * (-(-blocks // 4) * 4)
        part = scale.reshape(-1)[self._taken : self._taken + count]
        self._taken += count
        return part


def _global(scales: Sequence[torch.Tensor], index: int) -> float:
    """Returns the product of a group's global scales."""
    factor = 1.0
    for scale in scales:
        flat = scale.reshape(-1)
        factor *= float(flat[index if flat.numel() > 1 else 0])
    return factor


_REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "_scaled_mm": scaled_mm,
    "_scaled_mm_v2": scaled_mm_v2,
    "_grouped_mm": grouped_mm,
    "_scaled_grouped_mm": scaled_grouped_mm,
    "_scaled_grouped_mm_v2": scaled_grouped_mm_v2,
}
REFERENCES: dict[Callable, Callable] = {
    getattr(torch, name): reference for name, reference in _REFERENCES.items() if hasattr(torch, name)
}
"""GPU-only operators of this torch version, and the functions that compute them here."""
