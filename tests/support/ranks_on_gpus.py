"""Checks a layer over two GPUs (or RANKS of them, from the environment) against one GPU.

Checks captured graphs with changing routing, random layers, shares of every expert's width, a long run, and a rank that
does not arrive. "buffers" in the summary is the number of sizes for which ranks store into each other's memory.

    python tests/support/ranks_on_gpus.py [graphs layers shares soak lost] [--layers 300] [--soak 60] [--json FILE]

prints differences and a summary. Operands have exact sums, so every bit has to agree.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from expert_layers import Layer, moe, some_layer
from ranks import alone, differences, on_device, part_of, run_ranks, some_layer_of_ranks
from tqdm import tqdm

from nvfp4_cute import MoE, Parallel, route
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.errors import RankError
from nvfp4_cute.experts import parallel, symmetric
from nvfp4_cute.experts.keys import FinalizeKey, PermuteKey, PushResultsKey, PushRowsKey, UnpackRowsKey
from nvfp4_cute.experts.placement import Placement
from nvfp4_cute.experts.tensor_parallel import shard
from nvfp4_cute.gpus.targets import gpu_of

RANKS = int(os.environ.get("RANKS", "2"))
CAPACITY = 64
EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 4, 512, 256
WARMERS = 12
LOST_SECONDS = 8.0
SHARES = range(12)


def progress(rank: int, items: Any, what: str) -> Any:
    return tqdm(items, desc=what, disable=None if rank == 0 else True)


def random_layers(rank: int, seeds: range, device: str = "cuda", backend: str = "auto") -> dict[str, Any]:
    """Runs every layer in the exact form and with a capacity, and every fourth also with the group's collectives."""
    device = f"cuda:{rank}" if device == "cuda" else device
    began, wrong = time.monotonic(), []
    for seed in progress(rank, seeds, "layers"):
        check = lambda seed=seed: [
            differences(seed, dist.group.WORLD, capacity, device, backend) for capacity in (None, 40)
        ]
        found = check()
        if seed % 4 == 0:
            with patch.object(parallel, "buffers_of", lambda *_: None):
                found += check()
        wrong += [text for text in found if text]
    return {
        "layers": len(seeds), "wrong": wrong, "seconds": time.monotonic() - began, "buffers": num_buffers()
    }  # fmt: skip


def num_buffers() -> int:
    """Number of layouts with which the ranks store into each other's memory."""
    made = symmetric._made.get(dist.group.WORLD, {})
    return sum(buffers is not None for buffers in made.values())


def lost(rank: int, seconds: float) -> dict[str, Any]:
    """Rank 1 skips the third call: rank 0's result becomes NaN within the group's timeout, and its next call fails."""
    captured = Captured(rank)
    wrong = [] if captured.agrees(1) else ["before"]
    torch.cuda.synchronize()
    began, said = time.monotonic(), ""
    if rank:
        time.sleep(seconds + 4)
    else:
        captured.graph.replay()
        torch.cuda.synchronize()
        if num_buffers() and not captured.y.isnan().all():
            wrong.append("no NaN")
        try:
            captured.over_ranks(captured.x, captured.ids, captured.weights, CAPACITY)
            wrong.append("no error")
        except RankError as error:
            said = str(error)
    took = time.monotonic() - began
    del captured.graph
    return {"wrong": wrong, "seconds": took, "said": said, "buffers": num_buffers()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


class Captured:
    """A rank's part of a layer with a capacity, in a CUDA graph whose operands change."""

    def __init__(self, rank: int):
        self.rank, self.placement = rank, Placement.even(EXPERTS, RANKS)
        self.shares = [CAPACITY] * RANKS
        self.whole = on_device(self.drawn(0), f"cuda:{rank}")
        self.part = part_of(self.whole, self.placement, self.shares, rank)
        self.x, self.ids, self.weights = (t.clone() for t in self.part.arguments()[:3])
        call = lambda: self.over_ranks(self.x, self.ids, self.weights, CAPACITY)
        call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.y = call()

    def drawn(self, seed: int) -> Layer:
        """Tokens and routing of all ranks. Seeds 1 to 3 of 4 are skewed, or contain ids of no expert."""
        return some_layer(
            sum(self.shares), TOP_K, EXPERTS, HIDDEN, WIDTH, seed=seed, used=(None, 1, 3, 9)[seed % 4], foreign=seed % 2 == 1
        )  # fmt: skip

    def over_ranks(self, x, ids, weights, capacity):
        """Computes the layer over all ranks."""
        return moe(
            x, ids, weights, self.part.w13, self.part.w2, **self.part.options, group=dist.group.WORLD,
            placement=self.placement, capacity=capacity,
        )  # fmt: skip

    def agrees(self, seed: int) -> bool:
        """Whether the graph and the exact form agree with one GPU in every bit for other tokens and ids."""
        layer = self.drawn(seed)
        x, ids, weights = (t.to(self.x.device) for t in layer.arguments()[:3])
        want = moe(x, ids, weights, self.whole.w13, self.whole.w2, **self.whole.options)
        mine = slice(self.rank * CAPACITY, (self.rank + 1) * CAPACITY)
        for mine_now, new in ((self.x, x), (self.ids, ids), (self.weights, weights)):
            mine_now.copy_(new[mine])
        self.graph.replay()
        exact = self.over_ranks(self.x, self.ids, self.weights, None)
        return same_bits(self.y, want[mine]) and same_bits(exact, want[mine])


def graphs(rank: int, count: int) -> dict[str, Any]:
    """Replays a graph for ``count`` routings."""
    captured = Captured(rank)
    wrong = [seed for seed in progress(rank, range(1, count + 1), "routings") if not captured.agrees(seed)]
    del captured.graph  # before the group ends: NCCL waits for graphs that hold its calls
    return {"routings": count, "wrong": wrong}


def soak(rank: int, seconds: float) -> dict[str, Any]:
    """Runs for ``seconds``, with other tokens and ids in every step."""
    captured = Captured(rank)
    for seed in range(8):
        captured.agrees(seed)
    before, began, steps, wrong = memory(), time.monotonic(), 0, []
    go_on = torch.ones(1, device=captured.x.device)
    with tqdm(total=round(seconds), desc="soak", unit="s", disable=None if rank == 0 else True) as bar:
        while go_on.item():
            steps += 1
            if not captured.agrees(steps):
                wrong.append(steps)
            passed = time.monotonic() - began
            bar.update(min(round(passed), bar.total) - bar.n)
            go_on.fill_(passed < seconds)
            dist.all_reduce(go_on, dist.ReduceOp.MIN)
    grown = {name: now - before[name] for name, now in memory().items()}
    del captured.graph
    return {
        "seconds": seconds, "steps": steps, "wrong": wrong[:20], "grown_bytes": grown, "buffers": num_buffers()
    }  # fmt: skip


def memory() -> dict[str, int]:
    """Bytes in use: by torch's tensors, on the GPU by all processes, and on the host by this process."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"tensors": torch.cuda.memory_allocated(), "gpu": total - free, "host": resident}


class Shares:
    """Random layers with the same operands on all ranks. Each rank has a share of the width of every expert."""

    def __init__(self, seed: int, device: str):
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        hidden, width = dice.choice([64, 512, 1024]), 32 * RANKS * dice.choice([1, 4, 8])
        tokens = dice.choice([1, 5, 64, 300])
        draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().to(device)
        self.weights = draw(EXPERTS, 2 * width, hidden) / 8, draw(EXPERTS, hidden, width) / 16
        self.arguments = draw(tokens, hidden), *route(draw(tokens, EXPERTS), TOP_K)

    def layer(self, rank: int, **options: Any) -> MoE:
        """Returns the layer of a rank."""
        return MoE.from_experts(*shard(*self.weights, rank, RANKS), **options)

    def differing(self, rank: int) -> list[str]:
        """Names results that differ in a bit from the sum of all shares' layers on one GPU, eager and in a graph."""
        want = sum(self.layer(number)(*self.arguments).float() for number in range(RANKS)).bfloat16()
        own = self.layer(rank, parallel=Parallel(dist.group.WORLD, divide="tensor"))
        results = {"eager": own(*self.arguments)}
        graph = torch.cuda.CUDAGraph() if want.is_cuda else None
        if graph is not None:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results["graph"] = own(*self.arguments)
            graph.replay()
        return [name for name, y in results.items() if not same_bits(y, want)]


def shares(rank: int, seeds: range) -> dict[str, Any]:
    """Runs layers of shares."""
    wrong = []
    for seed in progress(rank, seeds, "shares"):
        wrong += [f"seed {seed}, {name}" for name in Shares(seed, f"cuda:{rank}").differing(rank)]
    return {"layers": len(seeds), "wrong": wrong}


def keys(arch: str) -> list[Any]:
    """Returns the kernels that store into other ranks' memory or wait for such stores."""
    dtypes, sides = (torch.bfloat16, torch.float16), (False, True)
    rows = [(True, False), (True, True), (False, False)]
    return [
        *(PushRowsKey(arch, RANKS, dtype, *options) for dtype in dtypes for options in rows),
        PushResultsKey(arch, RANKS),
        *(UnpackRowsKey(arch, finds, finds) for finds in sides),
        *(
            FinalizeKey(arch, dtype, shared, bias, True)
            for dtype in dtypes
            for shared in sides
            for bias in sides
        ),
        *(PermuteKey(arch, 128, phase, True) for phase in ("whole", "cluster", "count")),
    ]


def warm(worker: int, count: int, seeds: range) -> None:
    """Compiles the kernels of the layers, in many processes at once."""
    torch.cuda.set_device(worker % torch.cuda.device_count())
    for key in keys(gpu_of(torch.device("cuda", torch.cuda.current_device())).arch)[worker::count]:
        get_kernel(key)
    for seed in seeds[worker::count]:
        warm_layer(seed, "cuda")
    for seed in SHARES[worker::count]:
        found = Shares(seed, "cuda")
        found.layer(0)(*found.arguments)


def warm_layer(seed: int, device: str) -> None:
    """Computes a layer as a process with all experts does, and as one with the experts of the first rank."""
    layer, placement, shares = some_layer_of_ranks(seed, RANKS)
    layer = on_device(layer, device)
    for one in (layer, alone(part_of(layer, placement, shares, 0), placement, 0)):
        if one.w13.shape[0]:
            moe(*one.arguments(), **one.options)


def main() -> int:
    """Runs the command line. Returns 1 if a bit is wrong, and 2 without two GPUs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", help="those of graphs, layers, shares, soak and lost; none: all")
    parser.add_argument("--layers", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first of the layers' seeds")
    parser.add_argument(
        "--warmers", type=int, default=WARMERS, help="processes that compile; 0: nothing is before"
    )
    parser.add_argument("--routings", type=int, default=40)
    parser.add_argument("--soak", type=float, default=60, help="seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if torch.cuda.device_count() < RANKS:
        print(f"there are {torch.cuda.device_count()} GPUs here; {RANKS} are needed", file=sys.stderr)
        return 2
    seeds = range(options.first, options.first + options.layers)
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    began = time.monotonic()
    if options.warmers:
        torch.multiprocessing.spawn(warm, (options.warmers, seeds), options.warmers)
    print(f"kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    is_wrong = False
    for name, body, argument, seconds in (
        ("graphs", graphs, options.routings, 300),
        ("layers", random_layers, seeds, 300),
        ("shares", shares, SHARES, 300),
        ("soak", soak, options.soak, 300),
        ("lost", lost, LOST_SECONDS, LOST_SECONDS),
    ):
        if options.checks and name not in options.checks:
            continue
        found = run_ranks(body, RANKS, argument, backend="nccl", seconds=seconds)
        report[name] = [repr(one) if isinstance(one, Exception) else one for one in found]
        is_wrong |= any(isinstance(one, Exception) or one["wrong"] for one in found)
        print(name, json.dumps(report[name], indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))
    print("WRONG" if is_wrong else "every bit agrees")
    return int(is_wrong)


if __name__ == "__main__":
    raise SystemExit(main())
