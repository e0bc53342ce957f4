"""The process that runs a submission. It imports and calls it; inputs come from the parent, which judges the outputs.

The parent owns the random generator, the reference and the checker, so that nothing a submission does to its own process
can change what is right. What it could change here, the clock, is watched: see :class:`Guard`.
"""

import importlib
import io
import math
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from nvfp4_cute.competition.protocol import Stats
from nvfp4_cute.emulator.fronts.torch_memory import tensors_in
from nvfp4_cute.gpus.timing_figures import DEFAULT_TARGETS, MODEL_ERROR, constants_of
from nvfp4_cute.problems import registry


@dataclass(frozen=True)
class Settings:
    """How the worker runs things.

    Attributes:
        problem: name of the problem, for what of its inputs is output and what stays on the CPU.
        arch: of the virtual GPU; None for the GPU of the machine.
        modelled: whether the virtual GPU models the time of every launch.
        l2_clear_bytes: memory written before each timing.
        strict: watch for side queues, too.
    """

    problem: str
    arch: str | None
    modelled: bool = False
    l2_clear_bytes: int = 0
    strict: bool = False


@dataclass
class Answer:
    """What the calls of one request gave.

    Attributes:
        outputs: packed result of every call.
        indices: which input each is an answer to.
        faults: what was wrong with the calls themselves, each said once.
        durations_ns: of one call each; empty where a model has no time for them.
        source: where the durations come from: "measured" or "modelled"; empty without durations.
        report: what took the time, of a modelled profile.
    """

    outputs: list[bytes] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    durations_ns: list[float] = field(default_factory=list)
    source: str = ""
    report: str = ""

    def add(self, index: int, packed: bytes) -> None:
        """Note the output for an input."""
        self.indices.append(index)
        self.outputs.append(packed)

    def fault(self, message: str) -> None:
        """Note a fault once."""
        if message not in self.faults:
            self.faults.append(message)


class Guard:
    """Notices that a submission replaced what times it, or made queues of its own.

    What runs on another queue than the default one is not between the events of a timing. Only queues that are made
    through torch or cuda-python are seen.
    """

    def __init__(self, strict: bool):
        """Remember what is in place now, before a submission is imported."""
        self.side_queues: list[str] = []
        if strict:
            self._record_queues()
        self.before = [(owner, name, getattr(owner, name)) for owner, names in _watched() for name in names]

    def _record_queues(self) -> None:
        original, note = torch.cuda.Stream, self.side_queues.append

        class Queue(original):  # type: ignore[misc, valid-type]
            """A queue whose making is noted."""

            def __init__(self, *args: Any, **options: Any):
                if "stream_id" not in options:  # else torch names one that exists, as events do
                    note("torch.cuda.Stream")
                if original.__init__ is not object.__init__:
                    super().__init__(*args, **options)

        torch.cuda.Stream = Queue  # type: ignore[misc]
        external = self._recording("torch.cuda.ExternalStream", torch.cuda.ExternalStream)
        torch.cuda.ExternalStream = external  # type: ignore[misc, assignment]
        for module in ("cuda.bindings.driver", "cuda.bindings.runtime"):
            try:
                library = importlib.import_module(module)
            except ImportError:
                continue
            for name, value in list(vars(library).items()):
                if re.match(r"cu(da)?StreamCreate", name):
                    setattr(library, name, self._recording(f"{module}.{name}", value))

    def _recording(self, name: str, function: Callable) -> Callable:
        def make(*args: Any, **options: Any) -> Any:
            self.side_queues.append(name)
            return function(*args, **options)

        return make

    def faults(self) -> list[str]:
        """What was replaced or made since."""
        replaced = [
            f"replaced {getattr(owner, '__name__', owner)}.{name}, which the harness relies on"
            for owner, name, value in self.before
            if getattr(owner, name) is not value
        ]
        queues = [
            f"made a queue of its own ({name}); only the default queue is timed" for name in self.side_queues
        ]
        return [*dict.fromkeys(replaced + queues)]


def _watched() -> list[tuple[Any, tuple[str, ...]]]:
    """What timing and copying rely on. Asked for late: the virtual GPU has an Event class of its own."""
    return [
        (time, ("perf_counter", "perf_counter_ns", "monotonic", "time")),
        (torch.cuda, ("Event", "synchronize")),
        (torch.cuda.Event, ("record", "elapsed_time", "synchronize")),
        (torch, ("empty", "equal", "save", "load")),
        (torch.Tensor, ("clone", "copy_", "fill_", "cpu", "cuda", "data_ptr", "view")),
    ]


class Session:
    """The one submission of this process."""

    def __init__(self, settings: Settings):
        """Put the virtual GPU in place, if one is asked for, and remember what must not be replaced."""
        self.settings = settings
        self.problem = registry.load(settings.problem)
        self.stack = ExitStack()
        self.gpu = (
            emulated_process(settings.arch, self.stack, modelled=settings.modelled) if settings.arch else None
        )
        self.guard = Guard(settings.strict)
        self.custom_kernel: Callable[[Any], Any] | None = None

    def kernel(self) -> Callable[[Any], Any]:
        """``custom_kernel``, imported when first asked for."""
        if self.custom_kernel is None:
            self.custom_kernel = importlib.import_module("submission").custom_kernel
        return self.custom_kernel

    def to_device(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs where the problem has them: on the GPU, but for entries that it leaves on the CPU."""
        return tuple(
            entry if index in self.problem.cpu_entries else mapped(entry, lambda tensor: tensor.cuda())
            for index, entry in enumerate(data)
        )

    def poison(self, data: Any) -> None:
        """NaN into C."""
        for tensor in self.problem.output(data):
            tensor.fill_(math.nan)

    def clear_l2(self) -> None:
        """Fill L2 with something else, if that is asked for; queued, not waited for."""
        if self.settings.l2_clear_bytes:
            torch.empty(self.settings.l2_clear_bytes, dtype=torch.int8, device="cuda").fill_(42)

    def operands(self, data: Any) -> list[torch.Tensor]:
        """Every tensor but C."""
        written = {id(tensor) for tensor in self.problem.output(data)}
        return [tensor for tensor in tensors_in(data) if id(tensor) not in written]

    def call(self, data: Any, answer: Answer) -> Any:
        """One call, waited for. Exceptions become faults; then the result is None."""
        try:
            output = self.kernel()(data)
            torch.cuda.synchronize()
        except Exception as error:
            # What a launch raised says more than the error code that host code saw of it.
            error = (self.gpu and self.gpu.take_failure()) or error
            answer.fault(f"Encountered {type(error).__name__}: {error}")
            return None
        for tensor in tensors_in(output):
            if type(tensor) is not torch.Tensor:
                answer.fault(f"output is a {type(tensor).__name__}: an answer is made of plain tensors")
        for message in self.guard.faults():
            answer.fault(message)
        return output


_session: Session


def start(settings: Settings) -> None:
    """Initializer of the process."""
    global _session
    _session = Session(settings)


def emulated_process(arch: str, stack: ExitStack, *, modelled: bool = False):
    """Make a virtual GPU the GPU of this process until ``stack`` is closed; ``modelled``: and time its launches."""
    from nvfp4_cute.emulator.fronts.cuda_shim import answered_cuda
    from nvfp4_cute.emulator.fronts.dsl_shim import answered_dsl, set_environment
    from nvfp4_cute.emulator.fronts.torch_shim import emulated_cuda
    from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu
    from nvfp4_cute.timing.clock import Clock

    set_environment(arch)
    gpu = VirtualGpu(arch, timing=Clock(constants_of(DEFAULT_TARGETS[arch])) if modelled else None)
    for shim in (answered_cuda, answered_dsl, emulated_cuda):
        stack.enter_context(shim(gpu))
    stack.enter_context(gpu)
    return gpu


# ---- requests ----------------------------------------------------------------------------------------


def answer_each(inputs: list[bytes]) -> Answer:
    """One call on a copy of each input."""
    answer = Answer()
    for index, packed in enumerate(inputs):
        output = _session.call(_session.to_device(unpack(packed)), answer)
        answer.add(index, pack_output(output))
    return answer


def answer_strictly(inputs: list[bytes], order: list[int]) -> Answer:
    """Calls in a given order, each input at the addresses of the one before, C poisoned; then once more on fresh copies.

    The first pass defeats answers that are remembered by address, by shape, or by count of calls: what lies at an
    address changes from call to call, and the next input does not exist yet while a call runs. The second keeps every
    output until all calls are over and looks at it twice.
    """
    answer = Answer()
    memory = None
    for index in order:
        data = unpack(inputs[index])
        if memory is None:
            memory = _session.to_device(data)
        for place, tensor in zip(tensors_in(memory), tensors_in(data), strict=True):
            bits(place).copy_(bits(tensor))
        answer.add(index, _strict_call(memory, data, answer)[1])
    kept = []
    for index, packed in enumerate(inputs):
        data = unpack(packed)
        kept.append(_strict_call(_session.to_device(data), data, answer))
        answer.add(index, kept[-1][1])
    for index, (output, at_once) in enumerate(kept):
        if pack_output(output) != at_once:
            answer.fault(f"output {index} changed after its call: outputs share memory, or work went on")
    return answer


def _strict_call(memory: Any, data: Any, answer: Answer) -> tuple[Any, bytes]:
    """One call on ``memory``, which holds the values of ``data``; its output, and that packed at once."""
    _session.poison(memory)
    output = _session.call(memory, answer)
    packed = pack_output(output)
    pairs = zip(_session.operands(memory), _session.operands(data), strict=True)
    if not all(torch.equal(bits(now).cpu(), bits(before)) for now, before in pairs):
        answer.fault("changed its inputs; only C may be written")
    return output, packed


def time_calls(inputs: list[bytes], max_repeats: int, max_seconds: float, keep_outputs: bool) -> Answer:
    """Timings of one call on each input, back to back behind one clear of L2; a duration is their mean.

    Stops when the standard error is below 0.1 % of the mean, after ``max_seconds`` of kernel time, or two minutes.

    Args:
        keep_outputs: whether the outputs of every timing are handed back, or none.
    """
    answer = Answer(source="measured")
    data = [_session.to_device(unpack(packed)) for packed in inputs]
    custom_kernel = _session.kernel()
    began = time.perf_counter()
    for repeat in range(max_repeats):
        torch.cuda.synchronize()
        _session.clear_l2()
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        outputs = [custom_kernel(one) for one in data]
        end_event.record()
        torch.cuda.synchronize()
        answer.durations_ns.append(start_event.elapsed_time(end_event) / len(data) * 1e6)
        if keep_outputs:
            for index, output in enumerate(outputs):
                answer.add(index, pack_output(output))
        elapsed = time.perf_counter() - began
        if repeat > 1 and elapsed > 0.1:
            stats = Stats.of(answer.durations_ns)
            if stats.err < 0.001 * stats.mean or stats.mean * stats.runs > max_seconds * 1e9 or elapsed > 120:
                break
    for message in _session.guard.faults():
        answer.fault(message)
    return answer


def time_single_calls(inputs: list[bytes]) -> Answer:
    """Duration of each input's call by itself, C poisoned, L2 cleared: what back-to-back timing hides shows here."""
    answer = Answer(source="measured")
    for index, packed in enumerate(inputs):
        data = _session.to_device(unpack(packed))
        _session.poison(data)
        _session.clear_l2()
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start_event.record()
        output = _session.call(data, answer)
        end_event.record()
        torch.cuda.synchronize()
        answer.durations_ns.append(start_event.elapsed_time(end_event) * 1e6)
        answer.add(index, pack_output(output))
    return answer


def model_calls(inputs: list[bytes]) -> Answer:
    """One call on a copy of each input of a virtual GPU, and its modelled time: that of its kernels, one after the other.

    Launching them, gaps between them, and torch's own kernels take no time in it; L2 is cold at each launch. A call
    that launches nothing has no time.
    """
    gpu = _session.gpu
    assert gpu is not None
    answer = Answer(source="modelled")
    for index, packed in enumerate(inputs):
        before = len(gpu.timings)
        output = _session.call(_session.to_device(unpack(packed)), answer)
        answer.add(index, pack_output(output))
        if timings := gpu.timings[before:]:
            answer.durations_ns.append(sum(timing.us for timing in timings) * 1e3)
    return answer


def profile_call(packed: bytes) -> Answer:
    """One call inside an NVTX range ``custom_kernel``, for a profiler that watches this process.

    On a virtual GPU nothing watches: its model says what took the time of every launch.
    """
    answer = Answer()
    data = _session.to_device(unpack(packed))
    if _session.gpu:
        output = _session.call(data, answer)
        answer.report = "\n".join([*(timing.report() for timing in _session.gpu.timings), MODEL_ERROR])
    else:
        with torch.cuda.nvtx.range("custom_kernel"):
            output = _session.call(data, answer)
    answer.add(0, pack_output(output))
    return answer


# ---- data --------------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """Nested tensors as bytes, with their strides."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """Inverse of :func:`pack`, on the CPU."""
    return torch.load(io.BytesIO(packed), weights_only=True)


def pack_output(output: Any) -> bytes:
    """An answer on the CPU and contiguous: equal answers give equal bytes."""
    return pack(
        mapped(output, lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format).cpu())
    )


def mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same nesting with ``function`` of every tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, function) for item in value)
    return value


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that can be copied and compared: packed fp4 cannot."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
