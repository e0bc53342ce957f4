"""Copies tokens to the rows of their experts, quantized with one fp32 scale per row: once per token, then stored per choice.

x (tokens, K) fp16 or bf16; data (rows, K) int8 or e4m3 and scales (rows, 1) fp32, bit for bit those of ``formats.quantize``.

Work: a CTA takes a token, as in ``quantize_1xk``. If there are few choices in total, no earlier launch sorts them: every
warp computes the order of rows by itself, and the warps together write it for later kernels.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvfp4_cute.launch_table import GatherQuantize
from nvfp4_cute.planning.arch.simt import MAX_TOP_K, QUANTIZE_WARPS

from ..common import ptx
from ..common.global_access import global_scalar, store_word, store_words
from ..common.launch_record import read_record
from ..common.shared_access import load_shared, store_shared
from ..common.versions import SmemAllocator
from .expert_rows import Ids, Order
from .quantize_1xk import LANE_VALUES, THREADS, WORD_BYTES, Quantize1xKKernel
from .quantize_rows import divisor_of


@dataclass(frozen=True)
class GatherOperands:
    """Addresses and the byte pitch are Int64, extents Int32."""

    x: Int64
    rows: Int64
    places: Int64
    offs: Int64
    slots: Int64
    data: Int64
    scale: Int64
    x_pitch: Int64
    tokens: Int32
    k: Int32


class Gather1xKKernel(Quantize1xKKernel):
    """One compiled variant.

    Args:
        is_bf16, format, name: see the base class.
        finds_order: whether the order of rows is computed and written instead of read.
    """

    def __init__(self, is_bf16: bool, format, finds_order: bool, name: str):
        super().__init__(is_bf16, False, name, format)
        self.finds_order = finds_order

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one CTA per token.

        Args:
            table: Int64 in host memory: ``launch_table.GatherQuantize``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(GatherQuantize)))
        operands = read_record(GatherOperands, GatherQuantize, t)
        ids = read_record(Ids, GatherQuantize, t, address=t[GatherQuantize.IDS])
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, ids).launch(grid=(operands.tokens, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, operands: GatherOperands, ids: Ids):
        """Finds the rows and the scale of the token, then encodes it and stores it to its rows."""
        tidx, token = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = SmemAllocator()
        words, rows = (
            smem.allocate(count * WORD_BYTES, 4 * WORD_BYTES).toint() for count in (QUANTIZE_WARPS, MAX_TOP_K)
        )
        row = self.row_of_lane(operands, ids, token)
        if tidx < ids.top_k:
            store_shared(rows + tidx * WORD_BYTES, [row.to(Uint32)])
        units = operands.k // LANE_VALUES
        places = [operands.x + token * operands.x_pitch]
        held = self.hold(places, units)
        # The barrier in scale_of_row also makes the stored rows visible to all threads.
        scale = self.scale_of_row(places, held, units, words)
        if tidx < ids.top_k and row >= 0:
            store_word(operands.scale + Int64(row) * WORD_BYTES, ptx.bits_of(scale))
        self.store_row(places, held, units, divisor_of(scale), (operands.data, rows, ids.top_k))

    @cute.jit
    def store(self, unit: Int32, units: Int32, encoded: list, target: tuple):
        """Stores a unit to all rows of the token. target: address of data, shared address of the rows, and their number."""
        data, rows, count = target
        for k in cutlass.range(count, unroll=1):
            row = Int32(load_shared(rows + k * WORD_BYTES, 1)[0])
            if row >= 0:
                store_words(data + (Int64(row) * units + unit) * LANE_VALUES, encoded)

    @cute.jit
    def row_of_lane(self, operands: GatherOperands, ids: Ids, token: Int32) -> Int32:
        """Returns the row of choice k in lane k; -1 for none."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        row = Int32(-1)
        if cutlass.const_expr(self.finds_order):
            order = Order(operands.rows, operands.places, operands.offs, operands.slots)
            work, num_work = token * QUANTIZE_WARPS + warp, operands.tokens * QUANTIZE_WARPS
            row = order.find(ids, operands.tokens * ids.top_k, token, work, num_work, warp == 0).row
        elif lane < ids.top_k:
            row = global_scalar(Int32, operands.rows + Int64(token * ids.top_k + lane) * WORD_BYTES)[0]
        return row
