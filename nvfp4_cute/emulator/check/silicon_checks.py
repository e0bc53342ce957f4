"""Rules of `silicon` that need the checker's clocks: knowledge of warps, and the scope that passed it on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator import silicon
from nvfp4_cute.emulator.check.clocks import CLUSTER, COMPONENT_SHIFT, NOBODY, SEEN, VALUE_MASK
from nvfp4_cute.emulator.check.ledger import Ledger, Site
from nvfp4_cute.emulator.check.shadow import Shadow, distinct
from nvfp4_cute.emulator.modes import Engine

if TYPE_CHECKING:
    from nvfp4_cute.emulator.check.shadow import Actor
    from nvfp4_cute.emulator.state import Cluster, Cta, Warp


PATTERN_ROWS = 8
"""Rows after which a swizzle repeats."""

LINE_BYTES = 128
"""Bytes of shared memory with the same permutation."""


def in_columns(shadow: Shadow, chunks: np.ndarray) -> bool:
    """Whether stores filled a tile by columns once the swizzle is undone, so that they permuted it as the copy does.

    A store of a warp that covers the rows of a pattern lies in the same columns of all of them only then: elsewhere a
    swizzle moves its columns from row to row.

    chunks: numbers of the tile's 16-byte chunks in shared memory, in logical order (rows, chunks).
    """
    numbers = shadow.writers.at(chunks.reshape(-1)).reshape(len(chunks), -1)
    proven = False
    for number in distinct(numbers):
        mine = numbers == number
        rows, columns = mine.any(axis=1), mine.any(axis=0)
        if number == NOBODY or not np.array_equal(mine, np.outer(rows, columns)):
            return False
        proven = proven or bool(np.count_nonzero(rows) >= PATTERN_ROWS and not columns.all())
    return proven


@dataclass
class Tile:
    """Tiles that an instruction loads off the pattern of their swizzle: chunks [low, high]. `loaded`: by a warp itself."""

    site: Site
    text: str
    low: int
    high: int
    count: int = 0
    loaded: bool = False


class SiliconChecks:
    """Finds violations for a checker.

    The progress of a CTA in a cluster is a component of the clocks: 1 while it runs, plus the number of pair
    allocations that it has executed.

    Attributes:
        narrow: whether an arrival on the mbarrier of another CTA had only CTA scope.
    """

    def __init__(self, checker: Ledger):
        """`checker`: receives the findings."""
        self.checker = checker
        self.begin()

    def begin(self) -> None:
        """Starts new clusters."""
        self.narrow = False
        self._owners: dict[int, Cta] = {}
        self._work: dict[Warp, int] = {}
        self._lives: dict[Cta, int] = {}
        self._paired: dict[Cta, int] = {}
        self._tiles: dict[tuple[Cta, int], Tile] = {}
        self._failures: dict[Cluster, list[int]] = {}

    def begin_warp(self, warp: "Warp") -> None:
        """Starts a warp."""
        clock, cta = self.checker.clock(warp), warp.cta
        self._owners[clock.own] = cta
        if len(cta.cluster.ctas) > 1:
            if cta not in self._lives:
                self._lives[cta] = self.checker.components.new()
            clock.completed(self._lives[cta], 1)

    def owns(self, component: int, cta: "Cta") -> None:
        """Notes that the actions of a component are ordinary accesses by a CTA."""
        self._owners[component] = cta

    def report(
        self, name: str, site: "Site | None", what: str, other: "Site | None" = None, severity: str = ""
    ) -> None:
        """Collects a violation of a rule."""
        rule = silicon.BY_NAME[name]
        self.checker.report(
            "silicon", site, other, rule.text(what), severity=severity or rule.severity, rule=name
        )

    def _site(self, warp: "Warp", pc: int) -> "Site":
        return self.checker.sites[self.checker.site(warp, pc)]

    # ---- tensor memory -----------------------------------------------------------------------------------
    def scale_width(self, n: int) -> None:
        """Checks the width of a block-scaled MMA, the current operation: whether public kernels use it."""
        site = self.checker.sites[self.checker.operation().site]
        self.report("scale-width", site, f"{site} has N = {n} with block scales")

    def tile(
        self, cta: "Cta", offset: int, span: int, phases: int, chunks: np.ndarray, *, store: bool
    ) -> None:
        """Checks the offset of a tile in shared memory that the current operation copies.

        Args:
            span: bytes of the swizzle.  phases: lines of 128 bytes after which it repeats.
            chunks: numbers of the tile's 16-byte chunks in shared memory, in logical order (rows, chunks of a row).
            store: it is copied out of shared memory.
        """
        if len(chunks) < PATTERN_ROWS or not offset % (PATTERN_ROWS * span):
            return
        number = self.checker.operation().site
        site = self.checker.sites[number]
        text = (
            f"{site} copies {len(chunks)} rows with a swizzle of {span} bytes at smem+{offset:#x}, not a multiple of "
            f"{PATTERN_ROWS * span}"
        )
        if store:
            # Half a pattern off, a layout of the buffer's own moves every row alike: columns then tell nothing.
            telling = offset // LINE_BYTES % phases != phases // 2
            alike = telling and in_columns(self.checker.shared[cta], chunks)
            text += "; the stores before it permute the tile alike" if alike else ""
            self.report("swizzle-phase", site, text, severity="note" if alike else "")
            return
        tile = self._tiles.setdefault((cta, number), Tile(site, text, int(chunks.min()), int(chunks.max())))
        tile.count += 1
        tile.low, tile.high = min(tile.low, int(chunks.min())), max(tile.high, int(chunks.max()))

    def loads(self, cta: "Cta", span: tuple[int, int]) -> None:
        """Notes that a warp itself loads chunks [span) of shared memory.

        Matrix instructions permute what they read by absolute addresses, as copies do.
        """
        for (owner, _), tile in self._tiles.items():
            if owner is cta and tile.low < span[1] and span[0] <= tile.high:
                tile.loaded = True

    def judge_tiles(self) -> None:
        """Reports tiles that do not start with a swizzle pattern: notes if no warp itself loads from them."""
        tiles, self._tiles = self._tiles.values(), {}
        for tile in tiles:
            text = tile.text if tile.loaded else f"{tile.text}; no warp itself loads from it"
            for _ in range(tile.count):
                self.report("swizzle-phase", tile.site, text, severity="" if tile.loaded else "note")

    def issued(self, warp: "Warp", number: int) -> None:
        """Notes an operation of the tensor core that a commit waits for."""
        self._work[warp] = number

    def multicast_commit(self, warp: "Warp", pc: int) -> None:
        """Checks a commit to barriers of several CTAs, which a warp is about to issue."""
        clock, last = self.checker.clock(warp), self._work.get(warp, 0)
        component = clock.engine(Engine.TCGEN05)
        if clock.knowledge[SEEN, component] >= last:
            site = self._site(warp, pc)
            self.report(
                "empty-multicast-commit", site, f"{site} commits to several CTAs with nothing pending"
            )

    def caused(self, cause: np.ndarray, knowledge: np.ndarray) -> None:
        """Adds the progress of CTAs at the start of the awaited operation (`cause`) to `knowledge`.

        The progress of a CTA is not a memory access. A copy also announces it, although it orders nothing that its
        issuer wrote.
        """
        for component in self._lives.values():
            knowledge[SEEN, component] = max(knowledge[SEEN, component], cause[SEEN, component])

    def pair_alloc(self, warp: "Warp", pc: int, peer: "Cta") -> None:
        """Notes that a warp allocated tensor memory of a pair."""
        clock, cta = self.checker.clock(warp), warp.cta
        if not clock.knowledge[SEEN, self._lives[peer]]:
            site = self._site(warp, pc)
            self.report(
                "pair-alloc-order", site, f"{site} does not know that the CTA of rank {peer.rank} runs"
            )
        self._paired[cta] = self._paired.get(cta, 0) + 1
        clock.completed(self._lives[cta], 1 + self._paired[cta])

    def pair_dealloc(self, warp: "Warp", pc: int, peer: "Cta") -> None:
        """Checks a free of a pair's tensor memory by a warp of the leader."""
        needed = 1 + self._paired.get(warp.cta, 0)
        if self.checker.clock(warp).knowledge[SEEN, self._lives[peer]] < needed:
            site = self._site(warp, pc)
            self.report(
                "pair-dealloc-order",
                site,
                f"{site} does not know that the CTA of rank {peer.rank} has allocated",
            )

    def remote_access(self, warp: "Warp", site: "Site", target: "Cta") -> None:
        """Checks an access of a warp to the shared memory of another CTA."""
        if not self.checker.clock(warp).knowledge[SEEN, self._lives[target]]:
            self.report(
                "remote-access-order", site, f"{site} does not know that the CTA of rank {target.rank} runs"
            )

    # ---- scopes ------------------------------------------------------------------------------------------
    def late_elsewhere(self, epochs: Iterable[int], actor: "Actor") -> bool:
        """Whether an actor does not know, by a scope as wide as the cluster, of one of these accesses of another CTA."""
        known, own = actor.knowledge[CLUSTER], self.checker.sites[actor.site].cta
        for stamp in epochs:
            component = stamp >> COMPONENT_SHIFT
            if stamp != NOBODY and known[component] < stamp & VALUE_MASK:
                owner = self._owners.get(component)
                if owner is not None and owner.idx != own:
                    return True
        return False

    def stores_relied_on(self, epochs: np.ndarray, sites: np.ndarray, actor: "Actor", what: str) -> None:
        """Checks that a scope wide enough orders ordinary stores of other CTAs before an access to them.

        epochs, sites: epochs and places of the writes.
        what: description of the place.
        """
        flat = epochs.reshape(-1)
        components = flat >> COMPONENT_SHIFT
        late = (flat != NOBODY) & (actor.knowledge[CLUSTER][components] < flat & VALUE_MASK)
        if not late.any():
            return
        checker = self.checker
        site = checker.sites[actor.site]
        for component in np.unique(components[late]).tolist():
            owner = self._owners.get(component)
            if owner is not None and owner.idx != site.cta:
                position = int((late & (components == component)).argmax())
                other = checker.sites[int(sites.reshape(-1)[position])]
                self.report(
                    "remote-arrival-scope",
                    site,
                    f"{site} uses {what} that {other} writes; only arrivals that are relaxed or have the scope of their CTA "
                    "order them",
                    other,
                )
                return

    def async_store_awaited(self, warp: "Warp", pc: int, sender: "Site") -> None:
        """Checks a wait of CTA scope that found another CTA's st.async complete."""
        site = self._site(warp, pc)
        self.report(
            "async-store-scope", site, f"{site} waits for {sender} of another CTA with .cta scope", sender
        )

    def cancels(self, cluster: "Cluster") -> None:
        """Checks a request for a cluster of the grid, the current operation."""
        own = self.checker.operation()
        seen = own.knowledge[SEEN]
        if any(
            seen[stamp >> COMPONENT_SHIFT] >= stamp & VALUE_MASK for stamp in self._failures.get(cluster, ())
        ):
            site = self.checker.sites[own.site]
            self.report(
                "cancel-after-failure", site, f"{site} asks again after an answer that nothing is left"
            )

    def cancel_failed(self, cluster: "Cluster", stamp: int) -> None:
        """Notes that no cluster was left. Holders of the answer's epoch may know it."""
        self._failures.setdefault(cluster, []).append(stamp)

    # ---- warps and launches ------------------------------------------------------------------------------
    def spin(self, warp: "Warp", ctas: int, resident: int) -> None:
        """Reports a warp that waits in a loop for clusters of its launch that have not started. The GPU holds `resident` CTAs."""
        pc = warp.pc if warp.pc >= 0 else min(group.pc for group in warp.groups)
        site = self._site(warp, pc)
        self.report(
            "spin-without-co-residency",
            site,
            f"{site} waits in a loop for CTAs that have not started ({ctas} CTAs launched, this GPU holds {resident} "
            "when it runs nothing else)",
        )

    def unbounded_registers(self, warp: "Warp", pc: int) -> None:
        """Reports a warp that changes its register count in a kernel without a bound."""
        site = self._site(warp, pc)
        self.report(
            "register-bounds", site, f"{site} in a kernel without .minnctapersm and .reqntid, or .maxnreg"
        )

    def exits(self, cta: "Cta") -> None:
        """Checks that the warpgroups of a CTA that has ended agreed on their register counts."""
        for first in range(0, len(cta.warps), 4):
            warps = cta.warps[first : first + 4]
            if len({warp.budgets for warp in warps}) > 1:
                budgets = ", ".join(f"warp {w.idx} {list(w.budgets) or 'none'}" for w in warps)
                name = f"cta {','.join(map(str, cta.idx))}"
                self.report(
                    "register-warpgroup", None, f"{name}: setmaxnreg differs in a warpgroup: {budgets}"
                )

    def tensor_map(self, address: int, nbytes: int, name: str) -> None:
        """Reports a tensor map of a tensor with gaps between its rows in an allocation of `nbytes`, if that is small."""
        self.report(
            "small-tensor-map",
            None,
            f"tensor map of rows with gaps at {address:#x} in `{name}` of {nbytes} bytes",
        )
