"""A layer of experts over the GPUs of this machine: each phase, the layer, and one GPU with all experts and all tokens.

    nvfp4-cute bench ep [--containing qwen3] [--tokens 1,8,64] [--ranks 2] [--results ep.json] [--plot ep.png] [--save]
    torchrun --nproc-per-node 2 -m nvfp4_cute.bench.ep ep.json

The first command starts its own processes, and prints tables. Times in ``--results`` are not measured again, so it may
need no GPU.

- Tokens are per rank; "one GPU" has the tokens of all ranks.
- A time is that of the slowest rank, in us, the median over rounds, on a cold L2. A collective aligns the ranks before
  each interval.
- Phases, "capacity" and "one GPU" are replayed from CUDA graphs. "Exact" is eager: the host waits in it for the sizes;
  its host time is that of one of many calls in a row. "NCCL" is both forms with the group's backend moving the rows.
- A result is compared with one GPU's before it is timed.
- Bytes are the most that leave any rank, counted from the routes, each row once. Two rates of the same run accompany
  them: one large exchange by NCCL, which moves the rows through its own buffers, and one large copy into another rank's
  memory, the rate of the links. Phases that store into other ranks' memory may exceed the first rate, but not the
  second.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tqdm import tqdm

from nvfp4_cute import ActivationFormat, Experts, Parallel, Placement, private_api, route
from nvfp4_cute.activation import SILU
from nvfp4_cute.bench import provenance
from nvfp4_cute.bench.moe import MODELS, Model, make_weights
from nvfp4_cute.experts import dispatch, parallel, push
from nvfp4_cute.experts.combine import finalize
from nvfp4_cute.experts.dispatch import Routes, RowLayout
from nvfp4_cute.experts.exchange import gather, send_rows
from nvfp4_cute.experts.moe import moe
from nvfp4_cute.experts.products import LocalExperts
from nvfp4_cute.experts.records import LayerOfExperts
from nvfp4_cute.experts.symmetric import BufferLayout, buffers_of
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.nn.moe import MoE
from nvfp4_cute.roofline.plot import stacked_bars
from nvfp4_cute.tuning.stopwatch import cold_l2

RESULTS = Path(__file__).parent / "results"
CHOSEN = ("qwen3-30b-a3b", "deepseek-v3-slice")
TOKENS = (1, 8, 64, 512, 2048, 8192)
# Above this, buffers of a fixed capacity become impractically large.
MOST_CAPACITY = 1024
ROUNDS, WARM_UP = 20, 3
LINK_BYTES = 256 << 20
TIMEOUT = timedelta(seconds=300)
# Products with another config may round the last bit of a value differently.
WRONG = 0.01
# By buffers that ranks store into, or by the group's backend. The second and the second-last phase of each send.
PUSHED = ("send", "receive", "products", "give", "sum")
EXCHANGED = ("pack", "dispatch", "unpack", "products", "collect", "combine", "sum")
PUSHED_RATES = (
    '"Send" and "give" store straight into the memory of other ranks, so their rates may exceed that of NCCL, which copies '
    "through buffers of its own. The links set the limit: 450 GB/s in each direction on an H100 or H200. Copies reach "
    "370 to 391 GB/s.\n"
)
LAYERS = ("exact", "host", "capacity", "NCCL exact", "NCCL capacity", "one GPU")
HOST_CALLS = 50
# Replays are enqueued while the GPU spins, for about 100 us, so that no interval includes host time.
HOLD_CYCLES = 180_000
DEVICE = "cuda"
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Result:
    """Result for a number of tokens per rank.

    Attributes:
        tokens: tokens of each rank.
        us: times by name.
        differing: share of values that differ from those of one GPU.
        error: norm of the difference over that of the result.
        dispatch_bytes, combine_bytes: most bytes that leave any rank.
        bf16_bytes: bytes of an equal dispatch in bf16.
    """

    tokens: int
    us: dict[str, float]
    differing: float
    error: float
    dispatch_bytes: int
    combine_bytes: int
    bf16_bytes: int


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """Returns the replay of a call, compiled and set up by a first call. Inputs of the call stay alive."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, held: object) -> None:
    """Replays a graph whose inputs ``held`` keeps alive."""
    graph.replay()


def world() -> dist.ProcessGroup:
    """Returns the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def timed(calls: Calls, rounds: int = ROUNDS) -> dict[str, float]:
    """Returns medians of the slowest rank in us. All ranks call this with the same names."""
    flush, aligned = cold_l2(), torch.zeros(1, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-WARM_UP, rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            dist.all_reduce(aligned)
            if "exact" not in name:
                private_api.spin(HOLD_CYCLES)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if number >= 0:
                times[name].append(1e3 * begin.elapsed_time(end))
    table = torch.tensor([*times.values()], device="cuda")
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return {name: median(row) for name, row in zip(times, table.tolist(), strict=True)}


class Part:
    """A rank's experts of a model."""

    def __init__(self, model: Model, layer: MoE, rank: int, ranks: int):
        self.model, self.rank, self.ranks = model, rank, ranks
        self.placement = Placement.even(model.experts, ranks)
        held = torch.tensor(self.placement.experts[rank], device=DEVICE)
        pick = lambda data, scale: ExpertWeights(
            data[held], scale.view(torch.uint8)[held].view(scale.dtype), None
        )
        assert layer.alpha13 is not None and layer.alpha2 is not None
        self.w13 = Experts(pick(layer.w13, layer.w13_scale), alpha=layer.alpha13[0][held])
        self.w2 = Experts(pick(layer.w2, layer.w2_scale), alpha=layer.alpha2[held])

    def layer(self, x, ids, weights, capacity: int | None) -> torch.Tensor:
        """Computes the layer over all ranks."""
        parallel = Parallel(world(), capacity, self.placement)
        return moe(x, ids, weights, self.w13, self.w2, activations="nvfp4", parallel=parallel)

    @cached_property
    def experts(self) -> LocalExperts:
        """Returns the local experts, in the form that ``moe`` checks."""
        x = torch.empty((0, self.model.hidden), dtype=torch.bfloat16, device=DEVICE)
        return LocalExperts.of(x, LayerOfExperts(self.w13, self.w2, SILU, ActivationFormat("nvfp4")))

    def rows(self, rows, ids, order) -> torch.Tensor:
        """Computes both products."""
        mean = -(-len(rows.data) // self.model.experts)
        return self.experts.rows(
            rows, ids, order, dtype=torch.bfloat16, first_expert=0, backend="auto", mean_rows=mean
        )

    def moved(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns pairs (token, rank), then choices, int64 [from, to] each: [ranks, 2 * ranks]."""
        routes = Routes.of(ids, self.placement, self.rank, "auto")
        back = routes.choices("auto")
        ends = gather(world(), torch.cat([routes.tokens.offs, back.offs]))
        halves = ends.split(self.ranks, 1)
        return torch.cat([part.diff(dim=1, prepend=part.new_zeros(self.ranks, 1)) for part in halves], 1)

    def phases(self, x, ids, weights, table: torch.Tensor) -> Calls:
        """Returns the phases, each with the results of the earlier ones. table: see ``moved``."""
        layout = RowLayout(x.shape[1], 0, x.dtype, True)
        buffers = buffers_of(world(), BufferLayout(self.ranks, len(x), ids.shape[1], layout), x.device)
        if buffers is None:
            return self.exchanged(x, ids, weights, table)
        count, group = self.experts.count, self.placement
        send = lambda: push.send(x, ids, group, buffers, None, "auto")
        places = send()
        receive = lambda: push.receive(buffers, count, None, None, "auto")
        rows, order = receive()
        products = lambda: self.rows(rows, buffers.ids, order)
        down = products()
        give = lambda: push.return_results(down, order, buffers, "auto")
        give()
        total = lambda: finalize(buffers.results, places, weights, inbox=buffers.inbox)
        return dict(zip(PUSHED, (send, receive, products, give, total), strict=True))

    def exchanged(self, x, ids, weights, table: torch.Tensor) -> Calls:
        """Returns the phases of the exact form with the group's backend."""
        group, placement, rank = world(), self.placement, self.rank
        layout = RowLayout(x.shape[1], ids.shape[1], x.dtype, True)
        back_order = Routes.of(ids, placement, rank, "auto").choices("auto")
        tokens, choices = table.split(self.ranks, 1)
        sent, received = tokens[rank].tolist(), tokens[:, rank].tolist()
        wanted, owed = choices[rank].tolist(), choices[:, rank].tolist()

        def pack() -> torch.Tensor:
            found = Routes.of(ids, placement, rank, "auto")
            return dispatch.pack(x, found, layout, None, sum(sent), None, "auto")[0]

        rows = pack()
        exchange = lambda: send_rows(rows, group, sent, received)
        arrived = exchange()
        ids_of = lambda: layout.ids(arrived).contiguous()
        count = self.experts.count
        unpack = lambda: dispatch.unpack(arrived, ids_of(), layout, count, None, sum(owed), "auto")
        local, (sorted_rows, order) = ids_of(), unpack()
        products = lambda: self.rows(sorted_rows, local, order)
        down = products()
        collect = lambda: dispatch.collect(down, local, order, sum(owed), "auto")
        results = collect()
        combine = lambda: send_rows(results, group, owed, wanted)
        back = combine()
        total = lambda: finalize(back, back_order.rows, weights)
        calls = (pack, exchange, unpack, products, collect, combine, total)
        return dict(zip(EXCHANGED, calls, strict=True))


def by_backend(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a call in which the group's backend moves rows."""

    def called() -> Any:
        with patch.object(parallel, "buffers_of", lambda *_: None):
            return call()

    return called


def host_us(call: Callable[[], Any]) -> float:
    """Returns the host time of one of many calls in a row, on the slowest rank."""
    call()
    torch.accelerator.synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    spent = torch.tensor([(time.perf_counter() - began) * 1e6 / HOST_CALLS], device=DEVICE)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def measure(part: Part, whole: MoE, tokens: int, rounds: int) -> Result:
    """Compares, then times. Raises ValueError if the result differs from one GPU's."""
    model, rank, ranks = part.model, part.rank, part.ranks
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn((ranks * tokens, model.hidden), device=DEVICE, generator=generator).bfloat16()
    logits = torch.randn((ranks * tokens, model.experts), device=DEVICE, generator=generator).bfloat16()
    ids, weights = route(logits, model.top_k)
    mine = slice(rank * tokens, (rank + 1) * tokens)
    own = (x[mine], ids[mine], weights[mine])
    want = whole(x, ids, weights)[mine]
    exact, fixed = (partial(part.layer, *own, capacity) for capacity in (None, tokens))
    for form in (exact, fixed, by_backend(exact)):
        error = float((form().float() - want.float()).norm() / want.float().norm())
        if not error < WRONG:
            raise ValueError(f"{tokens} tokens: the result differs from one GPU's by {error:.3g} of its norm")
    got, table = fixed(), part.moved(ids[mine])
    calls: Calls = {name: captured(call) for name, call in part.phases(*own, table).items()}
    calls |= {"exact": exact, "NCCL exact": by_backend(exact)}
    if "send" in calls or tokens <= MOST_CAPACITY:
        calls["capacity"] = captured(fixed)
    if tokens <= MOST_CAPACITY:
        calls["NCCL capacity"] = captured(by_backend(fixed))
    calls["one GPU"] = captured(lambda: whole(x, ids, weights))
    us = timed(calls, rounds) | {"host": host_us(exact)}
    away = table.clone()
    for place in range(ranks):
        away[place, [place, ranks + place]] = 0
    pairs = int(away[:, :ranks].sum(1).max())
    result_bytes = model.hidden * x.dtype.itemsize
    return Result(
        tokens=tokens,
        us=us,
        differing=float((got != want).float().mean()),
        error=error,
        dispatch_bytes=pairs * RowLayout(model.hidden, model.top_k, x.dtype, True).row_bytes,
        combine_bytes=int(away[:, ranks:].sum(0).max()) * result_bytes,
        bf16_bytes=pairs * result_bytes,
    )


def copy_gigabytes_per_s(rank: int, ranks: int) -> float | None:
    """Returns the rate of one large copy into the next rank's memory in GB/s; None if ranks cannot reach each other's memory."""
    try:
        peers, _held = private_api.symmetric_memory(LINK_BYTES, torch.device(DEVICE, rank), world())
    except (RuntimeError, ImportError, AttributeError):
        return None
    own, there = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=DEVICE), peers[(rank + 1) % ranks]
    us = timed({"copy": lambda: there.copy_(own)})["copy"]
    return LINK_BYTES / us / 1e3


def exchange_gigabytes_per_s(ranks: int) -> float:
    """Returns the rate of one large exchange by the group's backend, in GB/s leaving a rank."""
    rows = torch.zeros((ranks, LINK_BYTES // ranks), dtype=torch.uint8, device=DEVICE)
    us = timed({"exchange": lambda: send_rows(rows, world())})["exchange"]
    return LINK_BYTES * (ranks - 1) / ranks / us / 1e3


@dataclass(frozen=True)
class Plan:
    """Plan of a run: models by name, tokens per rank, GPUs, rounds per call, and the file of the report."""

    models: tuple[str, ...]
    tokens: tuple[int, ...]
    ranks: int
    rounds: int
    results: Path

    def missing(self, report: dict[str, Any]) -> list[tuple[str, int]]:
        """Returns models and tokens that a report lacks."""
        known = {(name, result["tokens"]) for name, rows in report["models"].items() for result in rows}
        return [(name, count) for name in self.models for count in self.tokens if (name, count) not in known]

    def read(self) -> dict[str, Any]:
        """Returns the existing report."""
        if not self.results.exists():
            return {"models": {}}
        return provenance.read_object(self.results, ("models",), "nvfp4-cute bench ep --results")


def run_rank(rank: int, store: str | None, plan: Plan) -> None:
    """Runs one process: measures, and rank 0 writes. Without a ``store`` the environment names the other processes."""
    torch.cuda.set_device(rank)
    if store is None:
        dist.init_process_group("nccl", timeout=TIMEOUT)
    else:
        dist.init_process_group("nccl", f"file://{store}", TIMEOUT, world_size=plan.ranks, rank=rank)
    ranks = dist.get_world_size()
    report = plan.read() | {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ranks": ranks,
        "link_gb_s": exchange_gigabytes_per_s(ranks),
        "copy_gb_s": copy_gigabytes_per_s(rank, ranks),
        "held": True,
    }
    cells, whole, part, latest = plan.missing(report), None, None, ""
    for name, tokens in tqdm(cells, disable=None if rank == 0 else True):
        if name != latest:
            del whole, part  # only one model's weights at a time
            whole, latest = make_weights(MODELS[name]).layer, name
            part = Part(MODELS[name], whole, rank, ranks)
        assert whole is not None and part is not None
        report["models"].setdefault(name, []).append(asdict(measure(part, whole, tokens, plan.rounds)))
        torch.cuda.empty_cache()
        if rank == 0:
            plan.results.write_text(json.dumps(report, indent=1))
    torch.cuda.synchronize()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the end of a group may wait for calls that graphs hold


def run(plan: Plan, *, as_json: bool = False, plot: Path | None = None, save: bool = False) -> int:
    """Measures what the plan's report lacks, in separate processes, and prints it. Returns 2 if there are too few GPUs."""
    if plan.missing(plan.read()):
        found = torch.cuda.device_count()
        if found < plan.ranks:
            print(f"bench ep: {found} GPUs here, {plan.ranks} needed; nothing is measured", file=sys.stderr)
            return 2
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_rank, (f"{folder}/store", plan), plan.ranks)
    report = plan.read()
    print(json.dumps(report, indent=1) if as_json else page(report))
    if save:
        gpu = next(word for word in report["gpu"].lower().split() if any(map(str.isdigit, word)))
        name = f"{gpu}x{report['ranks']}_ep"
        (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / f"{name}.md").write_text(page(report, f"nvfp4-cute bench ep --results {name}.json --save"))
    if plot:
        draw(report, plot)
    return 0


def page(report: dict[str, Any], made_by: str = "") -> str:
    """Returns Markdown: times, then bytes. ``made_by``: the command, on a committed page."""
    copy = report.get("copy_gb_s")
    copied = f", one large copy into another rank's memory: {copy:.0f} GB/s" if copy else ""
    pushes = any(phases_of(results) is PUSHED for results in report["models"].values() if results)
    parts = [
        f"# A layer of experts on {report['ranks']} x {report['gpu']}\n",
        f"Measured with torch {report['torch']}; us, the slowest rank, medians on a cold L2. One large exchange by NCCL: "
        f"{report['link_gb_s']:.0f} GB/s out of a rank{copied}. {made_by and f'Made by `{made_by}`.'}\n",
        *([PUSHED_RATES] if pushes else []),
        '"Exact" is eager, and its host waits for sizes. "Capacity", "one GPU" and every phase are replayed CUDA graphs. Every '
        "phase begins with a cold L2. One GPU has the tokens of all ranks.\n",
    ]
    if not report.get("held"):
        parts.append(
            "Intervals of this run have the host's launch of a replay in them: about 25 us is the least that any can show, "
            "however short its work is. Later runs hold the GPU until the replay is enqueued.\n"
        )
    for model, results in report["models"].items():
        phases = phases_of(results)
        rows: list[tuple[str, ...]] = []
        for result in results:
            us = result["us"]
            cells = [f"{us[name]:.1f}" if name in us else "-" for name in (*phases, *LAYERS)]
            rows.append((str(result["tokens"]), *cells, f"{best(us) / us['one GPU']:.2f}"))
        head: tuple[str, ...] = ("tokens a rank", *phases, *LAYERS, "of one GPU")
        parts.append(f"## {model}: time\n\n{_table(head, rows)}\n")
        rows = []
        for result in results:
            us, sent, back = result["us"], result["dispatch_bytes"], result["combine_bytes"]
            there, here = sending(phases)
            rates = [f"{moved / us[name] / 1e3:.0f}" for name, moved in ((there, sent), (here, back))]
            share = sent / result["bf16_bytes"] if result["bf16_bytes"] else 0.0
            megabytes = f"{sent / 1e6:.3f}", f"{back / 1e6:.3f}"
            differs = f"{result['differing']:.2g}", f"{result['error']:.2g}"
            rows.append(
                (
                    str(result["tokens"]),
                    megabytes[0],
                    rates[0],
                    f"{share:.2f}",
                    megabytes[1],
                    rates[1],
                    *differs,
                )
            )
        head = (
            "tokens a rank", "dispatch MB", "GB/s", "of bf16's bytes", "combine MB", "GB/s", "differing values", "error",
        )  # fmt: skip
        parts.append(f"## {model}: bytes that leave a rank\n\n{_table(head, rows)}\n")
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows))


def phases_of(results: list[dict[str, Any]]) -> tuple[str, ...]:
    """Returns the names of the measured phases."""
    return PUSHED if "send" in results[0]["us"] else EXCHANGED


def sending(phases: tuple[str, ...]) -> tuple[str, str]:
    """Returns the phases in which tokens and results leave a rank."""
    return ("send", "give") if phases is PUSHED else ("dispatch", "combine")


def best(us: dict[str, float]) -> float:
    """Returns the time of the faster form."""
    return min(us[name] for name in ("exact", "capacity") if name in us)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws the phases of every number of tokens, relative to one GPU's time."""
    labels: list[str] = []
    marks: list[float] = []
    stacks: dict[str, list[float]] = {}
    for model, results in report["models"].items():
        phases = phases_of(results)
        for result in results:
            us = result["us"]
            labels.append(f"{model}, {result['tokens']} tokens per rank")
            for phase in phases:
                stacks.setdefault(phase, []).append(us[phase] / us["one GPU"])
            marks.append(best(us) / us["one GPU"])
    title = (
        f"Phases of a layer of experts over {report['ranks']} x {report['gpu']}, measured one by one, each with a cold L2; "
        "the mark is the whole layer"
    )
    unit = "time relative to one GPU that has all tokens"
    stacked_bars(path, title, labels, stacks, ("the layer", marks), unit=unit)


def main() -> int:
    """Runs a process of torchrun with the defaults of ``nvfp4-cute bench ep``, into the named file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="the report")
    results = parser.parse_args().results
    plan = Plan(CHOSEN, TOKENS, 0, ROUNDS, results)
    run_rank(int(dist.get_node_local_rank()), None, plan)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
