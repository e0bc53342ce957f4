"""Bytes moved by gemm, dual_gemm, gemv and quantize on the emulator, relative to the minimum."""

import math

import pytest
import torch

from nvfp4_cute import quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.bench import ours
from nvfp4_cute.bench.cases import select
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.roofline.modelled import modelled_times

MOST = 1.05
CASES = [
    case
    for case in select(("competition",))
    if case.problem in ("nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_gemv")
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_device_memory_moves_little_more_than_it_must(case):
    """Reads that miss in an L2 of the B200's size and stored sectors for the benchmark's shapes, in one launch."""
    (timing,) = modelled_times(
        lambda backend: ours.prepare(case, empty_operands(case), backend).run(), B200, by_representatives=True
    )
    moved = timing.hbm_bytes + timing.stored_bytes
    assert 0.99 * case.work.bytes <= moved <= MOST * case.work.bytes


def aligned_ones(*shape):
    """bfloat16 values that start at a cache line, as on a GPU."""
    count = math.prod(shape)
    buffer = torch.ones(count + 64, dtype=torch.bfloat16)
    return buffer[-buffer.data_ptr() % 128 // 2 :][:count].view(shape)


@pytest.mark.parametrize(
    ("m", "k", "gated"),
    [
        (16, 1024, False),
        *(pytest.param(m, 7168, g, marks=pytest.mark.slow) for m in (16, 128) for g in (0, 1)),
    ],
)
def test_quantize_reads_and_writes_once(m, k, gated):
    """Inputs and data are transferred once. Scales have at least 128 rows.

    Where few rows leave SMs idle, lanes hold one block each, which is faster on an H200. Up to four stores then write a
    sector of scales, because it belongs to rows r, r + 32, r + 64 and r + 96.
    """
    x, up = aligned_ones(2, m, k)
    with observe(timing=True) as observer:
        quantize(x, up=up if gated else None, global_scale=0.5, backend="emulator")
    (timing,) = observer.timings
    scales = -(-m // 128) * 128 * k // 16
    least = (1 + gated) * 2 * m * k + m * k // 2 + scales
    is_few = "_few_" in timing.kernel
    assert least <= timing.hbm_bytes + timing.stored_bytes <= MOST * (least + 3 * scales * is_few)
