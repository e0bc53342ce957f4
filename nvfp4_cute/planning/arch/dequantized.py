"""Cost model of weight-only products whose weights one launch dequantizes to 16 bits before torch multiplies.

Weight-only kernels dequantize weights for every tile of rows, and ``kernels/warp_mma`` multiplies with ``mma.sync``. From
some number of rows on, torch's 16-bit product saves more time than the additional pass over the weights costs.
"""

from dataclasses import dataclass

from nvfp4_cute.formats.block_format import FP32, NVFP4, BlockFormat
from nvfp4_cute.planning.arch.base import PACES, live_sizes

# Least number of rows and of weights. Launch overhead bounds smaller products, so they are not estimated.
LEAST_ROWS = 64
LEAST_WEIGHTS = 1 << 20
# Below HOST_US, the host takes longer to enqueue both launches than a GPU to execute them, and longer than for one launch: 87 to
# 100 us instead of 47 to 65 on an H200's host (``bench/notes/2026-11-29-h200-prefill.md``). Such a product dequantizes first only
# if this saves the fraction LEAST_GAIN of the kernels' time.
HOST_US, LEAST_GAIN = 100.0, 0.15
# Most bytes of dequantized weights in memory.
MOST_BYTES = 4 << 30
VALUE_BYTES, SUM_BYTES = 2, 4
# Rows of a tile of torch's grouped product.
GROUPED_ROWS = 128
# Bytes per weight that torch's operations move to dequantize weights with float32 scales.
BYTES_BY_TORCH = 16
# The activation of a dual GEMM takes about this number of passes of torch over float32 results.
ACTIVATION_PASSES = 10


@dataclass(frozen=True)
class Times:
    """Constants of both launches: of the one that dequantizes, and of torch's product.

    Source: dense products of 32 to 4096 rows on an H200 (``bench/results/h200_weight_only.json``,
    ``bench/notes/2026-11-29-h200-dequantized.md``); groups of 64 to 512 rows on an H100 (``bench/results/h100_moe.json``).

    Attributes:
        launch: us of both launches without work.
        memory: fraction of a copy's bandwidth that both reach.
        flops, grouped_flops: fraction of the tensor cores' rate that dense and grouped products reach.
    """

    launch: float = 9.0
    memory: float = 0.92
    flops: float = 0.87
    grouped_flops: float = 0.5


TIMES = Times()


def estimate_us(
    sizes: tuple[tuple[int, int, int], ...],
    arch: str,
    num_sms: int,
    num_b: int = 1,
    is_ragged: bool = False,
    b_format: BlockFormat = NVFP4,
) -> float:
    """Returns the modelled time in us of dequantizing the weights of all groups and of the product.

    Args:
        sizes, num_b, is_ragged: see ``WeightOnlyFamily.estimate_us``.
        b_format: format of the weights.
    """
    pace, times = PACES[arch], TIMES
    bandwidth = pace.memory_bytes * num_sms * times.memory
    rate = pace.flops * pace.clock * num_sms * (times.grouped_flops if is_ragged else times.flops)
    weights = sum(n * k for _, n, k in sizes) * num_b
    stored = sum(b_format.nbytes(n, k) for _, n, k in sizes) * num_b
    by_torch = b_format.scale == FP32 and not b_format.is_int4
    us = (BYTES_BY_TORCH * weights if by_torch else stored + VALUE_BYTES * weights) / bandwidth
    flops = moved = 0.0
    for (m, n, k), count in live_sizes(sizes, is_ragged).items():
        rows = -(-m // GROUPED_ROWS) * GROUPED_ROWS if is_ragged else m
        flops += 2.0 * count * num_b * rows * n * k
        moved += count * VALUE_BYTES * (num_b * n * k + m * k + num_b * m * n)
        if num_b > 1:
            us += count * ACTIVATION_PASSES * SUM_BYTES * m * n / bandwidth
    return times.launch + us + max(moved / bandwidth, flops / rate)


def is_faster(us: float, kernels_us: float) -> bool:
    """Returns whether ``estimate_us`` is below the time of weight-only kernels by enough."""
    return us < kernels_us * (1 - LEAST_GAIN if us < HOST_US else 1)


def suits(sizes: tuple[tuple[int, int, int], ...], num_b: int = 1) -> bool:
    """Returns whether there are enough rows and weights, and whether dequantized weights take at most ``MOST_BYTES``."""
    weights = num_b * sum(n * k for _, n, k in sizes)
    rows = sum(m for m, _, _ in sizes)
    return rows >= LEAST_ROWS and LEAST_WEIGHTS <= weights <= MOST_BYTES // VALUE_BYTES
