"""nvfp4_grouped_gemm: rows of all groups one after the other, as in a layer of experts."""

from nvfp4_cute.problems.trace_schema import Spec, TensorSpec
from nvfp4_cute.problems.traces.layout import ATOM, k_axes, row_atoms, scales, values


def spec(G: int = 32, N: int = 4096, K: int = 7168, M: tuple[int, ...] = (32, 256, 4096)) -> Spec:
    """C [M, N] bfloat16: rows offs[g - 1] to offs[g] of A times B[g]^T; G, N, K are constants, workloads give M."""
    return Spec(
        f"nvfp4_grouped_gemm_g{G}_n{N}_k{K}",
        "grouped_gemm",
        {
            "M": "rows of all groups",
            "A_atoms": "atoms of scales of a",
            "G": G,
            "N": N,
            "N_atoms": row_atoms(N),
        }
        | {"K": K, **k_axes("K", K), **ATOM},
        {
            "a": values("M", "K_bytes"),
            "b": values("G", "N", "K_bytes"),
            "a_scale": scales("A_atoms", "K_atoms"),
            "b_scale": scales("G", "N_atoms", "K_atoms"),
            "offs": TensorSpec("int32", ("G",), "inclusive ends of the groups, ascending; the last is M"),
        },
        {"c": TensorSpec("bfloat16", ("M", "N"))},
        tuple({"M": m, "A_atoms": m // 128 + G} for m in M),
        "NVFP4 grouped GEMM over ragged rows. The scales of every group of a begin with a new row of atoms.",
        ("A_atoms == M // 128 + G",),
        tags=("quantization:nvfp4", "stage:decode"),
        dependencies=("nvfp4-cute",),
    )
