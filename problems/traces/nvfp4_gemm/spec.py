"""nvfp4_gemm: C = A @ B^T for one matrix."""

from nvfp4_cute.problems.trace_schema import Spec, TensorSpec
from nvfp4_cute.problems.traces.layout import ATOM, k_axes, row_atoms, scales, values


def spec(N: int = 7168, K: int = 2048, M: tuple[int, ...] = (1, 16, 128, 512, 4096)) -> Spec:
    """C [M, N] float16 = A [M, K] @ B [N, K]^T; N and K are constants, workloads give M."""
    return Spec(
        f"nvfp4_gemm_n{N}_k{K}",
        "gemm",
        {"M": "rows of a", "M_atoms": "rows of a, in atoms of 128", "N": N, "N_atoms": row_atoms(N)}
        | {"K": K, **k_axes("K", K), **ATOM},
        {
            "a": values("M", "K_bytes"),
            "b": values("N", "K_bytes"),
            "a_scale": scales("M_atoms", "K_atoms"),
            "b_scale": scales("N_atoms", "K_atoms"),
        },
        {"c": TensorSpec("float16", ("M", "N"))},
        tuple({"M": m, "M_atoms": row_atoms(m)} for m in M),
        "NVFP4 block-scaled matrix product, C = A @ B^T, float32 accumulation.",
        ("M_atoms == (M + 127) // 128",),
        tags=("quantization:nvfp4",),
        target_hardware=("B200",),
        dependencies=("cutlass", "torch"),
    )
