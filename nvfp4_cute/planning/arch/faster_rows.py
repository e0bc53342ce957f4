"""Whether a W4A4 layer is faster with activations of 16 bits, on GPUs that dequantize weights in any case.

Both times come from the cost models of the kernels. Activations of 16 bits are exact, and no launch quantizes them.
"""

from functools import lru_cache

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.planning.arch import grouped_weight_only_us, of_groups, sm90, weight_only_us
from nvfp4_cute.planning.arch.base import PACES
from nvfp4_cute.planning.rows import rounded_rows
from nvfp4_cute.problem import GroupedProblem

# us by which quantizing rows and their product takes longer than the model of the product: the mean of 18 measured cells of
# 16 to 128 rows. The launch that quantizes takes 4.4 to 5 us of it, and a timed graph adds the rest, which the models of
# weight-only kernels contain. Source: ``bench/notes/2026-11-28-h200-w4a4-rows.md``.
QUANTIZING_US = 6.3
# Least relative gain in modelled time for which layers of experts use 16 bits. Models of ragged groups err by about as much.
LEAST_GAIN_OF_EXPERTS = 0.05


def has_choice(arch: str) -> bool:
    """Returns whether products of both kinds of activations run on the same units."""
    return arch in sm90.ARCHS


def keeps_16_bits(arch: str, num_sms: int, rows: int, n: int, k: int) -> bool:
    """Returns whether a linear layer is faster with activations of 16 bits.

    Args:
        arch, num_sms: the GPU.
        rows: rows of activations.
        n, k: extents of the weights [N, K].
    """
    # Rows are rounded before the cache, because a server calls with any number of them.
    return has_choice(arch) and rows > 0 and _keeps_16_bits(arch, num_sms, rounded_rows(rows), n, k)


@lru_cache(maxsize=4096)
def _keeps_16_bits(arch: str, num_sms: int, rows: int, n: int, k: int) -> bool:
    quantized = _quantizing_us(arch, num_sms, rows, k)
    quantized += sm90.estimate_us(GroupedProblem(((rows, n, k),)), num_sms)
    return weight_only_us(arch, num_sms, rows, n, k) <= quantized


def experts_keep_16_bits(
    arch: str, num_sms: int, rows: int, experts: int, hidden: int, width: int, is_gated: bool = True
) -> bool:
    """Returns whether a layer of experts is faster with activations of 16 bits.

    Args:
        arch, num_sms: the GPU.
        rows: rows of all experts: tokens times experts per token.
        experts, hidden, width: E, H and I.
        is_gated: whether the first product has a gate.
    """
    sizes = (experts, hidden, width)
    return (
        has_choice(arch)
        and rows > 0
        and _experts_keep_16_bits(arch, num_sms, rounded_rows(rows), *sizes, is_gated)
    )


@lru_cache(maxsize=4096)
def _experts_keep_16_bits(
    arch: str, num_sms: int, rows: int, experts: int, hidden: int, width: int, is_gated: bool
) -> bool:
    exact = quantized = 0.0
    for n, k, num_b in ((width, hidden, 1 + is_gated), (hidden, width, 1)):
        sizes = of_groups(rows, n, k, experts)
        exact += grouped_weight_only_us(arch, sizes, num_sms, num_b, True)
        problem = GroupedProblem(sizes, "ragged", activation="silu" if num_b == 2 else None)
        quantized += QUANTIZING_US + sm90.estimate_us(problem, num_sms)
    return exact * (1 + LEAST_GAIN_OF_EXPERTS) <= quantized


def _quantizing_us(arch: str, num_sms: int, rows: int, k: int) -> float:
    """Returns the time of quantizing rows to NVFP4 in us, which reads 16 bits per value and writes 4.5."""
    moved = 2 * rows * k + NVFP4.nbytes(rows, k)
    return QUANTIZING_US + moved / (PACES[arch].memory_bytes * num_sms)
