"""``dequantize``: converts block-scaled tensors to floats."""

import torch

from nvfp4_cute import backends, private_api
from nvfp4_cute.backends.calls import call
from nvfp4_cute.backends.host_floats import ieee_floats
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_scaled import BlockScaledTensor
from nvfp4_cute.launch.simt import DequantizeTask
from nvfp4_cute.operands import rules
from nvfp4_cute.operands.quantization import KERNEL_DTYPES
from nvfp4_cute.operands.rules import MAX_BATCHES

# A lane loads eight bytes with one instruction.
ALIGN_BYTES = 8


def dequantize(
    t: BlockScaledTensor, dtype: torch.dtype = torch.float32, *, backend: str = "auto"
) -> torch.Tensor:
    """Convert a block-scaled tensor to floats, exactly as ``formats.dequantize`` specifies.

        >>> dequantize(quantize(torch.ones(40, 512)), torch.bfloat16).shape
        torch.Size([40, 512])

    float16 and bfloat16 results on a GPU (or on the emulator) take one kernel launch, which reads 4.5 bits per NVFP4 value and
    writes 16. ``formats.dequantize`` computes everything else with torch operations, whatever the backend: float32 and float64
    results, CPU tensors, FP8 and INT8, and batches of batches with gaps between rows. Both give the same bits.

    Args:
        t: [..., K], of any format.
        dtype: float32, float16, bfloat16 or float64.
        backend: "auto", "cuda", "emulator", "emulator:ARCH", or "reference".

    Returns:
        [..., K] of ``dtype``, contiguous, on the device of ``t``.

    Raises:
        TypeError: ``t`` or ``dtype`` is of a type that ``formats.dequantize`` refuses.
        UnsupportedTarget: the GPU has no kernel.
    """
    if private_api.is_traced() or not isinstance(t, BlockScaledTensor):
        return block_scaled.dequantize(t, dtype)
    if (
        backends.resolve(backend, t.device) == "reference"
        or dtype not in KERNEL_DTYPES
        or not _is_for_kernel(t)
    ):
        _check_memory(t)
        with ieee_floats():
            return block_scaled.dequantize(t, dtype)
    inputs = [x for x in (t.data, t.scale, t.global_scale) if x is not None]
    settings = ("dequantize", t.format.name, t.shape, t.scale_layout, dtype)
    (out,) = call(backend, settings, inputs, [], _check, t, dtype)
    return out


def _is_for_kernel(t: BlockScaledTensor) -> bool:
    """Returns whether a kernel can read the tensor in place."""
    batches = t.shape[:-2]
    return (
        t.format.order == "rows"
        and (t.format.scale.bits == 8 or t.format.is_int4)
        and _has_rows_for_kernel(t.data)
        and t.scale.is_contiguous()
        and (t.global_scale is None or t.global_scale.is_contiguous())
        and torch.Size(batches).numel() <= MAX_BATCHES
    )


def _has_rows_for_kernel(data: torch.Tensor) -> bool:
    """Returns whether rows begin where lanes can load them; batches of batches have to be contiguous."""
    steps = (step * data.element_size() for step in data.stride()[:-1])
    is_even = data.stride(-1) == 1 and not any(step % ALIGN_BYTES for step in steps)
    return data.data_ptr() % ALIGN_BYTES == 0 and (data.is_contiguous() or (data.ndim in (2, 3) and is_even))


def _check(t: BlockScaledTensor, dtype: torch.dtype) -> tuple[DequantizeTask, list[torch.Tensor]]:
    """Returns the checked task and the tensor that it writes."""
    _check_memory(t)
    out = torch.empty(t.shape, dtype=dtype, device=t.device)
    return DequantizeTask(t, out), [out]


def _check_memory(t: BlockScaledTensor) -> None:
    rules.check_memory(data=t.data, scale=t.scale, global_scale=t.global_scale)
