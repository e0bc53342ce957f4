"""Predictions that are made before anybody measures: launches modelled here, measured elsewhere, compared.

    nvfp4-cute bench --predict h100.json --target H100 [--jobs 32]     models every launch, with the commit that did so
    nvfp4-cute bench --against h100.json                               on that GPU: measures them, and compares

The launches are those of ``CASES``, and Triton's matrix product where Triton is installed: dense, grouped, few rows, 16-bit rows,
quantization, and layers, every one as its user calls it. A prediction is what CUDA events around a replayed graph of the call say
on a cold L2 (``model.modelled.modelled_chain``); from a measured time is taken what an empty interval takes beyond the probe's.
None of the cases set a constant of the model.
"""

import json
import multiprocessing
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate, combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

import nvfp4_cute
from nvfp4_cute import LinearNVFP4, route
from nvfp4_cute.bench import processes, provenance, triton_matmul
from nvfp4_cute.bench.layers import INTERVAL_US, empty_experts
from nvfp4_cute.bench.moe import Model
from nvfp4_cute.errors import EmulatorError, UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.model.modelled import modelled_chain
from nvfp4_cute.text_table import text_table

RANKED_GAP = 1.10
"""Two measured times that differ by more must be predicted in the same order."""
SEED = 5
Call = Callable[[str], object]
"""Enqueues the launches on a backend."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        kind: a key of ``MAKERS``.
        sizes: whole numbers that its maker takes.
    """

    kind: str
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.kind} {' x '.join(map(str, self.sizes))}"

    def call(self, device: str) -> Call:
        """With operands on a device: random ones on a GPU, ones that hold no data on the CPU."""
        return MAKERS[self.kind](torch.device(device), *self.sizes)


# ---- operands and calls --------------------------------------------------------------------------------------------
def _bytes(device: torch.device, *shape: int) -> torch.Tensor:
    if device.type == "cpu":
        return torch.empty(shape, dtype=torch.uint8)
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)


def _scales(device: torch.device, *shape: int) -> torch.Tensor:
    """E4m3 from 0.5 to 2."""
    return (0x30 + _bytes(device, *shape) % 16 if device.type != "cpu" else _bytes(device, *shape)).view(
        torch.float8_e4m3fn
    )


def _rows(device: torch.device, *shape: int) -> torch.Tensor:
    if device.type == "cpu":
        return torch.zeros(shape, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randn(shape, device=device, generator=generator).bfloat16()


def _operand(device: torch.device, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _bytes(device, rows, NVFP4.row_bytes(k)), _scales(device, *NVFP4.scale_shape(rows, k))


def _gemm(device: torch.device, m: int, n: int, k: int) -> Call:
    (a, a_scale), (b, b_scale) = _operand(device, m, k), _operand(device, n, k)
    return lambda backend: nvfp4_cute.gemm(a, b, a_scale, b_scale, backend=backend)


def _dual_gemm(device: torch.device, m: int, n: int, k: int) -> Call:
    (a, a_scale), (b, b_scale), (b2, b2_scale) = (_operand(device, rows, k) for rows in (m, n, n))
    return lambda backend: nvfp4_cute.dual_gemm(a, b, b2, a_scale, b_scale, b2_scale, backend=backend)


def _w4a16(device: torch.device, m: int, n: int, k: int) -> Call:
    x, (b, b_scale) = _rows(device, m, k), _operand(device, n, k)
    return lambda backend: nvfp4_cute.gemm(x, b, None, b_scale, backend=backend)


def _gemv(device: torch.device, m: int, k: int, batches: int) -> Call:
    matrix = _bytes(device, batches, m, NVFP4.row_bytes(k)).permute(1, 2, 0)
    vector = _bytes(device, batches, NVFP4.row_bytes(k)).T
    scales = [_scales(device, batches, *NVFP4.scale_shape(rows, k)) for rows in (m, 1)]
    return lambda backend: nvfp4_cute.gemv(matrix, vector, *scales, backend=backend)


def _sizes(groups: int, mean: int) -> list[int]:
    draw = random.Random(SEED)
    return [draw.randint(1, 2 * mean - 1) for _ in range(groups)]


def _ragged(device: torch.device, groups: int, mean: int, n: int, k: int) -> Call:
    rows = _sizes(groups, mean)
    a = _bytes(device, sum(rows), NVFP4.row_bytes(k))
    a_scale = _scales(device, *NVFP4.ragged_scale_shape(sum(rows), k, groups))
    b, b_scale = (
        _bytes(device, groups, n, NVFP4.row_bytes(k)),
        _scales(device, groups, *NVFP4.scale_shape(n, k)),
    )
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    return lambda backend: nvfp4_cute.grouped_gemm(a, b, a_scale, b_scale, offs, backend=backend)


def _list(device: torch.device, groups: int, mean: int, n: int, k: int) -> Call:
    sides = [
        [_operand(device, m, k) for m in _sizes(groups, mean)],
        [_operand(device, n, k) for _ in range(groups)],
    ]
    a, b, a_scale, b_scale = ([pair[part] for pair in side] for part in (0, 1) for side in sides)
    return lambda backend: nvfp4_cute.grouped_gemm(a, b, a_scale, b_scale, backend=backend)


def _ragged_16bit(device: torch.device, groups: int, mean: int, n: int, k: int) -> Call:
    rows = _sizes(groups, mean)
    x = _rows(device, sum(rows), k)
    b, b_scale = (
        _bytes(device, groups, n, NVFP4.row_bytes(k)),
        _scales(device, groups, *NVFP4.scale_shape(n, k)),
    )
    offs = torch.tensor(list(accumulate(rows)), dtype=torch.int32, device=device)
    return lambda backend: nvfp4_cute.grouped_gemm(x, b, None, b_scale, offs, backend=backend)


def _quantize(device: torch.device, m: int, k: int) -> Call:
    x = _rows(device, m, k)
    return lambda backend: nvfp4_cute.quantize(x, backend=backend)


def _linear(device: torch.device, m: int, n: int, k: int) -> Call:
    layer, x = LinearNVFP4(k, n, bias=False, input_scale=None, device=device), _rows(device, m, k)
    layer._buffers["weight"], layer.weight_scale = _operand(device, n, k)

    def run(backend: str) -> object:
        layer.backend = backend
        return layer(x)

    return run


def _experts(device: torch.device, tokens: int, experts: int, top_k: int, hidden: int, width: int) -> Call:
    model = Model(experts, top_k, hidden, width)
    layer, x = empty_experts(model, device), _rows(device, tokens, hidden)
    if device.type != "cpu":
        for name in ("w13", "w2"):
            setattr(layer, name, _bytes(device, *getattr(layer, name).shape))
            setattr(layer, f"{name}_scale", _scales(device, *getattr(layer, f"{name}_scale").shape))
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn((tokens, experts), generator=generator).bfloat16().to(device)

    def run(backend: str) -> object:
        layer.backend = backend
        return layer(x, *route(logits, top_k, backend=backend))

    return run


MAKERS: dict[str, Callable[..., Call]] = {
    "gemm": _gemm,
    "dual_gemm": _dual_gemm,
    "gemm, 16-bit rows": _w4a16,
    "gemv": _gemv,
    "grouped_gemm, ragged": _ragged,
    "grouped_gemm, list": _list,
    "grouped_gemm, ragged, 16-bit rows": _ragged_16bit,
    "quantize": _quantize,
    "LinearNVFP4": _linear,
    "route + MoENVFP4": _experts,
}
"""Sizes: M, N, K of products; M, K, batches of a gemv; groups, mean of their rows, N, K; M, K; M, N, K of a linear layer; tokens,
experts, experts a token, hidden and intermediate size."""

CASES = (
    *(Case("gemm", sizes) for sizes in (
        (128, 4096, 4096), (256, 3072, 4096), (384, 2560, 5120), (512, 2048, 2048), (640, 5120, 1536), (1024, 2048, 1024),
        (1536, 1536, 1536), (64, 8192, 3072), (32, 6144, 4096), (2, 8192, 4096), (4, 4096, 7168), (8, 6144, 2048),
    )),
    *(Case("dual_gemm", sizes) for sizes in ((128, 2048, 4096), (320, 1536, 2048), (16, 4096, 3072))),
    *(Case("gemm, 16-bit rows", sizes) for sizes in (
        (1, 8192, 8192), (3, 12288, 4096), (8, 8192, 3072), (16, 10240, 4096), (48, 6144, 4096), (96, 4096, 4096),
    )),
    *(Case("gemv", sizes) for sizes in ((8192, 8192, 1), (3072, 5120, 4))),
    *(Case("grouped_gemm, ragged", sizes) for sizes in (
        (8, 16, 2048, 4096), (16, 48, 2048, 2048), (32, 8, 1536, 2048), (6, 160, 3072, 1536), (12, 96, 1024, 4096),
    )),
    *(Case("grouped_gemm, list", sizes) for sizes in ((4, 80, 3072, 4096), (8, 24, 2560, 2048))),
    *(Case("grouped_gemm, ragged, 16-bit rows", sizes) for sizes in ((8, 4, 4096, 3072), (16, 20, 2048, 2048))),
    *(Case("quantize", sizes) for sizes in ((1, 8192), (64, 5120), (512, 4096))),
    *(Case("LinearNVFP4", sizes) for sizes in ((1, 8192, 4096), (24, 5120, 5120), (200, 4096, 2560))),
    *(Case("route + MoENVFP4", sizes) for sizes in (
        (1, 32, 4, 2048, 1024), (6, 32, 4, 2048, 1024), (48, 32, 4, 2048, 1024), (2, 64, 6, 1536, 512),
        (20, 64, 6, 1536, 512), (160, 16, 2, 1024, 1024), (4, 8, 2, 3072, 2048),
    )),
)  # fmt: skip


MAKER = "nvfp4-cute bench --predict"


# ---- predictions -----------------------------------------------------------------------------------------------------
def predict(path: Path, target: Target, *, jobs: int, cases: Sequence[Case] = CASES) -> int:
    """Model all cases and write what is predicted, by name, with the commit; returns 0. Keeps times that the file has.

    Raises:
        ValueError: the file's predictions are of another GPU or other sources.
    """
    sources = provenance.digest()
    known: dict[str, Any] = {
        "gpu": target.name, "commit": provenance.commit(), "sources": sources, "made": _now(), "us": {}, "launches": {},
        "missing": {},
    }  # fmt: skip
    if path.exists():
        known = provenance.read_object(path, tuple(known), MAKER)
        if (known["gpu"], known["sources"]) != (target.name, sources):
            raise ValueError(
                f"{path} has predictions for {known['gpu']} by sources {known['sources']}, not for {target.name} by {sources}; "
                "name a new file"
            )
    names = [case.name for case in cases] + [name for name in triton_matmul.NAMES if triton_matmul.is_there()]
    missing = [name for name in names if name not in known["us"] and name not in known["missing"]]
    with tqdm(total=len(missing), desc=f"predicting {target.name}", unit="call", disable=None) as bar:
        predicted = partial(prediction, target_name=target.name)
        for name, found in processes.in_processes(predicted, missing, jobs):
            if isinstance(found, str):
                known["missing"][name] = found
            else:
                known["us"][name], known["launches"][name] = found
            processes.write_json(path, known)
            bar.update()
    print(f"{len(known['us'])} calls on an {target.name} predicted by {_made_by(known)}: {path}")
    for name, why in known["missing"].items():
        print(f"- {name}: {why}")
    return 0


def prediction(name: str, target_name: str) -> tuple[float, int] | str:
    """us and launches of a call; or why there is no prediction."""
    target = targets.lookup(target_name)
    try:
        if name in triton_matmul.NAMES:
            return triton_matmul.modelled_us(name, target), 1
        (case,) = (case for case in CASES if case.name == name)
        timing = modelled_chain(case.call("cpu"), target)
    except (UnsupportedProblem, UnsupportedTarget, EmulatorError) as error:
        return str(error).splitlines()[0]
    return round(timing.us, 3), len(timing.launches)


def _made_by(predictions: dict[str, Any]) -> str:
    commit = f"commit {predictions['commit']}, " if predictions["commit"] else ""
    return f"{commit}sources {predictions['sources']}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


# ---- measured ----------------------------------------------------------------------------------------------------------
def against(path: Path, *, results: Path | None = None, jobs: int = 1) -> int:
    """Measure what was predicted on the GPU of this machine, and compare; returns 0.

    Args:
        path: predictions.
        results: file for everything that was measured, as JSON, beside the predictions; written after every call.
        jobs: processes that make each call once before anything is measured, to compile its kernels into the disk cache.

    Raises:
        ValueError: the file has no predictions, the GPU is another one, or there is none.
    """
    predictions = provenance.read_object(path, ("gpu", "us"), MAKER)
    here = targets.detect()
    if here is None or here.name != predictions["gpu"]:
        found = "no GPU of the table" if here is None else f"an {here.name}"
        raise ValueError(f"{path} predicts times of an {predictions['gpu']}; this machine has {found}")
    names = list(predictions["us"])
    if jobs > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            list(pool.map(run_once, names))
    record = {**predictions, "measured": {}, "failed": {}, "measured_at": _now(), "torch": torch.__version__}
    for name in tqdm(names, desc=f"measuring {here.name}", unit="call", disable=None):
        found_us = measure(name)
        record["failed" if isinstance(found_us, str) else "measured"][name] = found_us
        if results is not None:
            results.write_text(json.dumps(record, indent=1) + "\n")
    print(comparison(record))
    return 0


def on_the_gpu(name: str) -> Callable[[], object]:
    """A call with operands on the GPU of this machine."""
    if name in triton_matmul.NAMES:
        return triton_matmul.call(name)
    (case,) = (case for case in CASES if case.name == name)
    call = case.call("cuda")
    return lambda: call("cuda")


def run_once(name: str) -> None:
    """Have a call's kernels compiled; what fails is told when it is measured."""
    with suppress(Exception):
        on_the_gpu(name)()


def measure(name: str) -> float | str:
    """us of a call between events beyond what an empty interval takes, that of the probe added; or why there is none."""
    from nvfp4_cute.tuning import stopwatch

    try:
        run = on_the_gpu(name)
        samples = stopwatch.measure({name: _call_of(run)}, 1, rounds=20, clean=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    torch.cuda.empty_cache()
    return round(samples[name].median - samples[stopwatch.EMPTY].median + INTERVAL_US, 3)


def _call_of(run: Callable[[], object]) -> Callable[[int], object]:
    return lambda _: run()


def comparison(record: dict[str, Any]) -> str:
    """Errors of predictions: a line a call, and the sum of it."""
    pairs = {name: (record["us"][name], us) for name, us in record["measured"].items()}
    errors = {name: predicted / us - 1 for name, (predicted, us) in pairs.items()}
    rows = [
        (name, f"{us:.2f}", f"{predicted:.2f}", f"{100 * errors[name]:+.0f} %")
        for name, (predicted, us) in pairs.items()
    ]
    sizes = sorted(abs(error) for error in errors.values())
    gaps = [
        (one, other)
        for (_, one), (_, other) in combinations(pairs.items(), 2)
        if max(one[1], other[1]) > RANKED_GAP * min(one[1], other[1])
    ]
    wrong = sum((one[0] < other[0]) != (one[1] < other[1]) for one, other in gaps)
    lines = [
        f"{record['gpu']}: predicted {record['made']} by {_made_by(record)}; measured {record['measured_at']}.",
        text_table(("call", "measured us", "predicted us", "error"), rows, left=1),
        f"{len(sizes)} calls: median error {100 * median(sizes):.1f} %, nine in ten within "
        f"{100 * sizes[max(0, -(-9 * len(sizes) // 10) - 1)]:.0f} %, worst {100 * sizes[-1]:.0f} %; "
        f"{wrong} of {len(gaps)} pairs whose times differ by over 10 % predicted in the wrong order.",
        *(f"- not measured: {name}: {why}" for name, why in record["failed"].items()),
    ]
    return "\n".join(lines)
