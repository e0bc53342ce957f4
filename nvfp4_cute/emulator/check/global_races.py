"""Races on global memory within one launch: between the warps of a cluster, and between clusters.

The emulator runs clusters one after the other; a GPU runs them in any order. A cluster may therefore rely on another's
writes only if it learnt of them through atomics or strong accesses. Between clusters this is tracked coarsely: an
acquire from an address gives knowledge of everything that the releasing clusters had written at their release. Relaxed
and volatile accesses synchronise only together with fences: a store announces what its warp knew at its last fence, and
what a load learns counts after the next fence.

A barrier of the CTA or the cluster passes on what fences before it covered: each thread fences its stores, all threads
arrive, and one raises the flag. PTX ISA asks for a fence of that thread after the barrier, but hardware has completed
the stores before it. A barrier also passes on what a relaxed load found: one thread sees the count, all threads arrive,
and each fences its loads.

The bytes of a bulk store count as written when a warp has waited for the complete operation, not only for its reads.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.check.clocks import NOBODY, SEEN, first_unordered, joined, unordered
from nvfp4_cute.emulator.check.global_reads import WORD, GlobalReads, Read
from nvfp4_cute.emulator.check.ledger import Ledger
from nvfp4_cute.emulator.check.shadow import Actor, GlobalShadow
from nvfp4_cute.emulator.check.silicon_checks import SiliconChecks
from nvfp4_cute.emulator.memory import GlobalMemory, Range, host_view

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

UNDER_WAY = np.iinfo(np.int32).max
"""Order of a write that has not been awaited, so no release announces it."""

MOST_FENCES = 32
"""Proxy fences kept per warp. Older fences count as the oldest kept one, which covers more."""

GENERIC = ("st", "atom", "red")
"""Instructions that write through the generic proxy."""


@dataclass
class Footprint:
    """Bytes of the writable ranges that some clusters read and wrote: packed bits by the range's address."""

    read: dict[int, np.ndarray] = field(default_factory=dict)
    written: dict[int, np.ndarray] = field(default_factory=dict)

    def meets(self, other: "Footprint") -> bool:
        """Whether one footprint wrote bytes that the other touched."""
        pairs = ((self.written, other.written), (self.written, other.read), (self.read, other.written))
        return any((a[start] & b[start]).any() for a, b in pairs for start in a.keys() & b.keys())

    def add(self, other: "Footprint") -> None:
        """Adds the bytes that other clusters touched."""
        for mine, theirs in ((self.read, other.read), (self.written, other.written)):
            for start, bits in theirs.items():
                mine[start] = mine[start] | bits if start in mine else bits

    def first_of(self, addresses: np.ndarray, nbytes: int, *, written: bool) -> int | None:
        """Returns the first byte among `nbytes` at each address (int64) that was written, or read; None if there is none."""
        for start, bits in (self.written if written else self.read).items():
            offsets = addresses.astype(np.int64) - start
            near = offsets[(offsets > -nbytes) & (offsets < 8 * bits.size)]
            if near.size:
                each = (near[:, None] + np.arange(nbytes)).reshape(-1)
                each = each[(each >= 0) & (each < 8 * bits.size)]
                hit = bits[each >> 3] >> (7 - (each & 7)) & 1
                if hit.any():
                    return start + int(each[int(hit.argmax())])
        return None


@dataclass
class Told:
    """Knowledge about other warps: exact for those that run side by side, by releases for earlier clusters.

    Attributes:
        knowledge: knowledge as in `clocks`, or None.
        clusters: number of known releases, by cluster.
        fenced: number of known releases whose writes a proxy fence has made visible to the async proxy, by cluster.
    """

    knowledge: np.ndarray | None = None
    clusters: dict[int, int] = field(default_factory=dict)
    fenced: dict[int, int] = field(default_factory=dict)

    def add(self, other: "Told") -> None:
        """Adds the knowledge of another one."""
        if other.knowledge is not None:
            known = self.knowledge
            self.knowledge = other.knowledge.copy() if known is None else joined(known, other.knowledge)
        _raise(self.clusters, other.clusters)
        _raise(self.fenced, other.fenced)


def _raise(counts: dict[int, int], others: dict[int, int]) -> None:
    """Raises each cluster's count to the greater of the two."""
    for cluster, count in others.items():
        counts[cluster] = max(count, counts.get(cluster, 0))


class GlobalRaces:
    """Last writers of the writable ranges, and knowledge released through addresses that are used for synchronisation."""

    def __init__(self, checker: Ledger, silicon: SiliconChecks, accessed: Callable[..., None]):
        """`checker`: receives the findings. `silicon`: rules of scopes. `accessed`: called for every access (`pdl`)."""
        self.checker, self.silicon, self._accessed = checker, silicon, accessed
        self._ranges: list[Range] = []
        self._starts: list[int] = []
        self._shadows: dict[int, GlobalShadow] = {}
        self._reads = GlobalReads()
        self._told: dict[Any, Told] = {}
        self._known: dict[int, int] = {}
        self._fenced: dict[int, int] = {}
        self._pending: dict[Warp, Told] = {}
        self._at_fence: dict[Warp, Told] = {}
        self._at_gate: dict[Any, Told] = {}
        self._found_at_gate: dict[Any, Told] = {}
        self._under_way: dict[int, list[tuple[GlobalShadow, np.ndarray, int]]] = {}
        self._ordinary: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # see `generic_writers`
        self._proxy_fences: dict[int, list[tuple[int, np.ndarray]]] = {}
        self._relaxed = False
        self._cluster = self._releases = 0
        self._keep_reads = False

    def keep_reads(self, keep: bool = True) -> None:
        """Turns the recording of reads in `footprint` on or off."""
        self._keep_reads = keep

    def footprint(self) -> Footprint:
        """Returns what was read (since `keep_reads`) and written in this launch."""
        shadows = self._shadows.values()
        return Footprint(
            {shadow.start: shadow.by_byte(shadow.read) for shadow in shadows},
            {shadow.start: shadow.by_byte(shadow.writers != NOBODY) for shadow in shadows},
        )

    def begin_launch(self, memory: GlobalMemory) -> None:
        """Forgets the writes of earlier launches."""
        self._ranges = [r for r in memory.ranges if r.writable]
        self._starts = [r.start for r in self._ranges]
        self._shadows, self._told, self._cluster = {}, {}, 0
        self._reads = GlobalReads()
        self._relaxed = False

    def begin_clusters(self) -> None:
        """Starts new clusters, which know nothing of the earlier ones.

        Clusters that run side by side count as one, because knowledge between them is exact.
        """
        self._cluster += 1
        self._releases = 1
        self._known, self._fenced, self._pending, self._at_fence = {}, {}, {}, {}
        self._at_gate, self._found_at_gate, self._under_way = {}, {}, {}
        self._ordinary, self._proxy_fences = {}, {}
        for key in [key for key in self._told if not isinstance(key, int)]:
            del self._told[key]
        for told in self._told.values():
            told.knowledge = None

    def access(
        self,
        addresses: np.ndarray,
        nbytes: int,
        actor: Actor,
        *,
        write: bool,
        atomic: bool = False,
        noted: bool = True,
    ) -> None:
        """Compares accesses of `nbytes` at each address (int64; no address for a box outside its tensor) with earlier ones.

        `noted`: the epoch of a read tells when it ends, so later writes are compared with it.
        """
        self._accessed(addresses, nbytes, actor, write=write)
        if addresses.size and noted and not atomic:
            self._reads_and_writes(addresses, nbytes, actor, write=write)
        self._access(addresses, nbytes, actor, write=write, atomic=atomic)

    def _reads_and_writes(self, addresses: np.ndarray, nbytes: int, actor: Actor, *, write: bool) -> None:
        """Notes a read, or compares a write with earlier reads."""
        position = bisect.bisect_right(self._starts, int(addresses.min())) - 1
        found = self._ranges[position] if position >= 0 else None
        if found is None or int(addresses.max()) + nbytes > found.end:
            return
        offsets = addresses.astype(np.int64, copy=False) - found.start
        if not write:
            read = Read(actor.epoch, self._cluster, self._releases, actor.site)
            self._reads.note(position, found.nbytes, offsets, nbytes, read)
            return
        over = self._reads.over(position, offsets, nbytes, actor, self._cluster, self._known)
        if over is not None:
            site, other = self.checker.sites[actor.site], self.checker.sites[over[0].site]
            where = f"global memory at {found.start + int(over[1][0]):#x} (`{found.name}`)"
            text = f"{site} writes {where} while {other} may still read it: nothing orders them"
            read_bytes = (over[1][:, None] + np.arange(WORD)).reshape(-1)
            content = lambda: host_view(found.start, found.nbytes).take(read_bytes)
            self.checker.report_write("race", site, other, text, content, self._hint())

    def _access(
        self, addresses: np.ndarray, nbytes: int, actor: Actor, *, write: bool, atomic: bool = False
    ) -> None:
        if not addresses.size or not (write or self._shadows or self._keep_reads):
            return
        first = int(addresses.min())
        shadow = self._shadow(first, create=write or self._keep_reads)
        if shadow is None:  # read-only or not written yet, unlike perhaps the later ranges
            following = bisect.bisect_right(self._starts, first)
            if following < len(self._starts):
                beyond = addresses[addresses >= self._starts[following]]
                self._access(beyond, nbytes, actor, write=write, atomic=atomic)
            return
        if int(addresses.max()) >= shadow.end:
            inside = addresses < shadow.end
            self._access(addresses[~inside], nbytes, actor, write=write, atomic=atomic)
            addresses = addresses[inside]
        index = shadow.index(addresses, nbytes)
        self._check(shadow, index, actor, write=write, atomic=atomic)
        if write:
            shadow.writes += 1
            shadow.writers[index] = actor.epoch
            shadow.clusters[index] = self._cluster
            shadow.sites[index] = actor.site
            if actor.proxy:
                shadow.order[index] = UNDER_WAY
                self._under_way.setdefault(actor.epoch, []).append((shadow, addresses, nbytes))
            else:
                shadow.order[index] = self._releases
        elif self._keep_reads:
            shadow.read[index] = True

    def constant(self, addresses: np.ndarray, nbytes: int, number: int) -> None:
        """Notes that the place `number` loads `nbytes` at each address (int64) as data that is constant in this launch."""
        shadow = self._shadow(int(addresses.min()), create=False)
        if shadow is None or int(addresses.max()) + nbytes > shadow.end:
            return
        index = shadow.index(addresses, nbytes)
        written = shadow.writers[index] != NOBODY
        if written.any():
            first = int(written.argmax())
            granule = index.start + first if isinstance(index, slice) else int(index[first])
            site, other = self.checker.sites[number], self.checker.sites[int(shadow.sites[granule])]
            self.checker.report(
                "race",
                site,
                other,
                f"{site} loads {self._place(shadow, granule)} through the read-only path (.nc), and {other} of the same "
                "launch wrote it: the loaded value may be stale, whatever the barriers",
            )

    def completed(self, operation: int) -> None:
        """Notes that a warp knows an operation to be complete. `operation`: the epoch of its writes."""
        for shadow, addresses, nbytes in self._under_way.pop(operation, ()):
            index = shadow.index(addresses, nbytes)
            shadow.order[index] = np.where(
                shadow.writers[index] == operation, self._releases, shadow.order[index]
            )

    def _shadow(self, address: int, *, create: bool) -> GlobalShadow | None:
        position = bisect.bisect_right(self._starts, address) - 1
        if position < 0 or address >= self._ranges[position].end:
            return None
        shadow = self._shadows.get(position)
        if shadow is None and create:
            found = self._ranges[position]
            shadow = self._shadows[position] = GlobalShadow(found.start, found.nbytes)
        return shadow

    def _check(self, shadow: GlobalShadow, index: Any, actor: Actor, *, write: bool, atomic: bool) -> None:
        epochs = shadow.writers[index]
        if not np.count_nonzero(epochs):
            return
        if isinstance(index, slice):
            index = np.arange(index.start, index.stop)
        clusters = shadow.clusters[index]
        own = clusters == self._cluster
        mine = np.where(own, epochs, NOBODY)
        late = first_unordered(actor.knowledge[SEEN], mine)
        if late is None:
            late = self._foreign(shadow, index, ~own & (epochs != NOBODY), clusters, self._known)
        unfenced = False
        if late is None and actor.proxy:
            late = self._unfenced(shadow, index, epochs, own, actor)
            unfenced = late is not None
        checker = self.checker
        if late is None:
            if self.silicon.narrow and not (atomic or (write and actor.proxy)):
                self.silicon.stores_relied_on(mine, shadow.sites[index], actor, self._place(shadow, index[0]))
            return
        number = int(shadow.sites[index[late]])
        site, other = checker.sites[actor.site], checker.sites[number]
        if atomic and other.atomic:
            return
        place = self._place(shadow, index[late])
        if unfenced:
            text = (
                f"{site} {'writes' if write else 'reads'} {place} through the async proxy, {other} wrote it through the generic "
                "proxy: no fence.proxy.async of global memory between them"
            )
            checker.report("proxy-fence", site, other, text)
        elif write:
            text = f"{site} writes {place} that {other} writes too: nothing orders them"
            late_granules = index[self._late(shadow, index, mine, ~own & (epochs != NOBODY), actor)]
            late_bytes = shadow.bytes_at(late_granules)
            content = lambda: host_view(shadow.start, shadow.end - shadow.start).take(late_bytes)
            checker.report_write("double-store", site, other, text, content, self._hint())
        else:
            text = f"{site} reads {place} that {other} writes: nothing orders them"
            checker.report("race", site, other, text, self._hint())

    def _late(
        self, shadow: GlobalShadow, index: np.ndarray, mine: np.ndarray, others: np.ndarray, actor: Actor
    ) -> np.ndarray:
        """Returns which of the granules have a writer that the actor does not know of."""
        late = unordered(actor.knowledge[SEEN], mine)
        for cluster in np.unique(shadow.clusters[index][others]).tolist():
            theirs = others & (shadow.clusters[index] == cluster)
            late |= theirs & (shadow.order[index] > self._known.get(cluster, 0))
        return late

    def _hint(self) -> str:
        return "relaxed accesses order nothing without a fence.acq_rel.gpu" if self._relaxed else ""

    def _place(self, shadow: GlobalShadow, granule: int) -> str:
        found = self._ranges[bisect.bisect_right(self._starts, shadow.start) - 1]
        return f"global memory at {shadow.start + shadow.granule * int(granule):#x} (`{found.name}`)"

    def _foreign(
        self,
        shadow: GlobalShadow,
        index: np.ndarray,
        others: np.ndarray,
        clusters: np.ndarray,
        known: dict[int, int],
    ) -> int | None:
        """Returns the position of a write of another cluster that is not among those `known`."""
        if not others.any():
            return None
        for cluster in np.unique(clusters[others]).tolist():
            late = others & (clusters == cluster) & (shadow.order[index] > known.get(cluster, 0))
            if late.any():
                return int(late.argmax())
        return None

    def _unfenced(
        self, shadow: GlobalShadow, index: np.ndarray, epochs: np.ndarray, own: np.ndarray, actor: Actor
    ) -> int | None:
        """Returns the position of a generic write that no fence has made visible to the async proxy."""
        generic = self._generic(shadow.sites[index])
        if not generic.any():
            return None
        mine = np.where(generic & own, epochs, NOBODY)
        if np.count_nonzero(mine):
            late = first_unordered(self._handed_on(actor.knowledge), mine)
            if late is not None:
                return late
        others = generic & ~own & (epochs != NOBODY)
        return self._foreign(shadow, index, others, shadow.clusters[index], self._fenced)

    def _handed_on(self, knowledge: np.ndarray) -> np.ndarray:
        """Returns, by component, the writes that proxy fences known to a holder of `knowledge` made visible."""
        handed = np.zeros(knowledge.shape[1], np.int64)
        for component, fences in self._proxy_fences.items():
            known = knowledge[SEEN, component] if component < handed.size else 0
            newest = next((row for value, row in reversed(fences) if known >= value), None)
            if newest is not None:
                part = handed[: newest.size]
                np.maximum(part, newest[: handed.size], out=part)
        return handed

    def _generic(self, numbers: np.ndarray) -> np.ndarray:
        """Returns a bool array: places that write through the generic proxy."""
        sites = self.checker.sites
        return np.isin(numbers, [n for n in np.unique(numbers).tolist() if sites[n].inst.opcode in GENERIC])

    def generic_writers(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Returns epochs and places of the ordinary stores of the running clusters that last wrote these `nbytes`."""
        shadow = self._shadow(address, create=False)
        if shadow is None:
            return []
        known = self._ordinary.get(address)
        if known is None or known[0] != shadow.writes:
            index = shadow.index(np.array([address], np.int64), nbytes)
            epochs, numbers = shadow.writers[index], shadow.sites[index]
            mine = (shadow.clusters[index] == self._cluster) & (epochs != NOBODY) & self._generic(numbers)
            found = sorted(set(zip(epochs[mine].tolist(), numbers[mine].tolist(), strict=True)))
            known = self._ordinary[address] = shadow.writes, found
        return known[1]

    # ---- synchronisation through memory ------------------------------------------------------------
    def acquire(self, warp: "Warp", keys: list[Any], *, relaxed: bool) -> None:
        """Executes a strong load of a warp. `keys`: addresses: ints for global memory, (CTA, offset) for shared memory."""
        for key in keys:
            told = self._told.get(key)
            if told is None:
                continue
            if relaxed and isinstance(key, int):
                self._pending.setdefault(warp, Told()).add(told)
                self._relaxed = True
            else:
                self._learn(warp, told)

    def release(self, warp: "Warp", keys: list[Any], *, relaxed: bool) -> None:
        """Executes a strong store of a warp. `keys`: see `acquire`."""
        now = None
        for key in keys:
            if relaxed and isinstance(key, int):
                self._relaxed = True
                telling = self._at_fence.get(warp)
            else:
                telling = now = now or self._publish(warp)
            if telling is not None:
                self._told.setdefault(key, Told()).add(telling)

    def fence(self, warp: "Warp") -> None:
        """Executes a fence of more than CTA scope: relaxed loads before it acquire, relaxed stores after it release."""
        unfenced = self._pending.pop(warp, None)
        if unfenced is not None:
            self._learn(warp, unfenced)
        self._at_fence[warp] = self._publish(warp)

    def arrive(self, warp: "Warp", gate: Any) -> None:
        """Notes that a warp arrives at a barrier of its CTA or cluster."""
        for told, gates in (
            (self._at_fence.get(warp), self._at_gate),
            (self._pending.get(warp), self._found_at_gate),
        ):
            if told is not None:
                gates.setdefault(gate, Told()).add(told)

    def pass_gate(self, warp: "Warp", gate: Any) -> None:
        """Notes that a warp passed a barrier: fences and relaxed loads of others before the barrier count as its own."""
        for told, warps in (
            (self._at_gate.get(gate), self._at_fence),
            (self._found_at_gate.get(gate), self._pending),
        ):
            if told is not None:
                warps.setdefault(warp, Told()).add(told)

    def proxy_fence(self, warp: "Warp") -> None:
        """Makes the generic writes to global memory that a warp and its cluster know of visible to the async proxy."""
        clock = self.checker.clock(warp)
        published = clock.publish()
        fences = self._proxy_fences.setdefault(clock.own, [])
        fences.append((int(published[SEEN, clock.own]), published[SEEN]))
        if len(fences) > MOST_FENCES:
            (oldest, _), (_, row) = fences[:2]
            fences[:2] = [(oldest, row)]
        _raise(self._fenced, {**self._known, self._cluster: self._releases})
        self._releases += 1

    def _learn(self, warp: "Warp", told: Told) -> None:
        if told.knowledge is not None:
            self.checker.clock(warp).learn(told.knowledge)
        _raise(self._known, told.clusters)
        _raise(self._fenced, told.fenced)

    def _publish(self, warp: "Warp") -> Told:
        clusters = {**self._known, self._cluster: self._releases}
        told = Told(self.checker.clock(warp).publish(), clusters, dict(self._fenced))
        self._releases += 1
        return told
