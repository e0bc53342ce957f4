"""The problem in numbers: shapes, seed, tolerance, published speed of light.

GPU MODE x NVIDIA "Blackwell NVFP4 kernel hackathon", third problem: C = silu(A @ B1^T) * (A @ B2^T), NVFP4 operands,
fp16 C, batch size L = 1 throughout.
"""

from datetime import datetime, timezone

from nvfp4_cute.problems import harness_rules
from nvfp4_cute.problems.matrix_case import MatrixCase
from nvfp4_cute.roofline import speed_of_light as light

RTOL = ATOL = 1e-3
HARNESS = harness_rules.BACK_TO_BACK
DEADLINE = datetime(2026, 1, 20, tzinfo=timezone.utc)


class DualGemmCase(MatrixCase):
    """One shape of the dual GEMM problem."""

    @property
    def work(self) -> light.Work:
        """Bytes and operations of the case."""
        return light.dual_gemm(self.m, self.n, self.k)


# The third repeats the first, as in the official list.
TESTS = (
    DualGemmCase(1536, 512, 7168),
    DualGemmCase(256, 512, 256),
    DualGemmCase(1536, 512, 7168),
    DualGemmCase(3072, 1024, 1536),
    DualGemmCase(7168, 1024, 256),
    DualGemmCase(7168, 2304, 2048),
    DualGemmCase(4608, 384, 7168),
    DualGemmCase(7168, 384, 2304),
    DualGemmCase(512, 768, 7168),
    DualGemmCase(4096, 768, 512),
)

BENCHMARKS = (
    DualGemmCase(256, 4096, 7168, 4.708),
    DualGemmCase(512, 4096, 7168, 8.714),
    DualGemmCase(256, 3072, 4096, 2.125),
    DualGemmCase(512, 3072, 7168, 6.535),
)
