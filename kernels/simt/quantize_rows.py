"""fp16 or bf16, or silu(x) * up of two such tensors, to blocks of 128 values with fp32 scales, as ``formats.quantize``.

x (M, K) in rows of unit stride; data (M, K) e4m3 and scales (M, K / 128) fp32, both without gaps, so a block's number
gives its place in both.

Work: half a warp takes a block, 16 bytes of x per lane, and finds the largest magnitude by shuffles. ``STEPS`` blocks
of each half are loaded before the first one is computed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch_table import Quantize
from nvfp4_cute.planning.arch.simt import QUANTIZE_WARPS, WARP_SIZE

from ..common import ptx
from ..common.encode import Encoding
from ..common.global_access import READ_ONCE, load_words, store_word, store_words
from ..common.quantize_block import divisor_of, scale_of
from .quantize import VECTOR_WORDS, QuantizeOperands, unpack
from .silu import silu_mul

HALF = WARP_SIZE // 2
LANE_BYTES = VECTOR_WORDS * 4
STEPS = 4
# A pair of normal numbers, in fp16 and in bf16. Fills blocks beyond the end of a row: zeros would have a scale of 0, and the
# division by it branches to a slow subroutine (2.7 us on an H200).
NUMBERS = 0x3C003C00


class QuantizeRowsKernel:
    """One compiled variant.

    Args:
        is_bf16: whether x is bfloat16, else float16.
        has_up: whether silu(x) * up is quantized.
        name: name of the kernel in profilers and in the emulator's reports.
        format: format of the results: blocks of 128 values of a row, fp32 scales.
    """

    def __init__(self, is_bf16: bool, has_up: bool, name: str, format: BlockFormat):
        self.is_bf16 = is_bf16
        self.has_up = has_up
        self.name = name
        self.block_k = format.block_k
        self.element = Encoding.of(format, has_fp4_convert=False).element
        self.most = format.element.max

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one thread per 16 bytes of x, in ``STEPS``.

        Args:
            table: Int64 in host memory: ``launch_table.Quantize``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Quantize)))
        operands = QuantizeOperands.of(t)
        blocks = Int32(t[Quantize.BATCHES]) * operands.m * (operands.k // self.block_k)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands, blocks).launch(
            grid=(cute.ceil_div(blocks, QUANTIZE_WARPS * 2 * STEPS), 1, 1),
            block=(QUANTIZE_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: QuantizeOperands, blocks: Int32):
        """Loads, finds scales, encodes, and stores."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        half, lane = tidx // HALF, tidx % HALF
        first = (block_idx * QUANTIZE_WARPS + half // 2) * (2 * STEPS) + half % 2
        k_blocks = operands.k // self.block_k
        inputs, factors = (
            [cute.make_rmem_tensor(VECTOR_WORDS, Uint32) for _ in range(STEPS)] for _ in range(2)
        )
        for step in cutlass.range_constexpr(STEPS):
            index = first + 2 * step
            inputs[step].fill(Uint32(NUMBERS))
            factors[step].fill(Uint32(NUMBERS))
            if index < blocks:
                row = index // k_blocks
                batch = row // operands.m
                row_in_batch, offset = row - batch * operands.m, (index - row * k_blocks) * self.block_k * 2
                offset = Int64(offset + lane * LANE_BYTES)
                x = operands.x + batch * operands.x_batch + row_in_batch * operands.x_pitch
                load(inputs[step], x + offset)
                if cutlass.const_expr(self.has_up):
                    up = operands.up + batch * operands.up_batch + row_in_batch * operands.up_pitch
                    load(factors[step], up + offset)
        for step in cutlass.range_constexpr(STEPS):
            index = first + 2 * step
            words, scale = self.quantize_block(inputs[step], factors[step])
            if index < blocks:
                at = Int64(index) * self.block_k + lane * (LANE_BYTES // 2)
                store_words(operands.data + at, words)
                if lane == 0:
                    store_word(operands.scale + Int64(index) * 4, ptx.bits_of(scale))

    @cute.jit
    def quantize_block(self, words: cute.Tensor, factors: cute.Tensor):
        """Returns words of a lane's elements, and the scale of its half warp's block."""
        inputs = [words, factors] if self.has_up else [words]
        values = values_of(*inputs, is_bf16=self.is_bf16)
        amax = ptx.abs_f32(values[0])
        for value in values[1:]:
            amax = ptx.max_nan(amax, ptx.abs_f32(value))
        for distance in cutlass.range_constexpr(4):
            amax = ptx.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, 1 << distance))
        scale = scale_of(amax, self.most)
        divisor = divisor_of(scale)
        return self.element.pack([ptx.div_f32(value, divisor) for value in values], []), scale


def values_of(words: cute.Tensor | list, factors: cute.Tensor | list | None = None, *, is_bf16: bool) -> list:
    """Returns the values to quantize in a lane's 16 bytes of x: its values, or silu of them times those of ``factors``."""
    values = [value for i in range(VECTOR_WORDS) for value in unpack(words[i], is_bf16)]
    if factors is None:
        return values
    others = [value for i in range(VECTOR_WORDS) for value in unpack(factors[i], is_bf16)]
    return [silu_mul(gate, up) for gate, up in zip(values, others, strict=True)]


def load(words: cute.Tensor, address: Int64) -> None:
    """Loads a lane's 16 bytes of x."""
    for i, word in enumerate(load_words(address, VECTOR_WORDS, READ_ONCE)):
        words[i] = word
