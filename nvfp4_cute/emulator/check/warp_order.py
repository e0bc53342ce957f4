"""Accesses of lanes of one warp to each other's places in shared memory, with nothing between that makes the warp meet.

Lanes run independently since Volta: what one lane stored another one may load only behind a barrier of the warp, which
bar.warp.sync is (PTX ISA). Everything else that waits for the lanes counts here, too, since hardware executes the
accesses of a warp that has met in program order. So only what may go wrong where the compiler lets lanes drift apart is
reported, as a warning. So are accesses of what a copy brought or read where other lanes waited for the copy and these did not:
what ``cp.async`` copied is a store of the lane that copied it, at the time when it waits for that.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nvfp4_cute.emulator.addresses import OFFSET_MASK
from nvfp4_cute.emulator.check.clocks import COMPONENT_SHIFT, SEEN, VALUE_MASK
from nvfp4_cute.emulator.check.ledger import Copied, Ledger
from nvfp4_cute.emulator.check.shadow import distinct
from nvfp4_cute.emulator.lanes import LANE_IDS, LANES
from nvfp4_cute.emulator.places import CHUNK_BYTES, LanePlaces, Place, granules, lane_places

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Cta, Warp

LANE_BITS, SITE_BITS = 5, 20
"""A mark says who accessed a byte: how often warps had met before, the place of the instruction, and the lane."""


class Access(NamedTuple):
    """What lanes of a warp accessed since the warp met.

    Attributes:
        round / place: how often warps had met before, the place of the instruction.
        addresses: int64, in the window shared::cluster; one if all lanes agree.  nbytes: at each.
        lanes: which, uint32; None for all of them alike.
    """

    round: int
    place: int
    addresses: np.ndarray
    nbytes: int
    lanes: np.ndarray | None
    write: bool

    @property
    def bytes_(self) -> np.ndarray:
        """Offsets in shared memory."""
        return ((self.addresses & OFFSET_MASK)[:, None] + np.arange(self.nbytes)).reshape(-1)

    def marks(self) -> np.ndarray | int:
        """Of each byte."""
        mark = (self.round << SITE_BITS | self.place) << LANE_BITS
        if self.lanes is None:  # what each lane stores there, it may load
            return 0 if self.write else mark | LANES - 1
        return mark | np.repeat(self.lanes.astype(np.int64), self.nbytes)


class WarpAccesses:
    """Accesses of one warp since it met last.

    Attributes:
        rounds: by 16-byte chunk, the round in which the warp accessed it last.
        copied: copies that their lanes have waited for, and their places.
    """

    def __init__(self, chunks: int):
        """None yet."""
        self.round = 0
        self.rounds = np.zeros(chunks, np.int32)
        self.unmarked: list[Access] = []
        self.copied: list[tuple[Copied, int]] = []


class Waits(NamedTuple):
    """What only some lanes of a warp have waited for since it met.

    Attributes:
        others: lanes that have not, bool (32,).  phases: of each component of them, how many events all lanes knew complete.
    """

    others: np.ndarray
    phases: dict[int, int]


class WarpOrder:
    """Accesses of each warp since it met last: a list, and marks of bytes where two of them are near each other.

    A mark is of the newest load or the newest store of a byte. A byte that several lanes load keeps the mark of the last of them.
    """

    def __init__(self, checker: Ledger):
        """`checker`: where findings go."""
        self.checker = checker
        self.begin()

    def begin(self) -> None:
        """Fresh memories."""
        self._marks: dict[Cta, np.ndarray] = {}  # (2, bytes): loads and stores
        self._warps: dict[Warp, WarpAccesses] = {}
        self._waits: dict[Warp, Waits] = {}
        self._rounds = 0

    def met(self, warp: "Warp") -> None:
        """All lanes of a warp are at one place."""
        accesses = self._warps.get(warp)
        if accesses is not None:
            accesses.round = 0
            accesses.unmarked.clear()
            accesses.copied.clear()
        if self._waits:
            self._waits.pop(warp, None)

    def waits(self, warp: "Warp", component: int) -> None:
        """Active lanes have found events of a component (phases, or copies) complete, which the warp has not learnt yet."""
        missing = warp.missing()
        if missing is None:
            return
        others, phases = self._waits.get(warp, (missing, {}))
        seen = self.checker.clock(warp).knowledge[SEEN]
        phases.setdefault(component, int(seen[component]) if component < len(seen) else 0)
        self._waits[warp] = Waits(others & missing, phases)

    def copied(self, warp: "Warp", site: int, copied: Copied) -> None:
        """Lanes have waited for what they copied."""
        self._accesses(warp).copied.append((copied, site))

    def _accesses(self, warp: "Warp") -> WarpAccesses:
        accesses = self._warps.get(warp)
        if accesses is None:
            accesses = self._warps[warp] = WarpAccesses(-(-warp.cta.smem.size // CHUNK_BYTES))
        return accesses

    def access(
        self,
        warp: "Warp",
        site: int,
        addresses: np.ndarray,
        nbytes: int,
        places: LanePlaces,
        *,
        write: bool,
    ) -> None:
        """Active lanes access `nbytes` at each address (int64, in the window shared::cluster; one if they agree), at `places`."""
        if len(places) > 1 or places[0][0] != warp.cta.rank:
            return
        if warp in self._waits:
            self._compare_waits(warp, site, addresses, nbytes, write=write)
        accesses = self._accesses(warp)
        if not accesses.round:
            self._rounds += 1
            accesses.round = self._rounds
        for copied, number in accesses.copied:
            earlier = Access(accesses.round, number, copied.offsets, copied.nbytes, copied.lanes, True)
            self._note(warp.cta, accesses, earlier, granules(copied.offsets, copied.nbytes))
        accesses.copied.clear()
        lanes = None
        if addresses.size == warp.num_active:
            lanes = LANE_IDS if warp.all_active else LANE_IDS[warp.active]
        one = Access(accesses.round, site, addresses, nbytes, lanes, write)
        self._note(warp.cta, accesses, one, places[0][1])

    def _note(self, cta: "Cta", accesses: WarpAccesses, one: Access, place: Place) -> None:
        """Hold an access against the earlier ones of its round where it is near one."""
        index = place[0]
        chunks = index[0] if isinstance(index, tuple) else index
        if np.count_nonzero(accesses.rounds[chunks] == accesses.round):
            self._compare(cta, accesses, one)
        else:
            accesses.unmarked.append(one)
        accesses.rounds[chunks] = accesses.round

    def _compare_waits(
        self, warp: "Warp", number: int, addresses: np.ndarray, nbytes: int, *, write: bool
    ) -> None:
        """Hold accesses of lanes against the copies that only others of the warp waited for."""
        others, phases = self._waits[warp]
        strange = others[warp.active]
        if addresses.size == strange.size:
            addresses = addresses[strange]
        if not strange.any():
            return
        ((_, (index, _)),) = lane_places(addresses, nbytes)
        shadow, sites = self.checker.shared[warp.cta], self.checker.sites
        copies = shadow.writers_of(index)
        if write:
            for component in phases.keys() & shadow.readers.keys():
                copies += distinct(shadow.readers[component].at(shadow.at(index)))
        for copy in copies:
            stamp = shadow.accesses.epochs[copy]
            if stamp & VALUE_MASK > phases.get(stamp >> COMPONENT_SHIFT, VALUE_MASK):
                site, other = sites[number], sites[shadow.accesses.sites[copy] >> 1]
                text = (
                    f"{site} {'stores over' if write else 'loads'} what {other} copied, and only another lane of the warp waited "
                    "for that: no bar.warp.sync between them, nor anything else for which the warp meets"
                )
                self.checker.report("race", site, other, text, severity="warning")
                return

    def _compare(self, cta: "Cta", accesses: WarpAccesses, one: Access) -> None:
        """Hold an access against the earlier ones of its round, byte by byte."""
        marks = self._marks.get(cta)
        if marks is None:
            marks = self._marks[cta] = np.zeros((2, cta.smem.size), np.int64)
        for earlier in accesses.unmarked:
            marks[int(earlier.write), earlier.bytes_] = earlier.marks()
        accesses.unmarked.clear()
        bytes_, mine = one.bytes_, one.marks()
        if one.lanes is not None or not one.write:
            others = (marks if one.write else marks[1:])[:, bytes_]
            strange = others >> SITE_BITS + LANE_BITS == accesses.round
            if one.lanes is not None:
                strange &= (others ^ mine) & (1 << LANE_BITS) - 1 != 0
            if strange.any():
                self._report(one.place, int(others[strange][0]), write=one.write)
        marks[int(one.write), bytes_] = mine

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
