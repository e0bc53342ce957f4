"""The problem in numbers: shapes, seed, tolerance, published speed of light.

GPU MODE x NVIDIA "Blackwell NVFP4 kernel hackathon", first problem: a batch of L matrix-vector products with NVFP4 operands and
fp16 results. B is padded to 128 rows, of which only the first counts.
"""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from nvfp4_cute.problems import harness_rules
from nvfp4_cute.roofline import speed_of_light as light

SEED = 1111
RTOL = ATOL = 1e-3
HARNESS = harness_rules.SINGLE
DEADLINE = datetime(2025, 11, 29, tzinfo=timezone.utc)
PADDED_N = 128


@dataclass(frozen=True)
class GemvCase:
    """One shape of the GEMV problem.

    Attributes:
        m, k: extents of a matrix in elements; k is a multiple of 64.
        l: number of products in the batch.
        sol_us: published speed of light in microseconds; None for test shapes.
        seed: seed of the inputs.
    """

    m: int
    k: int
    l: int
    sol_us: float | None = None
    seed: int = SEED

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the case's entries in a case file."""
        return {"m": self.m, "k": self.k, "l": self.l, "seed": self.seed}

    @property
    def work(self) -> light.Work:
        """Bytes and operations of the case."""
        return light.gemv(self.m, self.k, self.l)

    @classmethod
    def from_arguments(cls, m: int, k: int, l: int, seed: int) -> "GemvCase":
        """Makes a case from a case file or a task.yml."""
        return cls(m, k, l, seed=seed)

    @property
    def name(self) -> str:
        """Readable name, for example ``m7168_k16384_l1``."""
        return f"m{self.m}_k{self.k}_l{self.l}"


# The fifth repeats the fourth, as in the official list.
TESTS = (
    GemvCase(128, 256, 1),
    GemvCase(128, 1536, 1),
    GemvCase(128, 3072, 1),
    GemvCase(256, 7168, 1),
    GemvCase(256, 7168, 1),
    GemvCase(2432, 4608, 2),
    GemvCase(384, 7168, 2),
    GemvCase(512, 512, 2),
    GemvCase(512, 4096, 2),
    GemvCase(512, 1536, 2),
)

BENCHMARKS = (
    GemvCase(7168, 16384, 1, 8.622),
    GemvCase(4096, 7168, 8, 17.275),
    GemvCase(7168, 2048, 4, 4.317),
)
