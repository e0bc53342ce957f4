"""``Placement``: which ranks hold which experts."""

import zlib
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.planning.arch.simt import MAX_EXPERTS, MAX_TOP_K

# ``permute`` orders a rank's tokens by destination rank, and has this limit for its second dimension.
MAX_RANKS = MAX_TOP_K


@dataclass(frozen=True)
class Placement:
    """A map from experts to ranks. Ranks may hold different numbers of experts, and several ranks may hold copies of an expert.

    A token uses its own rank's copy of an expert if there is one. Otherwise the tokens of a rank alternate between the other
    ranks' copies.

    Attributes:
        experts: for every rank the ids of its experts, in the order of its weights. Every id from 0 to the largest occurs.

    Example:
        >>> Placement.even(4, 2).experts
        ((0, 1), (2, 3))
        >>> Placement(((0, 1), (0, 2))).ranks_of(0)
        (0, 1)

    Raises:
        ValueError: an id is missing, negative, or twice on one rank.
        UnsupportedProblem: there are too many ranks or experts.
    """

    experts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ids = {expert for held in self.experts for expert in held}
        if not ids or ids != set(range(max(ids) + 1)):
            raise ValueError(
                f"the ranks hold experts {sorted(ids)}; every id from 0 to the largest lies on a rank"
            )
        for rank, held in enumerate(self.experts):
            if len(set(held)) != len(held):
                raise ValueError(
                    f"rank {rank} holds an expert twice: {held}; each has one row of weights there"
                )
        for name, count, most in (
            ("ranks", len(self.experts), MAX_RANKS),
            ("experts", len(ids), MAX_EXPERTS),
        ):
            if count > most:
                raise UnsupportedProblem(
                    f"a placement on {count} {name}; at most {most} (tables in shared memory)"
                )

    @classmethod
    def even(cls, num_experts: int, num_ranks: int) -> "Placement":
        """Places adjacent ids on each rank. If the numbers do not divide, the first ranks hold one more expert."""
        return _even(num_experts, num_ranks)

    @cached_property
    def checksum(self) -> int:
        """Returns a checksum of the map. Ranks with equal maps compute equal checksums; unequal maps almost never do."""
        return zlib.crc32(repr(self.experts).encode())

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.experts)

    @cached_property
    def num_experts(self) -> int:
        """Number of experts, each counted once."""
        return len({expert for held in self.experts for expert in held})

    @cached_property
    def num_places(self) -> int:
        """Number of experts, every copy counted."""
        return sum(map(len, self.experts))

    def ranks_of(self, expert: int) -> tuple[int, ...]:
        """Returns the ranks that hold an expert."""
        return tuple(rank for rank, held in enumerate(self.experts) if expert in held)

    def tables(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tables in which a rank looks up its tokens' experts, cached per device.

        Returns:
            to_rank: int32 [E, P]; choice e of token t goes to rank ``to_rank[e, t % P]``.
            to_local: int32 [num_ranks, E], the index of an expert on a rank, or -1.
        """
        return _tables(self, rank, device)


@lru_cache(maxsize=64)
def _even(num_experts: int, num_ranks: int) -> Placement:
    share, more = divmod(num_experts, num_ranks)
    ends = [rank * share + min(rank, more) for rank in range(num_ranks + 1)]
    return Placement(
        tuple(tuple(range(start, stop)) for start, stop in zip(ends[:-1], ends[1:], strict=True))
    )


@cache  # cached, because graphs hold the addresses
def _tables(placement: Placement, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    copies = [placement.ranks_of(expert) for expert in range(placement.num_experts)]
    copies = [(rank,) if rank in ranks else ranks for ranks in copies]
    period = max(len(ranks) for ranks in copies)
    # Ranks start with different copies, so that few tokens per rank do not all go to the first copy.
    to_rank = [[ranks[(rank + token) % len(ranks)] for token in range(period)] for ranks in copies]
    to_local = [
        [held.index(expert) if expert in held else -1 for expert in range(placement.num_experts)]
        for held in placement.experts
    ]
    as_tensor = lambda rows: torch.tensor(rows, dtype=torch.int32, device=device)
    return as_tensor(to_rank), as_tensor(to_local)
