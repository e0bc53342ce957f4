"""Modelled times of launches on one GPU, for emulators and for a kernel in PTX text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nvfp4_cute.emulator.cubin import MachineCode
from nvfp4_cute.emulator.fronts.driver import launch_of
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.ptx import Program
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.emulator.record.placement import Placement
from nvfp4_cute.emulator.record.recorder import Recorder
from nvfp4_cute.timing.constants import Constants
from nvfp4_cute.timing.replay import replay
from nvfp4_cute.timing.result import Timing


@dataclass(frozen=True)
class Clock:
    """Models the time of every launch of an emulator: ``Emulator(timing=Clock(constants))``.

    Attributes:
        constants: constants of the GPU.
        with_data: whether copies and products are also done; otherwise results are meaningless, but times are equal.
        timeline: keep the actions of every warp, for ``timing.trace``.
        all_layouts: model a launch in every layout of memory, not only in the first.
    """

    constants: Constants
    with_data: bool = True
    timeline: bool = False
    all_layouts: bool = False

    def model(self, trace: LaunchTrace) -> Timing:
        """Returns the modelled time of a recorded launch."""
        return replay(self.constants, trace, timeline=self.timeline, all_layouts=self.all_layouts)

    def placement(self) -> Placement:
        """Returns a new placement: a launch shares its memory with no other."""
        return Placement()


@dataclass(frozen=True)
class Chain:
    """Collects the recordings of consecutive launches, to model their total time: ``Emulator(timing=chain)``.

    Attributes:
        traces: traces of the launches so far.
        memory: placement of their memory.
        with_data: see `Clock`.
        held: objects whose memory the launches used. While they live, nothing else gets that memory.
    """

    traces: list[LaunchTrace] = field(default_factory=list)
    memory: Placement = field(default_factory=Placement)
    with_data: bool = False
    held: list[object] = field(default_factory=list)

    def model(self, trace: LaunchTrace) -> None:
        """Stores the trace of a launch."""
        self.traces.append(trace)

    def placement(self) -> Placement:
        """Returns the placement that all launches share."""
        return self.memory


def time_ptx(constants: Constants, *launch: Any, timeline: bool = False, **options: Any) -> Timing:
    """Models the time of one kernel of a PTX text on a GPU.

    Args:
        constants: constants of the GPU.
        launch, options: arguments of `record_ptx` after the number of SMs.
        timeline: see `Clock`.

    Raises:
        EmulatorError: the text, the arguments, or the kernel's behaviour is not acceptable.
    """
    return replay(constants, record_ptx(constants.num_sms, *launch, **options), timeline=timeline)


def record_ptx(
    num_sms: int,
    ptx: str | Program,
    entry: str | None = None,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32,
    args: Sequence[Any] = (),
    *,
    cluster: int | Sequence[int] = 1,
    smem_bytes: int = 0,
    machine_code: MachineCode | None = None,
    with_data: bool = False,
) -> LaunchTrace:
    """Returns the trace that `time_ptx` replays.

    Args:
        num_sms: SMs of the GPU.
        ptx ... smem_bytes: see `emulator.fronts.driver.run_ptx`.
        machine_code: the assembler's output for it, if known.
        with_data: see `Clock`.

    Raises:
        EmulatorError: see `time_ptx`.
    """
    machine = Machine(num_sms)
    recorder = machine.recorder = Recorder(with_data=with_data)
    launch = launch_of(machine, ptx, entry, grid, block, args, cluster, smem_bytes, True, machine_code)
    machine.run(launch)
    return recorder.take(launch)
