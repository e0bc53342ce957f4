"""The operations on parts with one argument per tensor, for tests that vary one of many."""

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.ops import parts
from nvfp4_cute.ops.parts import grouped_quantize as grouped_quantize


def _side(data, scale, format, row_scale=None):
    """Returns whole tensors and 16-bit values as they are, and data with a scale or a format as a record."""
    first = data[0] if isinstance(data, list | tuple) and data else data
    has_own_format = isinstance(first, BlockScaledTensor) or format is NVFP4
    is_alone = scale is None and row_scale is None and has_own_format
    return data if is_alone else parts.Parts(data, scale, format, row_scale)


def _options(how):
    names = {"config": "config", "early_weights": "prefetch_weights"}
    given = {field: how.pop(name) for name, field in names.items() if name in how}
    return how | ({"options": parts.Options(**given)} if given else {})


def _sides(a, b, a_scale, b_scale, a_format, b_format, row_scale=None):
    return _side(a, a_scale, a_format, row_scale), _side(b, b_scale, b_format)


def gemm(
    a, b, a_scale=None, b_scale=None, alpha=None, *, a_format=NVFP4, b_format=NVFP4, row_scale=None, **how
):
    sides = _sides(a, b, a_scale, b_scale, a_format, b_format, row_scale)
    return parts.gemm(*sides, alpha, **_options(how))


def gemv(a, b, a_scale=None, b_scale=None, alpha=None, *, a_format=NVFP4, b_format=NVFP4, **how):
    return parts.gemv(*_sides(a, b, a_scale, b_scale, a_format, b_format), alpha, **how)


def grouped_gemm(
    a, b, a_scale=None, b_scale=None, offs=None, alpha=None, *, a_format=NVFP4, b_format=NVFP4, row_scale=None, **how
):  # fmt: skip
    sides = _sides(a, b, a_scale, b_scale, a_format, b_format, row_scale)
    return parts.grouped_gemm(*sides, offs, alpha, **_options(how))


def _dual(operation):
    def call(
        a, b1, b2=None, a_scale=None, b1_scale=None, b2_scale=None, alpha1=None, alpha2=None,
        *, a_format=NVFP4, b_format=NVFP4, row_scale=None, weight_layout="separate", **how,
    ):  # fmt: skip
        up = None if b2 is None and b2_scale is None else _side(b2, b2_scale, b_format)
        w = parts.gate_up(_side(b1, b1_scale, b_format), up, weight_layout, alpha1, alpha2)
        return operation(_side(a, a_scale, a_format, row_scale), w, **_options(how))

    call.__name__ = operation.__name__
    return call


dual_gemm = _dual(parts.dual_gemm)
grouped_dual_gemm = _dual(parts.grouped_dual_gemm)
