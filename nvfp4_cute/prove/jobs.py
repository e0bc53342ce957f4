"""The child process: `python -m nvfp4_cute.prove.jobs` reads jobs as lines of JSON and answers each with a line.

A child that meets a fault of the GPU reports it and ends, because its CUDA context is unusable. Its parent (``pool``)
starts another one.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from nvfp4_cute.errors import ConfigError, EmulatorError, UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.prove.outcome import (
    BROKEN,
    FAULT,
    PASSED,
    REFUSED,
    WRONG,
    Job,
    Outcome,
)

READY = "ready"
MAX_DETAIL = 400


def _device(backend: str) -> str:
    return "cuda" if backend == "cuda" else "cpu"


def problem(job: Job) -> Outcome:
    """Runs a random problem. Arguments: seed, small."""
    from nvfp4_cute.prove import problems

    drawn = problems.draw(job.arguments["seed"], small=job.arguments["small"])
    return _compared(job, drawn.text, drawn.failure(job.backend, _device(job.backend)))


def config(job: Job) -> Outcome:
    """Runs one config on the awkward problem. Arguments: operation, form, is_quantized, config."""
    from nvfp4_cute.prove import problems

    made = problems.config_problem(
        *(job.arguments[name] for name in ("operation", "form", "is_quantized", "config"))
    )
    return _compared(job, made.text, made.failure(job.backend, _device(job.backend)))


def probe(job: Job) -> Outcome:
    """Runs a probe of the table. Arguments: probe."""
    from nvfp4_cute.prove import probes

    return probes.run(job)


def constant(job: Job) -> Outcome:
    """Runs a microbenchmark. Arguments: constant."""
    from nvfp4_cute.prove import constants

    return constants.run(job)


def timed(job: Job) -> Outcome:
    """Times a case and its peers. Arguments: case."""
    from nvfp4_cute.prove import timed

    return timed.run(job)


def host(job: Job) -> Outcome:
    """Measures the host costs of calls, or runs a soak test. Arguments: measure, seconds."""
    from nvfp4_cute.prove import host

    return host.run(job)


KINDS: dict[str, Callable[[Job], Outcome]] = {
    "problem": problem,
    "config": config,
    "probe": probe,
    "constant": constant,
    "timed": timed,
    "host": host,
}


def _compared(job: Job, text: str, failure: str | None) -> Outcome:
    if failure is None:
        return Outcome(job.kind, job.name, PASSED, text)
    return Outcome(job.kind, job.name, WRONG, f"{text}: {failure}")


def perform(job: Job) -> Outcome:
    """Runs a job in this process; an exception becomes its verdict."""
    start = time.perf_counter()
    try:
        outcome = KINDS[job.kind](job)
    except (UnsupportedProblem, UnsupportedTarget, ConfigError) as error:
        outcome = Outcome(job.kind, job.name, REFUSED, str(error))
    except EmulatorError as error:
        outcome = Outcome(job.kind, job.name, FAULT, str(error))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        outcome = Outcome(job.kind, job.name, FAULT if is_gpu_fault(text) else BROKEN, text)
    detail = " ".join(outcome.detail.split())[:MAX_DETAIL]
    return replace(outcome, detail=detail, seconds=round(time.perf_counter() - start, 3))


def is_gpu_fault(text: str) -> bool:
    """Whether an error's text is the driver's report of a failed kernel."""
    lowered = text.lower()
    return any(
        word in lowered
        for word in ("cuda error", "cudaerror", "cuda_error", "acceleratorerror", "launch failure", "illegal")
    )


def main() -> int:
    """Answers jobs until there are no more. Ends with code 3 after a fault of the GPU."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not count as answers
    import torch  # noqa: F401  a child is ready when slow imports are done

    answers.write(READY + "\n")
    for line in sys.stdin:
        job = Job(**json.loads(line))
        outcome = perform(job)
        answers.write(json.dumps(asdict(outcome)) + "\n")
        if outcome.verdict == FAULT and job.backend == "cuda":
            return 3
    return 0


def as_line(job: Job) -> str:
    """Returns a job as a line for the child."""
    return json.dumps(asdict(job)) + "\n"


def outcome_of(line: str) -> Outcome:
    """Parses a child's answer. Raises ValueError for anything else."""
    values: dict[str, Any] = json.loads(line)
    return Outcome(**values)


if __name__ == "__main__":
    sys.stdout.flush()
    # os._exit, because a poisoned CUDA context may hang the interpreter's exit.
    code = main()
    sys.stderr.flush()
    os._exit(code)
