"""Rows of experts back to tokens: y[t] = sum over k of weight[t, k] * row[t, k], in fp32, in the order of k.

h (rows, N) and y (tokens, N) fp16 or bf16. Every product and every sum is one float32 operation: acc = acc + w * v,
with v = h or h + bias of the choice's expert; at the end acc + shared[t]; then one rounding. Choices without a row (-1)
are skipped. If rows are routed, choice c has row c, and choices of no local expert are skipped. If other ranks store rows
and one of them is late, all results are NaN.

Work: a warp takes 256 columns of a token, a lane eight. The rows of up to eight choices are loaded at once.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from nvfp4_cute.launch_table import Finalize, PeerHeader
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common import ptx
from ..common.global_access import KEEP, READ_ONCE, global_scalar, load_words, store_words
from ..common.launch_record import read_record
from ..common.select import select
from ..common.signals import Signals, signals_of
from .quantize import unpack

LANE_WORDS = 4
LANE_COLUMNS = 2 * LANE_WORDS
# The result may overwrite the shared row; other ranks may be storing rows.
MAY_CHANGE = "ld.global"
NAN = float("nan")


@dataclass(frozen=True)
class FinalizeOperands:
    """Addresses and byte pitches are Int64, extents Int32."""

    h: Int64
    rows: Int64
    weights: Int64
    shared: Int64
    bias: Int64
    ids: Int64
    y: Int64
    h_pitch: Int64
    shared_pitch: Int64
    y_pitch: Int64
    id_bytes: Int32
    tokens: Int32
    top_k: Int32
    n: Int32
    first_expert: Int32


class FinalizeKernel:
    """One compiled variant.

    Args:
        is_bf16: whether h, shared, bias and y are bfloat16, else float16.
        has_shared: whether each token has a row that is added.
        has_bias: whether each expert has a row that is added to its rows.
        waits: whether other ranks are storing rows of h, so that the kernel waits for them first.
        is_routed: whether choice c has row c, instead of one from ``rows``.
        is_programmatic: whether the kernel may start before the end of the previous launch, which writes no other operand than h.
        ahead: number of choices whose rows are loaded at once, a divisor of 32. Choices beyond the last one also take time.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(
        self,
        is_bf16: bool,
        has_shared: bool,
        has_bias: bool,
        waits: bool,
        is_routed: bool,
        is_programmatic: bool,
        ahead: int,
        name: str,
    ):
        self.is_bf16 = is_bf16
        self.is_routed = is_routed
        self.is_programmatic = is_programmatic
        self.waits = waits
        self.load_row = MAY_CHANGE if waits else READ_ONCE
        self.has_shared = has_shared
        self.has_bias = has_bias
        self.ahead = ahead
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one warp per 256 columns of a token.

        Args:
            table: Int64 in host memory: ``launch_table.Finalize``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Finalize)))
        operands = read_record(FinalizeOperands, Finalize, t)
        chunks = cute.ceil_div(operands.n, LANE_COLUMNS * WARP_SIZE)
        ctas = cute.ceil_div(operands.tokens * chunks, ROW_WARPS)
        signals = None
        if cutlass.const_expr(self.waits):  # also without a token of its own
            signals, ctas = signals_of(t, Finalize, PeerHeader.COMBINED), cutlass.max(ctas, 1)
        self.kernel.set_name_prefix(self.name)
        experts = Int32(t[Finalize.EXPERTS]) if self.is_routed else None
        self.kernel(operands, signals, experts).launch(
            grid=(ctas, 1, 1),
            block=(ROW_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
            use_pdl=self.is_programmatic,
        )

    @cute.kernel
    def kernel(self, operands: FinalizeOperands, signals: Signals | None, experts: Int32 | None):
        """Loads, weighs, adds, and stores. experts: number of local experts if rows are routed."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        chunks = cute.ceil_div(operands.n, LANE_COLUMNS * WARP_SIZE)
        work = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        token, lane = work // chunks, tidx % WARP_SIZE
        start = Float32(0.0)
        if cutlass.const_expr(self.waits):
            start = select(signals.wait(), Float32(NAN), start)
        if token < operands.tokens:
            column = (work % chunks * WARP_SIZE + lane) * LANE_COLUMNS
            is_inside = column < operands.n
            row, weight, expert = self.choice(operands, token, lane, experts)
            begin = Int32(0)
            if cutlass.const_expr(self.is_programmatic):
                # With one token, the product leaves SMs idle: an empty pass fetches the loop's code before the product ends.
                # It takes its choices from lanes without one, so it loads and adds nothing.
                is_warm = (operands.tokens == 1) & (operands.top_k <= WARP_SIZE - self.ahead)
                begin = select(is_warm, Int32(-self.ahead), begin)
                if begin == 0:
                    cute.arch.griddepcontrol_wait()
            acc = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
            acc.fill(start)
            for first in cutlass.range(begin, operands.top_k, self.ahead, unroll=1):
                # Without branches, so that the rows of all choices are loaded at once.
                choices = []
                for i in cutlass.range_constexpr(self.ahead):
                    at = (first + i) % WARP_SIZE
                    source = cute.arch.shuffle_sync(row, at)
                    factor = cute.arch.shuffle_sync(weight, at)
                    is_chosen = (first + i < operands.top_k) & (source >= 0)
                    is_read = is_chosen & is_inside
                    address = operands.h + Int64(source) * operands.h_pitch + column * 2
                    words, biases = load_words(address, LANE_WORDS, self.load_row, is_read), []
                    if cutlass.const_expr(self.has_bias):
                        bias_row = cute.arch.shuffle_sync(expert, at)
                        address = operands.bias + (Int64(bias_row) * operands.n + column) * 2
                        biases = load_words(address, LANE_WORDS, KEEP, is_read)
                    choices.append((is_chosen, factor, words, biases))
                for i in cutlass.range_constexpr(self.ahead):
                    is_chosen, factor, words, biases = choices[i]
                    for w in cutlass.range_constexpr(LANE_WORDS):
                        values = unpack(words[w], self.is_bf16)
                        if cutlass.const_expr(self.has_bias):
                            added = unpack(biases[w], self.is_bf16)
                            values = [ptx.add_f32(*pair) for pair in zip(values, added, strict=True)]
                        for j in cutlass.range_constexpr(2):
                            before = acc[2 * w + j]
                            summed = ptx.add_f32(before, ptx.mul_f32(factor, values[j]))
                            acc[2 * w + j] = select(is_chosen, summed, before)
                if cutlass.const_expr(self.is_programmatic):
                    if first < 0:
                        cute.arch.griddepcontrol_wait()
            if is_inside:
                self.store(operands, token, column, acc)

    @cute.jit
    def choice(self, operands: FinalizeOperands, token: Int32, lane: Int32, experts: Int32 | None):
        """Returns the row, the weight, and (with a bias) the expert of the lane's choice."""
        row, weight, expert = Int32(-1), Float32(0.0), Int32(0)
        if lane < operands.top_k:
            slot = Int64(token) * operands.top_k + lane
            if cutlass.const_expr(not self.is_routed):
                row = global_scalar(Int32, operands.rows + slot * 4)[0]
            weight = global_scalar(Float32, operands.weights + slot * 4)[0]
            if cutlass.const_expr(self.has_bias or self.is_routed):
                address = operands.ids + slot * operands.id_bytes
                expert = global_scalar(Int32, address)[0] - operands.first_expert
            if cutlass.const_expr(self.is_routed):
                row = select((expert >= 0) & (expert < experts), Int32(slot), Int32(-1))
        return row, weight, expert

    @cute.jit
    def store(self, operands: FinalizeOperands, token: Int32, column: Int32, acc: cute.Tensor):
        """Stores eight columns of the result."""
        if cutlass.const_expr(self.has_shared):
            address = operands.shared + Int64(token) * operands.shared_pitch + column * 2
            for w, word in enumerate(load_words(address, LANE_WORDS, MAY_CHANGE)):
                for j, value in enumerate(unpack(word, self.is_bf16)):
                    acc[2 * w + j] = ptx.add_f32(acc[2 * w + j], value)
        packed = [ptx.pack_16x2(acc[2 * w], acc[2 * w + 1], self.is_bf16) for w in range(LANE_WORDS)]
        store_words(operands.y + Int64(token) * operands.y_pitch + column * 2, packed)
