"""The process that runs a solution: ``python -m nvfp4_cute.competition.trace.session SETTINGS DESCRIPTOR``.

The solution's sources lie in the working directory. A line of JSON for every workload goes to the descriptor as soon as it is
known. As in both projects, reference and solution share the process; what times the solution is watched (:class:`Guard`).
"""

import gc
import importlib
import json
import os
import statistics
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from nvfp4_cute.competition.player import bits, record_queues, watched
from nvfp4_cute.competition.protocol import EMULATED_ARCH
from nvfp4_cute.competition.trace import native
from nvfp4_cute.competition.trace.inputs import make_inputs
from nvfp4_cute.competition.trace.matching import RULES, Errors, Rules
from nvfp4_cute.competition.trace.score import floor, score
from nvfp4_cute.competition.worker import emulated_process
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.gpus.timing_figures import DEFAULT_TARGETS
from nvfp4_cute.problems.trace_schema import DTYPES, Definition, Solution, Workload, read_folder

WARM_UPS, ITERATIONS = 10, 50
SEED = 200
L2_CLEAR_BYTES = 2**28
REFERENCE_FILE = "_reference.py"
PASSED, WRONG_SHAPE, WRONG_DTYPE = "PASSED", "INCORRECT_SHAPE", "INCORRECT_DTYPE"
WRONG_NUMBERS, RUNTIME_ERROR, COMPILE_ERROR = "INCORRECT_NUMERICAL", "RUNTIME_ERROR", "COMPILE_ERROR"
BAD_REFERENCE, CHEATS, TIMEOUT = "INVALID_REFERENCE", "REWARD_HACK", "TIMEOUT"


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        folder: of definition.json and workload.jsonl, for the files that workloads read.
        solution: a solution's file; None takes the folder's.
        device: "cuda", "emulator", or "cpu".
        rules: a name of ``matching.RULES``.
        rounds: inputs of every workload.
        timed: whether a workload that is right is timed.
        workload: only this one, counted from 0.
    """

    folder: str
    solution: str | None
    device: str
    rules: str
    rounds: int
    timed: bool
    workload: int | None = None


@dataclass(frozen=True)
class Result:
    """Of one workload: a status of the schema, and with it what is known. Times in microseconds.

    Attributes:
        us: of the solution: the median of ``ITERATIONS`` calls on a GPU with a cold L2, or modelled.
        source: "measured", "modelled", or "not timed".
        base_us: of the reference, measured the same way; None where it was not.
        sol_us, bound: the least possible time on the GPU, and what decides it.
        score: of SOL-ExecBench, with the reference as its baseline.
    """

    name: str
    status: str
    message: str = ""
    max_absolute: float | None = None
    max_relative: float | None = None
    matched: float | None = None
    us: float | None = None
    source: str = "not timed"
    base_us: float | None = None
    sol_us: float | None = None
    bound: str | None = None
    score: float | None = None


class Refused(Exception):
    """A workload that is not passed: its status, what is wrong, and the errors where numbers are wrong."""

    def __init__(self, status: str, message: str, errors: Errors | None = None):
        super().__init__(message)
        self.status, self.errors = status, errors or Errors()


class Guard:
    """Notices in this process that a solution replaced what times it, or made queues of its own."""

    def __init__(self) -> None:
        """Remember what is in place now, before a solution is imported."""
        self._queues: list[str] = []
        record_queues(self._queues.append)
        self._before = [(owner, name, getattr(owner, name)) for owner, name in watched()]

    def faults(self) -> list[str]:
        """What was replaced or made since."""
        replaced = [
            f"replaced {getattr(owner, '__name__', owner)}.{name}, which the harness relies on"
            for owner, name, value in self._before
            if getattr(owner, name) is not value
        ]
        return replaced + [
            f"made a queue of its own ({name}); only the default queue is timed"
            for name in dict.fromkeys(self._queues)
        ]


class Session:
    """One solution of one definition."""

    def __init__(self, settings: Settings, definition: Definition, solution: Solution):
        """Put the virtual GPU in place if one is asked for, load the reference, and remember what must not be replaced."""
        self.settings, self.definition, self.solution = settings, definition, solution
        self.rules: Rules = RULES[settings.rules]
        Path(REFERENCE_FILE).write_text(
            definition.reference, encoding="utf-8"
        )  # a file: some decorators read it
        self.reference = importlib.import_module(Path(REFERENCE_FILE).stem)
        self.stack = ExitStack()
        self.gpu = None
        if settings.device == "emulator":
            self.gpu = emulated_process(EMULATED_ARCH, self.stack, modelled=settings.timed)
        self.guard = Guard()
        self._function: Callable[..., Any] | None = None
        self._threads = 0

    @property
    def home(self) -> torch.device:
        """Where inputs and references are computed: on the GPU, or on the CPU for the emulator."""
        return torch.device("cuda" if self.settings.device == "cuda" else "cpu")

    def function(self) -> Callable[..., Any]:
        """The entry point, imported or built when first asked for."""
        if self._function is None:
            name = self.solution.entry_file.removesuffix(".py").replace("/", ".")
            try:
                if native.is_native(self.solution):
                    self._function = native.build(self.solution, Path.cwd())
                    return self._function
                module: ModuleType = importlib.import_module(name)
                self._function = getattr(module, self.solution.entry_name)
            except Exception as error:
                raise Refused(COMPILE_ERROR, f"{type(error).__name__}: {error}") from None
        return self._function

    # ---- one workload ----------------------------------------------------------------------------
    def run(self, workload: Workload) -> Result:
        """Judge and time one workload."""
        try:
            return self._run(workload)
        except Refused as refused:
            errors = refused.errors
            return Result(
                workload.name,
                refused.status,
                str(refused),
                errors.max_absolute,
                errors.max_relative,
                errors.matched,
            )

    def _run(self, workload: Workload) -> Result:
        sizes = self.definition.sizes(workload.axes)
        worst, flops, inputs = Errors(max_absolute=0.0, max_relative=0.0, matched=1.0), 0, []
        for number in range(self.settings.rounds):
            inputs = self._inputs(workload)
            right, flops = self._reference(inputs, flops)
            outputs = self._call(inputs, sizes, first=number == 0)
            if number == 0:
                self._look_at(outputs, right)
            for name, output, expected in zip(self.definition.outputs, outputs, right, strict=True):
                errors = self.rules.judge(
                    output.to(self.home), expected, workload.tolerance, self.definition.name
                )
                if errors.message:
                    raise Refused(WRONG_NUMBERS, f"{name}: {errors.message}", errors)
                worst = _worse(worst, errors)
        found = Result(workload.name, PASSED, "", worst.max_absolute, worst.max_relative, worst.matched)
        return self._timed(found, inputs, sizes, flops) if self.settings.timed else found

    def _inputs(self, workload: Workload) -> list[Any]:
        generate = getattr(self.reference, self.definition.generator or "", None)
        try:
            return make_inputs(self.definition, workload, Path(self.settings.folder), self.home, generate)
        except Exception as error:
            raise Refused(RUNTIME_ERROR, f"inputs: {type(error).__name__}: {error}") from None

    def _reference(self, inputs: list[Any], known_flops: int) -> tuple[list[torch.Tensor], int]:
        """The right outputs, and the operations of the products in them."""
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                result = self.reference.run(*inputs)
        except Exception as error:
            raise Refused(
                BAD_REFERENCE, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            ) from None
        return self._as_list(result), max(known_flops, counter.get_total_flops())

    def _as_list(self, result: Any) -> list[torch.Tensor]:
        """Outputs in the order of the definition; numbers become tensors."""
        outputs = self.definition.outputs
        if isinstance(result, Mapping):
            result = [result[name] for name in outputs]
        values = list(result) if isinstance(result, list | tuple) else [result]
        if len(values) != len(outputs):
            raise Refused(RUNTIME_ERROR, f"{len(values)} outputs; the definition has {len(outputs)}")
        return [
            value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=DTYPES[spec.dtype])
            for value, spec in zip(values, outputs.values(), strict=True)
        ]

    def _new_outputs(self, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Outputs to write, every byte 0xFF: what is not written shows."""
        made = []
        for spec in self.definition.outputs.values():
            tensor = torch.empty(self.definition.shape(spec, sizes), dtype=DTYPES[spec.dtype])
            tensor.view(torch.uint8).fill_(255) if tensor.dim() else tensor.fill_(1)
            made.append(self._sent(tensor))
        return made

    def _sent(self, value: Any) -> Any:
        """A tensor where the solution runs."""
        if not isinstance(value, torch.Tensor) or self.settings.device == "cpu":
            return value
        return value.cuda()

    def _call(self, inputs: list[Any], sizes: Mapping[str, int], *, first: bool) -> list[torch.Tensor]:
        function = self.function()
        arguments = [self._sent(value) for value in inputs]
        outputs = self._new_outputs(sizes) if self.solution.writes_outputs else []
        try:
            with torch.no_grad():
                result = function(*arguments, *outputs)
            self._wait()
        except Exception as error:
            error = (self.gpu and self.gpu.take_failure()) or error
            raise Refused(
                RUNTIME_ERROR, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            ) from None
        if first:
            self._threads = threading.active_count()
        for fault in self.guard.faults():
            raise Refused(CHEATS, fault)
        return outputs if self.solution.writes_outputs else self._as_list(result)

    def _look_at(self, outputs: list[torch.Tensor], right: list[torch.Tensor]) -> None:
        for name, output, expected in zip(self.definition.outputs, outputs, right, strict=True):
            if type(output) is not torch.Tensor:
                raise Refused(CHEATS, f"{name} is a {type(output).__name__}, not a plain tensor")
            if output.shape != expected.shape:
                raise Refused(WRONG_SHAPE, f"{name} is {tuple(output.shape)}, not {tuple(expected.shape)}")
            if output.dtype != expected.dtype:
                raise Refused(WRONG_DTYPE, f"{name} is {output.dtype}, not {expected.dtype}")

    def _wait(self) -> None:
        if self.settings.device != "cpu":
            torch.cuda.synchronize()

    # ---- times -----------------------------------------------------------------------------------
    def _timed(self, found: Result, inputs: list[Any], sizes: Mapping[str, int], flops: int) -> Result:
        function = self.function()
        fields: dict[str, Any] = {}
        if self.settings.device == "emulator":
            assert self.gpu is not None
            target: Target | None = DEFAULT_TARGETS[EMULATED_ARCH]
            before = len(self.gpu.timings)
            self._call(inputs, sizes, first=False)
            timings = self.gpu.timings[before:]
            if timings:
                fields = {"us": sum(timing.us for timing in timings), "source": "modelled"}
        elif self.settings.device == "cuda":
            target = targets.detect("cuda")
            outputs = self._new_outputs(sizes) if self.solution.writes_outputs else []
            fields = {
                "us": self._median_us(function, [*inputs, *outputs]),
                "source": "measured",
                "base_us": self._median_us(self.reference.run, inputs),
            }
            if threading.active_count() > self._threads:
                raise Refused(CHEATS, "threads were started after the first call; what they do is not timed")
        else:
            return found
        if target is not None:
            least = floor(self.definition, sizes, flops, target)
            fields |= {"sol_us": least.us, "bound": least.bound}
            if "base_us" in fields:
                fields["score"] = score(fields["us"], fields["base_us"], least.us)
        return Result(**{**asdict(found), **fields})

    def _median_us(self, function: Callable[..., Any], arguments: list[Any]) -> float:
        """Median time of one call between two events, L2 cleared before it, tensors at new addresses in every call."""
        clear = torch.empty(L2_CLEAR_BYTES, dtype=torch.int8, device="cuda")
        events = []
        for number in range(WARM_UPS + ITERATIONS):
            fresh = [_copy(value) for value in arguments]
            clear.zero_()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            function(*fresh)
            pair[1].record()
            if number >= WARM_UPS:
                events.append(pair)
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fresh = torch.empty_like(value)
    bits(fresh).copy_(bits(value))
    return fresh


def _worse(one: Errors, other: Errors) -> Errors:
    pairs = ((one.max_absolute, other.max_absolute), (one.max_relative, other.max_relative))
    absolute, relative = (max(a or 0.0, b or 0.0) for a, b in pairs)
    return Errors("", absolute, relative, min(one.matched or 0.0, other.matched or 0.0))


def main(settings_json: str, descriptor: int) -> None:
    """Run every workload, a line of JSON each."""
    settings = Settings(**json.loads(settings_json))
    solution_path = Path(settings.solution) if settings.solution else None
    definition, workloads, solution = read_folder(Path(settings.folder), solution_path)
    if settings.workload is not None:
        workloads = [workloads[settings.workload]]
    sys.path.insert(0, os.getcwd())
    session = Session(settings, definition, solution)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        for workload in workloads:
            torch.manual_seed(SEED)
            print(json.dumps(asdict(session.run(workload))), file=file, flush=True)
            gc.collect()
    session.stack.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
