"""Accesses of lanes of one warp to each other's places in shared memory, with nothing between that makes the warp meet.

Lanes run independently since Volta: what one lane stored another one may load only behind a barrier of the warp, which
bar.warp.sync is (PTX ISA). Everything else that waits for the lanes counts here, too, since hardware executes the
accesses of a warp that has met in program order. So only what may go wrong where the compiler lets lanes drift apart is
reported, as a warning.
"""

from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator.addresses import OFFSET_MASK, RANK_SHIFT
from nvfp4_cute.emulator.check.ledger import Ledger
from nvfp4_cute.emulator.lanes import LANE_IDS, LANES

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp

LANE_BITS, SITE_BITS = 5, 20
"""A mark says who accessed a byte: how often warps had met before, the place of the instruction, and the lane."""


class WarpOrder:
    """Marks of the newest load and the newest store of each byte of shared memory.

    A byte that several lanes load keeps the mark of the last of them.
    """

    def __init__(self, checker: Ledger):
        """`checker`: where findings go."""
        self.checker = checker
        self.begin()

    def begin(self) -> None:
        """Fresh memories."""
        self._marks: dict[Cta, np.ndarray] = {}  # (2, bytes): loads and stores
        self._round: dict[Warp, int] = {}
        self._rounds = 1

    def met(self, warp: "Warp") -> None:
        """All lanes of a warp are at one place."""
        self._rounds += 1
        self._round[warp] = self._rounds

    def access(self, warp: "Warp", site: int, addresses: np.ndarray, nbytes: int, *, write: bool) -> None:
        """Active lanes access `nbytes` at each address (int64, in the window shared::cluster; one if they agree)."""
        if (addresses >> RANK_SHIFT != warp.cta.rank).any():
            return
        marks = self._marks.get(warp.cta)
        if marks is None:
            marks = self._marks[warp.cta] = np.zeros((2, warp.cta.smem.size), np.int64)
        bytes_ = ((addresses & OFFSET_MASK)[:, None] + np.arange(nbytes)).reshape(-1)
        round_ = self._round.get(warp, 0) or self._first(warp)
        mine: np.ndarray | int = (round_ << SITE_BITS | site) << LANE_BITS
        alike = addresses.size < warp.num_active
        if alike and write:
            mine = 0  # each lane stores there, and may load what it stored
        else:
            mine |= LANES - 1 if alike else 0
            others = (marks if write else marks[1:])[:, bytes_]
            strange = others >> SITE_BITS + LANE_BITS == round_
            if not alike:
                lanes = LANE_IDS if warp.all_active else LANE_IDS[warp.active]
                mine = mine | np.repeat(lanes.astype(np.int64), nbytes)
                strange &= (others ^ mine) & (1 << LANE_BITS) - 1 != 0
            if strange.any():
                self._report(site, int(others[strange][0]), write=write)
        marks[int(write), bytes_] = mine

    def _first(self, warp: "Warp") -> int:
        self.met(warp)
        return self._rounds

    def _report(self, number: int, mark: int, *, write: bool) -> None:
        checker = self.checker
        site = checker.sites[number]
        other = checker.sites[mark >> LANE_BITS & (1 << SITE_BITS) - 1]
        does = "stores to" if write else "loads"
        text = (
            f"{site} {does} a place in shared memory that another lane of the warp accessed in {other}: no bar.warp.sync "
            "between them, nor anything else for which the warp meets"
        )
        checker.report("race", site, other, text, severity="warning")
