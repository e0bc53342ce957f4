"""Launches kernels: from PTX and arguments (run_ptx), or from CuTe DSL host code (Emulator and the launch shim)."""

import ctypes
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from nvfp4_cute.emulator.check.ledger import Hazard
from nvfp4_cute.emulator.code import Code
from nvfp4_cute.emulator.compiled import compiled
from nvfp4_cute.emulator.cubin import ELF, MachineCode, read_machine_code
from nvfp4_cute.emulator.fronts.launch_shim import active_emulators, shim_path
from nvfp4_cute.emulator.kernel_names import short_name
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.ptx import KEPT, Entry, Program, parse
from nvfp4_cute.emulator.record.device_images import image_at
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.emulator.record.recorder import Clock, Recorder
from nvfp4_cute.emulator.record.representatives import LaunchWork
from nvfp4_cute.emulator.silicon import SMALL_ALLOCATION
from nvfp4_cute.emulator.state import Launch, Stats
from nvfp4_cute.emulator.targets import Device, ptx_arch
from nvfp4_cute.emulator.tensormap import driver_element, encode_tiled
from nvfp4_cute.errors import EmulatorError

Dim3 = tuple[int, int, int]


def dim3(value: int | Sequence[int]) -> Dim3:
    """Returns a launch dimension given as an int or up to three ints."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    x, y, z = (*numbers, 1, 1, 1)[:3]
    return x, y, z


def param_buffer(nbytes: int) -> np.ndarray:
    """Returns a zeroed parameter buffer, aligned to 128 bytes because tensor maps are parameters."""
    raw = np.zeros(nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + max(nbytes, 16)]


def pack_arguments(entry: Entry, args: Sequence[Any]) -> np.ndarray:
    """Builds the parameter buffer of an entry from bytes, ints, floats, or arrays (passed by address).

    Raises:
        EmulatorError: the number or the size of the arguments does not fit the entry's signature.
    """
    if len(args) != len(entry.params):
        raise EmulatorError(
            f"kernel {short_name(entry.name)} takes {len(entry.params)} parameters, got {len(args)}"
        )
    buffer = param_buffer(entry.param_bytes)
    for param, arg in zip(entry.params, args, strict=True):
        if isinstance(arg, np.ndarray):
            data = int(arg.ctypes.data).to_bytes(8, "little")
        elif isinstance(arg, bytes | bytearray):
            data = bytes(arg)
        elif isinstance(arg, float):
            data = np.array(arg, np.float32 if param.nbytes == 4 else np.float64).tobytes()
        else:
            data = (int(arg) & ((1 << 8 * param.nbytes) - 1)).to_bytes(param.nbytes, "little")
        if len(data) != param.nbytes:
            raise EmulatorError(
                f"parameter {param.name} has {param.nbytes} bytes, the argument has {len(data)}"
            )
        buffer[param.offset : param.offset + param.nbytes] = np.frombuffer(data, np.uint8)
    return buffer


def run_ptx(
    ptx: str | Program,
    entry: str | None = None,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32,
    args: Sequence[Any] = (),
    *,
    cluster: int | Sequence[int] = 1,
    smem_bytes: int = 0,
    sm_count: int = 148,
    checked: bool = True,
    mode: str = "eager",
    check: bool = False,
    cooperative: bool = False,
    programmatic: bool = False,
    machine: Machine | None = None,
) -> Stats:
    """Runs one kernel of a PTX text.

    Args:
        ptx: module text, or a parsed Program.
        entry: kernel name; optional if there is only one kernel.
        grid, block, cluster: launch shape.
        smem_bytes: dynamic shared memory.
        args: one per parameter: bytes, int, float, or an ndarray (passed by address, and registered as memory).
        checked: accesses outside the given arrays raise; False trusts every address.
        mode: when asynchronous operations happen: "eager", "lazy", or "random:SEED" (see `modes`).
        check: look for hazards, and raise them at the end of the launch.
        cooperative, programmatic: attributes of the launch (see `Launch`).
        machine: run on this machine (its mode, ranges and statistics) instead of a fresh one.

    Returns:
        The machine's statistics.

    Raises:
        EmulatorError: the text, the arguments, or the kernel's behaviour is not acceptable.
    """
    if entry is not None and not isinstance(entry, str):
        raise TypeError(
            f"run_ptx: entry is the name of a kernel, not a {type(entry).__name__}; pass arguments as args=[...]"
        )
    machine = machine or Machine(sm_count, mode=mode, check=check)
    launch = launch_of(machine, ptx, entry, grid, block, args, cluster, smem_bytes, checked)
    machine.run(replace(launch, cooperative=cooperative, programmatic=programmatic))
    return machine.stats


def launch_of(
    machine: Machine,
    ptx: str | Program,
    entry: str | None,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    cluster: int | Sequence[int],
    smem_bytes: int,
    checked: bool,
    machine_code: MachineCode | None = None,
) -> Launch:
    """Builds a launch from PTX and arguments, compiled for the machine. Registers the arrays if `checked`.

    `machine_code`: see `Launch`.
    """
    program = parse(ptx) if isinstance(ptx, str) else ptx
    if entry is None:
        if len(program.entries) != 1:
            raise EmulatorError(
                f"the module has {len(program.entries)} entries, name one of {list(program.entries)}"
            )
        entry = next(iter(program.entries))
    if entry not in program.entries:
        raise EmulatorError(f"no entry `{entry}` in the module; it has {list(program.entries)}")
    kernel = program.entries[entry]
    if checked:
        for i, arg in enumerate(args):
            if isinstance(arg, np.ndarray):
                machine.memory.add_range(f"argument {i}", arg.ctypes.data, arg.nbytes, arg.flags.writeable)
    params = pack_arguments(kernel, args)
    code = _compiled(program, kernel, machine)
    device = Device(ptx_arch(program.target), machine.sm_count)
    check_launch(code, device, dim3(block), dim3(cluster), smem_bytes)
    return Launch(code, dim3(grid), dim3(block), dim3(cluster), smem_bytes, params, machine_code=machine_code)


_shared_code = lru_cache(KEPT)(compiled)


def _compiled(program: Program, entry: Entry, machine: Machine) -> Code:
    """Returns an entry compiled for the machine. All machines share code without variables in memory."""
    variables = (*program.variables.values(), *entry.variables.values())
    has_memory = any(v.space in ("global", "const") for v in variables)
    return (compiled if has_memory else _shared_code)(
        program,
        entry,
        late=not machine.immediate,
        checked=machine.checker is not None,
        timed=machine.recorder is not None,
        count_banks=machine.count_banks,
        forms=machine.forms is not None,
    )


def check_launch(
    code: Code, device: Device, block: Dim3, cluster: Dim3, smem_bytes: int, programmatic: bool = False
) -> None:
    """Raises if the hardware would refuse a launch.

    Raises:
        EmulatorError: the thread count contradicts ``.reqntid``/``.maxntid``; the cluster size or shared memory is too
            large; or a cluster or the programmatic attribute on a device without them.
    """
    entry, name = code.entry, short_name(code.entry.name)
    if not device.has_clusters and (programmatic or cluster != (1, 1, 1)):
        what = "programmatic launch" if programmatic else f"cluster {cluster}"
        raise EmulatorError(
            f"kernel {name}: {what} on {device.arch}; clusters and programmatic launches need compute capability 9.0"
        )
    threads = block[0] * block[1] * block[2]
    required = entry.directives.get("reqntid")
    if required and (*required, 1, 1)[:3] != block:
        raise EmulatorError(
            f"kernel {name} requires blocks of {required} threads (.reqntid), launched with {block}"
        )
    most = entry.directives.get("maxntid")
    limit = min(1024, most[0] * (*most, 1, 1)[1] * (*most, 1, 1)[2] if most else 1024)
    if not 1 <= threads <= limit:
        raise EmulatorError(f"kernel {name}: {threads} threads per CTA, allowed are 1..{limit}")
    if cluster[0] * cluster[1] * cluster[2] > 16:
        raise EmulatorError(f"kernel {name}: cluster {cluster} has more than 16 CTAs")
    total = code.static_shared + smem_bytes
    if total > device.shared_bytes:
        raise EmulatorError(
            f"kernel {name}: {total} bytes of shared memory, a CTA on {device.arch} has {device.shared_bytes}"
        )


# ---- CuTe DSL host code ---------------------------------------------------------------------------


COOPERATIVE, PROGRAMMATIC = 1, 2
"""Bits of a launch record's attributes."""


class LaunchRecord(ctypes.Structure):
    """struct launch_record of launch_shim.c."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("attributes", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("image", ctypes.c_void_p),
    )


class TensorMapRecord(ctypes.Structure):
    """struct tensor_map_record of launch_shim.c."""

    _fields_ = (
        ("descriptor", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("dims", ctypes.POINTER(ctypes.c_uint64)),
        ("strides", ctypes.POINTER(ctypes.c_uint64)),
        ("box", ctypes.POINTER(ctypes.c_uint32)),
        ("element_strides", ctypes.POINTER(ctypes.c_uint32)),
        ("element", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("interleave", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("fill", ctypes.c_uint32),
    )

    def gap(self) -> bool:
        """Whether some bytes between its rows belong to no element."""
        packed = self.dims[0] * driver_element(self.element).bits // 8
        strides = (self.strides[i] for i in range(self.rank - 1))
        for stride, dim in zip(strides, self.dims[1 : self.rank], strict=True):
            if stride > packed:
                return True
            packed = stride * dim
        return False

    def encode(self) -> None:
        """Writes the descriptor.

        Raises:
            ValueError, EmulatorError: the driver would refuse it, or it is not modelled.
        """
        rank = self.rank
        data = encode_tiled(
            self.address,
            self.element,
            tuple(self.dims[:rank]),
            tuple(self.strides[: rank - 1]),
            tuple(self.box[:rank]),
            tuple(self.element_strides[:rank]),
            interleave=self.interleave,
            swizzle=self.swizzle,
            fill=self.fill,
        )
        ctypes.memmove(self.descriptor, data, len(data))


LAUNCH_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(LaunchRecord))
TENSOR_MAP_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(TensorMapRecord))
ATTRIBUTE_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int)
SUCCESS, INVALID_VALUE, LAUNCH_FAILURE, COOPERATIVE_LAUNCH_TOO_LARGE = 0, 1, 719, 720


class _Refused(Exception):
    """A launch that the driver answers with an error code; the device stays usable."""

    def __init__(self, code: int):
        super().__init__(f"CUDA error {code}")
        self.code = code


class Emulator:
    """A virtual GPU for CuTe DSL functions of this process.

    While it is used as a context manager, every launch of a registered kernel runs on it. Host pointers are device
    pointers, so CPU tensors are the operands. Emulators nest; the innermost one is the device.

        emulator = Emulator(sm_count=4)
        emulator.register(compiled.artifacts.PTX)
        with emulator:
            compiled(a, b)

    An exception inside a launch cannot cross the native host code. It is kept, and raised by `check` and on leaving the
    context.

    Attributes:
        modules: cubin and parsed PTX of every registered compilation that has a cubin.
    """

    def __init__(
        self,
        arch: str = "sm_100a",
        sm_count: int = 148,
        progress: Callable[[int, int], None] | None = None,
        *,
        mode: str = "eager",
        check: bool = False,
        timing: Clock | None = None,
        count_banks: bool = False,
    ):
        """Makes a virtual GPU.

        Args:
            arch: the PTX target that it runs.
            progress: called with (finished CTAs, all CTAs) during launches.
            mode: when asynchronous operations happen: "eager", "lazy", or "random:SEED" (see `modes`).
            check: look for hazards (see `hazards`), and raise them at the end of a launch.
            timing: models the time of every launch (`timing.clock.Clock`), which `timings` keeps. Times are recorded in
                eager mode without checks: with either, every launch runs twice, and only the second run's stores
                remain.
            count_banks: count bank conflicts of shared memory, by instruction (`stats.banks`).

        Raises:
            EmulatorError: unknown architecture.
            ValueError: unknown mode.
        """
        self.device = Device(arch, sm_count)
        self.machine = Machine(sm_count, progress=progress, mode=mode, check=check, count_banks=count_banks)
        self._clock = timing
        self.timings: list[Any] = []
        self._timed: Machine = self.machine
        if timing is not None:
            if mode != "eager" or check:
                self._timed = Machine(sm_count, self.machine.memory)
            self._timed.recorder = Recorder(with_data=timing.with_data, placement=timing.placement)
        self._attributes = self.device.attributes()
        self._kernels: dict[str, Program] = {}
        self.modules: list[tuple[bytes, Program]] = []
        self._machine_code: dict[
            int, MachineCode
        ] = {}  # by the id of an entry, which its program keeps alive
        self._code: dict[tuple[int, str], Code] = {}
        self._error: BaseException | None = None

    @property
    def hazards(self) -> list[Hazard]:
        """Hazards of checked launches so far."""
        return list(self.machine.checker.hazards) if self.machine.checker is not None else []

    @property
    def stats(self) -> Stats:
        """Work of all launches so far."""
        return self.machine.stats

    def register(self, ptx: str, cubin: bytes | None = None) -> tuple[str, ...]:
        """Registers the kernels of a PTX text. Returns their names.

        `cubin`: output of the same compilation for the text. It distinguishes modules with kernels of equal names, and
        determines how many CTAs an SM holds and how fast a warp issues. Without it, a name means its newest
        registration.

        Raises:
            EmulatorError: the text does not parse, or is for another architecture.
        """
        program = parse(ptx)
        target = ptx_arch(program.target)
        if target != self.device.arch:
            raise EmulatorError(f"the PTX is for {target}, this emulator is {self.device.arch}")
        self._kernels.update(dict.fromkeys(program.entries, program))
        if cubin:
            self.modules.append((cubin, program))
            for name, made in read_machine_code(cubin).items() if cubin.startswith(ELF) else ():
                if name in program.entries:
                    self._machine_code[id(program.entries[name])] = made
        return tuple(program.entries)

    def learn(self, ptx: str, cubin: bytes) -> None:
        """Registers the text of an earlier compiled kernel that is being loaded, if it is for this device."""
        if ptx_arch(parse(ptx).target) == self.device.arch:
            self.register(ptx, cubin)

    def register_new(self, ptx: str) -> None:
        """Registers the kernels of a text if none of their names is known."""
        if self._kernels.keys().isdisjoint(parse(ptx).entries):
            self.register(ptx)

    def add_range(self, name: str, addr: int, nbytes: int, writable: bool = True) -> None:
        """Declares live memory. Once any is declared, accesses outside all declared memory raise."""
        self.machine.memory.add_range(name, addr, nbytes, writable)

    def clear_ranges(self) -> None:
        """Forgets the declared memory, so every address is trusted again."""
        self.machine.memory.clear_ranges()

    def check(self) -> None:
        """Raises the exception that a launch left, if there is one, and forgets it."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> "Emulator":
        """Becomes the device of this process."""
        self._error = None
        shim = ctypes.CDLL(shim_path())
        active_emulators.append(self)
        shim.nvfp4_cute_set_callbacks(_launch, _attribute, _tensor_map)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """Stops being the device, and raises the exception that a launch left."""
        active_emulators.remove(self)
        if not active_emulators:
            nothing = ctypes.c_void_p(None)
            ctypes.CDLL(shim_path()).nvfp4_cute_set_callbacks(nothing, nothing, nothing)
        left, self._error = self._error, None
        if left is not None:
            raise left from error

    def launch(self, record: LaunchRecord) -> None:
        """Runs a launch that host code requested.

        Raises:
            EmulatorError: unknown kernel, a launch that the hardware would refuse, or a failure of the kernel.
        """
        launch = self.decode(record)
        x, y, z = launch.grid
        if launch.cooperative and x * y * z > launch.resident_ctas(self.device.sm_count):
            raise _Refused(COOPERATIVE_LAUNCH_TOO_LARGE)
        self.run(launch)

    def decode(self, record: LaunchRecord) -> Launch:
        """Decodes a launch that host code requested, and copies its parameters.

        Raises:
            EmulatorError: unknown kernel, or a launch that the hardware would refuse.
        """
        code = self._find_code(record.name.decode(), image_at(record.image))
        entry = code.entry
        params = param_buffer(entry.param_bytes)
        for i, param in enumerate(entry.params):
            data = ctypes.string_at(record.arguments[i], param.nbytes)
            params[param.offset : param.offset + param.nbytes] = np.frombuffer(data, np.uint8)
        shape = list(record.grid), list(record.block), list(record.cluster)
        return self.launch_of(code, *shape, record.shared_bytes, params, record.attributes)

    def launch_of(
        self,
        code: Code,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int],
        shared_bytes: int,
        params: np.ndarray,
        attributes: int,
    ) -> Launch:
        """Builds a launch of compiled code.

        Args:
            cluster: zeros if the host code names none.
            attributes: COOPERATIVE and PROGRAMMATIC.

        Raises:
            EmulatorError: the hardware would refuse it.
        """
        clusters = dim3([max(n, 1) for n in cluster])
        check_launch(code, self.device, dim3(block), clusters, shared_bytes, bool(attributes & PROGRAMMATIC))
        return Launch(
            code,
            dim3(grid),
            dim3(block),
            clusters,
            shared_bytes,
            params,
            any(cluster),
            cooperative=bool(attributes & COOPERATIVE),
            programmatic=bool(attributes & PROGRAMMATIC),
            machine_code=self._machine_code.get(id(code.entry)),
        )

    def code_of(self, program: Program, name: str) -> Code:
        """Returns an entry of a program, compiled for the machine."""
        key = id(program), name
        if key not in self._code:
            self._code[key] = _compiled(program, program.entries[name], self.machine)
        return self._code[key]

    def _find_code(self, name: str, image: bytes) -> Code:
        program = self._made_into(image)
        if program is None and image and self.recover(image):
            program = self._made_into(image)
        program = program or self._kernels.get(name)
        if program is None or name not in program.entries:
            raise EmulatorError(
                f"kernel `{name}` was launched but its PTX is not registered; call emulator.register(ptx) first "
                f"(known: {', '.join(self._kernels) or 'none'}). An object file on disk holds machine code only: export "
                "it under `nvfp4-cute emulate`, which keeps its PTX, or put the .ptx next to it (CUTE_DSL_KEEP=ptx)"
            )
        return self.code_of(program, name)

    def _made_into(self, image: bytes) -> Program | None:
        return next((program for cubin, program in reversed(self.modules) if cubin in image), None)

    def recover(self, image: bytes) -> bool:
        """Registers the PTX of unknown device code if it can be found. Returns whether it was; subclasses know where to look."""
        return False

    def run(self, launch: Launch) -> None:
        """Runs a decoded launch to its end. Subclasses add work around it.

        Raises:
            EmulatorError: a failure of the kernel.
        """
        failure = None
        if self._timed is self.machine:
            self.machine.run(launch)
        else:
            failure = self._record_apart(launch)
        if self._timed.recorder is not None and failure is None:
            self.recorded(self._timed.recorder.take(launch))
        if self._timed is not self.machine:
            self.machine.run(launch)
        if failure is not None:
            raise failure

    def _record_apart(self, launch: Launch) -> EmulatorError | None:
        """Records a launch on a separate machine and leaves memory unchanged.

        Returns the error that stopped it; the run that follows explains it better.
        """
        memory, machine = self.machine.memory, self._timed
        if not memory.is_checked:
            raise ValueError(
                "times together with checks or another mode than eager need declared memory: call add_range"
            )
        code = _compiled(launch.code.program, launch.code.entry, machine)
        with memory.kept(), redirect_stdout(io.StringIO()):
            try:
                machine.run(replace(launch, code=code, tensor_maps={}))
            except EmulatorError as error:
                return error
        return None

    def expect(self, *works: LaunchWork | None) -> None:
        """States the work of the clusters of the next launches: of equal clusters only one is executed for its time."""
        assert self._timed.recorder is not None, "only times are modelled from few clusters"
        self._timed.recorder.upcoming = list(works)

    def recorded(self, trace: LaunchTrace) -> None:
        """Called with the recording of a launch that has ended; models its time here."""
        assert self._clock is not None
        self.timings.append(self._clock.model(trace))

    def attribute(self, number: int) -> int:
        """Returns the value of a cudaDeviceAttr.

        Raises:
            EmulatorError: the attribute is not in the device's table.
        """
        if number not in self._attributes:
            raise EmulatorError(
                f"host code asked for device attribute {number}, which the emulated device lacks"
            )
        return self._attributes[number]

    def tensor_map(self, record: TensorMapRecord) -> None:
        """Notes that a tensor map was made. The checker examines maps of small allocations."""
        checker = self.machine.checker
        if checker is not None and record.gap():
            for found in self.machine.memory.ranges:
                if found.start <= record.address < found.end and found.nbytes < SMALL_ALLOCATION:
                    checker.silicon.tensor_map(record.address, found.nbytes, found.name)

    def _guard(self, action: Callable[[], None], failure: int) -> int:
        if self._error is not None:
            return failure  # like a device after a fault: nothing runs until the error was taken
        try:
            action()
        except _Refused as refused:
            return refused.code
        except BaseException as error:
            self._error = error
            return failure
        return SUCCESS


@LAUNCH_CALLBACK
def _launch(record: Any) -> int:
    emulator = active_emulators[-1]
    return emulator._guard(lambda: emulator.launch(record.contents), LAUNCH_FAILURE)


@ATTRIBUTE_CALLBACK
def _attribute(value: Any, number: int) -> int:
    emulator = active_emulators[-1]

    def answer() -> None:
        value[0] = emulator.attribute(number)

    return emulator._guard(answer, INVALID_VALUE)


@TENSOR_MAP_CALLBACK
def _tensor_map(record: Any) -> int:
    emulator = active_emulators[-1]

    def answer() -> None:
        try:
            record.contents.encode()
            emulator.tensor_map(record.contents)
        except (ValueError, EmulatorError) as error:
            # CuTe DSL's compiled host code ends the process when this fails.
            print(f"cuTensorMapEncodeTiled: {error}", file=sys.stderr, flush=True)
            raise

    return emulator._guard(answer, INVALID_VALUE)
