"""nvfp4_quantize: quantizes bfloat16 rows to NVFP4."""

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.problems.trace_schema import Spec, TensorSpec


def spec(K: int = 7168, M: tuple[int, ...] = (1, 16, 128, 4096)) -> Spec:
    """Data [M, K/2] and row-major scales [M, K/16] for x [M, K]; K is a constant, workloads give M."""
    return Spec(
        f"nvfp4_quantize_k{K}",
        "quantize",
        {"M": "rows", "K": K, "K_bytes": NVFP4.row_bytes(K), "K_blocks": NVFP4.num_k_blocks(K)},
        {"x": TensorSpec("bfloat16", ("M", "K"))},
        {
            "data": TensorSpec(
                "int8", ("M", "K_bytes"), "two e2m1 values a byte, the first in the low four bits"
            ),
            "scale": TensorSpec("int8", ("M", "K_blocks"), "bytes of ue4m3, one for 16 values"),
        },
        tuple({"M": m} for m in M),
        "Blocks of 16 to e2m1 with a scale ue4m3 each: amax / 6 and x / scale, each to nearest even.",
        tags=("quantization:nvfp4",),
        dependencies=("nvfp4-cute",),
    )
