"""torch's scaled products, with the signatures of torch 2.10 and later, computed by this library.

``scaled_mm`` and ``scaled_grouped_mm`` follow ``torch.nn.functional``. ``_scaled_mm``, ``_scaled_mm_v2``,
``_scaled_grouped_mm`` and ``_scaled_grouped_mm_v2`` follow ``torch``. Arguments that both accept mean the same: a row-major [M,
K] times a column-major [K, N], sums in float32, factors and bias in float32, one rounding. Products that this library lacks
raise by name. :func:`enable` makes torch's own functions call these.

| recipe | elements | format |
|---|---|---|
| ``BlockWise1x16`` | float4_e2m1fn_x2 | NVFP4; with ``TensorWise`` as second recipe also a global scale |
| ``BlockWise1x32`` | float4_e2m1fn_x2 | MXFP4 |
| ``BlockWise1x32`` | float8_e4m3fn, float8_e5m2 | MXFP8 |
| ``BlockWise1x128`` | float8_e4m3fn | FP8_1x128, for ``mat_a``; ``mat_b`` is then BlockWise128x128 |
| ``BlockWise128x128`` | float8_e4m3fn | FP8_128x128, for ``mat_b`` |

Block scales have the 128x4 layout, ``SWIZZLE_32_4_4``. Float32 scales of FP8 have rows, ``NO_SWIZZLE``: [M, ceil(K/128)] for
``mat_a``, and [ceil(K/128), ceil(N/128)] for ``mat_b``, the first extent optionally padded to a multiple of 4, as torch
requires.

CPU tensors are computed by the reference, or by the emulator if ``NVFP4_CUTE_BACKEND`` says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import ScalingType, SwizzleType

from nvfp4_cute import private_api
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import (
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
    FP8_1x128,
    FP8_128x128,
)
from nvfp4_cute.formats.block_scaled import check_is_tensor
from nvfp4_cute.operands.rules import addable_bias, check_tensors
from nvfp4_cute.operands.whole import Parts
from nvfp4_cute.ops.parts.gemm import gemm
from nvfp4_cute.ops.parts.grouped_gemm import grouped_gemm

FORMATS: dict[tuple[ScalingType, torch.dtype], BlockFormat] = {
    (ScalingType.BlockWise1x16, torch.float4_e2m1fn_x2): NVFP4,
    (ScalingType.BlockWise1x32, torch.float4_e2m1fn_x2): MXFP4,
    (ScalingType.BlockWise1x32, torch.float8_e4m3fn): MXFP8_E4M3,
    (ScalingType.BlockWise1x32, torch.float8_e5m2): MXFP8_E5M2,
    (ScalingType.BlockWise1x128, torch.float8_e4m3fn): FP8_1x128,
    (ScalingType.BlockWise128x128, torch.float8_e4m3fn): FP8_128x128,
}
"""Recipe of the block scales and dtype of the elements -> format. Only these are multiplied."""
_FORMAT_OF_NAMES = {(recipe.name, elements): format for (recipe, elements), format in FORMATS.items()}
# Looked up by name: dynamo of torch 2.11 cannot hash or compare members of torch's own enumerations.
RECIPE_OF_SCALE = {
    torch.float8_e4m3fn: ScalingType.BlockWise1x16,
    torch.float8_e8m0fnu: ScalingType.BlockWise1x32,
}
"""Recipe by the dtype of block scales, as in torch, for signatures without a recipe."""
FP8_BLOCK = FP8_1x128.block_k
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CONTRACTIONS = ((), (1, 0), (-1, -2))
"""Values of ``contraction_dim`` that mean [M, K] @ [K, N]."""


@dataclass(frozen=True)
class _Side:
    """Scales of an operand: its format, the block scales, and float32 global scales or None."""

    format: BlockFormat
    scale: torch.Tensor
    global_scale: torch.Tensor | None


# ---- torch.nn.functional ---------------------------------------------------------------------------------------


def scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: Any,
    scale_recipe_a: Any,
    scale_b: Any,
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Computes ``torch.nn.functional.scaled_mm``: mat_a @ mat_b, each times its scales, plus ``bias``.

    Args:
        mat_a: [M, K], K-major; packed fp4: [M, K/2].
        mat_b: [K, N], K-major, the ``.t()`` of [N, K].
        scale_a, scale_b: block scales in the 128x4 layout, any shape; for NVFP4 optionally a list of these and a float32 global
            scale. Float32 scales of FP8 have rows, as described above.
        scale_recipe_a, scale_recipe_b: ``ScalingType``, or a list with one per scale.
        swizzle_a, swizzle_b: ``SwizzleType.SWIZZLE_32_4_4``, or a list that begins with it; for float32 scales none.
        bias: [N], floats, added in float32 before the rounding, in the launch of the product.
        output_dtype: float16, bfloat16 or float32.
        contraction_dim: (), or the last dimension of mat_a and the first of mat_b.
        use_fast_accum: accepted and ignored; sums are float32.

    Returns:
        [M, N].

    Raises:
        UnsupportedProblem: this library has no product for the recipe, swizzle, or dtype.
        TypeError, ValueError: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    recipes = (_listed(scale_recipe_a), _listed(swizzle_a), _listed(scale_recipe_b), _listed(swizzle_b))
    a, b = _sides(mat_a, mat_b, _listed(scale_a), _listed(scale_b), *recipes)
    _check_contraction(contraction_dim)
    return _product(mat_a, mat_b, a, b, bias, output_dtype)


def scaled_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: Any,
    scale_recipe_a: Any,
    scale_b: Any,
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Computes ``torch.nn.functional.scaled_grouped_mm``: every group's rows times its matrix, or a batch.

    Args:
        mat_a: [rows, K] with ``offs``, groups one after the other; or [G, M, K].
        mat_b: [G, K, N], K-major.
        scale_a: block scales; for ragged rows, every group's are padded to 128 rows. Global scales of NVFP4 have [G] elements,
            or one.
        scale_b: block scales of all groups, one after the other. Global scales as for ``scale_a``.
        offs: int32 [G], the inclusive ends of the groups.
        bias: refused.
        scale_recipe_a, scale_recipe_b, swizzle_a, swizzle_b, output_dtype, contraction_dim, use_fast_accum: see
        :func:`scaled_mm`.

    Returns:
        [rows, N], or [G, M, N].

    Raises:
        UnsupportedProblem: for the reasons of :func:`scaled_mm`, or because groups divide K or N instead of M.
        TypeError, ValueError: an operand breaks a rule.
        UnsupportedTarget: the GPU has no kernel.
    """
    recipes = (_listed(scale_recipe_a), _listed(swizzle_a), _listed(scale_recipe_b), _listed(swizzle_b))
    a, b = _sides(mat_a, mat_b, _listed(scale_a), _listed(scale_b), *recipes)
    _check_contraction(contraction_dim)
    return _grouped_product(mat_a, mat_b, a, b, offs, bias, output_dtype)


# ---- torch's operators -----------------------------------------------------------------------------------------


def _scaled_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Computes ``torch._scaled_mm``; the scales' dtype decides the recipe.

    See :func:`scaled_mm`; ``scale_result`` is refused.
    """
    return _product(self, mat2, *_told_by_dtype(self, mat2, scale_a, scale_b, scale_result), bias, out_dtype)


def _scaled_mm_v2(
    self: torch.Tensor,
    mat2: torch.Tensor,
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
    """Computes ``torch._scaled_mm_v2``: :func:`scaled_mm` with lists; recipes and swizzles are numbers."""
    return scaled_mm(self, mat2, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, bias, out_dtype,
                     contraction_dim, use_fast_accum)  # fmt: skip


def _scaled_grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Computes ``torch._scaled_grouped_mm``; the scales' dtype decides the recipe. See :func:`scaled_grouped_mm`."""
    a, b = _told_by_dtype(self, mat2, scale_a, scale_b, scale_result)
    return _grouped_product(self, mat2, a, b, offs, bias, out_dtype or torch.bfloat16)


def _scaled_grouped_mm_v2(
    self: torch.Tensor,
    mat2: torch.Tensor,
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
    """Computes ``torch._scaled_grouped_mm_v2``: :func:`scaled_grouped_mm` with lists; recipes and swizzles are numbers."""
    return scaled_grouped_mm(self, mat2, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, bias, offs,
                             out_dtype or torch.bfloat16, contraction_dim, use_fast_accum)  # fmt: skip


# ---- replacing torch's own functions -----------------------------------------------------------------------------

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "_scaled_mm": _scaled_mm,
    "_scaled_mm_v2": _scaled_mm_v2,
    "_scaled_grouped_mm": _scaled_grouped_mm,
    "_scaled_grouped_mm_v2": _scaled_grouped_mm_v2,
}
"""Operators of ``aten`` that :func:`enable` replaces."""
# Products that torch refused and this library computed: device, dtypes of the operands, recipes.
_REFUSED_BY_TORCH: set[tuple[Any, ...]] = set()


@contextmanager
def enable(*, prefer: bool = False) -> Iterator[None]:
    """Inside the context, torch's own functions also multiply what torch cannot, on CPU and CUDA tensors.

        >>> x, w = (quantize(torch.randn(rows, 64)) for rows in (16, 32))
        >>> a, b = x.data.view(torch.float4_e2m1fn_x2), w.data.view(torch.float4_e2m1fn_x2).t()
        >>> with enable():
        ...     torch._scaled_mm(a, b, x.scale.flatten(), w.scale.flatten(), out_dtype=torch.bfloat16).shape
        torch.Size([16, 32])

    A call goes to torch first, unless ``prefer`` is set. If torch refuses, it goes to the functions above, and so do later
    calls like it. If these also refuse, torch's error is raised. To keep this for good, call
    ``contextlib.ExitStack().enter_context(enable())``; closing the stack ends it.

    Args:
        prefer: call this library first, and torch if it refuses.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, ours in OPERATORS.items():
            for key in ("CPU", "CUDA"):
                library.impl(
                    name, _Answer(name, key, ours, prefer), key, with_keyset=True, allow_override=True
                )
        yield
    finally:
        library._destroy()
        _REFUSED_BY_TORCH.clear()


class _Answer:
    """One operator on one kind of device: torch's kernel and ours, in an order."""

    def __init__(self, name: str, key: str, ours: Callable[..., torch.Tensor], prefer: bool):
        """``key``: "CPU" or "CUDA". Torch's kernel is the one that is registered now."""
        self.ours, self.prefer, self.name = ours, prefer, name
        has_kernel = private_api.has_torch_kernel(name, key)
        self.torchs = torch.library.get_kernel(f"aten::{name}", key) if has_kernel else None

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        told = tuple(args[3]) if self.name.endswith("_v2") else args[3].dtype
        case = (self.name, args[0].device, args[0].dtype, args[1].dtype, told)
        if self.torchs is None or self.prefer or case in _REFUSED_BY_TORCH:
            try:
                return self.ours(*args, **kwargs)
            except UnsupportedProblem:
                if self.torchs is None:
                    raise
                return self.torchs.call_boxed(keyset, *args, **kwargs)
        try:
            return self.torchs.call_boxed(keyset, *args, **kwargs)
        except (NotImplementedError, RuntimeError, ValueError) as refusal:
            try:
                result = self.ours(*args, **kwargs)
            except UnsupportedProblem:
                raise refusal from None
        _REFUSED_BY_TORCH.add(case)
        return result


# ---- shared helpers ----------------------------------------------------------------------------------------------


def _listed(value: Any) -> list[Any]:
    """Returns one or several values as a list; None is an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _sides(mat_a, mat_b, scale_a, scale_b, recipe_a, swizzle_a, recipe_b, swizzle_b) -> tuple[_Side, _Side]:
    check_tensors({"mat_a": mat_a, "mat_b": mat_b})
    return (
        _side("a", mat_a.dtype, scale_a, recipe_a, swizzle_a),
        _side("b", mat_b.dtype, scale_b, recipe_b, swizzle_b),
    )


def _side(letter: str, dtype: torch.dtype, scales: list, recipes: list, swizzles: list) -> _Side:
    for scale in scales:
        check_is_tensor(f"scale_{letter}", scale)
    recipes = [_member(ScalingType, f"scale_recipe_{letter}", recipe).name for recipe in recipes]
    swizzles = [_member(SwizzleType, f"swizzle_{letter}", swizzle).name for swizzle in swizzles]
    if len(scales) != len(recipes) or not recipes:
        raise ValueError(
            f"scale_{letter} has {len(scales)} scales for {len(recipes)} recipes; give one for each"
        )
    format = _FORMAT_OF_NAMES.get((recipes[0], dtype))
    if format is None:
        known = ", ".join(f"{recipe} of {elements}" for recipe, elements in _FORMAT_OF_NAMES)
        raise UnsupportedProblem(
            f"scale_recipe_{letter}={recipes[0]} of {dtype}: this library multiplies {known}; call torch's own function"
        )
    if recipes[1:] not in ([], ["TensorWise"]) or (recipes[1:] and not format.has_global_scale):
        second = ", ".join(recipes[1:])
        raise UnsupportedProblem(
            f"scale_recipe_{letter} goes on with {second}; only NVFP4 has a second scale, TensorWise: multiply it into the result"
        )
    layout = swizzles[0] if swizzles else "NO_SWIZZLE"
    if format.scale_layout == "rowmajor" and layout != "NO_SWIZZLE":
        raise UnsupportedProblem(
            f"swizzle_{letter}={layout}: float32 scales of {format} lie in rows; use NO_SWIZZLE"
        )
    if format.scale_layout == "blocked" and layout != "SWIZZLE_32_4_4":
        raise UnsupportedProblem(
            f"swizzle_{letter}={layout}: block scales lie in SWIZZLE_32_4_4 here; "
            "nvfp4_cute.formats.scale_layout.to_blocked makes it of row-major ones"
        )
    if any(swizzle != "NO_SWIZZLE" for swizzle in swizzles[1:]):
        raise UnsupportedProblem(f"swizzle_{letter} of a global scale: it is one number; use NO_SWIZZLE")
    return _Side(format, scales[0], scales[1] if recipes[1:] else None)


def _member(kind: Any, name: str, given: object) -> Any:
    """Returns a member of a torch enumeration, given as itself or as its number. Raises TypeError for anything else."""
    if isinstance(given, kind):
        return given
    for member in kind.__members__.values():
        if type(given) is int and given == member.value:
            return member
    members = ", ".join(kind.__members__)
    raise TypeError(
        f"{name}={given!r} is not a {kind.__name__.lstrip('_')} of torch.nn.functional; pass one of {members}"
    )


def _told_by_dtype(a, b, scale_a, scale_b, scale_result) -> tuple[_Side, _Side]:
    """Returns the scales of both operands for the signatures without recipes."""
    if scale_result is not None:
        raise UnsupportedProblem(
            "scale_result: results have 16 or 32 bits here and no scale; multiply the result"
        )
    check_tensors({"mat_a": a, "mat_b": b, "scale_a": scale_a, "scale_b": scale_b})
    if scale_a.dtype == scale_b.dtype == torch.float32 and _are_fp8_blocks(a, b, scale_a, scale_b):
        recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        return _side("a", a.dtype, [scale_a], [recipes[0]], []), _side(
            "b", b.dtype, [scale_b], [recipes[1]], []
        )
    found = []
    for letter, operand, scale in (("a", a, scale_a), ("b", b, scale_b)):
        recipe = RECIPE_OF_SCALE.get(scale.dtype)
        if recipe is None:
            raise UnsupportedProblem(
                f"scale_{letter} is {scale.dtype}: this library multiplies block scales, "
                f"{' or '.join(map(str, RECIPE_OF_SCALE))}; call torch's own function"
            )
        found.append(_side(letter, operand.dtype, [scale], [recipe], [SwizzleType.SWIZZLE_32_4_4]))
    return found[0], found[1]


def _are_fp8_blocks(a, b, scale_a, scale_b) -> bool:
    """Returns whether float32 scales have the shapes of 1x128 by 128x128 blocks, by the rule of torch."""
    blocks = -(-a.shape[-1] // FP8_BLOCK)
    of_b = -(-b.shape[-1] // FP8_BLOCK)
    return (
        a.dim() == b.dim() == scale_a.dim() == scale_b.dim() == 2
        and tuple(scale_a.shape) == (a.shape[0], blocks)
        and scale_b.shape[1] == of_b
        and scale_b.shape[0] in (blocks, -(-blocks // 4) * 4)
        and (of_b, blocks) != (b.shape[1], 1)  # one scale per row and per column
    )


def _scales_of_rows(mat_a, mat_b, a: _Side, b: _Side) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales for ``gemm``: flat blocked ones, or float32 [M, ceil(K/128)] and [ceil(N/128), ceil(K/128)]."""
    if "rowmajor" not in (a.format.scale_layout, b.format.scale_layout):
        return a.scale.reshape(-1), b.scale.reshape(-1)
    if (a.format, b.format) != (FP8_1x128, FP8_128x128):
        raise UnsupportedProblem(
            f"{a.format} by {b.format}: float32 block scales are BlockWise1x128 of mat_a by BlockWise128x128 of mat_b here"
        )
    if not _are_fp8_blocks(mat_a, mat_b, a.scale, b.scale):
        blocks, of_b = -(-mat_a.shape[1] // FP8_BLOCK), -(-mat_b.shape[1] // FP8_BLOCK)
        raise ValueError(
            f"scale_a {tuple(a.scale.shape)} and scale_b {tuple(b.scale.shape)}; expected float32 "
            f"{(mat_a.shape[0], blocks)} and {(blocks, of_b)}"
        )
    return a.scale, b.scale.t()[:, : a.scale.shape[1]]


def _check_contraction(dims: Sequence[int]) -> None:
    if tuple(dims) not in CONTRACTIONS:
        raise UnsupportedProblem(
            f"contraction_dim={list(dims)}: the last dimension of mat_a with the first of mat_b is summed over here; transpose"
        )


def _check_out_dtype(dtype: torch.dtype | None) -> torch.dtype:
    if dtype not in OUT_DTYPES:
        raise UnsupportedProblem(f"output_dtype={dtype}: use one of {', '.join(map(str, OUT_DTYPES))}")
    return dtype


def _factor(a: _Side, b: _Side, count: int, device: torch.device) -> torch.Tensor | None:
    """Returns the product of the global scales, float32 [count], on the device; None without any."""
    scales = [side.global_scale for side in (a, b) if side.global_scale is not None]
    if not scales:
        return None
    factor = torch.ones(count, dtype=torch.float32, device=device)
    for scale in scales:
        if scale.numel() not in (1, count) or scale.dtype != torch.float32:
            raise ValueError(
                f"a global scale is {scale.dtype} {tuple(scale.shape)}; expected float32 of 1 or {count} elements"
            )
        factor = factor * scale.reshape(-1)
    return factor


def _columns(mat_b: torch.Tensor) -> torch.Tensor:
    """Returns the [..., N, K] of which [..., K, N] is the transposed view."""
    if mat_b.stride(-2) != 1 and mat_b.shape[-2] > 1:
        raise ValueError(
            f"mat_b {tuple(mat_b.shape)} has strides {mat_b.stride()}; pass the transposed view of contiguous [N, K]"
        )
    return mat_b.transpose(-1, -2)


def _product(mat_a, mat_b, a: _Side, b: _Side, bias, out_dtype) -> torch.Tensor:
    out_dtype = _check_out_dtype(out_dtype)
    if bias is not None:
        check_is_tensor("bias", bias)
    if mat_a.dim() != 2 or mat_b.dim() != 2:
        raise ValueError(f"mat_a has {mat_a.dim()} dimensions and mat_b {mat_b.dim()}; both have 2")
    if bias is not None and (bias.shape != mat_b.shape[1:] or not bias.dtype.is_floating_point):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}; expected floats of shape {tuple(mat_b.shape[1:])}"
        )
    a_scale, b_scale = _scales_of_rows(mat_a, mat_b, a, b)
    rows, weights = Parts(mat_a, a_scale, a.format), Parts(_columns(mat_b), b_scale, b.format)
    return gemm(rows, weights, _factor(a, b, 1, mat_a.device), bias=addable_bias(bias), out_dtype=out_dtype)


def _grouped_product(mat_a, mat_b, a: _Side, b: _Side, offs, bias, out_dtype) -> torch.Tensor:
    out_dtype = _check_out_dtype(out_dtype)
    if bias is not None:
        raise UnsupportedProblem("bias of a grouped product: add it to the result")
    if "rowmajor" in (a.format.scale_layout, b.format.scale_layout):
        raise UnsupportedProblem(
            "float32 block scales of groups: torch has no layout for them; call nvfp4_cute.grouped_gemm"
        )
    if mat_b.dim() != 3 or mat_a.dim() not in (2, 3) or (mat_a.dim() == 2) != (offs is not None):
        given = "without offs" if offs is None else "with offs"
        raise UnsupportedProblem(
            f"mat_a {tuple(mat_a.shape)} and mat_b {tuple(mat_b.shape)} {given}: groups are rows of mat_a with offs, "
            "[rows, K] by [G, K, N], or a batch without, [G, M, K] by [G, K, N]"
        )
    rows = _columns(mat_b)
    factor = _factor(a, b, len(rows), mat_a.device)
    if offs is not None:
        # Flat scales are those of all groups by the rule of this signature.
        b_scale = b.scale.view(len(rows), -1) if b.scale.ndim == 1 and len(rows) else b.scale
        first, second = Parts(mat_a, a.scale, a.format), Parts(rows, b_scale, b.format)
        return grouped_gemm(first, second, offs, factor, out_dtype=out_dtype)
    return gemm(_batched(a, mat_a), _batched(b, rows), factor, out_dtype=out_dtype).permute(2, 0, 1)


def _batched(side: _Side, operand: torch.Tensor) -> Parts:
    """Returns [G, rows, K] for ``gemm``: data [rows, K, G] and scales [G, rm, rk, 32, 4, 4]."""
    groups, rows, row_bytes = operand.shape
    k = side.format.elements(row_bytes)
    scale = side.scale.reshape(groups, *side.format.scale_shape(rows, k))
    return Parts(operand.permute(1, 2, 0), scale, side.format)
