"""One case on the GPU, compared with torch: the time, its deciles, the floor, and the kernels that ran."""

from statistics import median
from typing import Any

import torch

from nvfp4_cute.bench import measured
from nvfp4_cute.compile import cache
from nvfp4_cute.gpus import targets
from nvfp4_cute.prove import cases, moe
from nvfp4_cute.prove.outcome import NOT_HERE, PASSED, REFUSED, WRONG, Job, Outcome
from nvfp4_cute.prove.predictions import digests
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.tuning import stopwatch

LAYER_SETS = 2
LAYER_ERROR = 0.2
"""Norm of the difference from bf16 over the norm: NVFP4 rounds the activations twice on the way."""
PEER = "peer: "
"""Prefix of the names of peers' times."""


def run(job: Job) -> Outcome:
    """Times a job: a case of ``cases`` or a layer of ``moe``."""
    if job.backend != "cuda":
        return Outcome(job.kind, job.name, NOT_HERE, "an emulator's time is no GPU's")
    name = job.arguments["case"]
    layers = {moe.name_of(tokens): tokens for tokens in moe.TOKENS}
    with cache.watch() as kernels:
        try:
            found = _layer(layers[name]) if name in layers else _case(name)
        except ValueError as error:
            if "differs" in str(error):
                return Outcome(job.kind, job.name, WRONG, str(error))
            raise
    if isinstance(found, str):
        return Outcome(job.kind, job.name, REFUSED, found)
    return Outcome(job.kind, job.name, PASSED, numbers=found, notes=digests(kernels))


def _case(name: str) -> dict[str, float] | str:
    """Returns the figures of a case, or why our kernel does not support it."""
    case = next(case for case in cases.timed() if str(case) == name)
    time, peers, remarks = measured.time_case(case)
    if time is None:
        return "; ".join(remarks.values())
    numbers = _numbers(time, peers)
    target = targets.detect()
    if target is not None:
        numbers["floor_us"] = light.physical_floor(case.work, target).us
    numbers["bytes"] = float(case.work.bytes)
    if case.suite == "linear":
        clean, _, _ = measured.time_case(case, clean=True)
        if clean is not None:
            numbers["clean_us"] = clean.us
    return numbers


def _numbers(time: Any, peers: dict[str, Any]) -> dict[str, float]:
    numbers = {"us": time.us, "low": time.low or time.us, "high": time.high or time.us}
    return numbers | {PEER + name: peer.us for name, peer in peers.items()}


def _layer(tokens: int) -> dict[str, float]:
    """Returns the figures of the layer of experts. Raises ValueError if it differs too much from bf16 with the same weights."""
    device = torch.device("cuda")
    layers = [moe.make_layer(tokens, device, seed) for seed in range(LAYER_SETS)]
    bf16 = [layer.torch_bf16() for layer in layers]
    got, want = layers[0].run().float(), bf16[0]().float()
    error = float((got - want).norm() / want.norm())
    if not error < LAYER_ERROR:
        raise ValueError(f"the layer differs from torch's by {error:.3g} of its norm")
    samples = stopwatch.measure(
        {"ours": lambda i: layers[i].run(), "torch bf16": lambda i: bf16[i]()}, LAYER_SETS, rounds=30
    )
    ours, peer = samples["ours"], samples["torch bf16"]
    return {
        "us": ours.median, "low": ours.low, "high": ours.high, PEER + "torch bf16 grouped_mm": peer.median,
        "bytes": float(median(layer.weight_bytes for layer in layers)), "error": error,
    }  # fmt: skip
