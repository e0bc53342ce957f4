"""Layers as users call them, modelled as the chain of launches that the call makes: experts with routing, and linear layers.

    nvfp4-cute bench layers --target B200 [--containing qwen3] [--jobs 32] [--results layers.json] [--save]
    python -m nvfp4_cute.bench.layers --against bench/results/h100_moe.json [--results layers.json]

A layer is called by its own API on the emulator, every launch is recorded, and all are replayed as a CUDA graph on a
cold L2 (``roofline.modelled.modelled_chain``). Activations of experts are NVFP4. ``--results`` stores each time as soon
as it is known; stored times are not modelled again. ``bench.layers_page`` makes pages. The second command compares
modelled layers with those that ``bench.moe`` measured on an H100.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nvfp4_cute import Activation, MoE, QuantizedLinear, route
from nvfp4_cute.bench import processes, provenance
from nvfp4_cute.bench.moe import MODELS, Model
from nvfp4_cute.emulator.record.events import LaunchTrace
from nvfp4_cute.errors import EmulatorError, UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.experts.records import ExpertLayout
from nvfp4_cute.formats.block_format import ATOM_ROWS, NVFP4
from nvfp4_cute.gpus.targets import H100_SXM, lookup
from nvfp4_cute.nn.activations import multiplies_fp4
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.roofline.modelled import modelled_chain, modelled_launches, recorded_chain
from nvfp4_cute.timing.result import ChainTiming

TARGETS = ("B200", "B300", "RTX 5090", "RTX PRO 6000", "GB10")
EXPERTS = {
    **MODELS,
    "deepseek-v3": Model(256, 8, 7168, 2048),
    "flashinfer-h1024": Model(32, 2, 1024, 512),
}
"""Layers of experts: those that ``bench.moe`` measures, and two with published times of others."""
LINEAR = {f"linear-{n}x{k}": (n, k) for n, k in ((4096, 4096), (28672, 8192), (8192, 28672))}
TOKENS = (1, 8, 32, 128, 512, 2048, 4096)
PUBLISHED_TOKENS = {"deepseek-v3": (1, 16, 64, 256), "flashinfer-h1024": (128, 2048)}
"""Numbers of tokens of the layers with published times."""
PUBLISHED_TARGETS = ("B200",)
LINEAR_TOKENS = (1, 8, 32, 128)
SEED = 1
"""Seed of router logits, as in ``bench.moe``."""
INTERVAL_US = 1.28
"""Time of an empty interval between two events that the model's launch contains: bench/probes/h200_launch_probe.txt."""


@dataclass(frozen=True)
class Cell:
    """One time to model: names of a GPU and of a layer, and the number of tokens."""

    target: str
    layer: str
    tokens: int

    @property
    def key(self) -> str:
        """Key in a file of results."""
        return f"{self.target}/{self.layer}/{self.tokens}"

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear layer, not a layer of experts."""
        return self.layer in LINEAR


def cells(targets: Iterable[str] = TARGETS, containing: str = "", tokens: Sequence[int] = ()) -> list[Cell]:
    """Returns all cells of some GPUs whose layer's name contains a text; the largest first, because they take longest.

    Args:
        tokens: numbers of tokens, instead of each layer's own.
    """
    found = [
        Cell(target, layer, count)
        for target in targets
        for layer in (*EXPERTS, *LINEAR)
        if containing in layer and (layer not in PUBLISHED_TOKENS or target in PUBLISHED_TARGETS)
        for count in (
            tokens or LINEAR_TOKENS if layer in LINEAR else tokens or PUBLISHED_TOKENS.get(layer, TOKENS)
        )
    ]
    return sorted(found, key=lambda cell: -cell.tokens)


# ---- calls of layers -----------------------------------------------------------------------------------------------
def layer_call(layer: str, tokens: int) -> Callable[[str], object]:
    """Returns a call of the layer, including routing, that takes the name of a backend. Weights hold no data.

    Raises:
        ValueError: an unknown layer.
    """
    if layer in LINEAR:
        return _linear_call(*LINEAR[layer], tokens)
    if layer not in EXPERTS:
        raise ValueError(f"layer {layer!r} is unknown; use one of {', '.join((*EXPERTS, *LINEAR))}")
    model = EXPERTS[layer]
    module = empty_experts(model)
    layout = module.weight_layout
    x = torch.zeros((tokens, model.hidden), dtype=torch.bfloat16)
    logits = router_logits(model, tokens)

    def run(backend: str) -> object:
        module.backend = backend
        in_turns = model.width % ATOM_ROWS and multiplies_fp4(backend, x.device)  # as ``load`` makes it
        module.weight_layout = "interleaved_32_gate_first" if in_turns else layout
        return module(x, *route(logits, model.top_k, backend=backend))

    return run


def _linear_call(n: int, k: int, tokens: int) -> Callable[[str], object]:
    module = QuantizedLinear(k, n, bias=False, input_scale=1.0)
    x = torch.zeros((tokens, k), dtype=torch.bfloat16)

    def run(backend: str) -> object:
        module.backend = backend
        return module(x)

    return run


def empty_experts(
    model: Model,
    device: torch.device | str = "cpu",
    *,
    activation: Activation | None = None,
    gated: bool = True,
) -> MoE:
    """Makes a layer with unwritten weights, which take no memory on the CPU. activation: None for SwiGLU."""
    layout: ExpertLayout = "concatenated" if gated else "none"
    module = MoE(
        1,
        model.hidden,
        model.width,
        device=device,
        activation=activation or Activation(),
        weight_layout=layout,
    )
    for name, n, k in (("w13", (1 + gated) * model.width, model.hidden), ("w2", model.hidden, model.width)):
        empty = lambda *shape: torch.empty((model.experts, *shape), dtype=torch.uint8, device=device)
        scale = empty(*NVFP4.scale_shape(n, k))
        setattr(module, name, empty(n, NVFP4.row_bytes(k)))
        setattr(module, f"{name}_scale", scale.view(torch.float8_e4m3fn))
    module.num_experts = model.experts
    module.alpha13 = torch.ones((2, model.experts), device=device)
    module.alpha2 = torch.ones(model.experts, device=device)
    return module


def router_logits(model: Model, tokens: int) -> torch.Tensor:
    """Returns random logits [T, E]: every token goes to experts drawn without repetition."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn((tokens, model.experts), generator=generator).bfloat16()


def layer_work(cell: Cell) -> light.Work:
    """Returns the least traffic of the layer: tokens in and out in bf16, and weights of experts that a token chose."""
    if cell.is_linear:
        n, k = LINEAR[cell.layer]
        return _work_of([cell.tokens], ((n, k),), cell.tokens, (k, n))
    model = EXPERTS[cell.layer]
    ids, _ = route(router_logits(model, cell.tokens), model.top_k, backend="reference")
    rows = [count for count in torch.bincount(ids.flatten().long()).tolist() if count]
    return experts_work(rows, cell.tokens, model.hidden, model.width)


def experts_work(rows: Sequence[int], tokens: int, hidden: int, width: int, gated: bool = True) -> light.Work:
    """Returns the least traffic of a layer of experts. rows: tokens of each expert that has any."""
    return _work_of(rows, (((1 + gated) * width, hidden), (hidden, width)), tokens, (hidden, hidden))


def _work_of(
    rows: Sequence[int], sizes: Sequence[tuple[int, int]], tokens: int, columns: tuple[int, int]
) -> light.Work:
    products = [light.grouped_gemm([(m, n, k) for m in rows]) for n, k in sizes]
    operands = [one for product in products for one in product.operands if one.name.startswith("b")]
    x, y = (2 * tokens * count for count in columns)
    operands += [light.Traffic("x", x), light.Traffic("y", y, written=True)]
    return light.Work(tuple(operands), tuple(p for product in products for p in product.products))


def modelled(cell: Cell, *, timeline: bool = False, progress: Any = None) -> ChainTiming:
    """Returns the modelled timing of the layer. Raises the errors of ``modelled_chain``."""
    call = layer_call(cell.layer, cell.tokens)
    return modelled_chain(call, lookup(cell.target), timeline=timeline, progress=progress)


@lru_cache(maxsize=1)
def recorded(target: str, layer: str, tokens: int) -> list[LaunchTrace]:
    """Returns the launches of a layer on a GPU. Caches the last ones for a GPU with equal launches. Raises like `modelled`."""
    return recorded_chain(layer_call(layer, tokens), lookup(target))


def record(cell: Cell) -> dict[str, Any]:
    """Returns plain data of a cell: time, floor, launches; or why there is no time."""
    target = lookup(cell.target)
    floor = light.physical_floor(layer_work(cell), target)
    found: dict[str, Any] = {"floor_us": floor.us, "bound": floor.bound}
    try:
        traces = recorded(cell.target, cell.layer, cell.tokens)
        timing = modelled_launches(traces, target, explained=False)
    except (UnsupportedProblem, UnsupportedTarget, EmulatorError) as error:
        return {**found, "missing": str(error).splitlines()[0]}
    launches = [
        {"kernel": one.kernel, "us": one.us, "hbm_bytes": one.hbm_bytes, "l2_bytes": one.l2_bytes}
        for one in timing.launches
    ]
    return {**found, "us": timing.us, "launches": launches, "sources": provenance.digest()}


def model_all(wanted: Sequence[Cell], *, jobs: int, results: Path | None) -> dict[str, dict[str, Any]]:
    """Returns records of cells by their keys, modelled in several processes.

    Args:
        jobs: number of processes.
        results: file that stores records, and supplies those that it has.
    """
    cells = {cell.key: cell for cell in wanted}
    return processes.records(record, cells, jobs=jobs, results=results, label="layers")


# ---- comparison with measured layers
# -----------------------------------------------------------------------------------
def compare(measured: dict[str, Any], known: dict[str, dict[str, Any]]) -> list[tuple[Cell, float, float]]:
    """Returns (cell, measured us, modelled us) of "route + layer" in a report of ``bench.moe``.

    Subtracts the excess of the report's empty interval over that of the probe, which the model's launch is based on.
    """
    rows = []
    for layer, counts in measured["models"].items():
        for result in counts:
            cell = Cell(H100_SXM.name, layer, result["tokens"])
            found = known.get(cell.key, {})
            if "us" in found:
                us = result["us"]
                rows.append((cell, us["route + layer"] - us["an empty interval"] + INTERVAL_US, found["us"]))
    return rows


def comparison(rows: Sequence[tuple[Cell, float, float]]) -> str:
    """Returns Markdown of the result of ``compare``."""
    errors = [modelled / measured - 1 for _, measured, modelled in rows]
    lines = ["| layer | tokens | measured us | modelled us | error |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {cell.layer} | {cell.tokens} | {measured:.1f} | {modelled:.1f} | {100 * error:+.0f} % |"
        for (cell, measured, modelled), error in zip(rows, errors, strict=True)
    ]
    sizes = sorted(abs(error) for error in errors)
    summary = (
        f"{len(rows)} layers: median error {100 * median(sizes):.0f} %, worst {100 * sizes[-1]:.0f} %, "
        f"{sum(error < 0 for error in errors)} modelled too fast."
    )
    return f"{summary}\n\n" + "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, required=True, metavar="FILE", help="a report of bench.moe")
    parser.add_argument("--containing", default="", help="only layers whose name contains this")
    parser.add_argument("--tokens", default="1,8,32,128,512", help="numbers of tokens")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keeps records")
    options = parser.parse_args(arguments)
    measured = json.loads(options.against.read_text())
    counts = [int(count) for count in options.tokens.split(",")]
    wanted = [
        cell
        for cell in cells([H100_SXM.name], options.containing, counts)
        if cell.layer in measured["models"]
    ]
    known = model_all(wanted[::-1], jobs=options.jobs, results=options.results)
    print(comparison(compare(measured, {cell.key: known[cell.key] for cell in wanted})))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
