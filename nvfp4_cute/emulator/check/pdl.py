"""Programmatic dependent launches: which earlier launches may still run during a launch, and which warps waited for them.

The emulator runs launches one after the other. On a GPU, a launch with the attribute of programmatic stream
serialization may start when all CTAs of the launch before it have executed ``griddepcontrol.launch_dependents`` or
ended. Its ``griddepcontrol.wait`` returns when that launch is complete and its writes are visible (PTX ISA,
griddepcontrol). If the earlier launch does not trigger, its end starts the next launch, and no wait is needed. Only an
earlier launch that itself waited is known to have started after the end of its own predecessor. All launches count as
launches of one stream, with nothing else between them.

Waits are a component of the checker's clocks, so every warp that learns from a waiting warp knows of its wait.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nvfp4_cute.emulator.check.clocks import SEEN
from nvfp4_cute.emulator.check.global_races import Footprint
from nvfp4_cute.emulator.check.ledger import Ledger
from nvfp4_cute.emulator.check.silicon_checks import SiliconChecks

if TYPE_CHECKING:
    from nvfp4_cute.emulator.check.shadow import Actor
    from nvfp4_cute.emulator.ptx import Inst
    from nvfp4_cute.emulator.state import Launch, Warp

MOST_UNDER_WAY = 8
"""Number of earlier launches to check."""


@dataclass
class Progress:
    """Uses of dependencies by the CTAs of a launch, or of a part of it.

    Attributes:
        triggered: launch_dependents was executed.
        late: in some CTA, a warp that knew of a wait executed it.
        waited: coordinates of CTAs that waited.
    """

    triggered: bool = False
    late: bool = False
    waited: set[tuple[int, int, int]] = field(default_factory=set)

    def add(self, other: "Progress") -> None:
        """Adds the progress of another part of the launch."""
        self.triggered |= other.triggered
        self.late |= other.late
        self.waited |= other.waited


@dataclass
class Dependent:
    """A launch, and the earlier launches that may be under way when it starts (`before`) and when its waits return (`after`).

    `touched`: memory that it read and wrote, kept for launches that trigger.
    """

    name: str
    ctas: int
    before: "tuple[Dependent, ...]" = ()
    after: "tuple[Dependent, ...]" = ()
    progress: Progress = field(default_factory=Progress)
    touched: Footprint = field(default_factory=Footprint)

    def known_by_waiting(self) -> "tuple[Dependent, ...]":
        """Returns the launches that may still be under way when this launch is complete."""
        return self.after if self.progress.waited else self.before

    def left_running(self) -> "tuple[Dependent, ...]":
        """Returns the launches that may still be under way when this launch lets its dependents start."""
        if not self.progress.triggered:
            return self.known_by_waiting()
        return (self, *(self.after if self.progress.late else self.before))[:MOST_UNDER_WAY]


class Dependencies:
    """Tracks the launches of a checker.

    Attributes:
        current: the running launch.
        last: the launch before it; None if other work lies between.
    """

    def __init__(self, checker: Ledger, silicon: SiliconChecks):
        """`checker`: receives the findings. `silicon`: words them."""
        self.checker, self.silicon = checker, silicon
        self.current: Dependent | None = None
        self._launch: Launch | None = None
        self.last: Dependent | None = None
        self._component = 0

    @property
    def progress(self) -> Progress:
        """Progress of the running launch."""
        assert self.current is not None, "no launch runs"
        return self.current.progress

    def begin_launch(self, launch: "Launch") -> bool:
        """Notes that a launch starts, or starts again. Returns whether its reads must be kept."""
        last, self._launch = self.last, launch
        x, y, z = launch.grid
        self.current = Dependent(launch.code.entry.name, x * y * z)
        if last is not None and launch.programmatic:
            self.current.before, self.current.after = last.left_running(), last.known_by_waiting()
        return any(map(_triggers, launch.code.insts))

    def other_work(self) -> None:
        """Notes that something other than a checked launch ran on the device: it started when all before it had ended."""
        self.last = None

    def begin_clusters(self) -> None:
        """Starts new clusters, in which no warp has waited."""
        self._component = self.checker.components.new()

    def end_launch(self, touched: Footprint) -> None:
        """Notes that the launch has ended."""
        current, launch = self.current, self._launch
        if current is None or launch is None:
            return
        self.last, self.current, self._launch = current, None, None
        if current.progress.triggered:
            current.touched = touched
        silent = current.ctas - len(current.progress.waited)
        if silent and any(earlier.progress.triggered for earlier in current.before):
            before = current.before[0].name
            self.silicon.report(
                "pdl-chain",
                None,
                f"{silent} of {current.ctas} CTAs of {current.name} end without a wait after {before}, which lets its "
                "dependents start early",
            )

    # ---- instructions ------------------------------------------------------------------------------------
    def wait(self, warp: "Warp") -> None:
        """Notes griddepcontrol.wait of a warp."""
        self.checker.clock(warp).completed(self._component, 1)
        self.progress.waited.add(warp.cta.idx)

    def trigger(self, warp: "Warp") -> None:
        """Notes griddepcontrol.launch_dependents of a warp."""
        self.progress.triggered = True
        if self._waited(self.checker.clock(warp).knowledge):
            self.progress.late = True

    def _waited(self, knowledge: np.ndarray) -> bool:
        return self._component < knowledge.shape[1] and bool(knowledge[SEEN, self._component])

    def access(self, addresses: np.ndarray, nbytes: int, actor: "Actor", *, write: bool) -> None:
        """Checks an access of the launch to global memory: `nbytes` at each address."""
        current = self.current
        if current is None or not current.before or not addresses.size:
            return
        waited = self._waited(actor.knowledge)
        for earlier in current.after if waited else current.before:
            place = earlier.touched.first_of(addresses, nbytes, written=True)
            did = "writes"
            if place is None and write:
                place, did = earlier.touched.first_of(addresses, nbytes, written=False), "reads"
            if place is not None:
                site = self.checker.sites[actor.site]
                how = (
                    "and no launch in between waited for its end" if waited else "without griddepcontrol.wait"
                )
                self.silicon.report(
                    "pdl-order",
                    site,
                    f"{site} {'writes' if write else 'reads'} global memory at {place:#x} that the earlier launch of "
                    f"{earlier.name} {did}, {how}",
                )
                return


def _triggers(inst: "Inst") -> bool:
    return inst.opcode == "griddepcontrol" and "launch_dependents" in inst.mods
