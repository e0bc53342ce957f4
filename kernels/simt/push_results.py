"""Rows of experts into the buffers of the ranks that their tokens came from.

rows int32 (ranks * slots): for every choice that may have come, its row of h, or -1, by rank, token, k. A row of h, of
full 16 bytes, goes to the result's place of its choice in its rank's buffer (``launch_table.PeerHeader``).

Work: a warp takes 2 KB of a row, a lane 16 bytes of each 512, then others. The grid has ``ctas`` CTAs on every rank;
each signals all ranks at its end.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from nvfp4_cute.launch_table import PeerHeader, PushResults
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common.global_access import global_scalar
from ..common.launch_record import read_record
from ..common.signals import peer_of, signal
from .collect_rows import AHEAD, VECTOR_BYTES, copy_vectors


@dataclass(frozen=True)
class PushResultsOperands:
    """Addresses and an offset are Int64, extents Int32."""

    h: Int64
    rows: Int64
    peers: tuple
    rank: Int32
    slots: Int32
    row_words: Int32
    results_at: Int64
    ctas: Int32


class PushResultsKernel:
    """One compiled variant.

    Args:
        num_ranks: number of buffers that are written.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(self, num_ranks: int, name: str):
        self.num_ranks = num_ranks
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches ``ctas`` CTAs.

        Args:
            table: Int64 in host memory: ``launch_table.PushResults``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(PushResults)))
        operands = read_record(
            PushResultsOperands,
            PushResults,
            t,
            peers=tuple(t[PushResults.PEER_0 + number] for number in range(self.num_ranks)),
        )
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(operands.ctas, 1, 1), block=(ROW_WARPS * WARP_SIZE, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, operands: PushResultsOperands):
        """Copies, then signals."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        chunks = cute.ceil_div(operands.row_words, WARP_SIZE * AHEAD)
        first = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        step, row_bytes = operands.ctas * ROW_WARPS, operands.row_words * VECTOR_BYTES
        for work in cutlass.range(first, operands.slots * self.num_ranks * chunks, step, unroll=1):
            # Every rank begins with the next one, so that all links are busy at once and no rank is the target of all.
            goal = (operands.rank + 1 + work // chunks % self.num_ranks) % self.num_ranks
            place = work // chunks // self.num_ranks
            slot = goal * operands.slots + place
            row = global_scalar(Int32, operands.rows + Int64(slot) * 4)[0]
            if row >= 0:
                results = peer_of(operands.peers, goal) + operands.results_at
                copy_vectors(
                    operands.h + Int64(row) * row_bytes,
                    results + Int64(place) * row_bytes,
                    work % chunks,
                    operands.row_words,
                )
        signal(operands.peers, PeerHeader.COMBINED, operands.rank)
