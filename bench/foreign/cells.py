"""Cells of the comparison: both products of models' layers of experts, the competition's groups, and small groups."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from nvfp4_cute.bench.cases import Case, competition, routed_rows

TOKENS = ((1, 16), (128, 1024), (8192,))


@dataclass(frozen=True)
class Model:
    """A layer of experts, from the model's configuration.

    Attributes:
        name: name of the model.
        hidden, intermediate: columns of tokens, and of the values between both products of an expert.
        experts, top_k: experts of the layer, and experts per token.
        gated: whether the first product has two halves.
        gpus: number of GPUs that share the experts equally. The cell has those of the first GPU.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gated: bool = True
    gpus: int = 1


MODELS = (
    Model("Qwen3.5-35B-A3B", 2048, 512, 256, 8),
    Model("Qwen3.5-397B-A17B", 4096, 1024, 512, 10, gpus=2),
    Model("DeepSeek-V4-Flash", 4096, 2048, 256, 6),
    Model("GLM-5.2", 6144, 2048, 256, 8),
    Model("MiniMax-M3", 6144, 3072, 128, 4),
    Model("Nemotron-3.5-Lightning", 2688, 1856, 128, 6, gated=False),
    Model("Kimi-K3", 3584, 3072, 896, 16, gpus=4),
)
"""Layers with more than 256 experts are divided over GPUs, because LightMoE takes at most 256."""

SMALL_GROUPS = ((8, 128, 4096, 2048), (8, 64, 1024, 1024), (32, 16, 1024, 2048), (8, 256, 2048, 1024))
"""Number of groups, rows per group, N, and K."""


FLASHINFER = "published by FlashInfer"
"""Cells whose times FlashInfer published for its masked kernel, with its default tile, on an SM100 GPU that it does not name."""
MASKED_US = {
    # (groups, mean rows, N, K): (us, rows of all groups). The rows follow from the published TFLOP/s.
    (18, 28, 4096, 7168): (67, 492),
    (18, 227, 4096, 7168): (96, 4028),
    (18, 28, 7168, 2048): (38, 493),
    (18, 227, 7168, 2048): (62, 4369),
    (6, 1024, 4096, 7168): (87.3, 5880),
    (18, 455, 4096, 7168): (153, 8466),
    (18, 56, 4096, 7168): (67, 1022),
    (18, 113, 4096, 7168): (72, 1991),
    (18, 170, 4096, 7168): (89, 3212),
    (18, 341, 4096, 7168): (123, 6142),
    (18, 56, 7168, 2048): (38, 1033),
    (18, 113, 7168, 2048): (41, 1905),
    (18, 170, 7168, 2048): (53, 3090),
    (18, 341, 7168, 2048): (74, 6019),
    (18, 455, 7168, 2048): (88, 8090),
}
"""Source: flashinfer-ai/flashinfer#2503, and #1502 for the last one; `bench_cute_dsl_blockscaled_gemm.py`, times of kineto."""
LEAST_ROWS, MOST_ROWS = 0.7, 1.3
"""Range of a group's rows relative to the mean. That benchmark draws them uniformly."""


def cells() -> list[Case]:
    """Returns all cells: small groups, the competition's and FlashInfer's groups, then models by tokens."""
    return [*_small(), *_competition(), *published(), *_models()]


def published() -> dict[Case, float]:
    """Returns the cells with published times, and the times in us."""
    found = {}
    for (groups, mean, n, k), (us, total) in MASKED_US.items():
        draw = random.Random(42)
        drawn = [mean * draw.uniform(LEAST_ROWS, MOST_ROWS) for _ in range(groups)]
        rows = [round(value * total / sum(drawn)) for value in drawn]
        found[_case(FLASHINFER, f"{groups} of about {mean} x {n} x {k}", [(m, n, k) for m in rows])] = us
    return found


def _case(problem: str, name: str, sizes: Sequence[tuple[int, int, int]]) -> Case:
    return Case("foreign", problem, name, "grouped_gemm", tuple(sizes), form="ragged", out="bf16")


def _small() -> list[Case]:
    return [
        _case("equal groups", f"{groups} of {m} x {n} x {k}", [(m, n, k)] * groups)
        for groups, m, n, k in SMALL_GROUPS
    ]


def _competition() -> list[Case]:
    return [
        _case("competition", case.name, case.sizes)
        for case in competition()
        if case.problem == "nvfp4_group_gemm"
    ]


def _models() -> list[Case]:
    found = []
    # Few tokens first. Cells of one product follow each other, because kernels are compiled for its shape.
    for counts, model, product in itertools.product(TOKENS, MODELS, ("first", "second")):
        width = model.intermediate * (2 if model.gated else 1)
        n, k = (width, model.hidden) if product == "first" else (model.hidden, model.intermediate)
        for tokens in counts:
            rows = routed_rows(tokens, model.experts, model.top_k)[: model.experts // model.gpus]
            name = f"{product} product, {tokens} token{'s' * (tokens > 1)}"
            found.append(_case(model.name, name, [(m, n, k) for m in rows]))
    return found
