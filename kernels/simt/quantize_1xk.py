"""fp16 or bf16, or silu(x) * up of two such tensors, to rows with one fp32 scale each, bit for bit as by ``formats.quantize``.

x (M, K) in rows of unit stride; data (M, K) int8 or e4m3 and scales (M, 1) fp32, both without gaps.

Work: a CTA takes a row, 16 bytes of x per thread at a time. Until the scale is known, threads hold up to 8,192 values of the row
in registers. They read the rest of a longer row again, from caches.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch_table import Quantize
from nvfp4_cute.planning.arch.simt import QUANTIZE_WARPS, WARP_SIZE

from ..common import ptx
from ..common.fp8 import codes_of
from ..common.global_access import KEEP, load_words, store_word, store_words
from ..common.shared_access import load_shared, store_shared
from ..common.versions import SmemAllocator
from .global_scale import TWO_MAGNITUDES
from .quantize import VECTOR_WORDS, QuantizeOperands, unpack
from .quantize_rows import LANE_BYTES, divisor_of, scale_of, values_of

THREADS = QUANTIZE_WARPS * WARP_SIZE
LANE_VALUES = LANE_BYTES // 2
# 16-byte units that a thread holds in registers.
HELD_UNITS = 4
WORD_BYTES = 4
# For divisors from here to 1 / LEAST_USUAL, intermediate results of ``Divisor.of`` are normal unless the quotient rounds to 0.
LEAST_USUAL = 2.0**-80


@dataclass(frozen=True)
class Divisor:
    """Divides by the scale of a row, rounded to nearest even.

    Attributes:
        value: the divisor.
        reciprocal: 1 / ``value``, rounded to nearest even, if ``value`` is at least LEAST_USUAL and at most 1 / LEAST_USUAL.
    """

    value: Float32
    reciprocal: Float32 | None = None

    def of(self, x: Float32) -> Float32:
        """Returns x / ``value``. With a reciprocal: three instructions, correctly rounded if the quotient is at least 2^-100."""
        if self.reciprocal is None:
            return ptx.div_f32(x, self.value)
        # Markstein's correction. The negations keep the sign of a zero.
        first = x * self.reciprocal
        return ptx.fma_f32(-ptx.fma_f32(self.value, first, -x), self.reciprocal, first)


class Quantize1xKKernel:
    """One compiled variant.

    Args:
        is_bf16: whether x is bfloat16, else float16.
        has_up: whether silu(x) * up is quantized.
        name: name of the kernel in profilers and in the emulator's reports.
        format: format of the results: INT8 or FP8_1xK.
    """

    def __init__(self, is_bf16: bool, has_up: bool, name: str, format: BlockFormat):
        self.is_bf16 = is_bf16
        self.has_up = has_up
        self.name = name
        self.format = format

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one CTA per row.

        Args:
            table: Int64 in host memory: ``launch_table.Quantize``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Quantize)))
        operands = QuantizeOperands.of(t)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(Int32(t[Quantize.BATCHES]) * operands.m, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, operands: QuantizeOperands):
        """Loads, finds the scale, encodes, and stores."""
        tidx, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        batch = row // operands.m
        in_batch = row - batch * operands.m
        places = [operands.x + batch * operands.x_batch + in_batch * operands.x_pitch]
        if cutlass.const_expr(self.has_up):
            places.append(operands.up + batch * operands.up_batch + in_batch * operands.up_pitch)
        units = operands.k // LANE_VALUES
        words = SmemAllocator().allocate(QUANTIZE_WARPS * WORD_BYTES, 4 * WORD_BYTES).toint()
        held = self.hold(places, units)
        scale = self.scale_of_row(places, held, units, words)
        if tidx == 0:
            store_word(operands.scale + Int64(row) * WORD_BYTES, ptx.bits_of(scale))
        self.store_row(places, held, units, divisor_of(scale), (operands.data + Int64(row) * operands.k,))

    @cute.jit
    def hold(self, places: list, units: Int32) -> list:
        """Loads a thread's first units, as zeros beyond the end of the row. Returns, per unit, the words of every input."""
        held = [
            [cute.make_rmem_tensor(VECTOR_WORDS, Uint32) for _ in range(len(places))]
            for _ in range(HELD_UNITS)
        ]
        for i in cutlass.range_constexpr(HELD_UNITS):
            unit = cute.arch.thread_idx()[0] + i * THREADS
            for j in cutlass.range_constexpr(len(places)):
                held[i][j].fill(Uint32(0))
                if unit < units:
                    words = load_words(places[j] + Int64(unit) * LANE_BYTES, VECTOR_WORDS, KEEP)
                    for word in cutlass.range_constexpr(VECTOR_WORDS):
                        held[i][j][word] = words[word]
        return held

    @cute.jit
    def scale_of_row(self, places: list, held: list, units: Int32, words: Int32) -> Float32:
        """Returns the scale of a row, which all threads of the CTA read. words: shared memory, one word per warp."""
        first = cute.arch.thread_idx()[0] + HELD_UNITS * THREADS
        # Starts with values of the row instead of 0, because max of two halves takes no immediate operand.
        most = held[0][0][0] & Uint32(TWO_MAGNITUDES)
        if cutlass.const_expr(self.has_up):
            most = Float32(0.0)
        for i in cutlass.range_constexpr(HELD_UNITS):
            most = self.larger(most, held[i])
        for unit in cutlass.range(first, units, THREADS, unroll=1):
            most = self.larger(most, self.words(places, unit))
        amax = most if self.has_up else ptx.max_nan(*unpack(most, self.is_bf16))
        return scale_of(self.largest_of_cta(amax, words), self.format.element.max)

    def larger(self, most: Float32 | Uint32, inputs: list) -> Float32 | Uint32:
        """Returns the maximum of ``most`` and the magnitudes of a unit. Without ``up``, both halves of a word have their own."""
        if self.has_up:
            for value in values_of(*inputs, is_bf16=self.is_bf16):
                most = ptx.max_nan(most, ptx.abs_f32(value))
            return most
        for word in range(VECTOR_WORDS):
            most = ptx.max_nan_x2(most, inputs[0][word] & Uint32(TWO_MAGNITUDES), self.is_bf16)
        return most

    @cute.jit
    def store_row(self, places: list, held: list, units: Int32, divisor: Float32, target: tuple):
        """Encodes a row and stores it. target: argument of :meth:`store`."""
        if divisor >= LEAST_USUAL and divisor <= 1 / LEAST_USUAL:
            self.store_units(places, held, units, Divisor(divisor, ptx.rcp_f32(divisor)), target)
        else:
            self.store_units(places, held, units, Divisor(divisor), target)

    @cute.jit
    def store_units(self, places: list, held: list, units: Int32, divisor: Divisor, target: tuple):
        """Encodes the units of a row and stores them."""
        tidx = cute.arch.thread_idx()[0]
        for i in cutlass.range_constexpr(HELD_UNITS):
            if tidx + i * THREADS < units:
                self.store(tidx + i * THREADS, units, self.encoded(held[i], divisor), target)
        for unit in cutlass.range(tidx + HELD_UNITS * THREADS, units, THREADS, unroll=1):
            self.store(unit, units, self.encoded(self.words(places, unit), divisor), target)

    @cute.jit
    def store(self, unit: Int32, units: Int32, encoded: list, target: tuple):
        """Stores a unit of a row of ``units``. target: (address of the row's data,)."""
        store_words(target[0] + unit * LANE_VALUES, encoded)

    def encoded(self, inputs: list, divisor: Divisor) -> list:
        """Returns the elements of a unit, four per word. inputs: words of every input."""
        quotients = [divisor.of(value) for value in values_of(*inputs, is_bf16=self.is_bf16)]
        fours = [quotients[first : first + 4] for first in range(0, LANE_VALUES, 4)]
        if self.format.has_integer_sums:
            return [ptx.f32x4_to_s8(four) for four in fours]
        return [codes_of(four, self.format.element.name) for four in fours]

    def words(self, places: list, unit: Int32) -> list:
        """Loads the words of a thread's 16 bytes from every input."""
        return [load_words(place + Int64(unit) * LANE_BYTES, VECTOR_WORDS, KEEP) for place in places]

    @cute.jit
    def largest_of_cta(self, amax: Float32, words: Int32) -> Float32:
        """Returns the largest magnitude of all threads, through one word of shared memory per warp."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        for distance in cutlass.range_constexpr(5):
            amax = ptx.max_nan(amax, cute.arch.shuffle_sync_bfly(amax, 1 << distance))
        if lane == 0:
            store_shared(words + warp * WORD_BYTES, [ptx.bits_of(amax)])
        cute.arch.sync_threads()
        for first in cutlass.range_constexpr(0, QUANTIZE_WARPS, 4):
            for word in load_shared(words + first * WORD_BYTES, 4):
                amax = ptx.max_nan(amax, ptx.float_of(word))
        return amax
