"""Destinations of choices of experts, by the tables of a placement."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common.global_access import global_scalar


@dataclass(frozen=True)
class Choice:
    """The rank of a choice, and the number of its expert there; -1 for none."""

    rank: Int32
    local: Int32


@dataclass(frozen=True)
class Placement:
    """Addresses of to_rank int32 (experts, period) and to_local int32 (ranks, experts); see ``rank_choices``."""

    to_rank: Int64
    to_local: Int64
    experts: Int32
    period: Int32

    @cute.jit
    def choice(self, expert: Int32, token: Int32) -> Choice:
        """Returns the destination of a token that chose the expert."""
        rank, local = Int32(-1), Int32(-1)
        if (expert >= 0) & (expert < self.experts):
            column = expert * self.period + token % self.period
            rank = global_scalar(Int32, self.to_rank + Int64(column) * 4)[0]
            column = rank * self.experts + expert
            local = global_scalar(Int32, self.to_local + Int64(column) * 4)[0]
        return Choice(rank, local)
