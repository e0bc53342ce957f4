"""The problem in numbers: shapes, seed, tolerance, published speed of light.

GPU MODE x NVIDIA "Blackwell NVFP4 kernel hackathon", second problem: C = A @ B^T, NVFP4 operands, fp16 C, batch size
L = 1 throughout.
"""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from nvfp4_cute import speed_of_light as light
from nvfp4_cute.problems import harness_rules

SEED = 1111
RTOL = ATOL = 1e-3
HARNESS = harness_rules.BACK_TO_BACK
DEADLINE = datetime(2025, 12, 21, tzinfo=timezone.utc)


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
    def arguments(self) -> dict[str, Any]:
        """What a case file says of the case."""
        return {"m": self.m, "n": self.n, "k": self.k, "l": 1, "seed": self.seed}

    @property
    def work(self) -> light.Work:
        """What it moves and computes."""
        return light.gemm(self.m, self.n, self.k)

    @classmethod
    def from_arguments(cls, m: int, n: int, k: int, l: int, seed: int) -> "GemmCase":
        """The case of a case file or a task.yml."""
        if l != 1:
            raise ValueError(f"l={l}: this problem has batch size 1 throughout")
        return cls(m, n, k, seed=seed)

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
