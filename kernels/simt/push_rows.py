"""Tokens into the buffers of the ranks of their experts: x (tokens, K) fp16 or bf16 is read once, and stored at its destinations.

A rank's buffer (``launch_table.PeerHeader``) has room for ``capacity`` tokens of every rank. Token t of rank r has one
place in all buffers, with ids int32 (k), a row of values, and for NVFP4 values row-major scales, with the bits of
``quantize``. Ids are -1 for choices that go elsewhere and for missing tokens, whose rows are not written. results int32
(tokens, k) holds the place where the result of each choice will come back: token * k + k's index, or -1.

ids int32 or int64 (tokens, k), to_rank int32 (experts, period), to_local int32 (ranks, experts): see ``rank_choices``.

Work: a warp takes 512 values of one token, a lane a block of 16, then others. The first warp of a token writes its ids.
The grid has ``ctas`` CTAs on every rank; each signals all ranks at its end.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.launch_table import PeerHeader, PushRows
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common.encode import Encoding
from ..common.global_access import global_scalar
from ..common.launch_record import read_record
from ..common.select import select
from ..common.signals import signal
from .expert_rows import num_lanes
from .placement import Choice, Placement
from .row_blocks import RowEncoding, read_block


@dataclass(frozen=True)
class PushOperands:
    """Addresses and the byte pitch are Int64, extents and offsets Int32."""

    x: Int64
    global_scale: Int64
    ids: Int64
    to_rank: Int64
    to_local: Int64
    results: Int64
    peers: tuple
    x_pitch: Int64
    id_bytes: Int32
    tokens: Int32
    top_k: Int32
    k_blocks: Int32
    rank: Int32
    capacity: Int32
    experts: Int32
    period: Int32
    ids_at: Int64
    rows_at: Int64
    scales: Int32
    row_bytes: Int32
    ctas: Int32


class PushRowsKernel:
    """One compiled variant.

    Args:
        num_ranks: number of buffers that are written.
        is_bf16: whether x is bfloat16, else float16.
        quantizes: whether values become NVFP4; otherwise they stay those of x.
        has_global_scale: whether a factor is read.
        has_fp4_convert: whether e2m1 conversions are instructions.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(
        self,
        num_ranks: int,
        is_bf16: bool,
        quantizes: bool,
        has_global_scale: bool,
        has_fp4_convert: bool,
        name: str,
    ):
        self.num_ranks = num_ranks
        encode = Encoding.of(NVFP4, has_fp4_convert)
        self.encoding = RowEncoding(is_bf16, quantizes, has_global_scale, encode)
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches ``ctas`` CTAs for tokens.

        Args:
            table: Int64 in host memory: ``launch_table.PushRows``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(PushRows)))
        operands = read_record(
            PushOperands,
            PushRows,
            t,
            peers=tuple(t[PushRows.PEER_0 + number] for number in range(self.num_ranks)),
            k_blocks=Int32(t[PushRows.K]) // 16,
        )
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(operands.ctas, 1, 1), block=(ROW_WARPS * WARP_SIZE, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, operands: PushOperands):
        """Pushes tokens, including missing ones, then signals."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        chunks = cute.ceil_div(operands.k_blocks, WARP_SIZE)
        first = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        step = operands.ctas * ROW_WARPS
        for work in cutlass.range(first, operands.capacity * chunks, step, unroll=1):
            token, chunk = work // chunks, work % chunks
            if token < operands.tokens:
                self.push(operands, token, chunk)
            elif chunk == 0:
                self.tell(operands, token, Choice(Int32(-1), Int32(-1)))
        signal(operands.peers, PeerHeader.DISPATCHED, operands.rank)

    @cute.jit
    def push(self, operands: PushOperands, token: Int32, chunk: Int32):
        """Loads, encodes, and stores for every rank."""
        block = chunk * WARP_SIZE + cute.arch.lane_idx()
        words = read_block(operands.x, operands.x_pitch, token, block, operands.k_blocks)
        choice = self.choice(operands, token)
        if chunk == 0:
            self.tell(operands, token, choice)
            if cute.arch.lane_idx() < operands.top_k:
                slot = token * operands.top_k + cute.arch.lane_idx()
                result = select(choice.rank >= 0, slot, Int32(-1))
                global_scalar(Int32, operands.results + Int64(slot) * 4)[0] = result
        encoded = self.encoding.block(words, operands.global_scale)
        row = operands.rows_at + Int64(operands.rank * operands.capacity + token) * operands.row_bytes
        for goal in cutlass.range_constexpr(self.num_ranks):
            if (num_lanes(choice.rank == goal) > 0) & (block < operands.k_blocks):
                self.encoding.store(operands.peers[goal] + row, 0, operands.scales, block, encoded)

    @cute.jit
    def choice(self, operands: PushOperands, token: Int32) -> Choice:
        """Returns the destinations of the token's choices, choice k in lane k."""
        lane, found = cute.arch.lane_idx(), Choice(Int32(-1), Int32(-1))
        placement = Placement(operands.to_rank, operands.to_local, operands.experts, operands.period)
        if lane < operands.top_k:
            slot = Int64(token) * operands.top_k + lane
            expert = global_scalar(Int32, operands.ids + slot * operands.id_bytes)[0]
            found = placement.choice(expert, token)
        return found

    @cute.jit
    def tell(self, operands: PushOperands, token: Int32, choice: Choice):
        """Writes the token's ids to every rank."""
        lane = cute.arch.lane_idx()
        slot = Int64(operands.rank * operands.capacity + token) * operands.top_k + lane
        for goal in cutlass.range_constexpr(self.num_ranks):
            if lane < operands.top_k:
                local = select(choice.rank == goal, choice.local, Int32(-1))
                global_scalar(Int32, operands.peers[goal] + operands.ids_at + slot * 4)[0] = local
