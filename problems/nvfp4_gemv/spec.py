"""The problem in numbers: shapes, seed, tolerance, published speed of light.

GPU MODE x NVIDIA "Blackwell NVFP4 kernel hackathon", first problem: a batch of L products of a matrix and a vector,
NVFP4 operands, fp16 result. B arrives padded to 128 rows, of which only the first counts.
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
    """One shape of the problem.

    Attributes:
        m, k: extents of a matrix in elements; k is a multiple of 64.
        l: products of the batch.
        sol_us: published speed of light in microseconds; None for test shapes.
        seed: of the inputs.
    """

    m: int
    k: int
    l: int
    sol_us: float | None = None
    seed: int = SEED

    @property
    def arguments(self) -> dict[str, Any]:
        """What a case file says of the case."""
        return {"m": self.m, "k": self.k, "l": self.l, "seed": self.seed}

    @property
    def work(self) -> light.Work:
        """What it moves and computes."""
        return light.gemv(self.m, self.k, self.l)

    @classmethod
    def from_arguments(cls, m: int, k: int, l: int, seed: int) -> "GemvCase":
        """The case of a case file or a task.yml."""
        return cls(m, k, l, seed=seed)

    @property
    def name(self) -> str:
        """Readable, for example ``m7168_k16384_l1``."""
        return f"m{self.m}_k{self.k}_l{self.l}"


# The fifth repeats the fourth, as the official list does.
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
