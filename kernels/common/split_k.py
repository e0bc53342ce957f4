"""Split-K: the CTAs of a cluster share the K tiles of a work tile, and their sums travel between shared memories.

Sums are added in the order of the CTAs: the result does not depend on who is first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

# Sums of one store, in fp32.
CHUNK_VALUES = 4
CHUNK_BYTES = 4 * CHUNK_VALUES


@cute.jit
def k_tiles_of_cta(k_tile_cnt: Int32, split: cutlass.Constexpr) -> tuple:
    """First K tile of this CTA's share of a work tile, and how many; none where there are fewer K tiles than CTAs."""
    first, count = Int32(0), k_tile_cnt
    if cutlass.const_expr(split > 1):
        rank = cute.arch.block_idx_in_cluster()
        first = rank * k_tile_cnt // split
        count = (rank + 1) * k_tile_cnt // split - first
    return first, count


def address_in_cta(address: Int32, rank: Int32 | int) -> Int32:
    """The same place in the shared memory of another CTA of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, Int32(rank)],
    )


def store_async(address: Int32, values: list, barrier: Int32) -> None:
    """A chunk of sums to another CTA; their bytes complete its barrier (PTX ISA 9.7.9.12)."""
    cute.arch.inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} }, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )
