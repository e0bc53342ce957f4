"""grouped_gemm: C_g = alpha_g * A_g @ B_g^T over NVFP4 operands, many groups in one launch."""

from collections.abc import Sequence

import torch

from nvfp4_cute import backends
from nvfp4_cute.config import KernelConfig
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.problem import ScaleLayout, check_list_operands


def grouped_gemm(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    a_scale: Sequence[torch.Tensor],
    b_scale: Sequence[torch.Tensor],
    offs: None = None,
    alpha: torch.Tensor | Sequence[float] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_layout: ScaleLayout = "blocked",
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> list[torch.Tensor]:
    """Multiply every group's NVFP4 operands; M, N and K may differ from group to group.

    Args:
        a: one [M_g, K_g/2] (or [M_g, K_g/2, 1]) tensor a group, uint8 or float4_e2m1fn_x2, K-major, two e2m1 values a
            byte, the low nibble first. K a multiple of 16 and rows a multiple of 16 bytes apart.
        b: the same with N_g rows.
        a_scale: e4m3 scales of blocks of 16 along K (float8_e4m3fn or uint8): 128x4 blocked (flat, [rm, rk, 32, 4, 4]
            or the (32, 4, rm, 4, rk, 1) view, zero-copy), or [M_g, K_g/16] with ``scale_layout="rowmajor"``
            (converted, which allocates).
        b_scale: the same with N_g rows.
        offs: group ends of the ragged form, which is not built yet: must be None.
        alpha: one factor a group, float32 [G] on the operands' device (``global_scale_a * global_scale_b``), or numbers.
        out: one [M_g, N_g] (or [M_g, N_g, 1]) tensor a group, written in place, rows contiguous or, in all of them,
            columns; None allocates with contiguous rows.
        out_dtype: float16, bfloat16 or float32.
        scale_layout: "blocked" or "rowmajor".
        backend: "auto" (the GPU of the tensors; the float64 reference for CPU tensors), "cuda", "emulator" (the PTX of
            a B200's kernel, executed on the CPU), "emulator:RTX 5090" or "emulator:sm_120a" (the same for another
            GPU of ``targets``), or "reference". ``NVFP4_CUTE_BACKEND`` replaces "auto".
        config: tile shape and pipeline depths; None chooses.

    Returns:
        The outputs, [M_g, N_g] (or as given in ``out``). fp32 accumulation; alpha multiplies in fp32; one rounding to
        ``out_dtype``, to nearest even.

    Raises:
        TypeError, ValueError, UnsupportedProblem: an operand breaks a rule; the message names rule, value and fix.
        UnsupportedTarget: no kernel for the GPU. ConfigError: ``config`` cannot be built.
        Nothing is written to ``out`` when a check fails.
    """
    if offs is not None:
        raise UnsupportedProblem(
            "offs given: the ragged form is not built; pass lists with one tensor a group"
        )
    problem, operands = check_list_operands(
        a, b, a_scale, b_scale, alpha, out, out_dtype=out_dtype, scale_layout=scale_layout
    )
    backends.get(backend, operands.device)(problem, operands, config)
    return list(operands.out) if out is None else list(out)
