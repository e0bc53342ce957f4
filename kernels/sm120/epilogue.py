"""Epilogue of the MMA warps: from accumulators in registers to global memory.

With lane = 4g + t, a lane has row g and columns 2t and 2t + 1 of every 8 x 8 square of an MMA. If the elements of an output
line (``result_tile``) are along the M side, a warp first transposes these squares. Each lane then has line g and elements 2t
and 2t + 1, and a quad stores its neighbouring elements together: 32 bytes, or 16 elements of quantized results. These 16
are a block, or half of one whose other half another warp has (``shared_codes``).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.planning.arch.sm120 import WARP_COLUMNS

from ..common import ptx
from ..common.activation import gate
from ..common.bias import load_bias
from ..common.encode import Encoding
from ..common.group_table import WorkTile
from ..common.output_table import OutputTable, caller_index, group_bias, group_output
from ..common.quantized_output import quantized_group, store_quantized_part
from ..common.sides import TileSide, mma_sides
from ..common.transpose import exchange_in_warp, transpose_square
from .result_tile import ResultTile
from .shared_codes import SharedCodes
from .warp_tile import BAND, STRIP

# Lanes that share a line.
QUAD = 4


@dataclass(frozen=True)
class Results:
    """Float32 results of a warp's tile, computed on demand.

    Attributes:
        acc: (REGISTER, MMA_M, MMA_N) sums.
        tile: ``ResultTile``.
        alphas: the group's factor of every product.
        activation, limit: activation and clamp of a dual GEMM.
        are_integers: whether sums are the bits of integers, which are stored unchanged.
        bias: bias of the lane's rows of weights, two per MMA, or None.
        row_scales: words of the global scales of the lane's rows of ``a``, two per MMA, or None.
    """

    acc: cute.Tensor
    tile: ResultTile
    alphas: list
    activation: str | None
    limit: Float32 | None
    are_integers: bool = False
    bias: list | None = None
    row_scales: list | None = None

    def pair(self, line: tuple[int, int], element: tuple[int, int]) -> list:
        """Returns two neighbouring results of an MMA row, given a (strip, band) of lines and one of elements."""
        products = []
        for which, alpha in enumerate(self.alphas):
            at = self.tile.pair(which, line, element)
            sums = [self.acc[at.register + k, at.i, at.j] for k in range(2)]
            products.append(sums if self.are_integers else [total * alpha for total in sums])
            if self.row_scales is not None:
                first, step = (2 * at.j, 1) if self.tile.weights_along_m else (2 * at.i + at.register // 2, 0)
                scales = [ptx.float_of(self.row_scales[first + k * step]) for k in range(2)]
                products[-1] = [value * scale for value, scale in zip(products[-1], scales, strict=True)]
            if self.bias is not None:
                first, step = (2 * at.i + at.register // 2, 0) if self.tile.weights_along_m else (2 * at.j, 1)
                bias = [self.bias[first + k * step].to(Float32) for k in range(2)]
                products[-1] = [ptx.add_f32(*both) for both in zip(products[-1], bias, strict=True)]
        if self.activation is None:
            return products[0]
        return [gate(*both, self.activation, self.limit) for both in zip(*products, strict=True)]

    def pair_of_line(self, line: tuple[int, int], element: tuple[int, int]) -> list:
        """Returns two neighbouring results of an output line. All lanes of a warp must call it."""
        pair = self.pair(line, element)
        return transpose_square(*pair) if self.tile.lines_along_n else pair


@cute.jit
def store_tile(
    acc: cute.Tensor,
    outputs: OutputTable,
    kind: cutlass.Constexpr,
    tile: WorkTile,
    config: cutlass.Constexpr,
    result_tile: cutlass.Constexpr,
    first_row: Int32,
    first_col: Int32,
    alphas: list,
    codes_address: Int32 | None,
    row_scales: list | None = None,
):
    """Scales, combines, converts and stores a warp's sums. Memory beyond the group is not written.

    Args:
        acc: (REGISTER, MMA_M, MMA_N), float32; the bits of int32 results.
        kind: ``OutputKind``.
        result_tile: ``ResultTile``.
        first_row, first_col: first row and column of the warp in the tile.
        alphas: the group's factor of every product.
        codes_address: shared address for ``SharedCodes``; None if no blocks are shared.
        row_scales: see ``Results``.
    """
    limit = None
    if cutlass.const_expr(outputs.limit is not None):
        limit = ptx.float_of(outputs.limit)
    sides = list(mma_sides(config, tile))
    bias = None
    if cutlass.const_expr(outputs.bias is not None):
        of_group = outputs.bias
        if cutlass.const_expr(kind.num_products > 1):
            columns = tile.n // (kind.num_products // kind.num_b)
            of_group = group_bias(outputs, caller_index(outputs, tile.slot), columns)
        bias = _load_bias(of_group, result_tile, sides, first_row, first_col)
    results = Results(acc, result_tile, alphas, kind.activation, limit, kind.dtype is Int32, bias, row_scales)
    if cutlass.const_expr(kind.num_b < kind.num_products):
        # Interleaved weights: two rows of weights make one column of the output.
        weights = 0 if config.swap_ab else 1
        whole = sides[weights]
        sides[weights] = TileSide(whole.first_row // 2, whole.extent // 2, whole.origin)
    firsts = [sides[0].first_row + first_row, sides[1].first_row + first_col]
    # The side along which lines are counted, then the side along which elements are counted.
    along = [1, 0] if result_tile.lines_along_n else [0, 1]
    lane = cute.arch.lane_idx()
    first_line, first_element = [firsts[side] for side in along]
    lines, elements = [sides[side].extent for side in along]
    if cutlass.const_expr(kind.is_quantized):
        codes = None
        if cutlass.const_expr(codes_address is not None):
            codes = SharedCodes.of(codes_address, result_tile)
        group = quantized_group(outputs, tile, elements, kind.dtype)
        encode = Encoding.of(kind.dtype, has_fp4_convert=True)
        _store_quantized(results, group, codes, first_line, first_element, encode)
    else:
        line, element = first_line + lane // QUAD, first_element + 2 * (lane % QUAD)
        origin, row_pitch, column_pitch = group_output(outputs, tile, kind.dtype, kind.m_major)
        element_bytes = kind.dtype.width // 8
        pitch = (column_pitch if kind.m_major else row_pitch) * element_bytes
        address = origin + line * pitch + Int64(element) * element_bytes
        _store_plain(
            results, Lines(kind.dtype, address, pitch, lines - line, elements - element, lines - first_line)
        )


def _load_bias(
    bias: cute.Pointer, result_tile: ResultTile, sides: list, first_row: Int32, first_col: Int32
) -> list:
    """Loads the bias for ``Results``. With separate weights of a dual GEMM, the first operand's numbers precede the second's.

    Args:
        sides: sides of the MMA.
        first_row, first_col: of the warp in the tile.
    """
    warp_tile, lane = result_tile.warp_tile, cute.arch.lane_idx()
    if result_tile.weights_along_m:
        side, first = sides[0], first_row + lane // QUAD
        own = [
            (operand, strip * STRIP + (2 * pair + half) * BAND)
            for operand, strip, pair in warp_tile.mma_m
            for half in (0, 1)
        ]
    else:
        side, first = sides[1], first_col + 2 * (lane % QUAD)
        own = [
            (operand, strip * STRIP + band * BAND + e)
            for operand, strip, band in warp_tile.mma_n
            for e in (0, 1)
        ]
    loaded = [
        load_bias(
            bias + operand * side.extent if operand else bias, [side.first_row + first + place], side.extent
        )
        for operand, place in own
    ]
    return [value for (value,) in loaded]


@dataclass(frozen=True)
class Lines:
    """Destination of a lane's results.

    Attributes:
        address: of its first line's first element of its.
        pitch: bytes from line to line.
        lines, elements: that exist from there on.
        warp_lines: lines from the warp's first one on.
    """

    dtype: type
    address: Int64
    pitch: Int64
    lines: Int32
    elements: Int32
    warp_lines: Int32


@cute.jit
def _store_plain(results: Results, to: Lines):
    """Stores results that are not quantized."""
    for line in cutlass.range_constexpr(len(results.tile.lines)):
        strip, band = results.tile.lines[line]
        offset = strip * STRIP + band * BAND
        if offset < to.warp_lines:
            _store_lines(results, to, results.tile.lines[line], offset)


@cute.jit
def _store_lines(results: Results, to: Lines, line: cutlass.Constexpr, offset: cutlass.Constexpr):
    """Stores eight lines, ``offset`` lines after the warp's first."""
    tile, address = results.tile, to.address + offset * to.pitch
    # 16 elements of 2 bytes fill a sector.
    is_joined = to.dtype.width == 16 and tile.line_strips == 2
    for band in cutlass.range_constexpr(tile.line_bands):
        pairs = [_rounded_pair(results, to.dtype, line, (strip, band)) for strip in range(tile.line_strips)]
        if cutlass.const_expr(is_joined):
            _store_joined(pairs, to, address, offset, band * BAND)
        else:
            for strip in cutlass.range_constexpr(tile.line_strips):
                _store_run(pairs[strip], to, address, offset, band * BAND + strip * STRIP)


@cute.jit
def _rounded_pair(
    results: Results, dtype: cutlass.Constexpr, line: cutlass.Constexpr, element: cutlass.Constexpr
) -> cute.Tensor:
    """Returns two neighbouring results of a line.

    Rounds 16-bit results first, because one instruction then transposes them.
    """
    values = cute.make_rmem_tensor(2, dtype)
    if cutlass.const_expr(dtype.width == 16):
        word = ptx.pack_16x2(*results.pair(line, element), dtype is cutlass.BFloat16)
        if cutlass.const_expr(results.tile.lines_along_n):
            word = ptx.transpose_8x8(word)
        cute.recast_tensor(values, Uint32)[0] = word
    else:
        pair = results.pair_of_line(line, element)
        for k in cutlass.range_constexpr(2):
            values[k] = ptx.bits_of(pair[k]).to(Int32) if dtype is Int32 else pair[k]
    return values


@cute.jit
def _store_joined(pairs: list, to: Lines, address: Int64, line: cutlass.Constexpr, first: cutlass.Constexpr):
    """Stores 16 elements of a line, four per lane, so that a quad writes a whole sector at once.

    Lanes 2i and 2i + 1 exchange pairs: one then has four elements of the first strip, the other four of the second.
    """
    is_odd = cute.arch.lane_idx() % 2
    low, high = [cute.recast_tensor(pair, Int32)[0] for pair in pairs]
    received = cute.arch.shuffle_sync_bfly(low if is_odd == 1 else high, 1)
    words = cute.make_rmem_tensor(2, Int32)
    words[0] = received if is_odd == 1 else low
    words[1] = high if is_odd == 1 else received
    # Distance from the lane's own pair of the first strip, at 2 (lane % 4), to element 8 is_odd + 4 (lane % 4 / 2).
    _store_run(cute.recast_tensor(words, to.dtype), to, address, line, first + 6 * is_odd)


@cute.jit
def _store_run(values: cute.Tensor, to: Lines, address: Int64, line: cutlass.Constexpr, first):
    """Stores values from element ``first`` on, clipped to the line; in one instruction if the address is aligned."""
    if line < to.lines:
        run_bytes = cute.size(values) * to.dtype.width // 8
        address += first * (to.dtype.width // 8)
        num_valid = to.elements - first
        if num_valid >= cute.size(values) and address % run_bytes == 0:
            ptr = cute.make_ptr(to.dtype, address, cute.AddressSpace.gmem, assumed_align=run_bytes)
            cute.autovec_copy(values, cute.make_tensor(ptr, values.layout))
        else:
            for i in cutlass.range_constexpr(cute.size(values)):
                if i < num_valid:
                    ptr = cute.make_ptr(to.dtype, address + i * (to.dtype.width // 8), cute.AddressSpace.gmem)
                    cute.make_tensor(ptr, cute.make_layout(1))[0] = values[i]


@cute.jit
def _store_quantized(
    results: Results,
    group,
    codes: SharedCodes | None,
    first_line: Int32,
    first_element: Int32,
    encode: cutlass.Constexpr[Encoding],
):
    """Quantizes and stores results. The lanes of a quad exchange pieces of four parts, so that each lane has one part.

    Args:
        group: ``QuantizedGroup``.
        codes: exchange of scales, if blocks span two warps.
        first_line, first_element: first line and element of the warp in the group.
    """
    # A quad's parts, ordered by element band, then by line band, then by line strip.
    parts = [(line, band) for line in results.tile.lines for band in range(results.tile.line_bands)]
    for first in cutlass.range_constexpr(0, len(parts), QUAD):
        offsets = [strip * STRIP + band * BAND for (strip, band), _ in parts[first : first + QUAD]]
        if first_line + min(offsets) < group.rows:
            _store_parts(results, group, codes, parts, first, first_line, first_element, encode)


@cute.jit
def _store_parts(
    results: Results,
    group,
    codes: SharedCodes | None,
    parts: cutlass.Constexpr,
    first: cutlass.Constexpr,
    first_line: Int32,
    first_element: Int32,
    encode: cutlass.Constexpr[Encoding],
):
    """Quantizes and stores up to four of a quad's ``parts`` from number ``first`` on."""
    # Elements of a part are numbered by strip, lane of the quad and place in its pair. Before the exchange a lane has, in
    # the place of the other lanes, its own elements of other parts.
    values = cute.make_rmem_tensor(WARP_COLUMNS, Float32)
    values.fill(0.0)
    for i in cutlass.range_constexpr(min(QUAD, len(parts) - first)):
        line, element_band = parts[first + i]
        for strip in cutlass.range_constexpr(2):
            pair = results.pair_of_line(line, (strip, element_band))
            for k in cutlass.range_constexpr(2):
                values[strip * STRIP + 2 * i + k] = pair[k]
    exchange_in_warp(values, ((0, 1), (1, 2)))
    lane = cute.arch.lane_idx()
    mine = first + lane % QUAD
    scale = None
    if cutlass.const_expr(codes is not None):
        scale = codes.scale_of_blocks(values, encode)
    if mine < len(parts):
        num_band, num_line_band = results.tile.line_bands, results.tile.bands[results.tile.lines_along_n]
        offset = mine // num_band // num_line_band * STRIP + mine // num_band % num_line_band * BAND
        row, column = first_line + offset + lane // QUAD, first_element + mine % num_band * BAND
        store_quantized_part(values, scale, group, row, column, encode)
