"""Rows that have come from other ranks to rows of experts: quantized values and their scales, each written where a choice has it.

came (rows, bytes of a row): values e2m1 and row-major scales from offsets on. rows and places int32 (rows, k): as of ``permute``.
Written: data (choices, K / 2) and blocked scales, every expert's rows beginning a block of 128.

Work: a warp takes 32 blocks of one row, a lane a block of 16 values.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvfp4_cute.launch_table import UnpackRows
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common.global_access import READ_ONCE, global_scalar, load_words
from .expert_rows import OUTPUT_BYTES, QuantizedRows


@dataclass(frozen=True)
class UnpackOperands:
    """Addresses Int64, extents and offsets Int32."""

    came: Int64
    rows: Int64
    places: Int64
    num_rows: Int32
    top_k: Int32
    values: Int32
    scales: Int32
    row_bytes: Int32


class UnpackRowsKernel:
    """The kernel. Args: name: what it is called in profilers and in the emulator's reports."""

    def __init__(self, name: str):
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launch: a warp for 32 blocks of a row.

        Args:
            table: Int64 in host memory: ``launch_table.UnpackRows``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(UnpackRows)))
        operands = UnpackOperands(
            came=t[UnpackRows.CAME],
            rows=t[UnpackRows.ROWS],
            places=t[UnpackRows.PLACES],
            num_rows=Int32(t[UnpackRows.NUM_ROWS]),
            top_k=Int32(t[UnpackRows.TOP_K]),
            values=Int32(t[UnpackRows.VALUES]),
            scales=Int32(t[UnpackRows.SCALES]),
            row_bytes=Int32(t[UnpackRows.ROW_BYTES]),
        )
        results = QuantizedRows(t[UnpackRows.DATA], t[UnpackRows.SCALE], Int32(t[UnpackRows.K]) // 16)
        chunks = cute.ceil_div(results.k_blocks, WARP_SIZE)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, results).launch(
            grid=(cute.ceil_div(operands.num_rows * chunks, ROW_WARPS), 1, 1),
            block=(ROW_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: UnpackOperands, results: QuantizedRows):
        """Load, store for every choice."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        chunks = cute.ceil_div(results.k_blocks, WARP_SIZE)
        work = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        source, chunk, lane = work // chunks, work % chunks, tidx % WARP_SIZE
        if source < operands.num_rows:
            block = chunk * WARP_SIZE + lane
            low, high, scales = Uint32(0), Uint32(0), Uint32(0)
            if block < results.k_blocks:
                address = operands.came + Int64(source) * operands.row_bytes
                low, high = load_words(address + operands.values + block * OUTPUT_BYTES, 2, READ_ONCE)
                if block % 4 == 0:
                    scales = load_words(address + operands.scales + block, 1, READ_ONCE)[0]
            row, place = Int32(-1), Int32(-1)
            if lane < operands.top_k:
                slot = Int64(source) * operands.top_k + lane
                row = global_scalar(Int32, operands.rows + slot * 4)[0]
                place = global_scalar(Int32, operands.places + slot * 4)[0]
            for k in cutlass.range(operands.top_k, unroll=1):
                goal, goal_place = (cute.arch.shuffle_sync(x, k) for x in (row, place))
                if goal >= 0:
                    results.store(goal, goal_place, block, [low, high], scales)
