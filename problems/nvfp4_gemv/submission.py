"""The entry point that a competition server calls, which `nvfp4-cute export nvfp4_gemv` writes into one file.

There is one compiled kernel, cached for good, without sizes and data. Pointers, strides and sizes are kernel parameters, so
nothing is copied to the device and nothing waits. Every call computes every output.
"""

from array import array
from dataclasses import replace
from functools import cache

import torch

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.launch_table import Gemv
from nvfp4_cute.planning.arch import simt
from nvfp4_cute.problems.submission_parts import scale_address, sendable_errors, table_pointer


def frozen_constants() -> dict[str, str]:
    """Returns no constants for an export, because the kernel has no configs."""
    return {}


@sendable_errors
def custom_kernel(data):
    """Computes C of every batch, in place.

    Args:
        data: (a, b, scales of both, permuted scales of both, c): A [M, K/2, L] and B [128, K/2, L] float4_e2m1fn_x2, K-major,
            of which only row 0 of B counts; the permuted scales float8_e4m3fn [32, 4, rm, 4, rk, L], a view of contiguous [L,
            rm, rk, 32, 4, 4], whose memory is used in place; C [M, 1, L] float16.

    Returns:
        C.
    """
    table = _launch_table(data)
    _compiled()(table_pointer(table.buffer_info()[0]))
    return data[-1]


def _launch_table(data) -> array:
    """Returns the row that the compiled host code reads (``launch_table.Gemv``)."""
    a, b, _, _, sfa, sfb, c = data
    m, row_bytes, batches = a.shape
    k = NVFP4.elements(row_bytes)
    row = [0] * len(Gemv)
    row[Gemv.A], row[Gemv.B], row[Gemv.OUT] = a.data_ptr(), b.data_ptr(), c.data_ptr()
    row[Gemv.SFA], row[Gemv.SFB] = scale_address(sfa), scale_address(sfb)
    row[Gemv.A_PITCH], row[Gemv.A_BATCH], row[Gemv.B_BATCH] = a.stride(0), a.stride(2), b.stride(2)
    row[Gemv.SFA_BATCH] = NVFP4.scale_bytes(m, k)
    row[Gemv.SFB_BATCH] = NVFP4.scale_bytes(b.shape[0], k)
    row[Gemv.OUT_PITCH], row[Gemv.OUT_BATCH] = c.stride(0), c.stride(2)
    row[Gemv.M], row[Gemv.K], row[Gemv.L] = m, k, batches
    return array("q", row)


@cache
def _compiled():
    import cutlass
    import cutlass.cute as cute

    from nvfp4_cute.kernels.simt.gemv import GemvKernel

    # The kernel runs on CUDA cores of any GPU; only the conversion of e2m1 depends on the architecture.
    arch = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    kernel = GemvKernel(
        cutlass.Float16,
        has_alpha=False,
        has_fp4_convert=simt.has_fp4_convert(arch),
        spread=replace(simt.gemv_spread(arch), is_persistent=False),
        name="nvfp4_gemv",
    )
    return cute.compile(kernel, table_pointer(0))
