"""Weights of any format as modules store them: checks, empty weights, and scales that keep their dtype in conversions."""

import torch

from nvfp4_cute import backends
from nvfp4_cute.formats.block_format import ATOM_SHAPE, BlockFormat, Formats
from nvfp4_cute.formats.block_scaled import BlockScaledTensor, check_is_tensor
from nvfp4_cute.nn.activations import ROWS
from nvfp4_cute.planning.arch import ARCHS, mmas_of


def words_of(weight: BlockScaledTensor) -> torch.Tensor:
    """Returns the scales in the layout of kernels; blocked int4 scales as int32 words, [..., rm, rk, 32, 4]."""
    format = weight.format
    scale = weight.with_scale_layout(format.scale_layout).scale
    return as_words(scale) if format.is_int4 else scale.view(format.scale_dtypes[-1])


def as_words(scale: torch.Tensor) -> torch.Tensor:
    """Views blocked int4 scales [..., rm, rk, 32, 4, scales per word] as 32-bit words."""
    return scale.view(torch.int32).squeeze(-1)


def scales_of(stored: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Converts the result of :func:`words_of` back to scales in their own dtype."""
    if not format.is_int4:
        return stored
    assert stored.shape[-2:] == ATOM_SHAPE[:2]
    return stored.unsqueeze(-1).view(format.scale_dtypes[0])


def zeros(
    format: BlockFormat, lead: tuple[int, ...], n: int, k: int, device: torch.device | str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates zero codes [*lead, N, bytes of K] and zero scales like :func:`words_of`. Raises ValueError for a wrong K."""
    format.num_k_blocks(k)
    element = torch.uint8 if format.element.bits < 8 else format.data_dtypes[-1]
    data = _zeros((*lead, n, format.row_bytes(k)), element, device)
    scale = _zeros((*lead, *format.scale_shape(n, k)), format.scale_dtypes[-1], device)
    return data, as_words(scale) if format.is_int4 else scale


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> torch.Tensor:
    """Allocates zeros of any dtype; torch cannot fill some one-byte dtypes on every device."""
    made = torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device)
    return made.view(dtype)


def check_weight(weight: object) -> None:
    """Raises unless ``weight`` is [N, K] in a format that layers have."""
    fix = "quantize(weight, format=NVFP4)"
    if not isinstance(weight, BlockScaledTensor):
        given = "None" if weight is None else f"a {type(weight).__name__}"
        raise TypeError(f"weight is {given}; pass a BlockScaledTensor: {fix}")
    format = weight.format
    if not (format.is_int4 or format in ROWS) or len(weight.shape) != 2:
        known = ", ".join([*(one.title for one in ROWS), "an int4_format"])
        raise ValueError(
            f"weight is {format.title} of shape {list(weight.shape)}; expected [N, K] of {known}: {fix}"
        )


def kept_bias(
    name: str,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Returns the bias that a layer on ``device`` stores: contiguous, without a gradient, in ``dtype`` (None: its own).

    None stays None.

    Raises:
        TypeError: the bias is not a float tensor.
        ValueError: it has another shape, or is on the meta device and the layer is not.
    """
    if bias is None:
        return None
    check_is_tensor(name, bias)
    if not bias.is_floating_point():
        raise TypeError(f"{name} is {bias.dtype}; expected floats: pass {name}.float()")
    if tuple(bias.shape) != shape:
        raise ValueError(f"{name} has shape {list(bias.shape)}; expected {list(shape)}")
    if bias.is_meta and device.type != "meta":
        raise ValueError(f"{name} is on meta and the weights on {device}; pass one that has data")
    return bias.detach().to(device, dtype or bias.dtype).contiguous()


def has_products(backend: str, device: torch.device, formats: Formats) -> bool:
    """Returns whether a kernel, or the reference, multiplies rows and weights of these formats on a device."""
    if backends.resolve(backend, device) == "reference":
        return True
    arch = backends.gpu_of(backend, device).arch
    return arch in ARCHS and formats in mmas_of(arch)
