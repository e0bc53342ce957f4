"""gemv: c = alpha * A @ b over NVFP4 operands, a batch of matrices and vectors in one launch."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from nvfp4_cute import backends
from nvfp4_cute.compile.simt_keys import GemvKey
from nvfp4_cute.formats.block_scaled import SCALE_LAYOUTS, ScaleLayout
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch_table import Gemv
from nvfp4_cute.ops import vector_checks as checks
from nvfp4_cute.ops.batches import as_factor
from nvfp4_cute.ops.product_task import ProductTask
from nvfp4_cute.ops.repeated import keep_task
from nvfp4_cute.ops.traced import refuse_gradients
from nvfp4_cute.ops.w4a16 import ACTIVATION_DTYPES, weight_only
from nvfp4_cute.problem import INT32_MAX
from nvfp4_cute.reference import gemv_reference


def gemv(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor | None,
    alpha: torch.Tensor | float | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
) -> torch.Tensor:
    """Multiply NVFP4 matrices by NVFP4 vectors: ``c[m, l] = alpha[l] * sum over k of A[m, k, l] * b[k, l]``.

    Weight-only (W4A16): where ``b`` is float16 or bfloat16 [K] or [K, L] and ``b_scale`` None, the vector is not quantized;
    K is a multiple of 32 then, and sums are added as ``gemm`` adds those of 16-bit activations.

    Args:
        a: [M, K/2] or [M, K/2, L], uint8 or float4_e2m1fn_x2, K-major (stride 1 in K), two e2m1 values a byte, the low
            nibble first. K a multiple of 16; rows and batches a multiple of 16 bytes apart.
        b: [K/2] or [K/2, L], the same types; batches a multiple of 16 bytes apart.
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8): 128x4 blocked ([L, rm, rk, 32, 4, 4], the
            (32, 4, rm, 4, rk, L) view, and for one batch also [rm, rk, 32, 4, 4] or flat; zero-copy), or [M, K/16(, L)]
            with ``scale_layout="rowmajor"`` (converted, which allocates). Padding may hold anything.
        b_scale: the same of a matrix with one row, that is [1, K/16(, L)] where row-major.
        alpha: a number, or float32 on the operands' device: one element, or [L].
        out: [M] or [M, L], any strides, written in place; None allocates.
        out_dtype: float16, bfloat16 or float32.
        scale_layout: "blocked" or "rowmajor".
        backend: "auto" (the GPU of the tensors; the float64 reference for CPU tensors), "cuda", "emulator" (the PTX of
            the sm_100a kernel, executed on the CPU; "emulator:sm_90a" and the like for another), or "reference".

    Returns:
        c: [M], or [M, L] where ``a`` has batches. A block of 16 is summed exactly; blocks are added in fp32, in an
        order that depends on K alone (``kernels/simt/gemv.py`` states it); then alpha, in fp32; then one rounding to
        ``out_dtype``. So a result never depends on M, on L, or on the GPU.

    Example:
        >>> w, v = quantize(torch.randn(256, 512)), quantize(torch.randn(512))
        >>> gemv(w.data, v.data, w.scale, v.scale).shape
        torch.Size([256])

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedTarget: no kernel for the GPU.
        Nothing is written to ``out`` when a check fails.
    """
    if torch.compiler.is_compiling():  # the custom op (ops.library) that a traced graph keeps
        alpha = as_factor(alpha, a.device)
        refuse_gradients(a, b, a_scale, b_scale, alpha)
        if out is None:
            out = a.new_empty((*a.shape[2:], a.shape[0]), dtype=out_dtype)
            out = out if a.ndim == 2 else out.t()
        torch.ops.nvfp4_cute.gemv_out(a, b, a_scale, b_scale, alpha, out, out_dtype, scale_layout, backend)
        return out
    if b_scale is None or (isinstance(b, torch.Tensor) and b.dtype in ACTIVATION_DTYPES):
        if b_scale is not None:
            raise ValueError(
                f"b is {b.dtype} and has a b_scale; 16-bit b has none: pass b_scale=None, or quantize(b)"
            )
        rows = None if out is None else out.unsqueeze(0)
        names = ("b", "a", "a_scale")
        result = weight_only(b.unsqueeze(0), a, a_scale, alpha, rows, names, out_dtype, scale_layout, backend)
        return result.squeeze(0) if out is None else out
    inputs: list[Any] = [a, b, a_scale, b_scale] if alpha is None else [a, b, a_scale, b_scale, alpha]
    outs = [] if out is None else [out]
    key, call = prepared.lookup(
        inputs + outs, "gemv", alpha is None, len(outs), out_dtype, scale_layout, backend
    )
    launched = None if call is None else call.try_launch(inputs, outs)
    if launched is not None:
        return launched[0]
    task, result = _check(a, b, a_scale, b_scale, alpha, out, out_dtype, scale_layout, backend)
    backends.run_task(backend, task)
    keep_task(key, backend, task, inputs, [result])
    return result


@dataclass(frozen=True)
class GemvTask(ProductTask):
    """A matrix a [M, K/2, L] times a vector b [K/2, L]; out [M, L]. ``num_sms``: of the GPU."""

    COLUMNS: ClassVar = Gemv

    num_sms: int

    def key(self, arch: str) -> GemvKey:
        """What to compile."""
        return GemvKey(arch, self.out.dtype, self.alpha is not None)

    def table(self) -> np.ndarray:
        """``launch_table.Gemv``."""
        m, row_bytes, batches = self.a.shape
        table = np.zeros(len(Gemv), np.int64)
        table[Gemv.A : Gemv.OUT + 1] = [
            tensor.data_ptr() for tensor in (self.a, self.b, self.a_scale, self.b_scale, self.out)
        ]
        if self.alpha is not None:
            table[Gemv.ALPHA] = self.alpha.data_ptr()
        table[Gemv.A_PITCH] = self.a.stride(0) if m > 1 else 0
        table[Gemv.A_BATCH] = self.a.stride(2)
        table[Gemv.B_BATCH] = self.b.stride(1)
        table[Gemv.SFA_BATCH], table[Gemv.SFB_BATCH] = self.a_scale.stride(0), self.b_scale.stride(0)
        table[Gemv.OUT_PITCH], table[Gemv.OUT_BATCH] = self.out.stride()
        table[Gemv.ALPHA_BATCH] = self.alpha_step
        table[Gemv.M : Gemv.NUM_SMS + 1] = m, 2 * row_bytes, batches, self.num_sms
        return table

    def reference(self) -> None:
        """Float64 sums, rounded once to fp32, times alpha, rounded to the output type."""
        for batch in range(self.out.shape[1]):
            alpha = None if self.alpha is None else self.alpha[batch if self.alpha_step else 0]
            self.out[:, batch] = gemv_reference(
                self.a[:, :, batch],
                self.b[:, batch],
                self.a_scale[batch],
                self.b_scale[batch],
                alpha,
                self.out.dtype,
            )


def _check(
    a, b, a_scale, b_scale, alpha, out, out_dtype, scale_layout, backend
) -> tuple[GemvTask, torch.Tensor]:
    """The task, and the tensor to return."""
    checks.check_choice("out_dtype", out_dtype, checks.OUT_DTYPES)
    checks.check_choice("scale_layout", scale_layout, SCALE_LAYOUTS)
    factor = alpha if isinstance(alpha, torch.Tensor) else None
    named = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    device = checks.check_tensors(named, {"alpha": factor, "out": out})
    batched = a.ndim == 3
    matrix = checks.fp4_bytes("a", a if batched else a.unsqueeze(-1))
    vector = checks.fp4_bytes("b", b if batched else b.unsqueeze(-1))
    if matrix.ndim != 3 or vector.ndim != 2 or tuple(vector.shape) != tuple(matrix.shape[1:]):
        raise ValueError(
            "a is [M, K/2] and b [K/2], or a is [M, K/2, L] and b [K/2, L], with the same K and L; got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    m, row_bytes, batches = matrix.shape
    k = checks.check_k(2 * row_bytes)
    checks.check_extent("M", m, INT32_MAX)
    checks.check_extent("L", batches, checks.MAX_BATCHES)
    for name, tensor, stride in (("a", matrix, matrix.stride(1)), ("b", vector, vector.stride(0))):
        if stride != 1 and tensor.numel():
            raise ValueError(f"{name} has stride {stride} in K, not 1 (K-major); copy it in that order")
    pitches = [matrix.stride(0)] if m > 1 else []
    for pitch in pitches:
        checks.check_extent("row pitch of a in bytes", pitch, checks.MAX_PITCH)
    checks.check_aligned("a", matrix, pitches=pitches + ([matrix.stride(2)] if batches > 1 else []))
    checks.check_aligned("b", vector, pitches=[vector.stride(1)] if batches > 1 else [])
    shape = (m, batches) if batched else (m,)
    if out is not None:
        if out.dtype != out_dtype:
            raise TypeError(f"out has dtype {out.dtype} and out_dtype is {out_dtype}; make them agree")
        if tuple(out.shape) != shape:
            raise ValueError(f"out has shape {tuple(out.shape)}; expected {shape}")
        checks.check_overlap(out, {**named, "alpha": factor})
    factors, step = checks.as_alpha(alpha, batches, device)
    sfa = checks.batched_scales("a_scale", a_scale, m, k, batches, scale_layout)
    sfb = checks.batched_scales("b_scale", b_scale, 1, k, batches, scale_layout)
    if out is None:
        # Batch after batch in memory: the rows of one batch are stored side by side.
        out = torch.empty(shape[::-1], dtype=out_dtype, device=device)
        out = out.t() if batched else out
    result = out if batched else out.unsqueeze(-1)
    num_sms = backends.gpu_of(backend, device).num_sms
    return GemvTask(matrix, vector, sfa, sfb, factors, step, result, num_sms), out
