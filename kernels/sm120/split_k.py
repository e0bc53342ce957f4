"""Split-K: each CTA of a cluster multiplies a share of a tile's K; one of the CTAs adds the partial sums of a warp.

Warps are assigned to the CTAs round-robin, so that all CTAs receive, add and store equally much. CTAs of sm_120 form clusters
with
distributed shared memory: CUDA programming guide, features by compute capability (12.x; only TMA multicast has no hardware
there), and a report of a cluster that exchanged values on an RTX 5090 (QuACK issue 91).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_cute.planning.arch.sm120 import num_receivers

from ..common.ring import PRODUCER_PHASE, Ring
from ..common.split_k import CHUNK_BYTES, CHUNK_VALUES, PartialSums
from ..common.warp_schedule import WARP_SIZE
from .warp_tile import WarpTile


@dataclass(frozen=True)
class Exchange:
    """Memory and barriers by which a CTA's warps receive the partial sums of the same warps of the other CTAs.

    Attributes:
        address: shared address: ``PartialSums`` of each warp whose sums this CTA adds.
        ring: one stage per warp. full: in the CTA that adds the warp's sums. empty: 1 arrival, in the other CTAs.
        split: CTAs of the cluster.
        warp_tile: ``WarpTile``.
    """

    address: Int32
    ring: Ring
    split: int
    warp_tile: WarpTile

    def receiver(self, warp_idx: Int32) -> Int32:
        """Returns the CTA that adds and stores the sums of a warp."""
        return warp_idx % num_receivers(self.split)

    def partial_sums(self, warp_idx: Int32) -> PartialSums:
        """Returns the exchange of a warp."""
        chunks = 4 * len(self.warp_tile.mma_m) * len(self.warp_tile.mma_n) // CHUNK_VALUES
        warp_bytes = (self.split - 1) * chunks * WARP_SIZE * CHUNK_BYTES
        place = warp_idx // num_receivers(self.split) * warp_bytes + cute.arch.lane_idx() * CHUNK_BYTES
        full, empty = self.ring.full(warp_idx), self.ring.empty(warp_idx)
        return PartialSums(self.address + place, full, empty, WARP_SIZE, self.split)


@cute.jit
def wait_until_read(exchange: Exchange, warp_idx: Int32, turn: Int32):
    """Waits until the receiver has read this warp's last sums, after which it no longer accesses this CTA's shared memory."""
    if cute.arch.block_idx_in_cluster() != exchange.receiver(warp_idx):
        cute.arch.mbarrier_wait(exchange.ring.empty(warp_idx), turn ^ PRODUCER_PHASE)


@cute.jit
def first_tile_and_stride(split: cutlass.Constexpr) -> tuple:
    """Returns the first tile of a CTA, or of the ``split`` CTAs that share its tiles, and the distance to the next tile."""
    return cute.arch.block_idx()[0] // split, cute.arch.grid_dim()[0] // split
