"""nvfp4_dual_gemm: the first half of a gated layer, C = silu(A @ B1^T) * (A @ B2^T)."""

from nvfp4_cute.problems.trace_schema import Spec, TensorSpec
from nvfp4_cute.problems.traces.layout import ATOM, k_axes, row_atoms, scales, values


def spec(N: int = 3072, K: int = 4096, M: tuple[int, ...] = (1, 16, 256, 512)) -> Spec:
    """C [M, N] float16 from A [M, K], B1 and B2 [N, K]; N and K are constants, workloads give M."""
    return Spec(
        f"nvfp4_dual_gemm_n{N}_k{K}",
        "dual_gemm",
        {"M": "rows of a", "M_atoms": "rows of a, in atoms of 128", "N": N, "N_atoms": row_atoms(N)}
        | {"K": K, **k_axes("K", K), **ATOM},
        {
            "a": values("M", "K_bytes"),
            "b1": values("N", "K_bytes"),
            "b2": values("N", "K_bytes"),
            "a_scale": scales("M_atoms", "K_atoms"),
            "b1_scale": scales("N_atoms", "K_atoms"),
            "b2_scale": scales("N_atoms", "K_atoms"),
        },
        {"c": TensorSpec("float16", ("M", "N"))},
        tuple({"M": m, "M_atoms": row_atoms(m)} for m in M),
        "Two NVFP4 products of one A with the gate between them, C = silu(A @ B1^T) * (A @ B2^T).",
        ("M_atoms == (M + 127) // 128",),
        tags=("quantization:nvfp4", "fused"),
        target_hardware=("B200",),
        dependencies=("cutlass", "torch"),
    )
