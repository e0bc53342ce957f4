"""Times of launches on one GPU, for emulators that ask, and for a kernel of a PTX text."""

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
        constants: of the GPU.
        with_data: whether copies and products are done as well; otherwise results mean nothing, and the times stay.
        timeline: keep what every warp did when, for ``timing.trace``.
        all_layouts: model a launch in every layout of memory, not only in the first.
    """

    constants: Constants
    with_data: bool = True
    timeline: bool = False
    all_layouts: bool = False

    def model(self, trace: LaunchTrace) -> Timing:
        """The time of a launch from what was recorded of it."""
        return replay(self.constants, trace, timeline=self.timeline, all_layouts=self.all_layouts)

    def placement(self) -> Placement:
        """A launch's memory is that of no other."""
        return Placement()


@dataclass(frozen=True)
class Chain:
    """Keeps what is recorded of launches that follow each other, for the time of all: ``Emulator(timing=chain)``.

    Attributes:
        traces: of the launches so far.  memory: where they find their memory.  with_data: as of a `Clock`.
        held: objects whose memory the launches used: as long as they live, nothing else has it.
    """

    traces: list[LaunchTrace] = field(default_factory=list)
    memory: Placement = field(default_factory=Placement)
    with_data: bool = False
    held: list[object] = field(default_factory=list)

    def model(self, trace: LaunchTrace) -> None:
        """Keep a launch."""
        self.traces.append(trace)

    def placement(self) -> Placement:
        """That of all launches."""
        return self.memory


def time_ptx(constants: Constants, *launch: Any, timeline: bool = False, **options: Any) -> Timing:
    """Model the time of one kernel of a PTX text on a GPU.

    Args:
        constants: of the GPU.  launch, options: as `record_ptx` takes them behind the number of SMs.
        timeline: as of a `Clock`.

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
    """What `time_ptx` replays.

    Args:
        num_sms: of the GPU.  ptx ... smem_bytes: as `emulator.fronts.driver.run_ptx` takes them.
        machine_code: what the assembler made of it, if that is known.
        with_data: as of a `Clock`.

    Raises:
        EmulatorError: as of `time_ptx`.
    """
    machine = Machine(num_sms)
    recorder = machine.recorder = Recorder(with_data=with_data)
    launch = launch_of(machine, ptx, entry, grid, block, args, cluster, smem_bytes, True, machine_code)
    machine.run(launch)
    return recorder.take(launch)
