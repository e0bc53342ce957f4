"""Rounds of the fuzzer: a process judges and counts the calls of one kind, and keeps their compiled kernels."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from multiprocessing import TimeoutError, get_context
from multiprocessing.pool import IMapIterator
from time import monotonic, process_time

import torch

from fuzz.calls import MEMBERS, SMALLER, Call, draw
from fuzz.compare import failure_of, judged

ROUNDS_OF_A_PROCESS = 40
"""After so many a fresh one begins: what was compiled is kept in memory."""


@dataclass(frozen=True)
class Trait:
    """Properties of a call by which calls are counted."""

    operation: str
    arch: str
    form: str
    formats: str
    out: str
    mode: str
    config: str
    verdict: str

    @classmethod
    def of(cls, call: Call, verdict: str) -> "Trait":
        """Returns the traits of a call with this verdict."""
        given = call.arguments
        out = str(given.get("out_dtype", given.get("dtype", "-"))).removeprefix("torch.")
        config = "given" if given.get("config") else "chosen"
        mode = call.mode.partition(":")[0]
        return cls(call.operation, call.arch, call.form, call.formats, out, mode, config, verdict)


@dataclass
class Round:
    """Result of the calls of one kind.

    Attributes:
        start: first seed.
        counts: calls by their traits.
        mutations: counts of the invalid arguments by name.
        failures: seed, description, and the smallest call of the seed that still fails.
        seconds: processor time used.
    """

    start: int
    counts: Counter[Trait] = field(default_factory=Counter)
    mutations: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str | int]] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict:
        """Returns the round as a line of the report."""
        counts = [[*asdict(trait).values(), count] for trait, count in self.counts.items()]
        return {
            "done": self.start,
            "counts": counts,
            "mutations": self.mutations,
            "seconds": round(self.seconds, 1),
        }

    @classmethod
    def from_json(cls, line: dict) -> "Round":
        """Inverse of :meth:`to_json`, without failures, which have their own lines."""
        counts = Counter({Trait(*names): count for *names, count in line["counts"]})
        return cls(line["done"], counts, Counter(line["mutations"]), seconds=line["seconds"])


@dataclass(frozen=True)
class Plan:
    """What a run draws, and where calls are computed.

    Attributes:
        hostile: whether arguments are invalid, as in ``draw``.
        archs: architectures that are drawn from.
        on_gpu: whether the other backend is a GPU, which has the only architecture of ``archs``. Otherwise it is the
            emulator.
    """

    hostile: bool | None
    archs: tuple[str, ...]
    on_gpu: bool = False

    def backend(self, call: Call) -> str:
        """Returns the backend that the call is compared on."""
        return "cuda" if self.on_gpu else f"emulator:{call.arch}"

    def run(self, seeds: tuple[int, int]) -> Round:
        """Runs the calls of seeds from the first to the one before the last."""
        torch.set_num_threads(1)
        found, began = Round(seeds[0]), process_time()
        for seed in range(*seeds):
            try:
                self._judge(seed, found)
            except Exception as error:  # continue with the other calls
                text = f"not drawn or compared: {error!r}"
                found.failures.append({"seed": seed, "failure": text, "call": ""})
        found.seconds = process_time() - began
        return found

    def _judge(self, seed: int, found: Round) -> None:
        call = draw(seed, hostile=self.hostile, archs=self.archs)
        said = judged(call, self.backend(call))
        found.counts[Trait.of(call, said.word)] += 1
        found.mutations.update(made.partition(": ")[2] or made.partition("=")[0] for made in call.mutations)
        if said.reason is None:
            return
        reason = said.reason
        for limits in SMALLER:
            smaller = draw(seed, hostile=bool(call.mutations), archs=self.archs, limits=limits)
            if still := failure_of(smaller, self.backend(smaller)):
                call, reason = smaller, still
                break
        found.failures.append({"seed": seed, "failure": reason, "call": str(call)})


def pieces(first: int, count: int) -> list[tuple[int, int]]:
    """Splits seeds into rounds, each with the seeds of one kind."""
    last = first + count
    starts = [first, *range((first // MEMBERS + 1) * MEMBERS, last, MEMBERS)]
    return list(zip(starts, [*starts[1:], last], strict=True))


def rounds(plan: Plan, todo: list[tuple[int, int]], jobs: int, seconds: float | None) -> Iterator[Round]:
    """Yields rounds as they finish, in any order, and stops after ``seconds``."""
    end = None if seconds is None else monotonic() + seconds
    with get_context("spawn").Pool(jobs, maxtasksperchild=ROUNDS_OF_A_PROCESS) as pool:
        ended: IMapIterator[Round] = pool.imap_unordered(plan.run, todo)
        for _ in todo:
            try:
                yield ended.next(None if end is None else max(0.0, end - monotonic()))
            except TimeoutError:
                return


def table(counts: Counter[Trait]) -> str:
    """Returns a table of how many calls had each operation, arch, form and so on."""
    lines = []
    for name in (f.name for f in fields(Trait)):
        of_name: Counter[str] = Counter()
        for trait, count in counts.items():
            of_name[getattr(trait, name)] += count
        lines.append(f"{name}: " + ", ".join(f"{value} {count}" for value, count in sorted(of_name.items())))
    return "\n".join(lines)
