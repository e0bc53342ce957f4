"""Host time of repeated calls in microseconds, for every public operation and every mode of QuantizedLinear.

    python -m nvfp4_cute.bench.host_cost [--json]

Also measures ``torch.add``, the least cost of an operation of torch, and ``torch.nn.Linear``. A round is a few
consecutive calls, fewer launches than the GPU's queue holds, so that none waits for the GPU; nothing synchronizes
inside. The figure is the median of the rounds. Sizes are small, because they do not matter to the host.

The script uses only public names, so it can also measure an older checkout:
``PYTHONPATH=<older checkout> python bench/host_cost.py``.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import nvfp4_cute as nv
from nvfp4_cute.ops import parts
from nvfp4_cute.ops.parts import Parts

ROWS, N, K, GROUPS = 16, 1024, 1024, 8
CALLS, ROUNDS, WARM_UP = 30, 60, 10
Call = Callable[[], object]


def calls() -> Iterator[tuple[str, Call]]:
    """Yields every call by name, with operands on the GPU. The first two are torch's."""
    torch.manual_seed(0)
    x, y = (torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    yield "torch.add", lambda: torch.add(x, y)
    linear = torch.nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    yield "torch.nn.Linear", lambda: linear(x)
    yield from _products(x)
    yield from _groups(x)
    yield from _quantizations(x, y)
    yield from _layers(linear, x)
    yield from _experts()


def _products(x: torch.Tensor) -> Iterator[tuple[str, Call]]:
    w = nv.quantize(torch.randn(N, K, device="cuda", dtype=torch.bfloat16), global_scale=0.002)
    u = nv.quantize(torch.randn(N, K, device="cuda", dtype=torch.bfloat16), global_scale=0.002)
    a, one = nv.quantize(x), nv.quantize(x[:1])
    v, alpha, alpha2 = nv.quantize(x[0]), *torch.ones(2, 1, device="cuda").unbind()
    rows, row, weights, others, vector = (Parts(t.data, t.scale) for t in (a, one, w, u, v))
    yield "gemm", lambda: parts.gemm(rows, weights, alpha)
    yield "gemm, a number as alpha", lambda: parts.gemm(rows, weights, 0.5)
    yield "gemm, one row", lambda: parts.gemm(row, weights, alpha)
    yield "gemm, NVFP4 result", lambda: parts.gemm(rows, weights, alpha, out_dtype="nvfp4")
    yield "gemm, 16-bit a", lambda: parts.gemm(x, weights, alpha)
    yield "gemv", lambda: parts.gemv(weights, vector, alpha)
    yield "gemv, 16-bit b", lambda: parts.gemv(weights, x[0], alpha)
    both = parts.gate_up(weights, others, "separate", alpha, alpha2)
    yield "dual_gemm", lambda: parts.dual_gemm(rows, both)
    yield "dual_gemm, NVFP4 result", lambda: parts.dual_gemm(rows, both, out_dtype="nvfp4")
    yield "gemm of whole tensors", lambda: nv.gemm(a, w)


def _groups(x: torch.Tensor) -> Iterator[tuple[str, Call]]:
    weights = torch.randn(GROUPS, N, K, device="cuda", dtype=torch.bfloat16)
    b, b2 = nv.quantize(weights), nv.quantize(weights.flip(0))
    rows = torch.randn(GROUPS * ROWS, K, device="cuda", dtype=torch.bfloat16)
    offs = torch.arange(1, GROUPS + 1, device="cuda", dtype=torch.int32) * ROWS
    sizes = torch.full((GROUPS,), ROWS, device="cuda", dtype=torch.int32)
    alpha, alpha2 = torch.ones(2, GROUPS, device="cuda").unbind()
    data, scale = nv.grouped_quantize(rows, offs)
    batch = nv.quantize(rows.view(GROUPS, ROWS, K))
    listed = [nv.quantize(part) for part in rows.split(ROWS)]
    lists = Parts([x.data for x in listed], [x.scale for x in listed]), Parts(list(b.data), list(b.scale))
    quantized: Any = {"out_dtype": "nvfp4"}
    yield "grouped_gemm, list", lambda: parts.grouped_gemm(*lists, alpha=alpha)
    yield "grouped_gemm, list, NVFP4 results", lambda: parts.grouped_gemm(*lists, alpha=alpha, **quantized)
    ragged = Parts(data, scale), Parts(b.data, b.scale), offs
    yield "grouped_gemm, ragged", lambda: parts.grouped_gemm(*ragged, alpha=alpha)
    yield "grouped_gemm, ragged, NVFP4 results", lambda: parts.grouped_gemm(*ragged, alpha=alpha, **quantized)
    masked = Parts(batch.data, batch.scale), ragged[1]
    yield "grouped_gemm, masked", lambda: parts.grouped_gemm(*masked, masked_m=sizes, alpha=alpha)
    both = parts.gate_up(ragged[1], Parts(b2.data, b2.scale), "separate", alpha, alpha2)
    yield "grouped_dual_gemm, ragged", lambda: parts.grouped_dual_gemm(ragged[0], both, offs)
    listed_both = parts.gate_up(lists[1], Parts(list(b2.data), list(b2.scale)), "separate", alpha, alpha2)
    yield "grouped_dual_gemm, list", lambda: parts.grouped_dual_gemm(lists[0], listed_both)


def _quantizations(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[str, Call]]:
    factor = torch.full((), 0.002, device="cuda")
    offs = torch.tensor([ROWS // 2, ROWS], device="cuda", dtype=torch.int32)
    factors = torch.full((2,), 0.002, device="cuda")
    yield "quantize", lambda: nv.quantize(x)
    yield "quantize, global scale", lambda: nv.quantize(x, global_scale=factor)
    yield "quantize, a number as global scale", lambda: nv.quantize(x, global_scale=0.002)
    yield "quantize, auto", lambda: nv.quantize(x, global_scale="auto")
    yield "quantize, silu(x) * up", lambda: nv.quantize(x, up=y, global_scale=factor)
    yield "grouped_quantize", lambda: parts.grouped_quantize(x, offs, global_scale=factors)


def _layers(linear: torch.nn.Linear, x: torch.Tensor) -> Iterator[tuple[str, Call]]:
    for name, options in {
        "auto": {},
        "fixed scale": {"input_scale": 0.002},
        "no scale": {"input_scale": None},
        "16-bit": {"activations": "16bit"},
        "decoded": {"pre_decode": True},
    }.items():
        layer = nv.QuantizedLinear.from_linear(linear, **options)  # type: ignore[arg-type]
        yield f"QuantizedLinear, {name}", lambda layer=layer: layer(x)  # type: ignore[misc]


def _experts() -> Iterator[tuple[str, Call]]:
    gate_up = torch.randn(GROUPS, 2 * N, K, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(GROUPS, K, N, device="cuda", dtype=torch.bfloat16)
    w13, w2 = nv.quantize(gate_up), nv.quantize(down)
    logits = torch.randn(ROWS, GROUPS, device="cuda")
    yield "route", lambda: nv.route(logits, 2)
    for tokens in (1, ROWS):
        x = torch.randn(tokens, K, device="cuda", dtype=torch.bfloat16)
        ids, weights = nv.route(logits[:tokens], 2)
        for rows in ("nvfp4", "16bit"):
            layer = nv.MoE.from_experts(gate_up, down, activations=rows)
            end = f"{rows} rows, {tokens} tokens"
            yield f"MoE, {end}", lambda of=(layer, x, ids, weights): of[0](*of[1:])  # type: ignore[misc]
            call = (x, ids, weights, w13, w2)
            yield f"moe, {end}", lambda call=call, rows=rows: nv.moe(*call, activations=rows)  # type: ignore[misc]


def host_us(call: Call) -> float:
    """Returns the median time of one call, in microseconds."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - start) / 1000 / CALLS)
    torch.cuda.synchronize()
    return median(times)


def measure() -> dict[str, float | str]:
    """Returns microseconds by name, or the reason for a refused call."""
    found: dict[str, float | str] = {}
    with torch.no_grad():
        for name, call in calls():
            try:
                found[name] = host_us(call)
            except (ValueError, TypeError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU that torch can use: the cost of launches is measured on one", file=sys.stderr)
        return 1
    found = measure()
    package = str(Path(nv.__file__).resolve().parent)
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "package": package}
        print(json.dumps(about | {"host_us": found}, indent=2))
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {package}")
    print(f"{'us':>7}  {'x torch.add':>11}  {'x nn.Linear':>11}")
    add, linear = found["torch.add"], found["torch.nn.Linear"]
    for name, us in found.items():
        if isinstance(us, str) or isinstance(add, str) or isinstance(linear, str):
            print(f"{'-':>7}  {'-':>11}  {'-':>11}  {name}: {us}")
        else:
            print(f"{us:7.1f}  {us / add:11.2f}  {us / linear:11.2f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
