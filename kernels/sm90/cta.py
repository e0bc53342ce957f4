"""Launch settings, split-K exchange memory and cluster barriers shared by the GEMMs of this folder."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from nvfp4_cute.planning.config import KernelConfig

from ..common.ring import Ring
from ..common.split_k import CHUNK_BYTES, PartialSums
from ..common.versions import SmemAllocator
from .warp_schedule import WARP_SIZE, WarpSchedule

# The 128-byte swizzle repeats every 1024 bytes.
OPERAND_ALIGN_BYTES = 1024
# All of the unified memory is shared memory: no global read of the kernel profits from L1.
SMEM_CARVEOUT_PERCENT = 100


def launch_settings(
    config: KernelConfig, schedule: WarpSchedule, num_cta: Int64, ctas_per_sm: int
) -> dict[str, Any]:
    """Returns the arguments of a launch of ``num_cta`` persistent CTAs, ``ctas_per_sm`` of them per SM."""
    return {
        "grid": (Int32(num_cta), 1, 1),
        "cluster": (config.cluster_size, 1, 1) if config.cluster_size > 1 else None,
        "block": (schedule.threads_per_cta, 1, 1),
        "min_blocks_per_mp": ctas_per_sm,
        "preferred_smem_carveout": SMEM_CARVEOUT_PERCENT,
    }


def exchange_of_sums(
    smem: SmemAllocator, partial_bytes: int, schedule: WarpSchedule, split_k: int
) -> tuple[PartialSums, Ring]:
    """Allocates ``partial_bytes`` in which the first CTA of a cluster receives partial sums, and the ring of that one stage."""
    # (SENDER, CHUNK of 4 sums, THREAD, 16 bytes)
    sums = smem.allocate_array(Uint8, max(partial_bytes, 16), byte_alignment=16).toint()
    sums += cute.arch.thread_idx()[0] * CHUNK_BYTES
    ring, math_threads = Ring(smem.allocate_array(Int64, 2), 1), WARP_SIZE * schedule.num_math_warps
    return PartialSums(sums, ring.full(0), ring.empty(0), math_threads, split_k), ring


def meet(config: KernelConfig) -> None:
    """Synchronizes the cluster, or the CTA if it is alone, so that initialized barriers are visible to all threads."""
    if config.cluster_size > 1:
        _cluster_barrier()
    else:
        cute.arch.sync_threads()


def leave(config: KernelConfig) -> None:
    """Keeps a CTA alive while another CTA of the cluster may still access its shared memory."""
    if config.cluster_size > 1:
        _cluster_barrier()


def _cluster_barrier() -> None:
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
