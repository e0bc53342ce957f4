"""Few rows of activations: a gemm in one launch of a kernel that reads weights as a gemv does."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from nvfp4_cute import backends
from nvfp4_cute.compile.simt_keys import FewRowsKey
from nvfp4_cute.launch_table import FewRows
from nvfp4_cute.ops import vector_checks as checks
from nvfp4_cute.ops.product_task import ProductTask
from nvfp4_cute.planning.arch.simt import is_for_few_rows
from nvfp4_cute.reference import grouped_gemm_reference

# What a lane takes of K.
K_STEP = 32


@dataclass(frozen=True)
class FewRowsTask(ProductTask):
    """Rows a [M, K/2, L], eight at most, times weights b [N, K/2, L]; out [M, N, L]."""

    COLUMNS: ClassVar = FewRows

    def key(self, arch: str) -> FewRowsKey:
        """What to compile."""
        return FewRowsKey(arch, self.out.dtype, self.alpha is not None)

    def table(self) -> np.ndarray:
        """``launch_table.FewRows``."""
        table = np.zeros(len(FewRows), np.int64)
        table[self.address_places()] = [tensor.data_ptr() for _, tensor, _ in self.tensors()]
        table[FewRows.A_PITCH], table[FewRows.A_BATCH] = self.a.stride(0), self.a.stride(2)
        table[FewRows.B_PITCH], table[FewRows.B_BATCH] = self.b.stride(0), self.b.stride(2)
        table[FewRows.SFA_BATCH], table[FewRows.SFB_BATCH] = self.a_scale.stride(0), self.b_scale.stride(0)
        table[FewRows.OUT_ROW : FewRows.OUT_BATCH + 1] = self.out.stride()
        table[FewRows.ALPHA_BATCH] = self.alpha_step
        n, row_bytes, batches = self.b.shape
        table[FewRows.M : FewRows.L + 1] = len(self.a), n, 2 * row_bytes, batches
        return table

    def reference(self) -> None:
        """Float64 sums, rounded once to fp32, times alpha, rounded to the output type."""
        for batch in range(self.out.shape[2]):
            alphas = None
            if self.alpha is not None:
                alphas = self.alpha[batch if self.alpha_step else 0].reshape(1)
            (self.out[:, :, batch],) = grouped_gemm_reference(
                [self.a[:, :, batch]],
                [self.b[:, :, batch]],
                [self.a_scale[batch]],
                [self.b_scale[batch]],
                alphas,
                self.out.dtype,
            )


def few_rows_task(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
    backend: str,
) -> FewRowsTask | None:
    """The task that computes a ``gemm`` faster than a GEMM; None where there are more rows, or it does not take the operands.

    Args:
        a, b, out: of ``gemm``, checked. a_scale, b_scale: uint8 [L, bytes], blocked.
        alpha: float32 [L], or None.
        backend: as of ``gemm``: of its GPU.
    """
    gpu, batches = backends.gpu_of(backend, a.device), b.shape[2] if b.ndim == 3 else 1
    if not is_for_few_rows(gpu.arch, gpu.num_sms, len(a), len(b), batches):
        return None
    a, b = checks.fp4_bytes("a", a), checks.fp4_bytes("b", b)
    if b.ndim == 2:
        a, b, out = (t.unsqueeze(-1) for t in (a, b, out))
    # A lane takes whole pieces of K.
    if 2 * b.shape[1] % K_STEP:
        return None
    step = 0 if alpha is None else alpha.element_size()
    return FewRowsTask(a, b, a_scale, b_scale, alpha, step, out)
