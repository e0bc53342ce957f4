"""One row of activations: a gemm that is a gemv, with the weights as its matrix."""

from typing import ClassVar

import torch

from nvfp4_cute import backends
from nvfp4_cute.ops import vector_checks as checks
from nvfp4_cute.ops.gemv import GemvTask
from nvfp4_cute.planning.arch.simt import is_gemv_for_one_row


class OneRowTask(GemvTask):
    """``a`` [1, K/2(, L)] of ``gemm`` is the vector, ``b`` [N, K/2(, L)] the matrix."""

    OPERANDS: ClassVar = {"a": "b", "b": "a", "a_scale": "b_scale", "b_scale": "a_scale"}


def one_row_task(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
    backend: str,
) -> OneRowTask | None:
    """The task that computes a ``gemm`` faster than a GEMM; None where there are more rows, or a GEMM is as fast.

    Args:
        a, b, out: of ``gemm``, checked. a_scale, b_scale: uint8 [L, bytes], blocked.
        alpha: float32 [L], or None.
        backend: as of ``gemm``: of its GPU.
    """
    if len(a) != 1:
        return None
    gpu = backends.gpu_of(backend, a.device)
    if not is_gemv_for_one_row(gpu.arch):
        return None
    matrix, vector = checks.fp4_bytes("b", b), checks.fp4_bytes("a", a)[0]
    result = out[0]
    if b.ndim == 2:
        matrix, vector, result = matrix.unsqueeze(-1), vector.unsqueeze(-1), result.unsqueeze(-1)
    # What the gemv's 32-bit offsets and grid do not reach stays with the GEMM.
    if len(matrix) > 1 and matrix.stride(0) > checks.MAX_PITCH or matrix.shape[2] > checks.MAX_BATCHES:
        return None
    step = 0 if alpha is None else alpha.element_size()
    return OneRowTask(matrix, vector, b_scale, a_scale, alpha, step, result, gpu.num_sms)
