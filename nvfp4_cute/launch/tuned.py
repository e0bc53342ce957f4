"""Configs found by tuning, stored on disk next to the compiled kernels and used by later calls of the same problem.

An entry is a file, ``tuned/<digest>.json``, with the problem, whether its times are measured or modelled, every config's time,
and a checksum. Damaged entries, and entries of other versions or other kernel sources, are ignored. A process looks for a
problem's entry once, when it plans the first call, and never in a repeated call.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from nvfp4_cute import env
from nvfp4_cute.compile import disk_cache, trusted_files
from nvfp4_cute.gpus.targets import Gpu
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.terminal import text_table

Kind = Literal["measured", "modelled"]
FOLDER = "tuned"
_is_asking: ContextVar[bool] = ContextVar("is_asking", default=False)


@dataclass(frozen=True)
class Request:
    """A problem on a GPU that needs a config, without properties that do not affect the time.

    Attributes:
        problem: without alpha, bias, limit and early weights, and with bfloat16 instead of float16. If sizes are on the device,
            every group has the mean number of rows (masked: the largest), rounded up to a power of two.
        gpu: name, SMs and architecture.
    """

    problem: GroupedProblem
    gpu: Gpu

    @classmethod
    def of(cls, problem: GroupedProblem, gpu: Gpu) -> "Request":
        """Returns the request of a call."""
        sizes, form = problem.sizes, problem.form
        if form in ("ragged", "masked"):
            sizes = tuple((1 << max(m - 1, 0).bit_length(), n, k) for m, n, k in sizes)
        elif len(sizes) == 1:
            form = "list"
        dtype = torch.bfloat16 if problem.out_dtype == torch.float16 else problem.out_dtype
        return cls(
            replace(
                problem,
                sizes=sizes,
                form=form,
                out_dtype=dtype,
                has_alpha=False,
                bias_dtype=None,
                limit=None,
                early_weights=False,
                is_dense=False,
                has_row_scales=False,
            ),
            gpu,
        )

    def __str__(self) -> str:
        """Describes the request in one line, with the rows of groups as far as they matter."""
        problem = self.problem
        if problem.form not in ("ragged", "masked"):
            return str(problem)
        m, n, k = problem.sizes[0]
        rows = f"{m // 2 + 1} to {m}" if m > 1 else str(m)
        meaning = "on average" if problem.form == "ragged" else "at most"
        return f"{problem.form} of {problem.num_groups} groups of {rows} rows {meaning}, N {n}, K {k}"

    @property
    def identity(self) -> dict[str, Any]:
        """Returns everything that decides whether an entry can be used, for JSON."""
        return {
            "problem": repr(self.problem),
            "gpu": list(self.gpu),
            "sources": disk_cache.source_digest(),
            "dsl": disk_cache.dsl_versions(),
        }

    def path(self, folder: Path) -> Path:
        """Returns the path of its entry in a cache folder."""
        return folder / FOLDER / f"{_digest(self.identity)[:32]}.json"


@dataclass(frozen=True)
class Tuning:
    """Result of tuning; prints as a table, the fastest config first.

    Attributes:
        request: the request.
        kind: "measured" on the GPU, or "modelled".
        times_us: time of every config that can compute the problem, the fastest first.
    """

    request: Request
    kind: Kind
    times_us: Mapping[KernelConfig, float]

    @property
    def config(self) -> KernelConfig:
        """The fastest config."""
        return next(iter(self.times_us))

    def __str__(self) -> str:
        best = self.times_us[self.config]
        rows = [
            (config.to_name(), f"{us:.2f}", self.kind, f"{us / best:.3f}")
            for config, us in self.times_us.items()
        ]
        gpu = self.request.gpu
        table = text_table(("config", "us", "time is", "over the best"), rows)
        return f"{self.request}\n{gpu.name} ({gpu.arch}), {self.kind}:\n{table}"


Check = Callable[[KernelConfig], object]
"""Raises UnsupportedTarget, UnsupportedProblem or ConfigError if a call cannot be computed with a config."""


class Asked(Exception):
    """Ends a call that was made only to learn its request.

    Attributes:
        request: the request.
        check: check of configs for this call; None if it launches nothing itself.
    """

    def __init__(self, request: Request, check: Check | None):
        super().__init__(request)
        self.request, self.check = request, check


def request_of(call: Callable[[], object]) -> Request:
    """Returns the request of an operation's call without computing it. Raises as :func:`asked_by` does."""
    return asked_by(call).request


def asked_by(call: Callable[[], object]) -> Asked:
    """Returns the request of an operation's call, and the check of its configs, without computing it.

    Raises:
        ValueError: the call needs no config. Also whatever its checks raise.
    """
    token = _is_asking.set(True)
    try:
        call()
    except Asked as asked:
        return asked
    finally:
        _is_asking.reset(token)
    raise ValueError(
        "the call chooses no config: tuning is for GEMMs of NVFP4 operands, with work in them, without a config of the caller's"
    )


def find(problem: GroupedProblem, gpu: Gpu, check: Check | None = None) -> KernelConfig | None:
    """Returns the tuned config of a problem; None if there is no valid entry.

    check: check of configs for the caller's launch, for code that collects requests.
    """
    if _is_asking.get():
        raise Asked(Request.of(problem, gpu), check)
    return None if problem.batch_invariant else _found(problem, gpu)


@lru_cache(maxsize=1024)
def _found(problem: GroupedProblem, gpu: Gpu) -> KernelConfig | None:
    tuning = load(Request.of(problem, gpu))
    return tuning.config if tuning else None


def load(request: Request) -> Tuning | None:
    """Reads the entry of a request; None if it is missing, damaged, owned by another user, or made for something else."""
    folder = env.cache_dir()
    if folder is None or not (folder / FOLDER).is_dir():
        return None
    try:
        trusted_files.check_folder(folder)
        entry = json.loads(trusted_files.read_bytes(request.path(folder)))
        digest = entry.pop("sha256")
        if digest != _digest(entry) or entry["identity"] != request.identity:
            return None
        return Tuning(request, entry["kind"], _ranked(entry["times_us"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def store(tuning: Tuning) -> str | None:
    """Stores a result for later calls of all processes, starting with this one.

    A measured entry is not replaced by a modelled one.

    Returns:
        The reason why it was not stored; None if it was.
    """
    folder = env.cache_dir()
    if folder is None:
        return "NVFP4_CUTE_CACHE_DIR is `off`: name a folder"
    known = load(tuning.request)
    if known is not None and (known.kind, tuning.kind) == ("measured", "modelled"):
        return "there are measured times of this problem"
    path = tuning.request.path(folder)
    times = {config.to_name(): us for config, us in tuning.times_us.items()}
    entry: dict[str, Any] = {"identity": tuning.request.identity, "kind": tuning.kind, "times_us": times}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_text(json.dumps({**entry, "sha256": _digest(entry)}, indent=2))
        partial.replace(path)
    except OSError as error:
        return f"{path.parent} cannot be written ({error}): set NVFP4_CUTE_CACHE_DIR to a folder that can"
    forget()
    return None


def forget() -> None:
    """Makes later calls read the disk again."""
    _found.cache_clear()


def ranked(times_us: Mapping[KernelConfig, float]) -> dict[KernelConfig, float]:
    """Sorts by time, the fastest first; ties keep their order."""
    return dict(sorted(times_us.items(), key=lambda item: item[1]))


def _ranked(times_us: Mapping[str, float]) -> dict[KernelConfig, float]:
    return ranked({KernelConfig.from_name(name): us for name, us in times_us.items()})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
