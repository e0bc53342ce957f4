"""The global scale of a tensor, and alphas with it as a factor, bit for bit equal to ``formats.global_scale``.

x (rows, K) fp16 or bf16. The scale is the largest finite magnitude of x, divided by 2688 (4over6: by 1536); 1 if
that is 0. Each of up to two float32 factors is multiplied by it, for a product's alpha.

Work: lanes take eight values in turn, and keep the largest magnitude as an integer, which has the order of magnitudes.
One CTA handles a small x and stores the scale. For a larger x, every CTA stores its largest magnitude, and a second
launch of one CTA finishes.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.formats.codecs import FLOAT32_MIN_NORMAL
from nvfp4_cute.launch_table import GlobalScale
from nvfp4_cute.planning.arch.simt import AMAX_THREADS, AMAX_VALUES, WARP_SIZE

from ..common import ptx
from ..common.global_access import KEEP, global_scalar, load_words, store_word
from ..common.launch_record import read_record
from ..common.select import select
from ..common.versions import SmemAllocator

MAGNITUDE = 0x7FFF
TWO_MAGNITUDES = 0x7FFF7FFF
# Magnitudes from here on are infinity and NaN.
NOT_FINITE = {True: 0x7F80, False: 0x7C00}
INFINITY_BITS = 0x7F800000
UNIT_WORDS = AMAX_VALUES // 2
UNIT_BYTES = 4 * UNIT_WORDS
# Loads in flight per thread.
IN_FLIGHT = 4


@dataclass(frozen=True)
class GlobalScaleOperands:
    """Addresses and the byte pitch are Int64, extents Int32; ``row_units`` of 16 bytes."""

    x: Int64
    out: Int64
    partials: Int64
    times: tuple
    products: tuple
    pitch: Int64
    rows: Int32
    row_units: Int32
    ctas: Int32


class GlobalScaleKernel:
    """One compiled variant.

    Args:
        is_bf16: whether x is bfloat16, else float16.
        is_small: whether one CTA does everything.
        num_times: number of factors that are multiplied by the scale, up to two.
        format: format to which x will be quantized; decides the divisor of the largest magnitude.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(self, is_bf16: bool, is_small: bool, num_times: int, format: BlockFormat, name: str):
        self.divisor = format.global_scale_divisor
        self.is_bf16 = is_bf16
        self.is_small = is_small
        self.num_times = num_times
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one CTA, or the table's number of CTAs and then one more.

        Args:
            table: Int64 in host memory: ``launch_table.GlobalScale``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(GlobalScale)))
        operands = read_record(
            GlobalScaleOperands,
            GlobalScale,
            t,
            times=(t[GlobalScale.TIMES_0], t[GlobalScale.TIMES_1]),
            products=(t[GlobalScale.PRODUCT_0], t[GlobalScale.PRODUCT_1]),
        )
        block = (AMAX_THREADS, 1, 1)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(grid=(operands.ctas, 1, 1), block=block, stream=stream)
        if cutlass.const_expr(not self.is_small):
            self.finish.set_name_prefix(f"{self.name}_finish")
            self.finish(operands).launch(grid=(1, 1, 1), block=block, stream=stream)

    @cute.kernel
    def kernel(self, operands: GlobalScaleOperands):
        """Finds the largest magnitude of a CTA's values."""
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        units = operands.rows * operands.row_units
        most = Uint32(0)
        step = operands.ctas * AMAX_THREADS
        for first in cutlass.range(cta * AMAX_THREADS + tidx, units, step * IN_FLIGHT, unroll=1):
            words = []
            for unit in units_at_once(first, step, units, IN_FLIGHT):
                row, column = unit // operands.row_units, unit % operands.row_units
                address = operands.x + Int64(row) * operands.pitch + Int64(column) * UNIT_BYTES
                words += load_words(address, UNIT_WORDS, KEEP)
            most = largest_of_words(most, words, self.is_bf16)
        most = largest_of_cta(most, tidx, AMAX_THREADS)
        if tidx == 0:
            if cutlass.const_expr(self.is_small):
                self.store(operands, most)
            else:
                store_word(operands.partials + Int64(cta) * 4, most)

    @cute.kernel
    def finish(self, operands: GlobalScaleOperands):
        """Finds the largest magnitude of all CTAs, and stores the results."""
        tidx, _, _ = cute.arch.thread_idx()
        most = Uint32(0)
        if tidx < operands.ctas:
            most = Uint32(global_scalar(Uint32, operands.partials + Int64(tidx) * 4)[0])
        most = largest_of_cta(most, tidx, AMAX_THREADS)
        if tidx == 0:
            self.store(operands, most)

    @cute.jit
    def store(self, operands: GlobalScaleOperands, most: Uint32):
        """Stores the scale and its products, from the bits of the largest magnitude."""
        scale = scale_of_largest(most, self.is_bf16, self.divisor)
        times, products = operands.times[: self.num_times], operands.products[: self.num_times]
        store_scale_and_products(scale, operands.out, times, products)


def units_at_once(first: Int32, step: Int32 | int, units: Int32, count: int) -> list:
    """Returns ``count`` units, ``step`` apart, whose loads are in flight together. The last unit replaces those beyond it.

    An unrolled loop could end after any of its loads, so each load would wait for the previous one.
    """
    return [cutlass.min(first + i * step, units - 1) for i in range(count)]


@cute.jit
def largest_of_words(most: Uint32, words: list, is_bf16: cutlass.Constexpr) -> Uint32:
    """Returns the larger one of ``most`` and the bits of the largest finite magnitude in these words."""
    pairs = words[0] & TWO_MAGNITUDES
    for word in words[1:]:
        pairs = ptx.max_nan_x2(pairs, word & TWO_MAGNITUDES, is_bf16)
    largest = cutlass.max(pairs & MAGNITUDE, pairs >> 16)
    if largest >= NOT_FINITE[is_bf16]:
        # Rare: look for the largest of the finite ones.
        largest = Uint32(0)
        for word in words:
            for half in (word & MAGNITUDE, (word >> 16) & MAGNITUDE):
                largest = cutlass.max(select(half < NOT_FINITE[is_bf16], half, Uint32(0)), largest)
    return cutlass.max(most, largest)


@cute.jit
def largest_of_cta(most: Uint32, tidx: Int32, threads: cutlass.Constexpr) -> Uint32:
    """Returns the largest number of a CTA's ``threads``; the number of warps is a power of two."""
    warps = threads // WARP_SIZE
    found = SmemAllocator().allocate_tensor(Uint32, cute.make_layout(warps), 16)
    most = cute.arch.warp_redux_sync(most, "max")
    if tidx % WARP_SIZE == 0:
        found[tidx // WARP_SIZE] = most
    cute.arch.sync_threads()
    return cute.arch.warp_redux_sync(found[tidx % warps], "max")


@cute.jit
def scale_of_largest(most: Uint32, is_bf16: cutlass.Constexpr, divisor: cutlass.Constexpr) -> Float32:
    """Returns the global scale, from the bits of the largest magnitude."""
    amax = ptx.float_of(most << 16) if is_bf16 else ptx.unpack_f16x2(most)[0]
    scale = _normal_quotient(amax, divisor)
    return select(most == 0, Float32(1.0), scale)


@cute.jit
def largest_of_values(most: Uint32, values: list) -> Uint32:
    """Returns the larger one of ``most`` and the bits of the largest finite magnitude of float32 values."""
    largest = Float32(0.0)
    for value in values:
        largest = ptx.max_nan(largest, ptx.abs_f32(value))
    found = ptx.bits_of(largest)
    if found >= INFINITY_BITS:
        # Rare: look for the largest of the finite ones.
        found = Uint32(0)
        for value in values:
            bits = ptx.bits_of(ptx.abs_f32(value))
            found = cutlass.max(select(bits < INFINITY_BITS, bits, Uint32(0)), found)
    return cutlass.max(most, found)


@cute.jit
def scale_of_values(most: Uint32, divisor: cutlass.Constexpr) -> Float32:
    """Returns the global scale, from the bits of the largest magnitude of float32 values."""
    return select(most == 0, Float32(1.0), _normal_quotient(ptx.float_of(most), divisor))


def _normal_quotient(amax: Float32, divisor: float) -> Float32:
    """Returns the quotient, or the smallest normal number if that is larger."""
    scale = ptx.div_f32(amax, Float32(divisor))
    return select(scale < FLOAT32_MIN_NORMAL, Float32(FLOAT32_MIN_NORMAL), scale)


def store_scale_and_products(scale: Float32, out: Int64, times: tuple, products: tuple) -> None:
    """Stores the scale, and every factor times it."""
    store_word(out, ptx.bits_of(scale))
    for factor, product in zip(times, products, strict=True):
        value = global_scalar(Float32, factor)[0]
        store_word(product, ptx.bits_of(ptx.mul_f32(value, scale)))
