"""Rows that came from other ranks to rows of experts: quantized values and their scales, written for every choice of them.

came (rows, bytes of a row): values e2m1 and row-major scales, at offsets. rows and places int32 (rows, k): from
``permute``, or computed here from ids int32 (rows, k) with at most 64 entries, and written with offs and slots; then
the kernel may wait until other ranks have stored ids and rows. Outputs: data (choices, K / 2) and blocked scales, with
the rows of every expert starting at a block of 128.

Work: a warp takes 32 blocks of one row, a lane a block of 16 values.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvfp4_cute.launch_table import PeerHeader, UnpackRows
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common.global_access import READ_ONCE, global_scalar, load_words
from ..common.launch_record import read_record
from ..common.signals import Signals, signals_of
from .expert_rows import OUTPUT_BYTES, Choices, Ids, Order, QuantizedRows


@dataclass(frozen=True)
class UnpackOperands:
    """Addresses are Int64, extents and offsets Int32."""

    came: Int64
    order: Order
    ids: Ids
    num_rows: Int32
    top_k: Int32
    values: Int32
    scales: Int32
    row_bytes: Int32
    chunks: Int32


class UnpackRowsKernel:
    """One compiled variant.

    Args:
        finds_order: whether the kernel computes the order of rows, and writes it.
        waits: whether other ranks are storing ids and rows, so that the kernel waits for them first.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(self, finds_order: bool, waits: bool, name: str):
        self.finds_order = finds_order
        self.waits = waits
        # Rows are read once, but not through the cache that misses stores during the kernel.
        self.load_row = "ld.global" if waits else READ_ONCE
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one warp per 32 blocks of a row.

        Args:
            table: Int64 in host memory: ``launch_table.UnpackRows``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(UnpackRows)))
        operands = read_record(
            UnpackOperands,
            UnpackRows,
            t,
            order=Order(t[UnpackRows.ROWS], t[UnpackRows.PLACES], t[UnpackRows.OFFS], t[UnpackRows.SLOTS]),
            ids=Ids(
                address=t[UnpackRows.IDS],
                id_bytes=Int32(4),
                top_k=Int32(t[UnpackRows.TOP_K]),
                first_expert=Int32(0),
                experts=Int32(t[UnpackRows.EXPERTS]),
            ),
            chunks=cute.ceil_div(Int32(t[UnpackRows.K]) // 16, WARP_SIZE),
        )
        results = QuantizedRows(t[UnpackRows.DATA], t[UnpackRows.SCALE], Int32(t[UnpackRows.K]) // 16)
        signals = None
        if cutlass.const_expr(self.waits):
            signals = signals_of(t, UnpackRows, PeerHeader.DISPATCHED)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, results, signals).launch(
            grid=(cute.ceil_div(operands.num_rows * operands.chunks, ROW_WARPS), 1, 1),
            block=(ROW_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: UnpackOperands, results: QuantizedRows, signals: Signals | None):
        """Loads, and stores for every choice."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        chunks = operands.chunks
        work = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        source, chunk, lane = work // chunks, work % chunks, tidx % WARP_SIZE
        if cutlass.const_expr(self.waits):
            signals.wait()
        if source < operands.num_rows:
            block = chunk * WARP_SIZE + lane
            low, high, scales = Uint32(0), Uint32(0), Uint32(0)
            if block < results.k_blocks:
                address = operands.came + Int64(source) * operands.row_bytes
                low, high = load_words(address + operands.values + block * OUTPUT_BYTES, 2, self.load_row)
                if block % 4 == 0:
                    scales = load_words(address + operands.scales + block, 1, self.load_row)[0]
                    # Nobody writes what follows a row's last scale, and a GEMM multiplies scales of padding columns by zeros.
                    absent = cutlass.max(block + 4 - results.k_blocks, Int32(0))
                    scales = scales & (Uint32(0xFFFFFFFF) >> Uint32(absent * 8))
            choices = self.choices(operands, source, work, chunk)
            for k in cutlass.range(operands.top_k, unroll=1):
                goal, goal_place = (cute.arch.shuffle_sync(x, k) for x in (choices.row, choices.place))
                if goal >= 0:
                    results.store(goal, goal_place, block, [low, high], scales)

    @cute.jit
    def choices(self, operands: UnpackOperands, source: Int32, work: Int32, chunk: Int32) -> Choices:
        """Returns the choices of a row."""
        lane, order = cute.arch.lane_idx(), operands.order
        if cutlass.const_expr(self.finds_order):
            num_slots = operands.num_rows * operands.top_k
            num_work = operands.num_rows * operands.chunks
            return order.find(operands.ids, num_slots, source, work, num_work, chunk == 0)
        row, place = Int32(-1), Int32(-1)
        if lane < operands.top_k:
            slot = Int64(source) * operands.top_k + lane
            row = global_scalar(Int32, order.rows + slot * 4)[0]
            place = global_scalar(Int32, order.places + slot * 4)[0]
        return Choices(row, place, Int32(0))
