"""nvfp4_gemv: a batch of matrix-vector products."""

from nvfp4_cute.problems.trace_schema import Spec, TensorSpec
from nvfp4_cute.problems.traces.layout import ATOM, k_axes, row_atoms, scales, values


def spec(M: int = 4096, K: int = 7168, L: tuple[int, ...] = (1, 2, 8)) -> Spec:
    """y [L, M] float16 = A [L, M, K] @ x [L, K]; M and K are constants, workloads give L."""
    return Spec(
        f"nvfp4_gemv_m{M}_k{K}",
        "gemv",
        {"L": "products of the batch", "M": M, "M_atoms": row_atoms(M), "x_atoms": 1}
        | {"K": K, **k_axes("K", K), **ATOM},
        {
            "a": values("L", "M", "K_bytes"),
            "x": values("L", "K_bytes"),
            "a_scale": scales("L", "M_atoms", "K_atoms"),
            "x_scale": scales("L", "x_atoms", "K_atoms"),
        },
        {"y": TensorSpec("float16", ("L", "M"))},
        tuple({"L": size} for size in L),
        "A batch of NVFP4 matrix-vector products, float32 accumulation; row 0 of x's scales counts.",
        tags=("quantization:nvfp4",),
        dependencies=("cutlass", "torch"),
    )
