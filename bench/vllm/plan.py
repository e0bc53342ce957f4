"""Plan of measurements: engines by wave. The engines of one wave start together, and are timed one after the other."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Scheme = Literal["bf16", "w4a16", "w4a4"]
Method = Literal["plugin", "vllm", "marlin"]
METHODS = {"plugin": "plug-in", "vllm": "vLLM's choice", "marlin": "vLLM's Marlin"}


@dataclass(frozen=True)
class Job:
    """One engine to measure.

    Attributes:
        model: name of a config in ``bench/models/configs``.
        scheme: quantization of its weights and activations.
        method: implementation: this package, vLLM's choice, or vLLM's Marlin.
        batches: numbers of sequences that decode together.
        prefills: (sequences, tokens of each).
        seqs: largest number of sequences of the engine.
        kv_gib: size of its KV cache.
        temperature: 0 for greedy.
        soak: number of requests of random lengths after the timings, during which compilations are counted.
        profiled: batches, or "prefill", whose GPU time is listed by kernel.
        steps: number of timed decoding steps.
        engine: options of ``LLM``.
        config: entries of config.json to replace.
    """

    model: str
    scheme: Scheme
    method: Method
    batches: tuple[int, ...] = (1, 8, 32, 128)
    prefills: tuple[tuple[int, int], ...] = ((1, 2048),)
    seqs: int = 128
    kv_gib: float = 5.5
    temperature: float = 0.0
    soak: int = 0
    profiled: tuple[str, ...] = ()
    steps: int = 128
    engine: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its files, unique in a run."""
        return f"{self.model}-{self.scheme}-{self.method}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the job for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Job":
        """Inverts ``as_dict``."""
        given = {name: tuple(record[name]) for name in ("batches", "profiled")}
        return cls(**record | given | {"prefills": tuple(map(tuple, record["prefills"]))})


@dataclass(frozen=True)
class Wave:
    """Engines that start together. ``seconds``: time limit of the wave."""

    name: str
    seconds: float
    jobs: tuple[Job, ...]


def _dense(scheme: Scheme, method: Method, **options: Any) -> Job:
    return Job("qwen3-8b", scheme, method, **options)


def _experts(scheme: Scheme, method: Method, **options: Any) -> Job:
    # Random weights: sampled tokens keep experts as busy as real text does.
    few: dict[str, Any] = {"batches": (1, 8, 32), "seqs": 32, "kv_gib": 2.5, "temperature": 1.0}
    return Job("qwen3-30b-a3b", scheme, method, **few | options)


def _hybrid(scheme: Scheme, method: Method, **options: Any) -> Job:
    few: dict[str, Any] = {"batches": (1, 8, 32), "seqs": 32, "kv_gib": 4.0}
    return Job("nemotron-nano-9b-v2", scheme, method, **few | options)


WAVES = (
    Wave("dense", 260, (
        _dense("w4a16", "plugin", soak=500, profiled=("32",)),
        _dense("w4a16", "vllm", profiled=("32",)),
        _dense("w4a4", "plugin", soak=100, profiled=("1",)),
        _dense("bf16", "vllm"),
        _dense("w4a4", "vllm"),
    )),
    Wave("experts", 200, (
        _experts("w4a16", "plugin", soak=100, profiled=("prefill",)),
        _experts("w4a4", "vllm", profiled=("prefill",)),
        _experts("w4a4", "plugin", soak=100, profiled=("prefill",)),
        _experts("bf16", "vllm", profiled=("prefill",)),
    )),
    Wave("hybrid", 210, (
        _hybrid("w4a4", "plugin", soak=50, profiled=("1",)),
        _hybrid("bf16", "vllm"),
        _hybrid("w4a4", "vllm"),
        _hybrid("w4a16", "plugin"),
    )),
)  # fmt: skip


def selected(pattern: str) -> tuple[Wave, ...]:
    """Returns one wave with the jobs whose names match the regular expression; an empty tuple if none does."""
    jobs = tuple(job for wave in WAVES for job in wave.jobs if re.search(pattern, job.name))
    return (Wave("selected", max(wave.seconds for wave in WAVES), jobs),) if jobs else ()
