"""Weight-only products: 16-bit activations times NVFP4 weights, what ``gemm`` and ``gemv`` do with such operands."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nvfp4_cute import backends
from nvfp4_cute.compile.simt_keys import W4A16Key
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_scaled import DATA_DTYPES, SCALE_LAYOUTS
from nvfp4_cute.launch_table import W4A16
from nvfp4_cute.ops import vector_checks as checks
from nvfp4_cute.planning.arch.simt import w4a16_tokens
from nvfp4_cute.problem import INT32_MAX
from nvfp4_cute.reference import weight_only_reference

ACTIVATION_DTYPES = (torch.float16, torch.bfloat16)
# A lane takes 32 values of K.
K_STEP = 32


def weight_only(x, w, w_scale, alpha, out, names, out_dtype, scale_layout, backend) -> torch.Tensor:
    """``out[:, :, l] = alpha[l] * X[:, :, l] @ W[:, :, l]^T``, checked and run.

    Args:
        x: float16 or bfloat16 [M, K] or [M, K, L], K-major, rows and batches a multiple of 16 bytes apart.
        w: uint8 or float4_e2m1fn_x2 [N, K/2] or [N, K/2, L]. w_scale: of w. alpha: as of ``gemm``.
        out: [M, N] or [M, N, L] of any strides, or None.
        names: what the caller calls x, w and w_scale.

    Returns:
        ``out``, or a new tensor, batch after batch in memory.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule.
    """
    task, result = _check(x, w, w_scale, alpha, out, names, out_dtype, scale_layout)
    backends.run_task(backend, task)
    return result


@dataclass(frozen=True)
class W4A16Task:
    """Checked operands. x [M, K, L], b [N, K/2, L] uint8, b_scale [L, bytes] uint8 blocked, out [M, N, L].

    ``alpha_step``: bytes from one batch's factor to the next one's.
    """

    x: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    alpha: torch.Tensor | None
    alpha_step: int
    out: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device of the operands."""
        return self.x.device

    @property
    def is_empty(self) -> bool:
        """Whether the output has no elements."""
        return self.out.numel() == 0

    def key(self, arch: str) -> W4A16Key:
        """What to compile."""
        tokens = w4a16_tokens(self.x.shape[0])
        return W4A16Key(arch, self.x.dtype, self.out.dtype, self.alpha is not None, tokens)

    def table(self) -> np.ndarray:
        """``launch_table.W4A16``."""
        table = np.zeros(len(W4A16), np.int64)
        table[W4A16.X : W4A16.OUT + 1] = [t.data_ptr() for t in (self.x, self.b, self.b_scale, self.out)]
        if self.alpha is not None:
            table[W4A16.ALPHA] = self.alpha.data_ptr()
        table[W4A16.X_PITCH], table[W4A16.X_BATCH] = 2 * self.x.stride(0), 2 * self.x.stride(2)
        table[W4A16.B_PITCH], table[W4A16.B_BATCH] = self.b.stride(0), self.b.stride(2)
        table[W4A16.SFB_BATCH] = self.b_scale.stride(0)
        table[W4A16.OUT_ROW : W4A16.OUT_BATCH + 1] = self.out.stride()
        table[W4A16.ALPHA_BATCH] = self.alpha_step
        m, k, batches = self.x.shape
        table[W4A16.M : W4A16.L + 1] = m, self.b.shape[0], k, batches
        return table

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """No operand has a tensor map."""
        return iter(())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it is written."""
        for name in ("x", "b", "b_scale", "alpha", "out"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor, name == "out"

    def reference(self) -> None:
        """Float64 sums, rounded once to fp32, times alpha, rounded to the output type."""
        for batch in range(self.out.shape[2]):
            alpha = None if self.alpha is None else self.alpha[batch if self.alpha_step else 0]
            self.out[:, :, batch] = weight_only_reference(
                self.x[:, :, batch], self.b[:, :, batch], self.b_scale[batch], alpha, self.out.dtype
            )


def _check(x, w, w_scale, alpha, out, names, out_dtype, scale_layout) -> tuple[W4A16Task, torch.Tensor]:
    """The task, and the tensor to return."""
    checks.check_choice("out_dtype", out_dtype, checks.OUT_DTYPES)
    checks.check_choice("scale_layout", scale_layout, SCALE_LAYOUTS)
    name_x, name_w, name_scale = names
    factor = alpha if isinstance(alpha, torch.Tensor) else None
    inputs = {name_x: x, name_w: w, name_scale: w_scale}
    device = checks.check_tensors(inputs, {"alpha": factor, "out": out})
    if x.dtype in DATA_DTYPES:
        raise TypeError(
            f"{name_x}_scale is None and {name_x} has dtype {x.dtype}: pass the scales of its NVFP4 values"
        )
    checks.check_choice(f"dtype of {name_x}", x.dtype, ACTIVATION_DTYPES)
    batched = x.ndim == 3
    rows = x if batched else x.unsqueeze(-1)
    weights = checks.fp4_bytes(name_w, w if batched else w.unsqueeze(-1))
    if rows.ndim != 3 or weights.ndim != 3 or (2 * weights.shape[1], weights.shape[2]) != rows.shape[1:]:
        raise ValueError(
            f"{name_x} has shape {list(x.shape)} and {name_w} {list(w.shape)}; the 16-bit operand has K values and the "
            "NVFP4 one K/2 bytes along K, and both the same batches, if any, as a last extent"
        )
    (m, k, batches), n = rows.shape, weights.shape[0]
    if k % K_STEP or not k:
        raise UnsupportedProblem(
            f"K={k} is not a positive multiple of {K_STEP}, what a 16-byte load of weights holds; pad K to "
            f"{max(-(-k // K_STEP), 1) * K_STEP}"
        )
    checks.check_k(k)
    checks.check_extent("N", n, INT32_MAX)
    checks.check_extent("M", m, checks.MAX_BATCHES)
    checks.check_extent("L", batches, checks.MAX_BATCHES)
    for name, tensor, extent in ((name_x, rows, m), (name_w, weights, n)):
        if tensor.numel() and tensor.stride(1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(1)} in K, not 1 (K-major); copy it in that order"
            )
        strides = [tensor.stride(0)] * (extent > 1) + [tensor.stride(2)] * (batches > 1)
        pitches = [stride * tensor.element_size() for stride in strides]
        checks.check_aligned(name, tensor, pitches=pitches)
    if n > 1:
        checks.check_extent(f"row pitch of {name_w} in bytes", weights.stride(0), checks.MAX_PITCH)
    shape = (m, n, batches) if batched else (m, n)
    if out is not None:
        if out.dtype != out_dtype:
            raise TypeError(f"out has dtype {out.dtype} and out_dtype is {out_dtype}; make them agree")
        if tuple(out.shape) != shape:
            raise ValueError(f"out has shape {tuple(out.shape)}; expected {shape}")
        checks.check_overlap(out, inputs | {"alpha": factor})
    factors, step = checks.as_alpha(alpha, batches, device)
    scales = checks.batched_scales(name_scale, w_scale, n, k, batches, scale_layout)
    if out is None:
        out = torch.empty((*shape[2:], m, n), dtype=out_dtype, device=device)
        out = out.permute(1, 2, 0) if batched else out
    return W4A16Task(rows, weights, scales, factors, step, out if batched else out.unsqueeze(-1)), out
