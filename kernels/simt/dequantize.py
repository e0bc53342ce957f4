"""Block-scaled data to fp16 or bf16 in one pass, bit for bit equal to ``formats.dequantize``.

data (rows, K) of unit stride, scales blocked or row-major; out (rows, K) contiguous. Every value is ``value * scale``,
exact in float32 (except for int4 with float32 scales), times the global scale of its batch if there is one, rounded
once to the result.

Work: a warp takes 256 columns of ``DEQUANTIZE_ROWS`` rows, a lane eight of each, so it stores 16 bytes per row in every
format.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import ATOM_BYTES, ATOM_ROWS, BlockFormat
from nvfp4_cute.launch_table import Dequantize
from nvfp4_cute.planning.arch.simt import DEQUANTIZE_ROWS, DEQUANTIZE_WARPS, WARP_SIZE

from ..common import fp8, ptx
from ..common.decode import OPERAND_EXPONENT, SIGN_BITS, decode_scales, decode_word
from ..common.global_access import READ_ONCE, global_scalar, load_words, store_words
from ..common.int4 import Int4Decoding, codes_of_bytes
from ..common.launch_record import read_record
from ..common.ue8m0 import power_over

VALUES = 8
# In the order of ``decode_word``'s pairs of e2m1 values.
E2M1_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
ONE_F16 = 0x3C00
UINTS = {1: cutlass.Uint8, 2: cutlass.Uint16, 4: Uint32}


@dataclass(frozen=True)
class DequantizeOperands:
    """Addresses and strides in bytes are Int64, extents Int32."""

    data: Int64
    scale: Int64
    global_scale: Int64
    out: Int64
    pitch: Int64
    batch: Int64
    scale_batch: Int64
    global_scale_batch: Int64
    rows: Int32
    k: Int32


class DequantizeKernel:
    """One compiled variant.

    Args:
        format: format of the data: 4 or 8 bits per element with ue4m3 or ue8m0 scales; or int4.
        is_bf16: whether results are bfloat16, else float16.
        has_global_scale: whether a factor is read.
        is_blocked: layout of the scales: 128x4 blocked, else row-major.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(
        self, format: BlockFormat, is_bf16: bool, has_global_scale: bool, is_blocked: bool, name: str
    ):
        self.format = format
        self.scale_bytes = format.scale.bits // 8
        self.is_bf16 = is_bf16
        self.has_global_scale = has_global_scale
        self.is_blocked = is_blocked
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches columns along x, rows along y, batches along z.

        Args:
            table: Int64 in host memory: ``launch_table.Dequantize``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Dequantize)))
        operands = read_record(DequantizeOperands, Dequantize, t)
        chunks = cute.ceil_div(operands.k, WARP_SIZE * VALUES)
        units = cute.ceil_div(operands.rows, DEQUANTIZE_ROWS) * chunks
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(cute.ceil_div(units, DEQUANTIZE_WARPS), Int32(t[Dequantize.BATCHES]), 1),
            block=(DEQUANTIZE_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: DequantizeOperands):
        """Loads all rows, then decodes and stores them."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, batch, _ = cute.arch.block_idx()
        chunks = cute.ceil_div(operands.k, WARP_SIZE * VALUES)
        # Neighbouring warps take neighbouring columns of one set of rows.
        work = block_idx * DEQUANTIZE_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        first_row = work // chunks * DEQUANTIZE_ROWS
        column = (work % chunks * WARP_SIZE + tidx % WARP_SIZE) * VALUES
        if column < operands.k:
            words_each = self.format.row_bytes(VALUES) // 4
            words = cute.make_rmem_tensor((words_each, DEQUANTIZE_ROWS), Uint32)
            codes = cute.make_rmem_tensor(DEQUANTIZE_ROWS, Uint32)
            words.fill(Uint32(0))
            codes.fill(Uint32(0))
            data = operands.data + Int64(batch) * operands.batch + self.format.row_bytes(column)
            scales = operands.scale + Int64(batch) * operands.scale_batch
            for i in cutlass.range_constexpr(DEQUANTIZE_ROWS):
                row = first_row + i
                if row < operands.rows:
                    loaded = load_words(data + Int64(row) * operands.pitch, words_each, READ_ONCE)
                    for j in cutlass.range_constexpr(words_each):
                        words[j, i] = loaded[j]
                    codes[i] = self.load_scale(operands, scales, row, column // self.format.block_k)
            factor = Float32(1.0)
            if cutlass.const_expr(self.has_global_scale):
                of_batch = operands.global_scale + Int64(batch) * operands.global_scale_batch
                factor = global_scalar(Float32, of_batch)[0]
            for i in cutlass.range_constexpr(DEQUANTIZE_ROWS):
                row = first_row + i
                if row < operands.rows:
                    results = self.results([words[j, i] for j in range(words_each)], codes[i], factor)
                    index = (Int64(batch) * operands.rows + row) * operands.k + column
                    store_words(operands.out + index * 2, results)

    @cute.jit
    def load_scale(self, operands: DequantizeOperands, scales: Int64, row: Int32, block: Int32) -> Uint32:
        """Returns a block's stored scale, in the low bits of a word."""
        k_blocks, columns, nbytes = (
            operands.k // self.format.block_k,
            self.format.atom_shape[-1],
            self.scale_bytes,
        )
        offset = (Int64(row) * k_blocks + block) * nbytes
        if cutlass.const_expr(self.is_blocked):
            atom = Int64(row // ATOM_ROWS) * cute.ceil_div(k_blocks, columns) + block // columns
            in_atom = row % 32 * 16 + row % ATOM_ROWS // 32 * 4 + block % columns * nbytes
            offset = atom * ATOM_BYTES + in_atom
        return Uint32(global_scalar(UINTS[nbytes], scales + offset)[0])

    def results(self, words: list, code: Uint32, factor: Float32) -> list:
        """Returns eight results as pairs."""
        if self.format.is_int4:
            int4 = Int4Decoding(self.format, self.is_bf16)
            scale = int4.block_scale(code, 0)
            return [int4.weights(codes, scale) for codes in codes_of_bytes(*words)]
        values = self.decode(words, code)
        if self.has_global_scale:
            values = [ptx.mul_f32(value, factor) for value in values]
        pairs = zip(values[::2], values[1::2], strict=True)
        return [ptx.pack_16x2(*pair, self.is_bf16) for pair in pairs]

    def decode(self, words: list, code: Uint32) -> list:
        """Returns eight values times their scale, exactly."""
        if self.format.scale.name == "ue4m3":
            return e2m1_values(words[0], decode_scales(code))
        scale = power_over(code, 0)
        if self.format.element.bits == 4:
            values = e2m1_values(words[0], Uint32(ONE_F16))
        else:
            halves = [half for word in words for half in fp8.to_f16x2(word, self.format.element.name)]
            values = [value for half in halves for value in ptx.unpack_f16x2(half)]
        return [ptx.mul_f32(value, scale) for value in values]


def e2m1_values(word: Uint32, scales: Uint32) -> list:
    """Returns eight e2m1 values times the lower fp16 of ``scales``, in order."""
    pairs = decode_word(word, scales, False, Uint32(SIGN_BITS))
    values = [value for pair in pairs for value in ptx.unpack_f16x2(pair)]
    ordered = dict(zip(E2M1_ORDER, values, strict=True))
    return [ptx.mul_f32(ordered[i], Float32(2.0**OPERAND_EXPONENT)) for i in range(VALUES)]
