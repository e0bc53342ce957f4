"""One shape of a problem with a single M, N and K and batch size 1."""

from dataclasses import dataclass
from typing import Any, TypeVar

SEED = 1111

CaseT = TypeVar("CaseT", bound="MatrixCase")


@dataclass(frozen=True)
class MatrixCase:
    """One shape of a problem.

    Attributes:
        m, n, k: extents in elements, n per operand of weights; m and n are multiples of 128, k of 256.
        sol_us: published speed of light in microseconds; None for test shapes.
        seed: seed of the inputs.
    """

    m: int
    n: int
    k: int
    sol_us: float | None = None
    seed: int = SEED

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the case's entries in a case file."""
        return {"m": self.m, "n": self.n, "k": self.k, "l": 1, "seed": self.seed}

    @classmethod
    def from_arguments(cls: type[CaseT], m: int, n: int, k: int, l: int, seed: int) -> CaseT:
        """Makes a case from a case file or a task.yml. Raises ValueError for a batch."""
        if l != 1:
            raise ValueError(f"l={l}: this problem has batch size 1 throughout")
        return cls(m, n, k, seed=seed)

    @property
    def name(self) -> str:
        """Readable name, for example ``m128_n7168_k16384``."""
        return f"m{self.m}_n{self.n}_k{self.k}"
