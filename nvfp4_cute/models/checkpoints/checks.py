"""Checks that the tensors of a layer fit its scheme. Every refusal names the tensor, the rule, and the fix."""

import torch

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.formats.block_format import MXFP4, NVFP4, format_named
from nvfp4_cute.models.checkpoints.convention import INPUT, Convention, needed_roles
from nvfp4_cute.models.checkpoints.stored import FP8, INT8, Scheme

E4M3_NAN, SIGN = 0x7F, 0x80
UE8M0_NAN = 0xFF
# Bounds of a factor and of its inverse, such that products of two factors, and 2688 times one, are normal float32 numbers.
LEAST_FACTOR = 2.0**-62


def check_present(
    prefix: str, scheme: Scheme, roles: set[str], convention: Convention, optional: tuple[str, ...] = ()
) -> None:
    """Raises if a role that the scheme needs has no tensor; ``optional`` ones may be missing."""
    for role in needed_roles(scheme):
        if role not in roles and role not in optional:
            way_out = (
                ' (or pass missing_input_scale="fill": what calibration did not see is then scaled by what is known)'
                if role == INPUT
                else ""
            )
            raise CheckpointError(
                f"{prefix} is {scheme.name} and has no {convention.name_of(role)}; a file of the checkpoint is missing, or its "
                f"export went wrong: export it again{way_out}"
            )


def check_count(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises unless there is one factor, or one per expert of stored values with three or more dimensions."""
    if tensor.numel() != 1 and (len(shape) < 3 or tensor.numel() != shape[0]):
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}; a layer has one global scale, or one for each of its experts: export it "
            "again"
        )


def is_factor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns whether kernels can multiply by each factor, by its inverse, and by the product of two of them."""
    return (tensor >= LEAST_FACTOR) & (tensor <= 1 / LEAST_FACTOR) & torch.isfinite(tensor)


def check_factor(name: str, tensor: torch.Tensor) -> None:
    """Raises unless every float32 factor passes :func:`is_factor`."""
    if tensor.dtype != torch.float32:
        raise CheckpointError(
            f"{name} has dtype {tensor.dtype}; a global scale is float32: do not convert it"
        )
    bad = tensor[~is_factor(tensor)]
    if bad.numel():
        raise CheckpointError(
            f"{name} is {bad.reshape(-1)[0].item():g}, and a scale is finite and positive, {LEAST_FACTOR:.3g} to "
            f"{1 / LEAST_FACTOR:.3g}; the layer was never calibrated, or the tensor never written: export it again"
        )


def check_pre_scale(name: str, tensor: torch.Tensor, k: int) -> None:
    """Raises unless there is a finite, nonzero factor for each of ``k`` values."""
    if tensor.numel() != k or not tensor.is_floating_point():
        raise CheckpointError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; its layer has {k} activations, and a factor for each: they "
            "are of different exports"
        )
    if not bool((torch.isfinite(tensor) & (tensor != 0)).all()):
        raise CheckpointError(f"{name} has factors that are zero or not finite; export it again")


def check_alike(names: list[str], biases: list[torch.Tensor]) -> None:
    """Raises unless the experts' biases have one dtype and one shape."""
    first = biases[0]
    for name, one in zip(names, biases, strict=True):
        if (one.dtype, one.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{name} is {one.dtype} {list(one.shape)}, and {names[0]} {first.dtype} {list(first.shape)}; one layer's experts "
                "are alike: export it again"
            )


def check_bias(place: str, bias: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises unless there is one bias per row of the weights [E, N, K] of ``place``, or none at all."""
    if bias is None:
        return
    if tuple(bias.shape) != tuple(shape[:2]) or not bias.is_floating_point():
        raise CheckpointError(
            f"biases of {place} are {bias.dtype} {list(bias.shape)}, and weights {list(shape)} have one per row, "
            f"{list(shape[:2])}: the two are of different exports"
        )


def check_data(name: str, scheme: Scheme, data: torch.Tensor, scale: torch.Tensor, scale_name: str) -> None:
    """Raises unless dtypes and shapes of values and block scales fit each other, and no scale is NaN or negative.

    Args:
        name: name of the tensor of values.
        scheme: scheme of the layer.
        data, scale: K-major values, [..., N, K/2] or [..., N, K], and their row-major scales.
        scale_name: name of the tensor of scales.
    """
    packed = scheme.weights in (NVFP4.name, MXFP4.name)
    dtype = torch.uint8 if packed else {INT8: torch.int8}.get(scheme.weights, torch.float8_e4m3fn)
    if data.dtype != dtype:
        raise CheckpointError(
            f"{name} has dtype {data.dtype}; {scheme.weights} weights are {dtype}: export it again"
        )
    if data.ndim < 2:
        raise CheckpointError(
            f"{name} has shape {list(data.shape)}; weights are [..., N, K]: export it again"
        )
    n, k = data.shape[-2], data.shape[-1] * (2 if packed else 1)
    expected = scale_shape(scheme.weights, n, k)
    if scheme.weights in (FP8, INT8):
        fits = scale.ndim == data.ndim and scale.shape[-2] in (1, n) and scale.shape[-1] == 1
    else:
        fits = tuple(scale.shape) == (*data.shape[:-2], *expected)
    if not fits:
        raise CheckpointError(
            f"{scale_name} has shape {list(scale.shape)}; {name} of {n} x {k} in {scheme.weights} has "
            f"{[*data.shape[:-2], *expected]}: the two are of different exports"
        )
    _check_scales(scale_name, scheme.weights, scale)
    # Checks all scales together, because the scale of a block of zeros may be zero.
    if scheme.weights == "nvfp4" and not bool(scale.view(torch.uint8).any()) and bool((data & 0x77).any()):
        raise CheckpointError(f"{scale_name} is zero throughout, while {name} is not: it was never written")


def scale_shape(weights: str, n: int, k: int) -> tuple[int, int]:
    """Returns the shape of the row-major scales of [n, k] weights; (1, 1) for one scale of the whole tensor."""
    if weights == FP8:
        return 1, 1
    if weights == INT8:
        return n, 1
    kind = format_named(weights)
    return -(-n // kind.block_rows), k // kind.block_k if kind.scale_layout == "blocked" else -(
        -k // kind.block_k
    )


def _check_scales(name: str, weights: str, scale: torch.Tensor) -> None:
    if weights == "nvfp4":
        if scale.dtype != torch.float8_e4m3fn:
            raise CheckpointError(
                f"{name} has dtype {scale.dtype}; NVFP4 block scales are float8_e4m3fn: export it again"
            )
        codes = scale.view(torch.uint8)
        bad = (codes & E4M3_NAN == E4M3_NAN) | (codes > SIGN)
    elif weights in ("mxfp4", "mxfp8_e4m3"):
        if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
            raise CheckpointError(
                f"{name} has dtype {scale.dtype}; MX block scales are uint8, exponents plus 127: export it again"
            )
        bad = scale.view(torch.uint8) == UE8M0_NAN
    else:
        bad = ~((scale > 0) & torch.isfinite(scale))
    if bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        value = scale[at].float().item() if scale.dtype != torch.uint8 else "NaN"
        raise CheckpointError(
            f"{name}[{', '.join(map(str, at))}] is {value}, one of {int(bad.sum())} scales that are NaN, negative"
            f"{'' if weights == 'nvfp4' else ', zero or infinite'}; the weights were not finite when they were quantized: "
            "export it again"
        )


def foreign(prefix: str, scheme: Scheme, name: str) -> CheckpointError:
    """Returns the error for a tensor of a quantized layer whose meaning this reader does not support."""
    return CheckpointError(
        f"{name} belongs to {prefix}, which is {scheme.name}, and is nothing that this reader knows; what it means would be "
        "left out of the result: export the model without it (low-rank parts, rotations and zero points are not done)"
    )
