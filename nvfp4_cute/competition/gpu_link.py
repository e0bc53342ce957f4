"""A virtual GPU in a different process from the submission that uses it.

The submission's process compiles kernels and requests launches. The judge's process executes them on memory that both
share, models their times and keeps the record. Code in the submission's process cannot undo a launch or change its
time.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from nvfp4_cute.competition.wire import Arena, Refused, printable
from nvfp4_cute.emulator.fronts.driver import COOPERATIVE, PROGRAMMATIC, param_buffer
from nvfp4_cute.emulator.fronts.virtual_gpu import VirtualGpu
from nvfp4_cute.emulator.ptx import parse
from nvfp4_cute.emulator.state import Launch
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.gpus.timing_figures import DEFAULT_TARGETS, constants_of

Ask = Callable[[dict[str, Any], bytes], dict[str, Any]]


class LinkedGpu(VirtualGpu):
    """The GPU that a submission sees. Its memory lies in an arena; its launches run in the judge's process."""

    def __init__(self, arch: str, arena: Arena, ask: Ask):
        """`ask`: sends a message with bytes to the judge's process and returns the answer."""
        super().__init__(arch)
        self._arena, self._ask = arena, ask
        self._numbers: dict[int, int] = {}

    def register(self, ptx: str, cubin: bytes | None = None) -> tuple[str, ...]:
        """Registers kernels on both sides."""
        names = super().register(ptx, cubin)
        text = ptx.encode()
        answer = self._tell({"do": "register", "text": len(text)}, text + (cubin or b""))
        self._numbers |= {id(entry): answer["number"] for entry in parse(ptx).entries.values()}
        return names

    def new_bytes(self, nbytes: int) -> np.ndarray:
        """Returns memory that both sides see."""
        return self._arena.allocate(nbytes)

    def new_stream(self) -> int:
        """Returns a number for a stream, and tells the other side that it was made."""
        self._tell({"do": "queue", "name": "torch.cuda.Stream"})
        return super().new_stream()

    def _run_now(self, launch: Launch) -> None:
        entry = launch.code.entry
        ranges = [found for found in self.live_memory() if self._arena.holds(found[1], found[2])]
        message = {
            "do": "launch",
            "number": self._numbers[id(entry)],
            "entry": entry.name,
            "grid": launch.grid,
            "block": launch.block,
            "cluster": launch.cluster if launch.explicit_cluster else (0, 0, 0),
            "shared_bytes": launch.smem_bytes,
            "attributes": COOPERATIVE * launch.cooperative | PROGRAMMATIC * launch.programmatic,
            "ranges": ranges,
        }
        self._tell(message, launch.params.tobytes())

    def _tell(self, message: dict[str, Any], attached: bytes = b"") -> dict[str, Any]:
        answer = self._ask(message, attached)
        if "error" in answer:
            raise EmulatorError(answer["error"])
        return answer


class GpuServer:
    """The virtual GPU itself, in the judge's process.

    Attributes:
        gpu: executes launches; its `timings` are those that count.
        queues: origins of the submission's own queues.
        failure: message of the last failed launch.
        operands: addresses of inputs, on which launches need not be watched, because the judge compares them.
    """

    def __init__(self, arch: str, arena: Arena, *, modelled: bool):
        """`modelled`: model the time of every launch."""
        clock = None
        if modelled:
            from nvfp4_cute.timing.clock import Clock

            clock = Clock(constants_of(DEFAULT_TARGETS[arch]))
        self.gpu = VirtualGpu(arch, timing=clock)
        self.gpu.memory_sources.append(lambda: self._ranges)
        self.queues: list[str] = []
        self.failure = ""
        self.operands: set[int] = set()
        self._written: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._arena = arena
        self._programs: dict[int, Any] = {}
        self._next = itertools.count()
        self._ranges: list[tuple[str, int, int]] = []

    def answer(self, message: dict[str, Any], attached: bytes) -> dict[str, Any]:
        """Executes the request of a message. Errors become part of the answer."""
        actions = {"register": self._register, "launch": self._launch, "queue": self._queue}
        try:
            return actions[message["do"]](message, attached)
        except Exception as error:
            self.failure = printable(f"{type(error).__name__}: {error}")
            return {"error": self.failure}

    def take_failure(self) -> str:
        """Returns the failure of a launch, once."""
        failure, self.failure = self.failure, ""
        return failure

    def _register(self, message: dict[str, Any], attached: bytes) -> dict[str, Any]:
        text = attached[: message["text"]].decode()
        self.gpu.register(text, attached[message["text"] :] or None)
        number = next(self._next)
        self._programs[number] = parse(text)
        return {"number": number}

    def _queue(self, message: dict[str, Any], attached: bytes) -> dict[str, Any]:
        self.queues.append(printable(message["name"], 80))
        return {}

    def _launch(self, message: dict[str, Any], attached: bytes) -> dict[str, Any]:
        program, gpu = self._programs[message["number"]], self.gpu
        code = gpu.code_of(program, message["entry"])
        params = param_buffer(code.entry.param_bytes)
        if len(attached) != len(params):
            raise Refused(f"{len(attached)} bytes of parameters; the kernel takes {len(params)}")
        params[:] = np.frombuffer(attached, np.uint8)
        grid, block, cluster = ([int(n) for n in message[name]] for name in ("grid", "block", "cluster"))
        shared_bytes, attributes = int(message["shared_bytes"]), int(message["attributes"])
        launch = gpu.launch_of(code, grid, block, cluster, shared_bytes, params, attributes)
        ranges = [(printable(name, 200), int(at), int(nbytes)) for name, at, nbytes in message["ranges"]]
        # The machine accesses declared memory, and this process has no other memory at these addresses.
        if not all(self._arena.holds(at, nbytes) for _, at, nbytes in ranges):
            raise Refused("a launch with memory outside the shared one")
        self._ranges = ranges or [("no memory", self._arena.address, 1)]
        before = {at: self._bytes(at, nbytes) for _, at, nbytes in ranges if at not in self.operands}
        gpu.run(launch)
        self._note_writes(before)
        return {}

    def _bytes(self, address: int, nbytes: int) -> np.ndarray:
        return self._arena.view(address - self._arena.address, nbytes).copy()

    def _note_writes(self, before: dict[int, np.ndarray]) -> None:
        """Notes which bytes launches wrote. Bytes that the host changed between launches no longer count."""
        written = {}
        for address, old in before.items():
            made, last = self._written.get(address, (None, None))
            if made is None or last is None or made.size != old.size:
                made = np.zeros(old.size, bool)
            else:
                made = made & (last == old)
            now = self._bytes(address, old.size)
            written[address] = made | (now != old), now
        self._written = written

    def made_by_launches(
        self, address: int, shape: Sequence[int], strides: Sequence[int], item: int
    ) -> float:
        """Returns the share of a tensor's elements that a launch wrote last; 0 for memory that launches did not see.

        Args:
            address: address of its first element.
            strides: strides in elements.
            item: bytes per element.
        """
        if not all(shape):
            return 1.0
        span = item * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
        for start, (made, last) in self._written.items():
            at = address - start
            if 0 <= at and at + span <= made.size:
                now = self._arena.view(address - self._arena.address, span)
                kept = made[at : at + span] & (last[at : at + span] == now)
                steps = [*(s * item for s in strides), 1]
                return float(as_strided(kept, [*shape, item], steps).any(-1).mean())
        return 0.0
