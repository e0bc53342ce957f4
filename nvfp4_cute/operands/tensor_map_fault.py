"""A fault of CUDA drivers on Blackwell: wrong tensor maps of matrices with gaps in small allocations.

``cuTensorMapEncodeTiled`` sets a bit wrongly if a tensor is not dense and its allocation has less than 128 KiB: accesses fail,
or rows beyond its end are not zeros (release notes of driver 595.71.05, known issues). CuTe DSL clears the bit for drivers up
to CUDA 13.1, and later ones still have the fault (triton-lang/triton pull request 11011). torch's caching allocator allocates
at least 2 MiB at a time, so only tensors that other libraries allocated are affected.
"""

from collections.abc import Mapping
from functools import cache

import torch

from nvfp4_cute.errors import UnsupportedProblem

SMALL_BYTES = 128 * 1024
BLACKWELL_MAJOR = (10, 11, 12)
# CUDA version of the last driver for which CuTe DSL clears the bit.
LAST_CLEARED = 13010


def check(operands: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Raises UnsupportedProblem if the driver would encode a map of one of ``operands`` wrongly.

    Args:
        operands: by name, the bytes of rows that tensor maps describe, [rows, bytes] or [batches, rows, bytes].
        device: device of all of them.
    """
    suspects = {name: tensor for name, tensor in operands.items() if has_gaps(tensor)}
    if not suspects or not _has_fault(device):
        return
    for name, tensor in suspects.items():
        allocated = _allocated_bytes(tensor.data_ptr())
        if allocated < SMALL_BYTES:
            raise UnsupportedProblem(
                f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()} in an allocation of {allocated} bytes: "
                f"CUDA drivers from 13.2 on encode tensor maps of rows with gaps wrongly in allocations of less than "
                f"{SMALL_BYTES} bytes on Blackwell; pass {name}.contiguous()"
            )


def concerns(tensors: list[torch.Tensor]) -> bool:
    """Returns whether every call with operands of these shapes has to be checked, because the fault depends on addresses."""
    return any(map(has_gaps, tensors)) and tensors[0].is_cuda and _has_fault(tensors[0].device)


def has_gaps(tensor: torch.Tensor) -> bool:
    """Returns whether rows of bytes have gaps, and all of them fit in a small allocation."""
    if tensor.element_size() != 1 or tensor.dim() < 2 or tensor.is_contiguous() or not tensor.numel():
        return False
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 < SMALL_BYTES


@cache
def _has_fault(device: torch.device) -> bool:
    import cuda.bindings.driver as cuda

    error, version = cuda.cuDriverGetVersion()
    major, _ = torch.cuda.get_device_capability(device)
    return major in BLACKWELL_MAJOR and (error != cuda.CUresult.CUDA_SUCCESS or version > LAST_CLEARED)


def _allocated_bytes(address: int) -> int:
    """Returns the size of the allocation that holds ``address``; a large number if the driver does not tell."""
    import cuda.bindings.driver as cuda

    error, _, nbytes = cuda.cuMemGetAddressRange(address)
    return int(nbytes) if error == cuda.CUresult.CUDA_SUCCESS else SMALL_BYTES
