"""The process of a submission: imports the submission, calls it on inputs in shared memory and describes its answers.

Forked from the judge's side (`worker`), which sends one request at a time. No decision in this process affects a
verdict: the other side itself reads answers, compares inputs, counts launches and reads this process's memory.
"""

import contextlib
import importlib
import importlib.util
import linecache
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvfp4_cute import env
from nvfp4_cute.competition import contain, wire, witness
from nvfp4_cute.competition.gpu_link import LinkedGpu
from nvfp4_cute.competition.protocol import Stats
from nvfp4_cute.competition.wire import Arena
from nvfp4_cute.emulator.fronts.torch_memory import tensors_in

MOST_KEPT_BYTES = 1 << 30
"""Largest total size of outputs of timed calls that wait on the GPU before they are copied."""

SOURCE = ""
"""Path of the submission module's file, found before its import."""


@dataclass(frozen=True)
class Entry:
    """The function of a submission, and how to call it.

    Attributes:
        module: its module in the submission's folder.
        name: its name in that module.
        on_cpu: entries of an input that stay on the CPU.
        spread: whether the entries of an input are separate arguments; otherwise their tuple is the only argument.
        written: number of last entries of an input that are outputs it writes; 0: it returns its outputs.
        outputs: names of outputs that it may return as a mapping.
        keeps_inputs: whether strict mode refuses a call that changes another entry.
    """

    module: str = "submission"
    name: str = "custom_kernel"
    on_cpu: tuple[int, ...] = ()
    spread: bool = False
    written: int = 0
    outputs: tuple[str, ...] = ()
    keeps_inputs: bool = True


def watched() -> list[tuple[Any, str]]:
    """Returns the functions that timing and copying rely on. Called late, because the virtual GPU has its own Event class."""
    names = (
        (threading, ("_active",)),
        (time, ("perf_counter", "perf_counter_ns", "monotonic", "time")),
        (torch.cuda, ("Event", "synchronize")),
        (torch.cuda.Event, ("record", "elapsed_time", "synchronize")),
        (torch, ("empty", "equal", "save", "load", "from_numpy")),
        (torch.Tensor, ("clone", "copy_", "fill_", "cpu", "cuda", "data_ptr", "view", "set_")),
    )
    return [(owner, name) for owner, those in names for name in those]


def record_queues(note: Callable[[str], None]) -> None:
    """Calls `note` with a name for every queue that is made from now on through torch or cuda-python.

    Work on queues other than the default one is not between the events of a timing.
    """
    original = torch.cuda.Stream

    class Queue(original):  # type: ignore[misc, valid-type]
        """A queue whose creation is noted."""

        def __init__(self, *args: Any, **options: Any):
            if "stream_id" not in options:  # otherwise torch names an existing one, as for events
                note("torch.cuda.Stream")
            if original.__init__ is not object.__init__:
                super().__init__(*args, **options)

    def recording(name: str, function: Callable) -> Callable:
        def make(*args: Any, **options: Any) -> Any:
            note(name)
            return function(*args, **options)

        return make

    torch.cuda.Stream = Queue  # type: ignore[misc]
    external = recording("torch.cuda.ExternalStream", torch.cuda.ExternalStream)
    torch.cuda.ExternalStream = external  # type: ignore[misc, assignment]
    for module in ("cuda.bindings.driver", "cuda.bindings.runtime"):
        try:
            library = importlib.import_module(module)
        except ImportError:
            continue
        for name, value in list(vars(library).items()):
            if re.match(r"cu(da)?StreamCreate", name):
                setattr(library, name, recording(f"{module}.{name}", value))


class NotLoaded(Exception):
    """A submission that could not be imported or built."""


class Player:
    """Answers requests of the judge's process."""

    def __init__(self, arena: Arena, judge: socket.socket, gpu: socket.socket, settings: Any):
        """`judge`: socket for requests.

        `gpu`: socket for the submission's GPU work meanwhile. `settings`: settings of the worker.
        """
        self.arena, self.judge, self.settings = arena, judge, settings
        self._gpu_socket, self._lock = gpu, threading.Lock()
        self._stack = ExitStack()
        self._kernel: Callable[[Any], Any] | None = None
        self._data: Any = None
        self._output: Any = None  # output of the last call, whose memory the other side reads
        self._kept: dict[int, Any] = {}
        self._packed: list[Any] = []
        self._gpu: LinkedGpu | None = None
        if settings.arch is not None:
            self._gpu = linked_process(settings.arch, arena, self.ask, self._stack)
        if settings.strict:
            record_queues(self._note_queue)

    def ask(self, message: dict[str, Any], attached: bytes = b"") -> dict[str, Any]:
        """Sends a message to the GPU's side and returns the answer."""
        with self._lock:
            wire.send(self._gpu_socket, message, attached)
            return wire.receive(self._gpu_socket)[0]

    def _note_queue(self, name: str) -> None:
        self.ask({"do": "queue", "name": name})

    def serve(self) -> None:
        """Answers requests until the judge's side closes the connection."""
        wire.send(self.judge, {"noted": witness.note(watched())})
        while True:
            try:
                request, _ = wire.receive(self.judge)
            except EOFError:
                return
            answer = getattr(self, "do_" + request.pop("do"))(**request)
            wire.send(self.judge, answer)

    # ---- requests ------------------------------------------------------------------------------
    def do_call(
        self, data: wire.Tree, on_cpu: list[int], number: int | None = None, same: bool = False
    ) -> dict[str, Any]:
        """Makes one call and waits for it.

        Args:
            data: places of the inputs.
            on_cpu: entries of the argument that stay on the CPU.
            number: key under which the output is kept for `do_look`; None forgets it.
            same: pass the argument of the previous call, whose tensors now hold these inputs.
        """
        self._packed.clear()
        try:
            self._data = self._inputs(data, on_cpu, same)
            self._load()
            output = self._output = self._call(self._data)
            self._wait()
        except BaseException as error:
            return self._raised(error)
        if number is not None:
            self._kept[number] = output
        return {"output": wire.to_tree(output, self._place)}

    def do_look(self, number: int) -> dict[str, Any]:
        """Returns the current content of an output that was kept."""
        self._packed.clear()
        return {"output": wire.to_tree(self._kept[number], self._place)}

    def do_inputs(self) -> dict[str, Any]:
        """Returns the current inputs of the last call, on a real GPU."""
        self._packed.clear()
        return {"output": wire.to_tree(self._data, self._place)}

    def do_forget(self) -> dict[str, Any]:
        """Forgets all kept outputs."""
        self._kept.clear()
        self._packed.clear()
        return {}

    def do_profile(self, data: wire.Tree, on_cpu: list[int]) -> dict[str, Any]:
        """Makes one call inside an NVTX range `custom_kernel`, for a profiler that watches this process."""
        with torch.cuda.nvtx.range("custom_kernel"):
            return self.do_call(data, on_cpu)

    def do_time(
        self,
        data: list[wire.Tree],
        on_cpu: list[int],
        max_repeats: int,
        max_seconds: float,
        keep_outputs: bool,
    ) -> dict[str, Any]:
        """Times one call on each input, back to back after one clear of L2. A duration is their mean."""
        self._packed.clear()
        durations: list[float] = []
        answers: list[Any] = []
        try:
            inputs = [self._inputs(one, on_cpu, False) for one in data]
            self._load()
            began = time.perf_counter()
            for repeat in range(max_repeats):
                torch.cuda.synchronize()
                self._clear_l2()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                outputs = [self._call(one) for one in inputs]
                end.record()
                torch.cuda.synchronize()
                durations.append(start.elapsed_time(end) / len(inputs) * 1e6)
                if keep_outputs:
                    answers += [wire.to_tree(output, self._copy) for output in outputs]
                elapsed = time.perf_counter() - began
                if repeat > 1 and elapsed > 0.1:
                    stats = Stats.of(durations)
                    if (
                        stats.err < 0.001 * stats.mean
                        or stats.mean * stats.runs > max_seconds * 1e9
                        or elapsed > 120
                    ):
                        break
        except BaseException as error:
            return self._raised(error)
        return {"durations": durations, "outputs": answers}

    def do_time_single(self, data: wire.Tree, on_cpu: list[int]) -> dict[str, Any]:
        """Returns the duration of one single call after a clear of L2."""
        self._packed.clear()
        try:
            inputs = self._inputs(data, on_cpu, False)
            self._load()
            self._clear_l2()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            output = self._call(inputs)
            end.record()
            torch.cuda.synchronize()
            return {"durations": [start.elapsed_time(end) * 1e6], "output": wire.to_tree(output, self._place)}
        except BaseException as error:
            return self._raised(error)

    def do_time_fresh(
        self, data: list[wire.Tree], on_cpu: list[int], order: list[int], warm_ups: int
    ) -> dict[str, Any]:
        """Returns the durations of single calls on copies of inputs, each after a clear of L2, and their outputs.

        Args:
            order: the input of every call.
            warm_ups: number of first calls, which are not timed.
        """
        self._packed.clear()
        events: list[tuple[Any, Any]] = []
        answers: list[Any] = []
        waiting: list[Any] = []
        try:
            inputs = [self._inputs(one, on_cpu, False) for one in data]
            self._load()
            for number, index in enumerate(order):
                fresh = _mapped(inputs[index], _at_new_address)
                self._clear_l2()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                output = self._call(fresh)
                end.record()
                if number >= warm_ups:
                    events.append((start, end))
                    waiting.append(output)
                if len(waiting) * sum(tensor.nbytes for tensor in tensors_in(output)) > MOST_KEPT_BYTES:
                    answers += [wire.to_tree(one, self._copy) for one in waiting]
                    waiting.clear()
            torch.cuda.synchronize()
            answers += [wire.to_tree(one, self._copy) for one in waiting]
            durations = [start.elapsed_time(end) * 1e6 for start, end in events]
        except BaseException as error:
            return self._raised(error)
        return {"durations": durations, "outputs": answers}

    # ---- helpers --------------------------------------------------------------------------------
    def _load(self) -> None:
        """Imports the function on first use.

        Raises:
            NotLoaded: it failed; the cause is the original error.
        """
        if self._kernel is not None:
            return
        global SOURCE
        entry = self.settings.entry
        try:
            spec = importlib.util.find_spec(entry.module)
            SOURCE = str(spec.origin) if spec else ""
            self._kernel = getattr(importlib.import_module(entry.module), entry.name)
        except BaseException as error:
            raise NotLoaded from error

    def _call(self, data: tuple[Any, ...]) -> Any:
        """Returns the outputs of one call of the loaded function."""
        assert self._kernel is not None
        entry = self.settings.entry
        if not entry.spread:
            return self._kernel(data)
        with torch.no_grad():
            result = self._kernel(*data)
        if entry.written:
            return data[-entry.written :]
        return [result[name] for name in entry.outputs] if isinstance(result, Mapping) else result

    def _wait(self) -> None:
        if self.settings.on_gpu:
            torch.cuda.synchronize()

    def _inputs(self, data: wire.Tree, on_cpu: list[int], same: bool) -> Any:
        """Returns the inputs in the problem's places: on the GPU, except entries that the problem keeps on the CPU."""

        def take(record: dict[str, Any]) -> torch.Tensor:
            dtype, shape, strides, nbytes = wire.layout(record)
            return wire.tensor_over(self.arena.view(record["offset"], nbytes), dtype, shape, strides)

        entries = []
        for index, tree in enumerate(next(iter(data.values()))):
            entry = wire.from_tree(tree, take)
            entries.append(entry if index in on_cpu else _mapped(entry, self._to_gpu))
        if not same or self._data is None:
            return tuple(entries)
        if self._gpu is None and self.settings.on_gpu:  # otherwise the other side has already written them
            for place, tensor in zip(tensors_in(self._data), tensors_in(entries), strict=True):
                bits(place).copy_(bits(tensor))
        return self._data

    def _to_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._gpu:
            return self._gpu.torch_memory.adopt(tensor)
        return tensor.cuda() if self.settings.on_gpu else tensor

    def _place(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Returns a tensor's place if the other side can see it, or copies it to such a place."""
        tensor = tensor.detach()
        address = tensor.data_ptr()
        if (self._gpu or not self.settings.on_gpu) and self.arena.holds(
            address, tensor.untyped_storage().nbytes()
        ):
            return wire.describe(tensor, address - self.arena.address)
        return self._copy(tensor)

    def _copy(self, tensor: torch.Tensor) -> dict[str, Any]:
        plain = tensor.detach().clone(memory_format=torch.contiguous_format).cpu()
        nbytes = plain.numel() * plain.element_size()
        view = self.arena.allocate(nbytes)
        if nbytes:
            view[:nbytes] = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())[:nbytes].numpy()
        self._packed.append(view)
        return wire.describe(plain, self.arena.offset_of(view))

    def _clear_l2(self) -> None:
        """Fills L2 with other data, if requested; queued, not waited for."""
        if self.settings.l2_clear_bytes:
            torch.empty(self.settings.l2_clear_bytes, dtype=torch.int8, device="cuda").fill_(42)

    def _raised(self, error: BaseException) -> dict[str, Any]:
        """Returns the exception with the submission's lines that led to it. Launches may work again afterwards."""
        if self._gpu:
            self._gpu.take_failure()
        loading = isinstance(error, NotLoaded)
        if loading and error.__cause__ is not None:
            error = error.__cause__
        said = {"raised": f"Encountered {type(error).__name__}", "where": "", "loading": loading}
        with contextlib.suppress(Exception):
            said |= {"raised": f"Encountered {type(error).__name__}: {error}", "where": _lines_of(error)}
        return said


def _lines_of(error: BaseException) -> str:
    """Returns lines of the files in the submission's folder, outermost first."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}, line {error.lineno}: {(error.text or '').strip()}"
    folder = os.path.dirname(SOURCE or os.path.abspath("submission.py"))
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if os.path.dirname(frame.filename) == folder:
            text = linecache.getline(frame.filename, frame.lineno or 0).strip()
            lines.append(f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {text}")
    return "\n".join(lines[-8:])


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Applies `function` to every tensor of a nested value."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, function) for item in value)
    return value


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a tensor in a dtype that can be copied and compared, which packed fp4 cannot."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _at_new_address(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor."""
    fresh = torch.empty_like(tensor)
    bits(fresh).copy_(bits(tensor))
    return fresh


def linked_process(arch: str, arena: Arena, ask: Any, stack: ExitStack) -> LinkedGpu:
    """Makes a linked GPU the GPU of this process until `stack` is closed."""
    from nvfp4_cute.emulator.fronts.script import answers

    gpu = LinkedGpu(arch, arena, ask)
    stack.enter_context(answers(gpu))
    stack.enter_context(gpu)
    return gpu


def main(
    arena: Arena, judge: socket.socket, gpu: socket.socket, output: int, parent: int, settings: Any
) -> None:
    """Runs a submission's process; never returns."""
    try:
        os.setsid()
        contain.die_with(parent)
        contain.be_readable()
        contain.limit_resources()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        keep = {judge.fileno(), gpu.fileno(), output}
        os.dup2(output, 1)
        os.dup2(output, 2)
        # A fork has its parent's files, including results of other processes.
        for number in range(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 4096 else 4096):
            if number not in keep:
                with contextlib.suppress(OSError):
                    os.close(number)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        env.become_submission(Path(settings.folder) if settings.folder else None)
        folders = [Path(path) for path in settings.writable]
        if settings.folder:
            os.chdir(settings.folder)
            sys.path.insert(0, settings.folder)
        contain.confine([*folders, Path.cwd() if settings.folder else Path(tempfile.gettempdir())])
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        arena.take_second_half()
        Player(arena, judge, gpu, settings).serve()
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
        os._exit(1)
    os._exit(0)
