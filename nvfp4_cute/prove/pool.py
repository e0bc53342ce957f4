"""Runs jobs in child processes. A job that faults, hangs or dies loses only its own result."""

import os
import queue
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nvfp4_cute import child_process
from nvfp4_cute.prove import jobs
from nvfp4_cute.prove.outcome import BROKEN, FAULT, HANG, SKIPPED, Job, Outcome

MODULE = "nvfp4_cute.prove.jobs"
START_S = 120.0
ENDED = ""


@dataclass(frozen=True)
class Limits:
    """Limits for running jobs.

    Attributes:
        workers: children at a time; 0 runs the jobs in this process, without a time limit.
        job_s: seconds until a job counts as hung.
        seconds: time from when the first child is ready after which no further job starts.
        fresh: whether every job has its own child.
        module: module that a child runs.
    """

    workers: int
    job_s: float
    seconds: float = float("inf")
    fresh: bool = False
    module: str = MODULE


def run(wanted: Sequence[Job], limits: Limits, on_outcome: Callable[[Outcome], None]) -> None:
    """Runs all jobs. Calls ``on_outcome`` with each outcome as it arrives, from one thread at a time."""
    clock = _Clock(limits.seconds)
    if limits.workers == 0:
        clock.start()
        for job in wanted:
            on_outcome(_skipped(job) if clock.is_over() else jobs.perform(job))
        return
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in wanted:
        waiting.put(job)
    lock = threading.Lock()

    def report(outcome: Outcome) -> None:
        with lock:
            on_outcome(outcome)

    threads = [
        threading.Thread(target=_work, args=(waiting, limits, clock, report), daemon=True)
        for _ in range(min(limits.workers, len(wanted)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _skipped(job: Job) -> Outcome:
    return Outcome(job.kind, job.name, SKIPPED, "no time was left")


class _Clock:
    """Time since jobs began. Importing torch and making a CUDA context, seconds each, do not count."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, float("inf")

    def start(self) -> None:
        """Starts the clock unless it runs."""
        self._began = min(self._began, time.monotonic())

    def is_over(self) -> bool:
        """Whether no further job may start."""
        return time.monotonic() - self._began > self._seconds


def _work(
    waiting: "queue.SimpleQueue[Job]", limits: Limits, clock: _Clock, report: Callable[[Outcome], None]
) -> None:
    """Runs one child after the other, as long as jobs wait."""
    child: _Child | None = None
    try:
        for job in _taken(waiting):
            if clock.is_over():
                report(_skipped(job))
                continue
            if child is None:
                child = _Child(limits.module)
            if child.is_ready():
                clock.start()
            outcome = child.ask(job, limits.job_s)
            report(outcome)
            if limits.fresh or not child.is_well:
                child.end()
                child = None
    finally:
        if child is not None:
            child.end()


def _taken(waiting: "queue.SimpleQueue[Job]") -> Iterator[Job]:
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


class _Child:
    """A process that answers jobs."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            child_process.command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._pending = b""
        self._is_ready = False
        self.is_well = True
        """Whether it can be used again."""

    def is_ready(self) -> bool:
        """Waits for its start. Returns whether it started."""
        if not self._is_ready:
            line = self._line(START_S)
            self._is_ready = line is not None and line.strip() == jobs.READY
        return self._is_ready

    def ask(self, job: Job, seconds: float) -> Outcome:
        """Returns the outcome of a job, whatever happens to the child."""
        if not self.is_ready():
            self.is_well = False
            return Outcome(job.kind, job.name, BROKEN, "a child process did not start")
        start = time.monotonic()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(jobs.as_line(job).encode())
            line = self._line(seconds)
        except BrokenPipeError:
            line = ENDED
        took = round(time.monotonic() - start, 3)
        if line is None:
            self.is_well = False
            return Outcome(job.kind, job.name, HANG, f"no answer within {seconds:.0f} s; ended", took)
        if line == ENDED:
            self.is_well = False
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return Outcome(job.kind, job.name, FAULT, f"the process ended by {how}", took)
        outcome = jobs.outcome_of(line)
        self.is_well = outcome.verdict != FAULT
        return outcome

    def _line(self, seconds: float) -> str | None:
        """Returns the next line; None if none came in time; ``ENDED`` if none will come."""
        stream = self._process.stdout
        assert stream is not None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = until - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                got = os.read(stream.fileno(), 1 << 16)
                if not got:
                    return ENDED
                self._pending += got
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode()

    def end(self) -> None:
        """Closes its input, and kills it if that does not end it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if self.is_well:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self.is_well = False
        if not self.is_well:
            self._process.kill()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:  # in the driver; it will end when the GPU does
                pass
        self._process.stdout.close()
