"""The problem in numbers: shapes, seed, tolerance, published speed of light.

GPU MODE x NVIDIA "Blackwell NVFP4 kernel hackathon", second problem: C = A @ B^T, NVFP4 operands, fp16 C, batch size
L = 1 throughout.
"""

from datetime import datetime, timezone

from nvfp4_cute.problems import harness_rules
from nvfp4_cute.problems.matrix_case import MatrixCase
from nvfp4_cute.roofline import speed_of_light as light

RTOL = ATOL = 1e-3
HARNESS = harness_rules.BACK_TO_BACK
DEADLINE = datetime(2025, 12, 21, tzinfo=timezone.utc)


class GemmCase(MatrixCase):
    """One shape of the GEMM problem."""

    @property
    def work(self) -> light.Work:
        """Bytes and operations of the case."""
        return light.gemm(self.m, self.n, self.k)


TESTS = (
    GemmCase(128, 256, 256),
    GemmCase(128, 1536, 7168),
    GemmCase(128, 3072, 1536),
    GemmCase(256, 7168, 256),
    GemmCase(256, 7168, 2048),
    GemmCase(2304, 4608, 7168),
    GemmCase(384, 7168, 2304),
    GemmCase(512, 512, 7168),
    GemmCase(512, 4096, 512),
    GemmCase(512, 1536, 7168),
)

BENCHMARKS = (
    GemmCase(128, 7168, 16384, 8.994),
    GemmCase(128, 4096, 7168, 2.354),
    GemmCase(128, 7168, 2048, 1.333),
)
