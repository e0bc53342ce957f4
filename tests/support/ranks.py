"""Runs the ranks of a gloo group as processes on the CPU, and divides layers over them."""

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from expert_layers import Layer, moe, mx_weights, some_layer
from new_process import forking

from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.records import Activations
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats.block_format import INT8

# If a rank does not arrive, every other rank reports it within this time.
TIMEOUT_SECONDS = 60.0
RESULT_SECONDS = 900.0
JOIN_SECONDS = 20.0


def run_ranks(
    body: Callable[..., Any],
    count: int,
    *arguments: Any,
    seconds: float = TIMEOUT_SECONDS,
    backend: str = "gloo",
) -> list[Any]:
    """Calls ``body(rank, *arguments)`` in ``count`` processes of one group. Returns results or exceptions, by rank.

    With ``backend="nccl"``, the process of rank i uses GPU i.
    """
    context = forking()
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        processes = [
            context.Process(
                target=_process,
                args=(body, rank, count, folder, seconds, backend, results, arguments),
                daemon=True,
            )
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=RESULT_SECONDS) for _ in processes)
        for process in processes:
            process.join(JOIN_SECONDS)
            process.kill()
    return [found[rank] for rank in range(count)]


def _process(body, rank, count, folder, seconds, backend, results, arguments) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=seconds),
    )
    try:
        result = body(rank, *arguments)
    except Exception as error:
        result = error
    results.put((rank, result))
    if backend == "nccl":  # the end of a group may wait for calls that graphs have held
        results.close()
        results.join_thread()
        os._exit(0)


def some_placement(dice: random.Random, experts: int, ranks: int) -> Placement:
    """Places every expert on one or more ranks, unevenly. A rank may have none."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    ids = [*range(experts)]
    dice.shuffle(ids)
    for expert in ids:
        for rank in dice.sample(range(ranks), dice.choice([1, 1, 1, min(2, ranks), ranks])):
            held[rank].append(expert)
    return Placement(tuple(map(tuple, held)))


def some_layer_of_ranks(seed: int, ranks: int) -> tuple[Layer, Placement, list[int]]:
    """Returns a random layer with all ranks' tokens, the placement of its experts, and the number of tokens of each rank."""
    dice = random.Random(1000 * ranks + seed)
    experts = dice.choice([1, 2, 4, 8, 16]) if ranks == 1 else dice.choice([ranks, 2 * ranks, 9, 16])
    placement = (
        Placement.even(experts, ranks) if dice.random() < 0.4 else some_placement(dice, experts, ranks)
    )
    shares = [dice.choice([0, 1, 2, 5, 17, 40]) for _ in range(ranks)]
    top_k, hidden, width = dice.randint(1, 8), dice.choice([32, 64, 160]), dice.choice([32, 64, 128])
    generator = torch.Generator().manual_seed(seed)
    dtype = dice.choice([torch.bfloat16, torch.float16])
    layout = dice.choice(["concatenated", "concatenated", "interleaved", "none"])
    options: dict[str, Any] = {}
    rows = width if layout == "none" else 2 * width
    if dice.random() < 0.4 and layout != "none":
        options["bias13"] = torch.randint(-2, 3, (experts, rows), generator=generator).to(dtype)
    if dice.random() < 0.4:
        options["bias2"] = torch.randn(experts, hidden, generator=generator).to(dtype)
    if dice.random() < 0.4:
        options["shared"] = torch.randn(sum(shares), hidden, generator=generator).to(dtype)
    scale = dice.choice(["none", "one", "each"])
    if scale == "one":
        options["input_scale"] = torch.tensor([dice.choice([0.5, 2.0])])
    if scale == "each" and all(len(held) > 1 for held in placement.experts):
        options["input_scale"] = torch.exp2(torch.randint(-2, 2, (experts,), generator=generator).float())
    if dice.random() < 0.5:
        options["hidden_scale"] = torch.exp2(torch.randint(-2, 2, (experts,), generator=generator).float())
    if layout == "interleaved":
        options["weight_layout"] = layout
    # Skewed routing: only few experts are chosen, and some ranks may have none of them.
    layer = some_layer(
        sum(shares), top_k, experts, hidden, width, seed=seed, dtype=dtype, gated=layout != "none",
        used=dice.choice([None, 1, 2]), foreign=dice.random() < 0.5, **options,
    )  # fmt: skip
    rows: Any = dice.choice(["nvfp4", "nvfp4", "16bit", "mxfp8_e4m3", "int8"])
    return layer if rows == "nvfp4" else with_rows(layer, rows, generator), placement, shares


def with_rows(layer: Layer, rows: Activations, generator: torch.Generator) -> Layer:
    """Replaces the rows by others: in 16 bits, MX with weights in MXFP4, or INT8 with weights in INT8. Sums stay exact."""
    (experts, n, hidden), (_, _, width) = layer.w13.shape, layer.w2.shape
    weights = replace(layer.w13, global_scale=torch.ones(experts)), layer.w2
    sizes = (n, hidden), (hidden, width)
    if rows == "int8":
        floats = (torch.randn(experts, *size, generator=generator) for size in sizes)
        weights = tuple(ExpertWeights.quantize(w, INT8) for w in floats)
    elif rows != "16bit":
        weights = tuple(mx_weights(experts, *size, generator) for size in sizes)
    dropped = ("input_scale", "hidden_scale")
    options = {name: value for name, value in layer.options.items() if name not in dropped}
    return Layer(layer.x, layer.ids, layer.weights, *weights, options | {"activations": rows})


PER_EXPERT = ("bias13", "hidden_scale", "input_scale")


def part_of(layer: Layer, placement: Placement, shares: list[int], rank: int) -> Layer:
    """Returns the tokens and experts of a rank."""
    start = sum(shares[:rank])
    tokens = slice(start, start + shares[rank])
    held = torch.tensor(placement.experts[rank], dtype=torch.long, device=layer.x.device)
    pick = lambda weights: replace(
        weights,
        data=weights.data[held],
        scale=_picked(weights.scale, held),
        global_scale=None if weights.global_scale is None else weights.global_scale[held],
    )
    options = dict(layer.options)
    for name in PER_EXPERT:
        if options.get(name) is not None and len(options[name]) == placement.num_experts > 1:
            options[name] = options[name][held]
    if options.get("shared") is not None:
        options["shared"] = options["shared"][tokens]
    return Layer(
        layer.x[tokens], layer.ids[tokens], layer.weights[tokens], pick(layer.w13), pick(layer.w2), options
    )


def alone(part: Layer, placement: Placement, rank: int) -> Layer:
    """Returns a rank's part as a layer of one process, where ``bias2`` has rows of only the experts that are present."""
    options = dict(part.options)
    if options.get("bias2") is not None:
        options["bias2"] = options["bias2"][list(placement.experts[rank])]
    return replace(part, options=options)


def _picked(scale: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8)[held].view(scale.dtype)


def on_device(layer: Layer, device: str) -> Layer:
    """Copies the layer to another device."""

    def moved(x: Any) -> Any:
        if isinstance(x, ExpertWeights):
            return replace(x, data=moved(x.data), scale=moved(x.scale), global_scale=moved(x.global_scale))
        return x.to(device) if isinstance(x, torch.Tensor) else x

    options = {name: moved(value) for name, value in layer.options.items()}
    return Layer(*map(moved, layer.arguments()), options)


def differences(
    seed: int, group: Any, capacity: int | None, device: str = "cpu", backend: str = "auto"
) -> str:
    """Lists how this rank's result of a random layer differs from that of one process with all experts."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    layer, placement, shares = some_layer_of_ranks(seed, ranks)
    layer = on_device(layer, device)
    part = part_of(layer, placement, shares, rank)
    got = moe(
        *part.arguments(),
        **part.options,
        group=group,
        placement=placement,
        capacity=capacity,
        backend=backend,
    )
    want = moe(*layer.arguments(), **layer.options)
    want = want[sum(shares[:rank]) :][: shares[rank]]
    if got.dtype == want.dtype and torch.equal(got.view(torch.int16), want.view(torch.int16)):
        return ""
    wrong = int((got != want).sum()) if got.shape == want.shape else "all"
    return f"seed {seed}, {ranks} ranks, rank {rank}, capacity {capacity}: {wrong} of {want.numel()} values differ"
