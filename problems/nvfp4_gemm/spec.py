"""The problem in numbers: shapes, seed, tolerance, published speed of light.

GPU MODE x NVIDIA "Blackwell NVFP4 kernel hackathon", second problem: C = A @ B^T, NVFP4 operands, fp16 C, batch size
L = 1 throughout.
"""

from dataclasses import dataclass

SEED = 1111
RTOL = ATOL = 1e-3


@dataclass(frozen=True)
class GemmCase:
    """One shape of the problem.

    Attributes:
        m, n, k: extents in elements; m and n are multiples of 128, k of 256.
        sol_us: published speed of light in microseconds; None for test shapes.
        seed: of the inputs.
    """

    m: int
    n: int
    k: int
    sol_us: float | None = None
    seed: int = SEED

    @property
    def name(self) -> str:
        """Readable and unique, for example ``m128_n7168_k16384``."""
        return f"m{self.m}_n{self.n}_k{self.k}"


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
