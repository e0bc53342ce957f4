"""The judge of a solution: makes inputs, computes references, compares answers, and writes one line of JSON per workload.

The solution runs in a separate process (`player`), which a second process (`worker`) starts and queries, as in a
competition. Lines go to the descriptor that POPCORN_FD names as soon as they are known.
"""

import gc
import importlib.util
import json
import multiprocessing
import os
import random
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from nvfp4_cute import env
from nvfp4_cute.competition import player, protocol, worker
from nvfp4_cute.competition.player import bits
from nvfp4_cute.competition.protocol import EMULATED_ARCH
from nvfp4_cute.competition.trace.inputs import make_inputs
from nvfp4_cute.competition.trace.matching import RULES, Errors, Rules
from nvfp4_cute.competition.trace.score import floor, score
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
STATUS_OF = {worker.LOADING: COMPILE_ERROR, worker.RAISED: RUNTIME_ERROR, worker.CHEATED: CHEATS}
"""Kind of fault -> status of a workload."""


@dataclass(frozen=True)
class Settings:
    """Options of a run.

    Attributes:
        folder: folder of definition.json and workload.jsonl, for the files that workloads read.
        solution: a solution's file; None means the folder's.
        place: folder with the solution's sources; the solution may write there.
        device: "cuda", "emulator", or "cpu".
        rules: a name of ``matching.RULES``.
        rounds: inputs per workload.
        timed: whether to time a right workload.
        workload: number of the only workload to run, from 0.
    """

    folder: str
    solution: str | None
    place: str
    device: str
    rules: str
    rounds: int
    timed: bool
    workload: int | None = None


@dataclass(frozen=True)
class Result:
    """Result of one workload: a status of the schema, and the known figures. Times in microseconds.

    Attributes:
        us: time of the solution: the median of ``ITERATIONS`` calls on a GPU with a cold L2, or modelled.
        source: "measured", "modelled", or "not timed".
        base_us: time of the reference, measured in the same way; None if it was not.
        sol_us, bound: the least possible time on the GPU, and its deciding term.
        score: SOL-ExecBench's score, with the reference as its baseline.
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
    """Raised for a workload that does not pass, with its status, the reason, and the errors of wrong numbers."""

    def __init__(self, status: str, message: str, errors: Errors | None = None):
        super().__init__(message)
        self.status, self.errors = status, errors or Errors()


class Session:
    """One solution of one definition.

    Args:
        pool: the process that starts the solution's process.
    """

    def __init__(self, settings: Settings, definition: Definition, solution: Solution, pool: Executor):
        self.settings, self.definition, self.solution, self.pool = settings, definition, solution, pool
        self.rules: Rules = RULES[settings.rules]
        self.reference = _module_of(definition.reference)

    @property
    def home(self) -> torch.device:
        """Device on which inputs and references are computed: the GPU, or the CPU for the emulator."""
        return torch.device("cuda" if self.settings.device == "cuda" else "cpu")

    # ---- one workload ----------------------------------------------------------------------------
    def run(self, workload: Workload) -> Result:
        """Judges and times one workload."""
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
        worst, flops = Errors(max_absolute=0.0, max_relative=0.0, matched=1.0), 0
        inputs, kept = list[Any](), list[tuple[bytes, list[torch.Tensor]]]()
        for _ in range(self.settings.rounds):
            inputs = self._inputs(workload)
            right, flops = self._reference(inputs, flops)
            kept = [*kept[-1:], (self._packed(inputs, sizes), right)]
            answer = self._ask(worker.answer_each, [kept[-1][0]])
            worst = _worse(worst, self._judged(answer, [right], workload))
        found = Result(workload.name, PASSED, "", worst.max_absolute, worst.max_relative, worst.matched)
        if not self.settings.timed or self.settings.device == "cpu":
            return found
        return self._timed(found, workload, inputs, kept, sizes, flops)

    def _inputs(self, workload: Workload) -> list[Any]:
        generate = getattr(self.reference, self.definition.generator or "", None)
        try:
            return make_inputs(self.definition, workload, Path(self.settings.folder), self.home, generate)
        except Exception as error:
            raise Refused(RUNTIME_ERROR, f"inputs: {type(error).__name__}: {error}") from None

    def _reference(self, inputs: list[Any], known_flops: int) -> tuple[list[torch.Tensor], int]:
        """Returns the right outputs, and the operations of the products in them."""
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                result = self.reference.run(*inputs)
        except Exception as error:
            raise Refused(
                BAD_REFERENCE, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            ) from None
        if isinstance(result, Mapping):
            result = [result[name] for name in self.definition.outputs]
        return self._as_list(result), max(known_flops, counter.get_total_flops())

    def _packed(self, inputs: list[Any], sizes: Mapping[str, int]) -> bytes:
        """Returns the arguments of the solution: inputs, and the outputs if the solution writes them."""
        outputs = self._new_outputs(sizes) if self.solution.writes_outputs else []
        on_cpu = [value.cpu() if isinstance(value, torch.Tensor) else value for value in inputs]
        return worker.pack((*on_cpu, *outputs))

    def _new_outputs(self, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Returns outputs to write, with every byte 0xFF, so that unwritten parts show."""
        made = []
        for spec in self.definition.outputs.values():
            tensor = torch.empty(self.definition.shape(spec, sizes), dtype=DTYPES[spec.dtype])
            tensor.view(torch.uint8).fill_(255) if tensor.dim() else tensor.fill_(1)
            made.append(tensor)
        return made

    # ---- answers ---------------------------------------------------------------------------------
    def _ask(self, request: Callable[..., worker.Answer], *args: Any) -> worker.Answer:
        """Returns an answer without faults.

        Raises:
            Refused: the answer has faults.
        """
        answer = self.pool.submit(request, *args).result()
        if answer.faults:
            raise Refused(STATUS_OF[answer.kind], "; ".join(answer.faults))
        return answer

    def _judged(self, answer: worker.Answer, rights: list[list[torch.Tensor]], workload: Workload) -> Errors:
        """Returns the largest errors of the outputs of an answer.

        Args:
            rights: right outputs of every input.

        Raises:
            Refused: an output is wrong.
        """
        worst = Errors(max_absolute=0.0, max_relative=0.0, matched=1.0)
        for index, packed in zip(answer.indices, answer.outputs, strict=True):
            outputs = self._as_list(worker.unpack(packed))
            for name, output, expected in zip(self.definition.outputs, outputs, rights[index], strict=True):
                _check_kind(name, output, expected)
                errors = self.rules.judge(
                    output.to(self.home), expected, workload.tolerance, self.definition.name
                )
                if errors.message:
                    raise Refused(WRONG_NUMBERS, f"{name}: {errors.message}", errors)
                worst = _worse(worst, errors)
        return worst

    def _as_list(self, result: Any) -> list[torch.Tensor]:
        """Returns outputs in the order of the definition; numbers become tensors."""
        outputs = self.definition.outputs
        values: Sequence[Any] = result if isinstance(result, list | tuple) else [result]
        if len(values) != len(outputs):
            raise Refused(RUNTIME_ERROR, f"{len(values)} outputs; the definition has {len(outputs)}")
        found = []
        for value, (name, spec) in zip(values, outputs.items(), strict=True):
            if isinstance(value, bool | int | float):
                value = torch.tensor(value, dtype=DTYPES[spec.dtype])
            if not isinstance(value, torch.Tensor):
                raise Refused(RUNTIME_ERROR, f"{name} is a {type(value).__name__}, not a tensor")
            found.append(value)
        return found

    # ---- times -----------------------------------------------------------------------------------
    def _timed(
        self,
        found: Result,
        workload: Workload,
        inputs: list[Any],
        kept: list[tuple[bytes, list[torch.Tensor]]],
        sizes: Mapping[str, int],
        flops: int,
    ) -> Result:
        """Returns a result with times, after a check of every output of the timed calls.

        Args:
            inputs: the input of the last round.
            kept: packed inputs and right outputs of the last two rounds, or of the only one.
        """
        fields: dict[str, Any] = {}
        packed, rights = [one for one, _ in kept], [right for _, right in kept]
        if self.settings.device == "emulator":
            target: Target | None = DEFAULT_TARGETS[EMULATED_ARCH]
            answer = self._ask(worker.model_calls, packed[-1:])
            rights = rights[-1:]
            if answer.durations_ns:
                fields = {"us": answer.durations_ns[0] / 1e3, "source": "modelled"}
        else:
            target = targets.detect("cuda")
            order = random.SystemRandom().choices(range(len(packed)), k=WARM_UPS + ITERATIONS)
            answer = self._ask(worker.time_fresh_calls, packed, order, WARM_UPS)
            fields = {
                "us": statistics.median(answer.durations_ns) / 1e3,
                "source": "measured",
                "base_us": self._reference_us(inputs),
            }
        self._judged(answer, rights, workload)
        if target is not None:
            least = floor(self.definition, sizes, flops, target)
            fields |= {"sol_us": least.us, "bound": least.bound}
            if "base_us" in fields:
                fields["score"] = score(fields["us"], fields["base_us"], least.us)
        return Result(**{**asdict(found), **fields})

    def _reference_us(self, inputs: list[Any]) -> float:
        """Returns the median time of one call of the reference between two events.

        L2 is cleared and tensors are copied before each.
        """
        clear = torch.empty(L2_CLEAR_BYTES, dtype=torch.int8, device="cuda")
        events = []
        for number in range(WARM_UPS + ITERATIONS):
            fresh = [_copy(value) for value in inputs]
            clear.zero_()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            self.reference.run(*fresh)
            pair[1].record()
            if number >= WARM_UPS:
                events.append(pair)
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def _module_of(reference: str) -> ModuleType:
    """Returns a definition's reference as a module of a file in the working directory, since some decorators read sources."""
    path = Path(REFERENCE_FILE).resolve()
    path.write_text(reference, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_kind(name: str, output: torch.Tensor, expected: torch.Tensor) -> None:
    if output.shape != expected.shape:
        raise Refused(WRONG_SHAPE, f"{name} is {tuple(output.shape)}, not {tuple(expected.shape)}")
    if output.dtype != expected.dtype:
        raise Refused(WRONG_DTYPE, f"{name} is {output.dtype}, not {expected.dtype}")


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


def entry_of(definition: Definition, solution: Solution) -> player.Entry:
    """Returns how to call a solution's function."""
    return player.Entry(
        solution.entry_file.removesuffix(".py").replace("/", "."),
        solution.entry_name,
        spread=True,
        written=len(definition.outputs) if solution.writes_outputs else 0,
        outputs=tuple(definition.outputs),
        keeps_inputs=False,
    )


def main(arguments: Sequence[str]) -> int:
    """Runs every workload, and writes one line of JSON for each.

    Args:
        arguments: one element: the settings as JSON.
    """
    descriptor = env.take_popcorn_fd()
    assert descriptor is not None
    os.set_inheritable(descriptor, False)
    settings = Settings(**json.loads(arguments[0]))
    solution_path = Path(settings.solution) if settings.solution else None
    definition, workloads, solution = read_folder(Path(settings.folder), solution_path)
    if settings.workload is not None:
        workloads = [workloads[settings.workload]]
    host = worker.Settings(
        None,
        EMULATED_ARCH if settings.device == "emulator" else None,
        settings.timed,
        L2_CLEAR_BYTES if settings.device == "cuda" else 0,
        strict=True,
        folder=settings.place,
        entry=entry_of(definition, solution),
        on_gpu=settings.device != "cpu",
    )
    # The worker is forked before this process makes threads or a CUDA context, which a fork does not get.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), worker.start, (host,)) as pool:
        pool.submit(os.getpid).result()
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            session = Session(settings, definition, solution, pool)
            for workload in workloads:
                torch.manual_seed(SEED)
                print(json.dumps(asdict(session.run(workload))), file=file, flush=True)
                gc.collect()
    return protocol.OK
