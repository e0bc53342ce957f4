"""Accesses by lanes of one warp to each other's places in shared memory, without a warp barrier between them.

Lanes run independently since Volta: a lane may load what another one stored only after a barrier of the warp, such as
bar.warp.sync (PTX ISA). Every other instruction that waits for the lanes also counts here, because hardware executes
the accesses of a converged warp in program order. So this module reports, as warnings, only accesses that may go wrong
if the compiler lets lanes diverge. It also reports accesses to bytes that a copy wrote or read if other lanes waited
for the copy and these did not. A ``cp.async`` copy counts as a store of its lane, at the time when the lane waits for
it.
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
"""A mark packs the access of a byte: number of times the warp had converged before, place of the instruction, and lane."""


class Access(NamedTuple):
    """An access by lanes since the warp last converged.

    Attributes:
        round: number of times the warp had converged before.
        place: place of the instruction.
        addresses: int64, in the window shared::cluster; one address if all lanes agree.
        nbytes: bytes at each address.
        lanes: lane of each address, uint32; None if all lanes make every access.
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
        """Mark of each byte."""
        mark = (self.round << SITE_BITS | self.place) << LANE_BITS
        if self.lanes is None:  # each lane may load what it stores there
            return 0 if self.write else mark | LANES - 1
        return mark | np.repeat(self.lanes.astype(np.int64), self.nbytes)


class WarpAccesses:
    """Accesses of one warp since it last converged.

    Attributes:
        rounds: round of the warp's last access, by 16-byte chunk.
        copied: copies that their lanes have waited for, and their places.
    """

    def __init__(self, chunks: int):
        """Starts without accesses."""
        self.round = 0
        self.rounds = np.zeros(chunks, np.int32)
        self.unmarked: list[Access] = []
        self.copied: list[tuple[Copied, int]] = []


class Waits(NamedTuple):
    """Events that only some lanes of a warp have waited for since it converged.

    Attributes:
        others: lanes that have not waited, bool (32,).
        phases: by component, the number of events that all lanes knew to be complete.
    """

    others: np.ndarray
    phases: dict[int, int]


class WarpOrder:
    """Accesses of each warp since it last converged: a list, and marks of bytes where two of them are close to each other.

    A mark belongs to the newest load or the newest store of a byte. A byte that several lanes load keeps the mark of
    the last one.
    """

    def __init__(self, checker: Ledger):
        """`checker`: receives the findings."""
        self.checker = checker
        self.begin()

    def begin(self) -> None:
        """Starts with new memories."""
        self._marks: dict[Cta, np.ndarray] = {}  # (2, bytes): loads and stores
        self._warps: dict[Warp, WarpAccesses] = {}
        self._waits: dict[Warp, Waits] = {}
        self._rounds = 0

    def met(self, warp: "Warp") -> None:
        """Notes that all lanes of a warp have converged."""
        accesses = self._warps.get(warp)
        if accesses is not None:
            accesses.round = 0
            accesses.unmarked.clear()
            accesses.copied.clear()
        if self._waits:
            self._waits.pop(warp, None)

    def waits(self, warp: "Warp", component: int) -> None:
        """Notes that active lanes found events of a component (phases, or copies) complete that the warp does not know yet."""
        missing = warp.missing()
        if missing is None:
            return
        others, phases = self._waits.get(warp, (missing, {}))
        seen = self.checker.clock(warp).knowledge[SEEN]
        phases.setdefault(component, int(seen[component]) if component < len(seen) else 0)
        self._waits[warp] = Waits(others & missing, phases)

    def copied(self, warp: "Warp", site: int, copied: Copied) -> None:
        """Notes that lanes have waited for their copies."""
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
        """Checks accesses of active lanes to `places`.

        `addresses`: int64 in the shared::cluster window, one if they agree; `nbytes` at each.
        """
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
        """Compares an access with earlier ones of its round that are close to it."""
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
        """Compares accesses of lanes with copies that only other lanes of the warp waited for."""
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
                    f"{site} {'stores over' if write else 'loads'} the copy of {other}, but only another lane of the warp waited "
                    "for it: no bar.warp.sync between them, nor anything else that makes the warp converge"
                )
                self.checker.report("race", site, other, text, severity="warning")
                return

    def _compare(self, cta: "Cta", accesses: WarpAccesses, one: Access) -> None:
        """Compares an access with earlier ones of its round, byte by byte."""
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
            "between them, nor anything else that makes the warp converge"
        )
        checker.report("race", site, other, text, severity="warning")
