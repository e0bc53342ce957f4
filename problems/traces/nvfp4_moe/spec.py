"""nvfp4_moe: a layer of gated experts with NVFP4 weights, after the router."""

from nvfp4_cute.problems.trace_schema import Spec, TensorSpec, Tolerance
from nvfp4_cute.problems.traces.layout import ATOM, k_axes, row_atoms, scales, values


def spec(
    E: int = 128, H: int = 2048, I: int = 768, TOPK: int = 8, T: tuple[int, ...] = (1, 16, 256, 4096)
) -> Spec:
    """y [T, H] bfloat16 of E experts with hidden size I, TOPK per row; workloads give T."""
    return Spec(
        f"nvfp4_moe_e{E}_h{H}_i{I}_topk{TOPK}",
        "moe",
        {"T": "rows", "E": E, "TOPK": TOPK, "H": H, **k_axes("H", H), "H_rows": row_atoms(H)}
        | {"I": I, **k_axes("I", I), "I2": 2 * I, "I2_rows": row_atoms(2 * I), **ATOM},
        {
            "x": TensorSpec("bfloat16", ("T", "H")),
            "topk_ids": TensorSpec("int32", ("T", "TOPK"), "experts of a row, no two the same"),
            "topk_weights": TensorSpec("float32", ("T", "TOPK")),
            "w13": values("E", "I2", "H_bytes"),
            "w13_scale": scales("E", "I2_rows", "H_atoms"),
            "w2": values("E", "H", "I_bytes"),
            "w2_scale": scales("E", "H_rows", "I_atoms"),
        },
        {"y": TensorSpec("bfloat16", ("T", "H"))},
        tuple({"T": t} for t in T),
        "A layer of experts, W2 (silu(W1 x) * W3 x): rows are rounded to NVFP4 before each product.",
        tolerance=Tolerance(matched_ratio=0.95),
        tags=("quantization:nvfp4", "fused"),
        dependencies=("nvfp4-cute",),
    )
