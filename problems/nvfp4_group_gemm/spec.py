"""The problem in numbers: shapes, seed, tolerance, published speed of light.

GPU MODE x NVIDIA "Blackwell NVFP4 kernel hackathon", fourth problem: C_g = A_g @ B_g^T for 2 to 8 groups, NVFP4
operands, fp16 C, batch size L = 1 throughout.
"""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from nvfp4_cute.problems import harness_rules
from nvfp4_cute.roofline import speed_of_light as light

SEED = 1111
RTOL = ATOL = 1e-3
HARNESS = harness_rules.GROUPED
DEADLINE = datetime(2026, 2, 21, 7, 30, tzinfo=timezone.utc)


@dataclass(frozen=True)
class GroupCase:
    """One shape of the grouped GEMM problem.

    Attributes:
        m, n, k: extents in elements, one entry per group; n is a multiple of 128, k of 256, m of 4.
        sol_us: published speed of light in microseconds; None for test shapes.
        seed: seed of the inputs.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    sol_us: float | None = None
    seed: int = SEED

    @property
    def num_groups(self) -> int:
        """Number of groups of the case."""
        return len(self.m)

    @property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """(m, n, k) of every group."""
        return tuple(zip(self.m, self.n, self.k, strict=True))

    @property
    def problem_sizes(self) -> list[tuple[int, int, int, int]]:
        """Returns (m, n, k, l) of every group, as in the problem's inputs."""
        return [(*size, 1) for size in self.sizes]

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the case's entries in a case file."""
        return {"m": self.m, "n": self.n, "k": self.k, "g": self.num_groups, "seed": self.seed}

    @property
    def work(self) -> light.Work:
        """Bytes and operations of the case."""
        return light.grouped_gemm(self.sizes)

    @classmethod
    def from_arguments(
        cls, m: tuple[int, ...], n: tuple[int, ...], k: tuple[int, ...], g: int, seed: int
    ) -> "GroupCase":
        """Makes a case from a case file or a task.yml."""
        if not len(m) == len(n) == len(k) == g:
            raise ValueError(f"g={g} groups with {len(m)} m, {len(n)} n, {len(k)} k; one of each a group")
        return cls(tuple(m), tuple(n), tuple(k), seed=seed)

    @property
    def name(self) -> str:
        """Readable unique name, for example ``g2_m96-128_n128-256_k256-512``; equal extents are written once."""
        return f"g{self.num_groups}_" + "_".join(
            letter + "-".join(map(str, extents if len(set(extents)) > 1 else extents[:1]))
            for letter, extents in (("m", self.m), ("n", self.n), ("k", self.k))
        )


def _benchmark(m: tuple[int, ...], n: int, k: int, sol_us: float) -> GroupCase:
    return GroupCase(m, (n,) * len(m), (k,) * len(m), sol_us)


TESTS = (
    GroupCase((96, 128), (128, 256), (256, 512)),
    GroupCase((256, 72), (512, 384), (256, 256)),
    GroupCase((128, 128), (128, 256), (512, 256)),
    GroupCase((80, 128, 256), (384, 256, 128), (256, 512, 256)),
    GroupCase((64, 72, 96), (128, 384, 512), (512, 512, 256)),
    GroupCase((64, 256, 128), (768, 128, 256), (512, 256, 512)),
    GroupCase((128, 128, 64), (256, 512, 512), (768, 256, 768)),
    GroupCase((128, 128, 128, 128), (128, 128, 128, 128), (512, 256, 512, 256)),
    GroupCase((40, 56, 384, 512), (512, 384, 256, 128), (256, 256, 256, 256)),
    GroupCase((512, 384, 256, 128), (256, 256, 256, 256), (512, 768, 512, 768)),
)

BENCHMARKS = (
    _benchmark((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168, 18.833),
    _benchmark((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048, 10.667),
    _benchmark((192, 320), 3072, 4096, 2.406),
    _benchmark((128, 384), 4096, 1536, 1.525),
)
