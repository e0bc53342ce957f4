"""Copies tokens to the rows of their experts, quantized or not.

x (tokens, K) fp16 or bf16 is read once, and a row is written for every choice of a token.

Quantized: data (rows, bytes of K) and blocked scales, with the rows of every expert starting at a block of 128. With
one global scale or none, a block is quantized once for all choices of its token; with one global scale per expert, once
per choice. The operations are those of ``quantize``, bit for bit. Scales of missing rows stay unwritten, because
nothing reads them. Unquantized: data (rows, K).

Work: a warp takes 512 values of one token, a lane 16: a block of NVFP4, or half a block of MXFP4 and MXFP8. With a
global scale per row, a CTA takes a token, and reads it twice: for the largest magnitude, then from caches to quantize
it. If there are few choices in total, every warp computes the order of rows by itself without an earlier launch, and the warps
together write the order for later kernels.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch_table import GatherQuantize
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common import ptx
from ..common.encode import Encoding
from ..common.global_access import global_scalar, store_word
from ..common.launch_record import read_record
from ..common.versions import PROGRAMMATIC_FROM, compiles_for
from .expert_rows import Choices, Ids, Order, PlainRows, QuantizedRows, scale_word
from .global_scale import largest_of_cta, largest_of_words, scale_of_largest
from .quantize import quantize_words
from .row_blocks import read_block

LANE_VALUES = 16
ROW_THREADS = ROW_WARPS * WARP_SIZE


@dataclass(frozen=True)
class GatherOperands:
    """Addresses and the byte pitch are Int64, extents Int32."""

    x: Int64
    rows: Int64
    places: Int64
    global_scale: Int64
    offs: Int64
    slots: Int64
    x_pitch: Int64
    tokens: Int32
    k_blocks: Int32


class GatherQuantizeKernel:
    """One compiled variant.

    Args:
        is_bf16: whether x is bfloat16, else float16.
        format: format of the rows; None keeps that of x.
        global_scales: "none", "one", "each": one per expert, or "rows": one per row, found and written.
        finds_order: whether ``rows`` is written instead of read.
        has_fp4_convert: whether e2m1 conversions are instructions.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(
        self,
        is_bf16: bool,
        format: BlockFormat | None,
        global_scales: str,
        finds_order: bool,
        has_fp4_convert: bool,
        name: str,
    ):
        self.is_bf16 = is_bf16
        self.quantizes = format is not None
        self.global_scales = global_scales
        self.finds_order = finds_order
        self.encode = None if format is None else Encoding.of(format, has_fp4_convert)
        # Lanes that share a block.
        self.lanes = 1 if format is None else format.block_k // LANE_VALUES
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one warp per 32 blocks of a token.

        Args:
            table: Int64 in host memory: ``launch_table.GatherQuantize``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(GatherQuantize)))
        k_blocks = Int32(t[GatherQuantize.K]) // LANE_VALUES
        operands = read_record(GatherOperands, GatherQuantize, t, k_blocks=k_blocks)
        ids = read_record(Ids, GatherQuantize, t, address=t[GatherQuantize.IDS])
        results = PlainRows(t[GatherQuantize.DATA], k_blocks)
        if cutlass.const_expr(self.quantizes):
            results = QuantizedRows(t[GatherQuantize.DATA], t[GatherQuantize.SCALE], k_blocks)
        chunks = cute.ceil_div(k_blocks, WARP_SIZE)
        if cutlass.const_expr(self.global_scales == "rows"):
            self.kernel_of_rows.set_name_prefix(self.name)
            self.kernel_of_rows(operands, ids, results).launch(
                grid=(operands.tokens, 1, 1), block=(ROW_THREADS, 1, 1), stream=stream
            )
        else:
            self.kernel.set_name_prefix(self.name)
            self.kernel(operands, ids, results).launch(
                grid=(cute.ceil_div(operands.tokens * chunks, ROW_WARPS), 1, 1),
                block=(ROW_THREADS, 1, 1),
                stream=stream,
            )

    @cute.kernel
    def kernel(self, operands: GatherOperands, ids: Ids, results: QuantizedRows | PlainRows):
        """Finds the token and its rows, loads, encodes, and stores."""
        if cutlass.const_expr(compiles_for(PROGRAMMATIC_FROM)):
            # The next launch may load weights meanwhile.
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        chunks = cute.ceil_div(results.k_blocks, WARP_SIZE)
        work = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        token, chunk, lane = work // chunks, work % chunks, tidx % WARP_SIZE
        if token < operands.tokens:
            block = chunk * WARP_SIZE + lane
            words = read_block(operands.x, operands.x_pitch, token, block, results.k_blocks)
            choices = self.choices(operands, ids, token, work, chunk == 0)
            factor = Float32(1.0)
            if cutlass.const_expr(self.global_scales == "one"):
                factor = global_scalar(Float32, operands.global_scale)[0]
            if cutlass.const_expr(not self.quantizes):
                for k in cutlass.range(ids.top_k, unroll=1):
                    row = cute.arch.shuffle_sync(choices.row, k)
                    if row >= 0:
                        results.store(row, block, [words[i] for i in range(cute.size(words))])
            elif cutlass.const_expr(self.global_scales == "each"):
                if choices.row >= 0:
                    factor = global_scalar(Float32, operands.global_scale + Int64(choices.expert) * 4)[0]
                for k in cutlass.range(ids.top_k, unroll=1):
                    row, place = (cute.arch.shuffle_sync(x, k) for x in (choices.row, choices.place))
                    encoded, scales = self.quantize(words, cute.arch.shuffle_sync(factor, k))
                    if row >= 0:
                        results.store(row, place, block, encoded, scales, self.lanes)
            else:
                encoded, scales = self.quantize(words, factor)
                self.store_all(results, choices, ids.top_k, block, encoded, scales)

    @cute.jit
    def store_all(
        self,
        results: QuantizedRows,
        choices: Choices,
        top_k: Int32,
        block: Int32,
        encoded: list,
        scales: Uint32,
    ):
        """Stores a block in all rows of a token. Each lane computes the addresses of one choice and shares them with the warp."""
        addresses = results.addresses(choices.row, choices.place, 4 * len(encoded), self.lanes)
        for k in cutlass.range(top_k, unroll=1):
            row = cute.arch.shuffle_sync(choices.row, k)
            data, scale = (cute.arch.shuffle_sync(x, k) for x in addresses)
            if row >= 0:
                results.store_at(data, scale, block, encoded, scales, self.lanes)

    @cute.kernel
    def kernel_of_rows(self, operands: GatherOperands, ids: Ids, results: QuantizedRows):
        """Finds a token's rows and its global scale, then loads again, encodes, and stores; a CTA has one token."""
        if cutlass.const_expr(compiles_for(PROGRAMMATIC_FROM)):
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP_SIZE), tidx % WARP_SIZE
        work, num_work = token * ROW_WARPS + warp, operands.tokens * ROW_WARPS
        choices = self.choices(operands, ids, token, work, warp == 0, num_work)
        most, k_blocks = Uint32(0), results.k_blocks
        for first in cutlass.range(tidx, k_blocks, 2 * ROW_THREADS, unroll=1):
            loaded = [
                read_block(operands.x, operands.x_pitch, token, block, k_blocks)
                for block in (first, first + ROW_THREADS)
            ]
            words = [block[i] for block in loaded for i in range(cute.size(block))]
            most = largest_of_words(most, words, self.is_bf16)
        most = largest_of_cta(most, tidx, ROW_THREADS)
        factor = scale_of_largest(most, self.is_bf16, self.encode.format.global_scale_divisor)
        if warp == 0 and choices.row >= 0:
            store_word(operands.global_scale + Int64(choices.row) * 4, ptx.bits_of(factor))
        for first in cutlass.range(warp * WARP_SIZE, k_blocks, ROW_THREADS, unroll=1):
            words = read_block(operands.x, operands.x_pitch, token, first + lane, k_blocks)
            encoded, scales = self.quantize(words, factor)
            self.store_all(results, choices, ids.top_k, first + lane, encoded, scales)

    @cute.jit
    def quantize(self, words: cute.Tensor, factor: Float32):
        """Returns words of elements, and the scales of four blocks; zeros for blocks beyond K, where ``words`` are zeros."""
        encoded, code = quantize_words(
            words, None if self.global_scales == "none" else factor, self.is_bf16, self.encode
        )
        return encoded, scale_word(code, self.lanes)

    @cute.jit
    def choices(
        self,
        operands: GatherOperands,
        ids: Ids,
        token: Int32,
        work: Int32,
        tells: cutlass.Boolean,
        num_work: Int32 | None = None,
    ):
        """Returns the token's choices.

        If they are computed here, the warp writes them if it ``tells``, and its part of ``offs``.

        work, num_work: number of the warp, and of warps; None: a warp has 32 blocks.
        """
        lane = cute.arch.lane_idx()
        slot = token * ids.top_k + lane
        num_slots = operands.tokens * ids.top_k
        if cutlass.const_expr(self.finds_order):
            order = Order(operands.rows, operands.places, operands.offs, operands.slots)
            if cutlass.const_expr(num_work is None):
                num_work = operands.tokens * cute.ceil_div(operands.k_blocks, WARP_SIZE)
            return order.find(ids, num_slots, token, work, num_work, tells)
        row, place, expert = Int32(-1), Int32(-1), Int32(0)
        if lane < ids.top_k:
            row = global_scalar(Int32, operands.rows + Int64(slot) * 4)[0]
            place = global_scalar(Int32, operands.places + Int64(slot) * 4)[0]
            if cutlass.const_expr(self.global_scales == "each"):
                expert = ids.local_expert(slot, num_slots)
        return Choices(row, place, expert)
