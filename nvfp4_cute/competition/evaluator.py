"""Our harness: the program that a runner calls as ``eval.py MODE CASES``, here preceded by the problem's name.

This process makes inputs and references, and judges answers. A second process (``worker``) starts a third one for the
submission (``player``), places inputs in memory that the two share, and reads the answers. The harness is stricter than
the official ones: it checks every output instead of the last one of a timing, and an exit code of 0 means that
everything was accepted, even in leaderboard mode.
"""

import argparse
import base64
import dataclasses
import multiprocessing
import os
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TextIO

from nvfp4_cute import env
from nvfp4_cute.competition import protocol, worker
from nvfp4_cute.competition.protocol import Stats
from nvfp4_cute.competition.wire import printable
from nvfp4_cute.problems import registry
from nvfp4_cute.problems.registry import Problem
from nvfp4_cute.roofline.speed_of_light import competition_us

# Inputs per case in strict mode, and calls per input.
STRICT_INPUTS = 3
STRICT_CALLS = 2
# Least possible share of the published speed of light, which assumes 96 % of a B200's bandwidth.
POSSIBLE = 0.9
# Characters of a value that a log stores.
MOST_SHOWN = 1 << 20
# Seed of the order of strict calls.
ORDER_SEED = 7


class Log:
    """Writes ``key: value`` lines to the descriptor that the runner reads."""

    def __init__(self, file: TextIO):
        """`file`: open for writing."""
        self.file = file

    def __call__(self, key: str, value: Any) -> None:
        """Writes a line at once. Further lines of a value are indented, so that none looks like a key."""
        text = "\n ".join(printable(value, MOST_SHOWN).splitlines())
        print(f"{key}: {text}", file=self.file, flush=True)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict on one case: what is wrong with it, if anything, and its times."""

    message: str = ""
    stats: Stats | None = None
    source: str = "not timed"
    report: str = ""


class Harness:
    """Runs one mode over the cases of one problem.

    Args:
        problem: the problem.
        pool: the process that starts the submission's.
        strict: whether to look for answers that are not computed.
        modelled: whether the submission runs on a virtual GPU with modelled times; one call gives them.
        num_inputs: inputs of a timing.
    """

    def __init__(self, problem: Problem, pool: Any, *, strict: bool, modelled: bool, num_inputs: int):
        self.problem, self.pool = problem, pool
        self.strict, self.modelled, self.num_inputs = strict, modelled, num_inputs
        # By identity of the inputs, which are kept alive so that the identity stays theirs.
        self._known: dict[int, tuple[Any, Any]] = {}

    # ---- modes ---------------------------------------------------------------------------------
    def run(self, mode: str, cases: Sequence[tuple[str, Any]], log: Log) -> int:
        """Runs a mode over (spec, case) pairs. Returns the exit code."""
        rules = self.problem.harness
        if mode == "test":
            return self._all(cases, log, "test", self.test)
        if mode == "profile":
            return self._all(cases, log, "benchmark", self.profile)
        if mode == "benchmark":
            if not self.modelled:
                self.benchmark(cases[0][1], rules.benchmark_repeats, 0.1, recheck=False)
            return self._all(
                cases,
                log,
                "benchmark",
                lambda case: self.benchmark(
                    case, rules.benchmark_repeats, rules.benchmark_s, recheck=self.strict
                ),
            )
        if not self.modelled:
            for _, case in cases if rules.warms_all else cases[:1]:
                self.benchmark(case, rules.warm_repeats, rules.warm_s, recheck=False)
        return self._all(
            cases,
            log,
            "benchmark",
            lambda case: self.benchmark(case, rules.ranked_repeats, rules.ranked_s, recheck=True),
            stops=True,
        )

    def _all(
        self, cases: Sequence[tuple[str, Any]], log: Log, kind: str, judge: Any, stops: bool = False
    ) -> int:
        passed = True
        log(f"{kind}-count", len(cases))
        for index, (spec, case) in enumerate(cases):
            prefix = f"{kind}.{index}."
            log(prefix + "spec", spec)
            self._known.clear()
            verdict = judge(case)
            if verdict.stats:
                for name in protocol.STATISTICS:
                    log(prefix + name, getattr(verdict.stats, name))
            log(prefix + "source", verdict.source)
            log(prefix + "status", "fail" if verdict.message else "pass")
            if verdict.message:
                log(prefix + "error", verdict.message)
                passed = False
            elif kind == "benchmark" and verdict.report:
                log(prefix + "report", base64.b64encode(verdict.report.encode(), b"+*").decode())
            if stops and not passed:
                break
        log("check", "pass" if passed else "fail")
        return protocol.OK if passed else protocol.REJECTED

    # ---- cases ---------------------------------------------------------------------------------
    def test(self, case: Any) -> Verdict:
        """Makes one call, or in strict mode several calls on inputs with other seeds."""
        if self.strict:
            return Verdict(self._strict_fault(case))
        data = self._data(case, [case.seed])
        return Verdict(self._fault(data, self._ask(worker.answer_each, _packed(data))))

    def benchmark(self, case: Any, repeats: int, seconds: float, *, recheck: bool) -> Verdict:
        """Checks every input, then times. ``recheck``: also checks every output of every timing.

        A model times the checked calls themselves, because its times do not vary between repeats.
        """
        rules = self.problem.harness
        data = self._data(case, [case.seed + rules.seed_step * (1 + i) for i in range(self.num_inputs)])
        packed = _packed(data)
        first = self._ask(worker.model_calls if self.modelled else worker.answer_each, packed)
        message = self._fault(data, first)
        if not message and self.strict:
            message = self._strict_fault(case)
        if message:
            return Verdict(message)
        if self.modelled:
            return _verdict(case, first, len(data))
        answer = self._ask(worker.time_calls, packed, repeats, seconds, recheck)
        message = self._fault(data, answer)
        if not message and self.strict:
            message = self._single_call_fault(data, packed, answer)
        return Verdict(message) if message else _verdict(case, answer, 1)

    def profile(self, case: Any) -> Verdict:
        """Makes one call in the range that a profiler looks for. Returns the model's report."""
        data = self._data(case, [case.seed])
        answer = self._ask(worker.profile_call, _packed(data)[0])
        return Verdict(self._fault(data, answer), report=answer.report)

    def _strict_fault(self, case: Any) -> str:
        """Returns what is wrong with answers to several inputs of one shape in shuffled order; empty if nothing."""
        # Seeds that no list of the competition implies.
        data = self._data(case, [protocol.combine_seeds(case.seed, 1009 + i) for i in range(STRICT_INPUTS)])
        order = list(range(STRICT_INPUTS)) * STRICT_CALLS
        random.Random(ORDER_SEED).shuffle(order)
        return self._fault(data, self._ask(worker.answer_strictly, _packed(data), order))

    def _single_call_fault(self, data: list[Any], packed: list[bytes], together: worker.Answer) -> str:
        """Returns a fault if single calls take much longer than calls in a row, because then a row computes something else."""
        single = self._ask(worker.time_single_calls, packed)
        message = self._fault(data, single)
        mean_ns = Stats.of(together.durations_ns).mean
        slowest, fastest = max(single.durations_ns), min(single.durations_ns)
        if not message and slowest > 2 * fastest + 5 * mean_ns:
            times = f"one call took {slowest / 1e3:.1f} us and another {fastest / 1e3:.1f} us"
            message = f"{times}: work of several calls is done in one"
        return message

    # ---- inputs and answers --------------------------------------------------------------------
    def _data(self, case: Any, seeds: Sequence[int]) -> list[Any]:
        return [self.problem.make_inputs(case, seed=seed % (1 << 63)) for seed in seeds]

    def _ask(self, request: Any, *args: Any) -> worker.Answer:
        return self.pool.submit(request, *args).result()

    def _fault(self, data: list[Any], answer: worker.Answer) -> str:
        """Returns the first fault of the answers; empty if there is none."""
        if answer.faults:
            return "; ".join(answer.faults)
        for index, packed in zip(answer.indices, answer.outputs, strict=True):
            try:
                passed, message = self.problem.check(worker.unpack(packed), self._reference(data[index]))
            except (
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:  # for example dtypes that do not support subtraction
                return f"an output that cannot be compared: {type(error).__name__}: {error}"
            if not passed:
                return message
        return ""

    def _reference(self, data: Any) -> Any:
        """Returns the right answer, computed once for every input of a case."""
        if id(data) not in self._known:
            self._known[id(data)] = data, self.problem.reference(data)
        return self._known[id(data)][1]


def _verdict(case: Any, answer: worker.Answer, least: int) -> Verdict:
    """Accepts a case, with times if there are at least `least`, unless no GPU could be that fast."""
    if len(answer.durations_ns) < least:
        return Verdict()
    stats = Stats.of(answer.durations_ns)
    floor_us = POSSIBLE * competition_us(case.work)
    if stats.mean < 1e3 * floor_us:
        return Verdict(
            f"{stats.mean / 1e3:.3f} us on average; moving the operands takes at least {floor_us:.3f} us on a B200"
        )
    return Verdict("", stats, answer.source)


def _packed(data: list[Any]) -> list[bytes]:
    return [worker.pack(one) for one in data]


def read_cases(problem: Problem, path: Path, seed: int | None) -> list[tuple[str, Any]]:
    """Returns (line, case) of a case file, with seeds mixed with the runner's.

    Raises:
        ValueError: a line that is not a case of the problem.
    """
    cases = []
    for line in path.read_text().splitlines():
        arguments = protocol.parse_case(line)
        if seed is not None and "seed" in arguments:
            arguments["seed"] = protocol.combine_seeds(arguments["seed"], seed)
        try:
            cases.append((line, problem.case_type.from_arguments(**arguments)))
        except TypeError as error:
            raise ValueError(f"{line!r} is no case of {problem.name}: {error}") from None
    return cases


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the harness. Returns the exit code of the protocol."""
    parser = argparse.ArgumentParser(prog="nvfp4_cute.competition.evaluator", description=__doc__)
    parser.add_argument("problem", choices=registry.names())
    parser.add_argument("mode", choices=protocol.MODES)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--arch", help="of a virtual GPU to run on; left out: the GPU of the machine")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--inputs", type=int, help="inputs of a timing")
    parser.add_argument("--l2-clear-bytes", type=int)
    parser.add_argument("--folder", help="of submission.py")
    parser.add_argument("--writable", action="append", default=[], help="a folder that it may write to")
    args = parser.parse_args(argv)
    descriptor, seed = env.take_popcorn_fd(), env.take_popcorn_seed()
    if descriptor is None:
        print("POPCORN_FD is not set: there is nowhere to write results to", file=sys.stderr)
        return protocol.NO_DESCRIPTOR
    problem = registry.load(args.problem)
    try:
        cases = read_cases(problem, args.cases, seed)
    except (OSError, ValueError) as error:
        print(f"cannot read {args.cases}: {error}", file=sys.stderr)
        return protocol.BAD_CASES
    virtual = args.arch is not None
    l2_bytes = problem.harness.l2_clear_bytes if args.l2_clear_bytes is None else args.l2_clear_bytes
    modelled = virtual and args.mode != "test"
    settings = worker.Settings(
        problem.name,
        args.arch,
        modelled,
        0 if virtual else l2_bytes,
        args.strict,
        args.folder or os.getcwd(),
        tuple(args.writable),
    )
    num_inputs = args.inputs or (1 if virtual else problem.harness.num_inputs)
    os.set_inheritable(descriptor, False)
    with os.fdopen(descriptor, "w") as file:
        # An executor instead of a Pool, whose workers may not have children; the emulator divides a launch among
        # children.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, worker.start, (settings,)) as pool:
            harness = Harness(problem, pool, strict=args.strict, modelled=modelled, num_inputs=num_inputs)
            try:
                return harness.run(args.mode, cases, Log(file))
            except BrokenProcessPool:
                print("the process that runs the submission died", file=sys.stderr)
                return protocol.CUDA_FAILED


if __name__ == "__main__":
    sys.exit(main())
