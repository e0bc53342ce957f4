"""Tokens to rows that travel: x (tokens, K) fp16 or bf16 is read once, and a row is written for every rank that a token goes to.

A row consists of ids int32 (k), values, and for NVFP4 values row-major scales, with the bits of ``quantize``. Each part
begins at a multiple of 16 bytes. ranks and locals int32 (tokens, k): see ``rank_choices``. pairs int32 (tokens, ranks)
is the row of a token for a rank, ordered by rank, then token, or -1.

With a capacity, every rank has this number of rows. Ids of missing rows are -1, and results int32 (tokens, k) holds the
place where the result of each choice will come back, with k places per row, or -1.

Work: a warp takes 512 values of one token, a lane a block of 16. The first warp of a token writes its ids.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.launch_table import PackRows
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common.encode import Encoding
from ..common.global_access import global_scalar
from ..common.launch_record import read_record
from ..common.select import select
from .row_blocks import RowEncoding, read_block


@dataclass(frozen=True)
class PackOperands:
    """Addresses and the byte pitch are Int64, extents and offsets Int32."""

    x: Int64
    global_scale: Int64
    ranks: Int64
    locals: Int64
    pairs: Int64
    offs: Int64
    sent: Int64
    results: Int64
    x_pitch: Int64
    tokens: Int32
    top_k: Int32
    k_blocks: Int32
    num_ranks: Int32
    capacity: Int32
    values: Int32
    scales: Int32
    row_bytes: Int32


@dataclass(frozen=True)
class Pairs:
    """Rows of a token, for rank r in lane r: its row or -1; with a capacity also the rank's number of rows."""

    row: Int32
    count: Int32


class PackRowsKernel:
    """One compiled variant.

    Args:
        is_bf16: whether x is bfloat16, else float16.
        quantizes: whether values become NVFP4; otherwise they stay those of x.
        has_global_scale: whether a factor is read.
        has_capacity: whether every rank has the same number of rows.
        has_fp4_convert: whether e2m1 conversions are instructions.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(
        self,
        is_bf16: bool,
        quantizes: bool,
        has_global_scale: bool,
        has_capacity: bool,
        has_fp4_convert: bool,
        name: str,
    ):
        encode = Encoding.of(NVFP4, has_fp4_convert)
        self.encoding = RowEncoding(is_bf16, quantizes, has_global_scale, encode)
        self.has_capacity = has_capacity
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one warp per 32 blocks of a token.

        Args:
            table: Int64 in host memory: ``launch_table.PackRows``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(PackRows)))
        operands = read_record(PackOperands, PackRows, t, k_blocks=Int32(t[PackRows.K]) // 16)
        chunks = cute.ceil_div(operands.k_blocks, WARP_SIZE)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(cute.ceil_div(operands.tokens * chunks, ROW_WARPS), 1, 1),
            block=(ROW_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: PackOperands):
        """Loads, encodes, and stores for every rank; the first warp of a token writes ids and places."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        chunks = cute.ceil_div(operands.k_blocks, WARP_SIZE)
        work = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        token, chunk, lane = work // chunks, work % chunks, tidx % WARP_SIZE
        if token < operands.tokens:
            block = chunk * WARP_SIZE + lane
            words = read_block(operands.x, operands.x_pitch, token, block, operands.k_blocks)
            pairs = self.pairs(operands, token)
            if chunk == 0:
                self.tell(operands, token, pairs)
            encoded = self.encoding.block(words, operands.global_scale)
            for rank in cutlass.range(operands.num_ranks, unroll=1):
                row = cute.arch.shuffle_sync(pairs.row, rank)
                if (row >= 0) & (block < operands.k_blocks):
                    address = operands.sent + Int64(row) * operands.row_bytes
                    self.encoding.store(address, operands.values, operands.scales, block, encoded)

    @cute.jit
    def pairs(self, operands: PackOperands, token: Int32) -> Pairs:
        """Returns the places of the token's rows."""
        rank = cute.arch.lane_idx()
        row, count = Int32(-1), Int32(0)
        if rank < operands.num_ranks:
            row = global_scalar(Int32, operands.pairs + (Int64(token) * operands.num_ranks + rank) * 4)[0]
            if cutlass.const_expr(self.has_capacity):
                start = Int32(0)
                if rank > 0:
                    start = global_scalar(Int32, operands.offs + Int64(rank - 1) * 4)[0]
                count = global_scalar(Int32, operands.offs + Int64(rank) * 4)[0] - start
                if row >= 0:
                    row = row - start + rank * operands.capacity
        return Pairs(row, count)

    @cute.jit
    def tell(self, operands: PackOperands, token: Int32, pairs: Pairs):
        """Writes ids of the token's rows; with a capacity also the places of results, and a share of the missing rows."""
        lane = cute.arch.lane_idx()
        slot = Int64(token) * operands.top_k + lane
        rank, local, is_choice = Int32(-1), Int32(-1), lane < operands.top_k
        if is_choice:
            rank = global_scalar(Int32, operands.ranks + slot * 4)[0]
            local = global_scalar(Int32, operands.locals + slot * 4)[0]
        for goal in cutlass.range(operands.num_ranks, unroll=1):
            row = cute.arch.shuffle_sync(pairs.row, goal)
            if row >= 0:
                self.store_id(operands, row, select(rank == goal, local, Int32(-1)), is_choice)
        if cutlass.const_expr(self.has_capacity):
            row = cute.arch.shuffle_sync(pairs.row, cutlass.max(rank, 0))
            if is_choice:
                result = select(rank >= 0, row * operands.top_k + lane, Int32(-1))
                global_scalar(Int32, operands.results + slot * 4)[0] = result
            for goal in cutlass.range(operands.num_ranks, unroll=1):
                count = cute.arch.shuffle_sync(pairs.count, goal)
                for place in cutlass.range(token, operands.capacity, operands.tokens, unroll=1):
                    if place >= count:
                        self.store_id(operands, goal * operands.capacity + place, Int32(-1), is_choice)

    @cute.jit
    def store_id(self, operands: PackOperands, row: Int32, local: Int32, is_choice: Boolean):
        """Stores the lane's id of a row."""
        if is_choice:
            address = operands.sent + Int64(row) * operands.row_bytes + cute.arch.lane_idx() * 4
            global_scalar(Int32, address)[0] = local
