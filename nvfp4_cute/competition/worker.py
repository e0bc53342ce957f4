"""The judge's side of a submission's process: places inputs, requests calls and reads the answers.

The submission runs in a process forked from this one (`player`), with which it shares no objects. This side has the
virtual GPU with its times, compares inputs with its own copies, and reads the other process's memory to see whether the
submission replaced functions that the harness relies on. On a real GPU the times come from the submission's process;
GUIDE.md lists the gaps that this leaves.
"""

import contextlib
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from nvfp4_cute.competition import contain, player, wire, witness
from nvfp4_cute.competition.gpu_link import GpuServer
from nvfp4_cute.competition.wire import Arena, printable
from nvfp4_cute.emulator.fronts.torch_memory import tensors_in
from nvfp4_cute.gpus.timing_figures import DEFAULT_TARGETS, MODEL_ERROR, constants_of
from nvfp4_cute.problems import registry

LEAST_MADE = 0.5
"""Least share of an answer's elements that launches must have written for their time to count as the answer's."""

LOADING, RAISED, CHEATED = "loading", "raised", "cheated"
"""Kinds of faults: the submission could not be imported or built; it raised or ended; it broke a rule."""

MOST_OUTPUT_BYTES = 1 << 20
"""Largest part of a submission's output that is shown."""


@dataclass(frozen=True)
class Settings:
    """Settings of the worker.

    Attributes:
        problem: name of a competition's problem, which states which inputs are outputs and which stay on the CPU; None
            if `entry` states it.
        arch: architecture of the virtual GPU; None for the machine's GPU.
        modelled: whether the virtual GPU models the time of every launch.
        l2_clear_bytes: memory written before each timing.
        strict: watch for side queues and changed inputs.
        folder: folder of submission.py; None searches the path.
        writable: folders that the submission may write to, besides its own and the temporary one.
        entry: its function.
        on_gpu: whether its tensors are on a GPU, virtual or real; otherwise they are on the CPU.
    """

    problem: str | None
    arch: str | None
    modelled: bool = False
    l2_clear_bytes: int = 0
    strict: bool = False
    folder: str | None = None
    writable: tuple[str, ...] = ()
    entry: player.Entry = player.Entry()
    on_gpu: bool = True


@dataclass
class Answer:
    """Results of the calls of one request.

    Attributes:
        outputs: packed result of every call.
        indices: index of the input of each output.
        faults: faults of the calls themselves, without repeats.
        durations_ns: durations of single calls; empty if a model has no time for them.
        source: source of the durations: "measured" or "modelled"; empty without durations.
        report: report of a modelled profile.
        kind: kind of the first fault: `LOADING`, `RAISED` or `CHEATED`.
    """

    outputs: list[bytes] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    durations_ns: list[float] = field(default_factory=list)
    source: str = ""
    report: str = ""
    kind: str = ""

    def add(self, index: int, packed: bytes) -> None:
        """Adds the output for an input."""
        self.indices.append(index)
        self.outputs.append(packed)

    def fault(self, message: str, kind: str = CHEATED) -> None:
        """Adds a fault unless it is known."""
        self.kind = self.kind or kind
        if message not in self.faults:
            self.faults.append(message)


class Ended(Exception):
    """Raised when the submission's process is gone."""


@dataclass
class Placed:
    """One input in shared memory.

    Attributes:
        tree: places of its tensors.
        pieces: (view, original bytes, whether it is output) of every storage.
    """

    tree: wire.Tree
    pieces: list[tuple[np.ndarray, np.ndarray, bool]]

    def rewrite(self, other: "Placed") -> None:
        """Writes the bytes of another input of the same shape to these addresses."""
        for index, (view, _, is_output) in enumerate(self.pieces):
            view[:] = other.pieces[index][1]
            self.pieces[index] = view, other.pieces[index][1], is_output

    def poison(self) -> None:
        """Fills C with NaN: all bits set mean NaN in every float format that has one."""
        for view, _, is_output in self.pieces:
            if is_output:
                view[:] = 0xFF

    def is_unchanged(self) -> bool:
        """Whether everything but C still has its original bytes."""
        return all(is_output or np.array_equal(view, before) for view, before, is_output in self.pieces)


class Host:
    """The submission of this process, and its GPU."""

    def __init__(self, settings: Settings):
        """Starts nothing before the first request."""
        self.settings = settings
        self.problem = registry.load(settings.problem) if settings.problem else None
        self.on_cpu = list(self.problem.cpu_entries) if self.problem else list(settings.entry.on_cpu)
        self.arena = Arena()
        self.server: GpuServer | None = None
        self.queues: list[str] = []
        if settings.arch is not None:
            self.server = GpuServer(settings.arch, self.arena, modelled=settings.modelled)
            self.queues = self.server.queues
        self._process = 0
        self._shown = 0
        contain.adopt_orphans()

    # ---- the process ---------------------------------------------------------------------------
    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        reader, writer = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = os.fork()
        if not self._process:
            player.main(self.arena, pairs[0][1], pairs[1][1], writer, parent, self.settings)
        os.close(writer)
        for _, theirs in pairs:
            theirs.close()
        self._judge, self._gpu = (ours for ours, _ in pairs)
        self._output = reader
        self._death = os.pidfd_open(self._process)
        self._memory: witness.Memory | None = None
        self._noted = self._receive()["noted"]
        with contextlib.suppress(OSError):
            self._memory = witness.Memory(self._process)

    def close(self) -> None:
        """Ends the submission's process and everything that it started."""
        if not self._process:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)
        contain.end_descendants(set())
        self._process = 0
        for descriptor in (self._output, self._death):
            os.close(descriptor)
        self._judge.close()
        self._gpu.close()
        if self._memory:
            self._memory.close()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Sends a request and returns the answer. Answers the process's GPU requests in the meantime.

        Raises:
            Ended: the process ended, or sent a message outside of the protocol.
        """
        if not self._process:
            self._start()
        try:
            wire.send(self._judge, {"do": do, **request})
        except OSError:
            raise self._ended() from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        poll = select.poll()
        for descriptor in (self._judge, self._gpu, self._output, self._death):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._output in ready:
                    self._show(poll)
                if self._judge.fileno() in ready:
                    return wire.receive(self._judge)[0]
                if self._gpu.fileno() in ready:
                    message, attached = wire.receive(self._gpu)
                    wire.send(self._gpu, self._served(message, attached))
                elif self._death in ready:
                    raise EOFError
        except (EOFError, OSError):
            raise self._ended() from None
        except wire.Refused as refused:
            self.close()
            raise Ended(f"the process that runs the submission sent {refused}") from None

    def _served(self, message: dict[str, Any], attached: bytes) -> dict[str, Any]:
        if self.server is not None:
            return self.server.answer(message, attached)
        self.queues.append(printable(message.get("name"), 80))
        return {}

    def _show(self, poll: Any) -> None:
        """Passes on the submission's output, without control sequences that a terminal would obey."""
        text = os.read(self._output, 1 << 16)
        if not text:
            poll.unregister(self._output)
        elif self._shown < MOST_OUTPUT_BYTES:
            self._shown += len(text)
            sys.stderr.write(printable(text.decode(errors="replace"), len(text)))
            sys.stderr.flush()

    def _ended(self) -> Ended:
        process, meaning = self._process, "it closed its connection"
        with contextlib.suppress(ChildProcessError):
            for _ in range(200):  # it closes its files before it is gone
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    code = os.waitstatus_to_exitcode(status)
                    meaning = f"exit code {code}" if code >= 0 else f"signal {-code}"
                    break
                time.sleep(0.01)
        self.close()
        return Ended(f"the process that runs the submission ended during a request: {meaning}")

    # ---- inputs --------------------------------------------------------------------------------
    def place(self, packed: bytes) -> Placed:
        """Puts an input into shared memory."""
        data = unpack(packed)
        outputs = {tensor.untyped_storage().data_ptr() for tensor in self._written(data)}
        pieces: dict[int, tuple[np.ndarray, np.ndarray, bool]] = {}

        def put(tensor: torch.Tensor) -> dict[str, Any]:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in pieces:
                content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().copy()
                view = self.arena.allocate(content.size)[: content.size]
                view[:] = content
                pieces[key] = view, content, key in outputs
            offset = self.arena.offset_of(pieces[key][0])
            return wire.describe(tensor, offset + int(tensor.storage_offset()) * tensor.element_size())

        tree = wire.to_tree(data, put)
        return Placed(tree, list(pieces.values()))

    def _written(self, data: Any) -> list[torch.Tensor]:
        """Returns the tensors of an input that a call may write."""
        if self.problem is not None:
            return self.problem.output(data)
        written = self.settings.entry.written
        return list(tensors_in(data[-written:])) if written else []

    # ---- calls ---------------------------------------------------------------------------------
    def call(
        self, placed: Placed, answer: Answer, do: str = "call", **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Makes one call. Returns the output, None after a fault, and the rest of the process's answer."""
        if self.server is not None:
            self.server.operands = {
                int(view.ctypes.data) for view, _, is_output in placed.pieces if not is_output
            }
        output, said = self.request(answer, do, data=placed.tree, **options)
        keeps = self.settings.strict and self.settings.entry.keeps_inputs
        if keeps and not self._inputs_are_unchanged(placed, said):
            answer.fault("changed its inputs; only C may be written")
        return output, said

    def request(self, answer: Answer, do: str, **request: Any) -> tuple[Any, dict[str, Any]]:
        """Makes a request about calls. Returns its result, and the complete answer."""
        try:
            said = self.ask(do, on_cpu=self.on_cpu, **request)
        except Ended as ended:
            answer.fault(str(ended), RAISED)
            return None, {}
        output = None
        if "raised" in said:
            failure = self.server.take_failure() if self.server else ""
            message = f"Encountered {failure}" if failure else printable(said["raised"])
            where = printable(said.get("where", ""))
            kind = LOADING if said.get("loading") is True else RAISED
            answer.fault(f"{message}\n{where}" if where else message, kind)
        elif "output" in said:
            output = self.read(said["output"], answer)
        for message in self.faults():
            answer.fault(message)
        return output, said

    def read(self, tree: wire.Tree, answer: Answer) -> Any:
        """Returns an output as tensors of this process."""
        try:
            return wire.from_tree(tree, self._tensor)
        except wire.Refused as refused:
            answer.fault(str(refused))
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            answer.fault(f"an output that is no tensor: {printable(error, 200)}")
        return None

    def _tensor(self, record: dict[str, Any]) -> torch.Tensor:
        dtype, shape, strides, nbytes = wire.layout(record)
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        # NumPy copies, because torch would start threads, and a process with threads does not fork well.
        source = self.arena.view(record["offset"], nbytes)
        steps = [*(stride * dtype.itemsize for stride in strides), 1]
        plain = np.ascontiguousarray(as_strided(source, [*shape, dtype.itemsize], steps)).reshape(-1)
        contiguous: list[int] = []
        step = 1
        for size in reversed(shape):
            contiguous.insert(0, step)
            step *= size
        return wire.tensor_over(plain.copy(), dtype, shape, tuple(contiguous))

    def faults(self) -> list[str]:
        """Returns what the submission has replaced or created since its import."""
        replaced = self._memory.replaced(self._noted) if self._process and self._memory else []
        queues = [*dict.fromkeys(self.queues)] if self.settings.strict else []
        return [
            *(f"replaced {name}, which the harness relies on" for name in replaced),
            *(f"made a queue of its own ({name}); only the default queue is timed" for name in queues),
        ]

    def threads(self) -> int:
        """Returns the Python threads of the submission's process; 0 if its memory cannot be read."""
        if not self._process or not self._memory:
            return 0
        active = next(entry for entry in self._noted if entry["label"] == "threading._active")
        return self._memory.length(active["value"])

    def made_by_launches(self, tree: wire.Tree) -> bool:
        """Whether launches wrote most of an output."""
        assert self.server is not None
        shares, server = [], self.server

        def look(record: dict[str, Any]) -> torch.Tensor:
            dtype, shape, strides, _ = wire.layout(record)
            address = self.arena.address + record["offset"]
            shares.append(server.made_by_launches(address, shape, strides, dtype.itemsize))
            return torch.empty(0)

        wire.from_tree(tree, look)
        return all(share >= LEAST_MADE for share in shares)

    def _inputs_are_unchanged(self, placed: Placed, said: dict[str, Any]) -> bool:
        if self.server is not None or "output" not in said:
            return placed.is_unchanged()
        try:
            now = wire.from_tree(self.ask("inputs")["output"], self._tensor)
            before = wire.from_tree(placed.tree, self._tensor)
        except (Ended, wire.Refused):
            return False
        written = {id(tensor) for tensor in self._written(before)}
        pairs = zip(tensors_in(now), tensors_in(before), strict=True)
        return all(id(old) in written or _same_bytes(new, old) for new, old in pairs)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    content, expected = (
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy() for tensor in (one, other)
    )
    return bool(np.array_equal(content, expected))


_host: Host


def start(settings: Settings) -> None:
    """Initializes the process."""
    global _host
    torch.set_num_threads(1)  # a fork of a process with a pool of OpenMP threads waits for them forever
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid == os.getppid():
        contain.die_with(os.getppid())
    _host = Host(settings)
    multiprocessing.util.Finalize(None, _host.close, exitpriority=100)


def emulated_process(arch: str, stack: ExitStack, *, modelled: bool = False):
    """Makes a virtual GPU the GPU of this process until ``stack`` is closed. ``modelled``: model the time of its launches."""
    from nvfp4_cute.emulator.fronts.script import answers
    from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu
    from nvfp4_cute.timing.clock import Clock

    gpu = VirtualGpu(arch, timing=Clock(constants_of(DEFAULT_TARGETS[arch])) if modelled else None)
    stack.enter_context(answers(gpu))
    stack.enter_context(gpu)
    return gpu


# ---- requests ----------------------------------------------------------------------------------------


def answer_each(inputs: list[bytes]) -> Answer:
    """Makes one call on a copy of each input."""
    answer = Answer()
    for index, packed in enumerate(inputs):
        output, _ = _host.call(_host.place(packed), answer)
        answer.add(index, pack(output))
    return answer


def answer_strictly(inputs: list[bytes], order: list[int]) -> Answer:
    """Makes calls in a given order, each input at the addresses of the previous one, with C poisoned; then again on fresh copies.

    The first pass defeats answers that are remembered by address, by shape, or by number of calls: the data at an
    address change from call to call, and the next input does not exist yet while a call runs. The second pass keeps
    every output until all calls are over and reads it twice.
    """
    answer = Answer()
    memory = _host.place(inputs[order[0]])
    for count, index in enumerate(order):
        memory.rewrite(_host.place(inputs[index]))
        memory.poison()
        output, _ = _host.call(memory, answer, same=count > 0)
        answer.add(index, pack(output))
    places = [_host.place(packed) for packed in inputs]
    for number, placed in enumerate(places):
        placed.poison()
        output, _ = _host.call(placed, answer, number=number)
        answer.add(number, pack(output))
    if answer.faults:
        return answer
    for number, at_once in enumerate(answer.outputs[-len(inputs) :]):
        try:
            later = _host.read(_host.ask("look", number=number)["output"], answer)
        except Ended as ended:
            answer.fault(str(ended))
            break
        if pack(later) != at_once:
            answer.fault(f"output {number} changed after its call: outputs share memory, or work went on")
    with contextlib.suppress(Ended):
        _host.ask("forget")
    return answer


def time_calls(inputs: list[bytes], max_repeats: int, max_seconds: float, keep_outputs: bool) -> Answer:
    """Times one call on each input, back to back after one clear of L2; a duration is their mean.

    Stops when the standard error is below 0.1 % of the mean, after ``max_seconds`` of kernel time, or after two
    minutes.

    Args:
        keep_outputs: whether to return the outputs of every timing, or none.
    """
    answer = Answer(source="measured")
    places = [_host.place(packed) for packed in inputs]
    began = time.perf_counter()
    _, said = _host.request(
        answer,
        "time",
        data=[placed.tree for placed in places],
        max_repeats=max_repeats,
        max_seconds=max_seconds,
        keep_outputs=keep_outputs,
    )
    elapsed_ns = 1e9 * (time.perf_counter() - began)
    answer.durations_ns = _durations(said)
    if sum(answer.durations_ns) * len(inputs) > elapsed_ns:
        answer.fault("the times that the submission's process reports are longer than the whole request took")
    for number, tree in enumerate(said.get("outputs", [])):
        answer.add(number % len(inputs), pack(_host.read(tree, answer)))
    if not answer.durations_ns:
        answer.fault("the submission's process reports no times")
    return answer


def time_single_calls(inputs: list[bytes]) -> Answer:
    """Times a single call of each input, with C poisoned and L2 cleared. It reveals costs that back-to-back timing hides."""
    answer = Answer(source="measured")
    for index, packed in enumerate(inputs):
        placed = _host.place(packed)
        placed.poison()
        output, said = _host.request(answer, "time_single", data=placed.tree)
        answer.durations_ns += _durations(said)
        answer.add(index, pack(output))
    return answer


def time_fresh_calls(inputs: list[bytes], order: list[int], warm_ups: int) -> Answer:
    """Times single calls on copies of inputs, with L2 cleared before each. Returns durations and every distinct output.

    Args:
        order: the input of every call: a submission that remembers one answer gives it to another input as well.
        warm_ups: number of first calls, which are not timed.
    """
    answer, timed = Answer(source="measured"), order[warm_ups:]
    places, threads = [_host.place(packed) for packed in inputs], _host.threads()
    began = time.perf_counter()
    _, said = _host.request(
        answer, "time_fresh", data=[placed.tree for placed in places], order=order, warm_ups=warm_ups
    )
    elapsed_ns = 1e9 * (time.perf_counter() - began)
    if _host.threads() > threads:
        answer.fault("threads were started after the first call; what they do is not timed")
    answer.durations_ns = _durations(said)
    if sum(answer.durations_ns) > elapsed_ns:
        answer.fault("the times that the submission's process reports are longer than the whole request took")
    trees = said.get("outputs")
    outputs = [pack(_host.read(tree, answer)) for tree in (trees if isinstance(trees, list) else [])]
    if not answer.faults and not len(answer.durations_ns) == len(outputs) == len(timed):
        answer.fault(
            f"{len(timed)} timed calls gave {len(answer.durations_ns)} times and {len(outputs)} outputs"
        )
    for index, output in dict.fromkeys(zip(timed, outputs, strict=False)):
        answer.add(index, output)
    return answer


def _durations(said: dict[str, Any]) -> list[float]:
    """Returns the valid durations that a submission's process reports."""
    found = said.get("durations")
    numbers = found if isinstance(found, list) else []
    return [float(n) for n in numbers if isinstance(n, int | float) and 0 < n < 1e15]


def model_calls(inputs: list[bytes]) -> Answer:
    """Makes one call on a copy of each input on a virtual GPU. Its modelled time is the sum of its kernels' times.

    The time includes neither their launch, gaps between them, nor torch's own kernels; L2 is cold at each launch. A
    call has no time unless launches wrote most of its output.
    """
    assert _host.server is not None
    gpu = _host.server.gpu
    answer = Answer(source="modelled")
    for index, packed in enumerate(inputs):
        before = len(gpu.timings)
        placed = _host.place(packed)  # C may be the output, and is read below
        output, said = _host.call(placed, answer)
        answer.add(index, pack(output))
        timings = gpu.timings[before:]
        if timings and output is not None and _host.made_by_launches(said["output"]):
            answer.durations_ns.append(sum(timing.us for timing in timings) * 1e3)
    return answer


def profile_call(packed: bytes) -> Answer:
    """Makes one call inside an NVTX range ``custom_kernel``, for a profiler that watches the submission's process.

    On a virtual GPU there is no profiler; its model reports where the time of every launch goes.
    """
    answer = Answer()
    server = _host.server
    before = len(server.gpu.timings) if server else 0
    output, _ = _host.call(_host.place(packed), answer, "call" if server else "profile")
    if server:
        answer.report = "\n".join([*(timing.report() for timing in server.gpu.timings[before:]), MODEL_ERROR])
    answer.add(0, pack(output))
    return answer


# ---- data --------------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """Packs nested tensors as bytes, with their strides."""
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """Inverts :func:`pack`, on the CPU."""
    return torch.load(BytesIO(packed), weights_only=True)
