"""The problem in numbers: shapes, seed, tolerance, published speed of light.

GPU MODE x NVIDIA "Blackwell NVFP4 kernel hackathon", third problem: C = silu(A @ B1^T) * (A @ B2^T), NVFP4 operands,
fp16 C, batch size L = 1 throughout.
"""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from nvfp4_cute import speed_of_light as light
from nvfp4_cute.problems import harness_rules

SEED = 1111
RTOL = ATOL = 1e-3
HARNESS = harness_rules.BACK_TO_BACK
DEADLINE = datetime(2026, 1, 20, tzinfo=timezone.utc)


@dataclass(frozen=True)
class DualGemmCase:
    """One shape of the problem.

    Attributes:
        m, n, k: extents in elements, n of B1 and of B2 each; m and n are multiples of 128, k of 256.
        sol_us: published speed of light in microseconds; None for test shapes.
        seed: of the inputs.
    """

    m: int
    n: int
    k: int
    sol_us: float | None = None
    seed: int = SEED

    @property
    def arguments(self) -> dict[str, Any]:
        """What a case file says of the case."""
        return {"m": self.m, "n": self.n, "k": self.k, "l": 1, "seed": self.seed}

    @property
    def work(self) -> light.Work:
        """What it moves and computes."""
        return light.dual_gemm(self.m, self.n, self.k)

    @classmethod
    def from_arguments(cls, m: int, n: int, k: int, l: int, seed: int) -> "DualGemmCase":
        """The case of a case file or a task.yml."""
        if l != 1:
            raise ValueError(f"l={l}: this problem has batch size 1 throughout")
        return cls(m, n, k, seed=seed)

    @property
    def name(self) -> str:
        """Readable, for example ``m256_n4096_k7168``."""
        return f"m{self.m}_n{self.n}_k{self.k}"


# The third repeats the first, as the official list does.
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
