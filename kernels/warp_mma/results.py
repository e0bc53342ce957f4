"""Multiplies a warp's sums by factors, combines those of two products, and stores results in rows of tokens."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ..common import ptx
from ..common.activation import gate
from ..common.bias import load_bias
from ..common.fp32_scales import SCALE_BYTES
from ..common.global_access import KEEP, load_words, store_words
from ..common.group_table import select_slot
from ..common.output_table import OutputTable, caller_index, group_bias, load_dual_bias
from ..common.select import select
from ..common.versions import inline_ptx
from .operands import BAND_ROWS, BANDS, OCTET, Lane, Loads
from .places import Place

# prmt: lower halves and upper halves of two words.
HALVES = (0x5410, 0x7632)


@dataclass(frozen=True)
class Results:
    """The epilogue of a tile.

    Attributes:
        outputs: addresses and pitches of the results.
        dtype: cutlass.Float16, BFloat16 or Float32.
        activation: activation of a dual product; None for a single one.
        loads: the operands of the products.
    """

    outputs: OutputTable
    dtype: type
    activation: str | None
    loads: Loads

    @cute.jit
    def store(self, acc: Any, place: Place, lane: Lane):
        """Stores the results of a warp's complete sums."""
        layout, slot = self.loads.layout, place.slot
        unit = place.unit + lane.row_warp
        n = select_slot(self.loads.n, slot)
        columns = n if cutlass.const_expr(layout.layout in (None, "separate")) else n // 2
        first = unit // layout.atom_units * layout.columns() + layout.octet(unit) * OCTET
        factors = self.factors(place)
        batch = Int64(0)
        if cutlass.const_expr(self.loads.has_batches):
            batch = slot * self.outputs.batch_pitch
        pitch, nbytes = select_slot(self.outputs.pitches, slot), self.dtype.width // 8
        base = select_slot(self.outputs.addresses, slot) + (batch + Int64(self.row(place)) * pitch) * nbytes
        # Stores pairs of columns as words if all pairs are aligned.
        is_paired = (pitch % 2 == 0) & (base % 4 == 0)
        row_scales = self.row_scales(unit, place, n, lane)
        for band in cutlass.range_constexpr(BANDS):
            if cutlass.const_expr(self.activation is None or layout.product(band) == 0):
                column = first + layout.column(unit, band)
                biases = self.biases(column + lane.group, columns, place)
                for j in cutlass.range_constexpr(self.loads.max_tokens // OCTET):
                    values = []
                    for c in cutlass.range_constexpr(2):
                        value = acc[band % 2 * 2 + c, band // 2, j]
                        if cutlass.const_expr(row_scales is not None):
                            value = value * row_scales[band]
                        value = value * factors[0]
                        if cutlass.const_expr(biases is not None):
                            value = ptx.add_f32(value, biases[0])
                        if cutlass.const_expr(self.activation is not None):
                            at = self.partner(band)
                            other = acc[at % 2 * 2 + c, at // 2, j] * factors[1]
                            if cutlass.const_expr(biases is not None):
                                other = ptx.add_f32(other, biases[1])
                            value = self.combined(value, other)
                        values.append(value)
                    token, own = j * OCTET + lane.group, column + 2 * lane.quad
                    address = base + (Int64(token) * pitch + own) * nbytes
                    self.store_pair(values, address, token < place.rows, columns - own, is_paired)

    def row(self, place: Place) -> Int32:
        """Returns the row of the results at which the group's tile begins."""
        return place.slot if self.loads.form == "routed" else place.row

    def factors(self, place: Place) -> list:
        """Returns the factors of the products; 0 for a routed group without weights."""
        exponent = Float32(2.0**self.loads.decoding.exponent)
        count, is_routed = 1 if self.activation is None else 2, self.loads.form == "routed"
        if is_routed:
            exponent = select(place.row < 0, Float32(0.0), exponent)
        if self.outputs.alphas is None:
            return [exponent] * count
        index = self.group(place)
        alphas = [cute.make_tensor(alpha + index, cute.make_layout(1))[0] for alpha in self.outputs.alphas]
        return [alpha * exponent for alpha in alphas]

    def group(self, place: Place) -> Int32:
        """Returns the caller's index of the group, or of a routed group's weights."""
        if self.loads.form == "routed":
            return self.loads.batch(place)
        return caller_index(self.outputs, place.slot)

    def partner(self, band: int) -> int:
        """Returns the band of the other product with the same columns."""
        layout = self.loads.layout
        if layout.layout == "interleaved_32_gate_first":
            return band + 1
        return (band + 2) % BANDS

    @cute.jit
    def combined(self, value: Float32, other: Float32) -> Float32:
        """Returns the activation of one product times the other one."""
        limit = None
        if cutlass.const_expr(self.outputs.limit is not None):
            limit = ptx.float_of(Uint32(self.outputs.limit))
        return gate(value, other, self.activation, limit)

    def biases(self, column: Int32, columns: Int32, place: Place) -> list | None:
        """Loads a column's bias of every product; None if the call has no bias."""
        outputs = self.outputs
        if outputs.bias is None:
            return None
        if self.activation is None:
            return [bias.to(Float32) for bias in load_bias(outputs.bias, [column], columns)]
        of_group = group_bias(outputs, self.group(place), columns)
        loaded = load_dual_bias(of_group, [column], columns, self.loads.layout.layout)
        return [bias.to(Float32) for (bias,) in loaded]

    def row_scales(self, unit: Int32, place: Place, n: Int32, lane: Lane) -> list | None:
        """Loads the scales of the lane's weight rows if the format has one per row; otherwise returns None."""
        loads = self.loads
        if not loads.decoding.format.is_1xk:
            return None
        weights = loads.weights[0]
        first = unit // BANDS * (BANDS * BAND_ROWS) + unit % BANDS * OCTET + lane.group
        rows = [cutlass.min(first + band * BAND_ROWS, n - 1) for band in range(BANDS)]
        base = select_slot(weights.scale, place.slot)
        places = [Int64(loads.batch(place) * weights.scale_pitch + row) * SCALE_BYTES for row in rows]
        return [ptx.float_of(load_words(base + place, 1, KEEP)[0]) for place in places]

    @cute.jit
    def store_pair(self, values: list, address: Int64, is_there: Boolean, columns: Int32, is_paired: Boolean):
        """Stores two neighbouring columns of a token, which a lane has after a transposition; fewer at the end of N."""
        if cutlass.const_expr(self.dtype.width == 32):
            words = transposed_floats(values)
            for c in cutlass.range_constexpr(2):
                store_words(address + 4 * c, [words[c]], predicate=is_there & (columns > c))
        else:
            word = ptx.transpose_8x8(ptx.pack_16x2(*values, self.dtype is cutlass.BFloat16))
            store_words(address, [word], predicate=is_there & is_paired & (columns > 1))
            for c in cutlass.range_constexpr(2):
                is_alone = is_there & (columns > c) & ~(is_paired & (columns > 1))
                store_half_if(address + 2 * c, word >> 16 * c, is_alone)


def store_half_if(address: Int64, word: Uint32, is_there: Boolean) -> None:
    """Stores the low half of a word if ``is_there``."""
    inline_ptx("st.global.u16 [{$r0}], {$r1};", read_only_args=[address, word], predicate=is_there)


def transposed_floats(values: list) -> list:
    """Transposes two floats per lane as ``ptx.transpose_8x8`` does two halves: the upper and the lower halves separately."""
    bits = [ptx.bits_of(value) for value in values]
    lower, upper = (ptx.transpose_8x8(ptx.prmt(*bits, Uint32(selector))) for selector in HALVES)
    return [ptx.prmt(lower, upper, Uint32(selector)) for selector in HALVES]
