"""Collects rows of experts for their way back: back[goal[i]] = h[rows[i]], or back[i], for every choice i that has a row.

h and back have rows of full 16 bytes; rows and goals are int32 (choices), with row -1 for none.

Work: a warp takes 2 KB of a row, a lane 16 bytes of each 512.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvfp4_cute.launch_table import CollectRows
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common.global_access import READ_ONCE, global_scalar, load_words, store_words
from ..common.launch_record import read_record

VECTOR_WORDS, VECTOR_BYTES = 4, 16
AHEAD = 4


@dataclass(frozen=True)
class CollectOperands:
    """Addresses are Int64, extents Int32."""

    h: Int64
    rows: Int64
    goals: Int64
    back: Int64
    slots: Int32
    row_words: Int32


class CollectRowsKernel:
    """One compiled variant.

    Args:
        has_goals: whether ``goals`` is read.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(self, has_goals: bool, name: str):
        self.has_goals = has_goals
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one warp per 2 KB of a row.

        Args:
            table: Int64 in host memory: ``launch_table.CollectRows``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(CollectRows)))
        operands = read_record(CollectOperands, CollectRows, t)
        chunks = cute.ceil_div(operands.row_words, WARP_SIZE * AHEAD)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(cute.ceil_div(operands.slots * chunks, ROW_WARPS), 1, 1),
            block=(ROW_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: CollectOperands):
        """Looks up the rows and copies them."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        chunks = cute.ceil_div(operands.row_words, WARP_SIZE * AHEAD)
        work = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        slot = work // chunks
        if slot < operands.slots:
            source = global_scalar(Int32, operands.rows + Int64(slot) * 4)[0]
            goal = slot
            if cutlass.const_expr(self.has_goals):
                goal = global_scalar(Int32, operands.goals + Int64(slot) * 4)[0]
            if source >= 0:
                source_row = operands.h + Int64(source) * operands.row_words * VECTOR_BYTES
                goal_row = operands.back + Int64(goal) * operands.row_words * VECTOR_BYTES
                copy_vectors(source_row, goal_row, work % chunks, operands.row_words)


@cute.jit
def copy_vectors(source: Int64, goal: Int64, chunk: Int32, row_words: Int32):
    """Copies 2 KB of a row by a warp: loads all of a lane's vectors, then stores. ``source``, ``goal``: addresses of rows."""
    first = chunk * (WARP_SIZE * AHEAD) + cute.arch.lane_idx()
    # (WORD, VECTOR)
    words = cute.make_rmem_tensor((VECTOR_WORDS, AHEAD), Uint32)
    for i in cutlass.range_constexpr(AHEAD):
        vector = first + i * WARP_SIZE
        if vector < row_words:
            loaded = load_words(source + vector * VECTOR_BYTES, VECTOR_WORDS, READ_ONCE)
            for w, word in enumerate(loaded):
                words[w, i] = word
    for i in cutlass.range_constexpr(AHEAD):
        vector = first + i * WARP_SIZE
        if vector < row_words:
            store_words(goal + vector * VECTOR_BYTES, [words[w, i] for w in range(VECTOR_WORDS)])
