"""nvfp4_group_gemm: two products with separate operands, in one launch."""

from nvfp4_cute.problems.trace_schema import Spec, TensorSpec
from nvfp4_cute.problems.traces.layout import ATOM, k_axes, row_atoms, scales, values

Pairs = tuple[tuple[int, int], ...]


def spec(N: int = 3072, K: int = 4096, M: Pairs = ((192, 320), (8, 1), (64, 96))) -> Spec:
    """C [M_g, N] float16 = A [M_g, K] @ B [N, K]^T for each of two groups; workloads give (M_0, M_1)."""
    groups = (0, 1)
    return Spec(
        f"nvfp4_group_gemm_g2_n{N}_k{K}",
        "grouped_gemm",
        {f"M_{g}": f"rows of a_{g}" for g in groups}
        | {f"M_{g}_atoms": f"rows of a_{g}, in atoms of 128" for g in groups}
        | {"N": N, "N_atoms": row_atoms(N), "K": K, **k_axes("K", K), **ATOM},
        {f"a_{g}": values(f"M_{g}", "K_bytes") for g in groups}
        | {f"b_{g}": values("N", "K_bytes") for g in groups}
        | {f"a_scale_{g}": scales(f"M_{g}_atoms", "K_atoms") for g in groups}
        | {f"b_scale_{g}": scales("N_atoms", "K_atoms") for g in groups},
        {f"c_{g}": TensorSpec("float16", (f"M_{g}", "N")) for g in groups},
        tuple(
            {f"M_{g}": m for g, m in enumerate(pair)}
            | {f"M_{g}_atoms": row_atoms(m) for g, m in enumerate(pair)}
            for pair in M
        ),
        "NVFP4 group GEMM over tensors of their own, C_g = A_g @ B_g^T, as GPU MODE's nvfp4_group_gemm.",
        tuple(f"M_{g}_atoms == (M_{g} + 127) // 128" for g in groups),
        tags=("quantization:nvfp4",),
        target_hardware=("B200",),
        dependencies=("cutlass", "torch"),
    )
