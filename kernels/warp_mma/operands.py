"""Loads of a warp: weights and their scales into registers, tokens through registers into shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from nvfp4_cute.formats.block_format import ATOM_BYTES
from nvfp4_cute.planning.arch.warp_mma import STEP_BYTES, STEPS_OF_TURN, WARP_SIZE, Warps

from ..common.global_access import KEEP, READ_ONCE
from ..common.group_table import select_slot
from ..common.select import select
from ..common.versions import inline_ptx
from .decode import PIECE_K, Decoding
from .places import Place, divide

# A warp's weight rows: r, r + 32, r + 64, r + 96 for eight consecutive r, whose scales are neighbours in an atom.
BANDS, BAND_ROWS, OCTET = 4, 32, 8
# Words and bytes of a row that a lane loads at once.
VECTOR_WORDS, VECTOR_BYTES = 4, 16
PIECE_BYTES = 2 * PIECE_K


@dataclass(frozen=True)
class Lane:
    """Indices of a thread.

    Attributes:
        row_warp, k_warp: index of its warp along weight rows, and along K.
        lane: index in the warp, 4 * ``group`` + ``quad``.
        thread: index among the threads of the warps with the same K.
    """

    row_warp: Int32
    k_warp: Int32
    lane: Int32
    group: Int32
    quad: Int32
    thread: Int32

    @classmethod
    def of(cls, tidx: Int32, warps: Warps) -> "Lane":
        """Computes the indices of a thread."""
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP_SIZE), tidx % WARP_SIZE
        row_threads = warps.rows * WARP_SIZE
        return cls(warp % warps.rows, warp // warps.rows, lane, lane // 4, lane % 4, tidx % row_threads)


@dataclass(frozen=True)
class Layout:
    """Maps the four bands of a warp to operands and rows, among the 128 weight rows that share scale atoms.

    Attributes:
        layout: None for a single product; for a dual one, "separate" or the interleaved layout of the weights.
    """

    layout: str | None

    @property
    def atom_units(self) -> int:
        """Number of warps for the weights, of all operands, whose scales share a row of atoms."""
        return 8 if self.layout == "separate" else 4

    def octet(self, unit: Int32) -> Int32:
        """Returns which eight of each band's 32 rows a warp has."""
        return unit % self.atom_units // (self.atom_units // BANDS)

    def band(self, unit: Int32, band: int) -> tuple:
        """Returns the operand of a band, and which 32 rows of the atom it belongs to."""
        if self.layout != "separate":
            return 0, Int32(band)
        return band // 2, unit % 2 * 2 + band % 2

    def columns(self) -> int:
        """Returns the number of result columns per row of atoms."""
        return 128 if self.layout in (None, "separate") else 64

    def product(self, band: int) -> int:
        """Returns the product that a band belongs to: 0 is the gate."""
        return {
            None: 0,
            "separate": band // 2,
            "interleaved_64_up_first": 1 - band // 2,
            "interleaved_32_gate_first": band % 2,
        }[self.layout]

    def column(self, unit: Int32, band: int) -> Int32:
        """Returns the column of the result of a band's first row in an octet, counted from the atom's first column."""
        if self.layout is None:
            return Int32(band * BAND_ROWS)
        if self.layout == "separate":
            return (unit % 2 * 2 + band % 2) * BAND_ROWS
        return Int32((band % 2 if self.layout == "interleaved_64_up_first" else band // 2) * BAND_ROWS)


@dataclass(frozen=True)
class Weights:
    """One operand of weights in global memory; lists have an entry per slot. Pitches are in bytes.

    Attributes:
        data, scale: addresses.
        pitch, batch_pitch: distance of rows, and of groups.
        scale_pitch: distance of the scales of groups, in blocks of 128 rows.
    """

    data: list
    scale: list
    pitch: list
    batch_pitch: Int64
    scale_pitch: Int32


@dataclass(frozen=True)
class Tokens:
    """16-bit rows in global memory; lists have an entry per slot. Pitches are in bytes.

    Attributes:
        choices: for routed groups, the number of consecutive groups that share a row; otherwise empty.
    """

    data: list
    pitch: list
    batch_pitch: Int64
    choices: list


@dataclass(frozen=True)
class Loads:
    """Operands and their division, for all warps.

    Attributes:
        weights: one operand, or two for a dual product.
        layout: layout of the weight rows.
        n, k: extents, one entry per slot.
        form: how the tokens of groups lie in memory. "masked" and "batched" groups are batches. A "routed" group is one of
            the ``Tokens.choices`` of a row: group g writes row g of the results, and its weights are batch ``Place.row``.
        max_tokens: most tokens per tile.
    """

    weights: list
    tokens: Tokens
    layout: Layout
    decoding: Decoding
    warps: Warps
    n: list
    k: list
    form: str
    max_tokens: int

    @property
    def has_batches(self) -> bool:
        """Whether every group has a batch of its own."""
        return self.form in ("masked", "batched")

    @property
    def step_pieces(self) -> int:
        """Number of pieces of a token's row per step."""
        return self.decoding.step_k // PIECE_K

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row in shared memory per step."""
        return self.step_pieces * PIECE_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of all tokens per turn."""
        return STEPS_OF_TURN * self.max_tokens * self.row_bytes

    @property
    def thread_pieces(self) -> int:
        """Number of pieces that a thread loads per turn."""
        return -(-self._pieces // (self.warps.rows * WARP_SIZE))

    def has_idle_threads(self, i: int) -> bool:
        """Returns whether some threads have no piece ``i``."""
        return (i + 1) * self.warps.rows * WARP_SIZE > self._pieces

    @property
    def _pieces(self) -> int:
        return STEPS_OF_TURN * self.max_tokens * self.step_pieces

    def k_step(self, place: Place, lane: Lane, half: int) -> Int32:
        """Returns which 128 or 64 values of K the warp multiplies in this half of a turn."""
        return (place.step + half) * self.warps.k + lane.k_warp

    def piece(self, lane: Lane, i: int) -> tuple:
        """Returns the step of the turn, the token, and the place in the token's row, of piece ``i`` of a thread."""
        index = lane.thread + i * self.warps.rows * WARP_SIZE
        return (
            index // (self.max_tokens * self.step_pieces),
            index // self.step_pieces % self.max_tokens,
            index % self.step_pieces,
        )

    @cute.jit
    def load_tokens(self, x: Any, place: Place, lane: Lane):
        """Loads a thread's pieces of a turn into ``x``; zeros beyond the end of K or of the tokens."""
        k, batch = select_slot(self.k, place.slot), Int64(0)
        if cutlass.const_expr(self.has_batches):
            batch = Int64(place.slot) * self.tokens.batch_pitch
        base = select_slot(self.tokens.data, place.slot) + batch
        pitch = select_slot(self.tokens.pitch, place.slot)
        first_row = place.row
        if cutlass.const_expr(self.form == "routed"):
            first_row = divide(place.slot, self.tokens.choices[0])
        for i in cutlass.range_constexpr(self.thread_pieces):
            half, token, piece = self.piece(lane, i)
            k_piece = self.k_step(place, lane, half) * self.step_pieces + piece
            is_there = (place.step + half < place.end) & (token < place.rows) & (k_piece * PIECE_K < k)
            if cutlass.const_expr(self.has_idle_threads(i)):
                is_there = is_there & (half < STEPS_OF_TURN)
            address = base + Int64(first_row + token) * pitch + k_piece * PIECE_BYTES
            words = load_or_zeros(address, is_there, KEEP)
            for w in cutlass.range_constexpr(VECTOR_WORDS):
                x[w, i] = words[w]

    @cute.jit
    def store_tokens(self, x: Any, stage: Int32, lane: Lane):
        """Stores the pieces to shared memory, in the order of pairs that converted weights have."""
        for i in cutlass.range_constexpr(self.thread_pieces):
            half, token, piece = self.piece(lane, i)
            pairs = self.decoding.token_pairs([x[w, i] for w in range(VECTOR_WORDS)])
            row = (half * self.max_tokens + token) * self.row_bytes
            inline_ptx(
                "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[stage + row + swizzled(token, piece) * PIECE_BYTES, *pairs],
                predicate=half < STEPS_OF_TURN if self.has_idle_threads(i) else None,
            )

    @cute.jit
    def load_weights(self, words: Any, scales: Any, place: Place, lane: Lane, half: cutlass.Constexpr):
        """Loads a lane's words of four rows for a step, and their scales; zeros beyond the end of K or N."""
        slot, unit = place.slot, place.unit + lane.row_warp
        n, k = select_slot(self.n, slot), select_slot(self.k, slot)
        k_step = self.k_step(place, lane, half)
        first_k = k_step * self.decoding.step_k + lane.quad * self.decoding.lane_k
        # K is a multiple of a lane's values, so a lane has all of them or none.
        is_inside = (place.step + half < place.end) & (first_k < k)
        atom, in_band = unit // self.layout.atom_units, self.layout.octet(unit) * OCTET + lane.group
        offset = k_step * STEP_BYTES + lane.quad * VECTOR_BYTES
        first_row = atom * (BANDS * BAND_ROWS) + in_band
        for band in cutlass.range_constexpr(BANDS):
            operand, rows = self.layout.band(unit, band)
            weights, row = self.weights[operand], first_row + rows * BAND_ROWS
            pitch = select_slot(weights.pitch, slot)
            in_operand = Int64(row) * pitch + offset
            batch = Int64(self.batch(place)) * weights.batch_pitch
            address = select_slot(weights.data, slot) + batch + in_operand
            loaded = load_or_zeros(address, is_inside & (row < n), READ_ONCE)
            for w in cutlass.range_constexpr(VECTOR_WORDS):
                words[w, band, half] = loaded[w]
        if cutlass.const_expr(self.decoding.format.scale_layout == "blocked"):
            self.load_scales(scales, place, unit, atom, in_band, first_k, is_inside & (first_row < n), half)

    @cute.jit
    def load_scales(
        self,
        scales: Any,
        place: Place,
        unit: Int32,
        atom: Int32,
        in_band: Int32,
        first_k: Int32,
        is_there: Boolean,
        half: cutlass.Constexpr,
    ):
        """Loads one word of scales for each of a lane's rows, whose words are neighbours in an atom."""
        atom_k, slot = self.decoding.format.atom_k, place.slot
        atoms_k = cute.ceil_div(select_slot(self.k, slot), atom_k)
        for operand in cutlass.range_constexpr(len(self.weights)):
            weights = self.weights[operand]
            blocks = Int64(self.batch(place) * weights.scale_pitch + atom) * atoms_k + first_k // atom_k
            address = select_slot(weights.scale, slot) + blocks * ATOM_BYTES + in_band * VECTOR_BYTES
            count = BANDS // len(self.weights)
            if cutlass.const_expr(len(self.weights) > 1):
                address += unit % 2 * (VECTOR_BYTES // 2)
            loaded = load_or_zeros(address, is_there, KEEP, count)
            for band in cutlass.range_constexpr(count):
                scales[operand * count + band, half] = loaded[band]

    def batch(self, place: Place) -> Int32:
        """Returns the batch of a group's weights; 0 in a list, where every group has its own operands."""
        if self.form == "list":
            return Int32(0)
        return cutlass.max(place.row, 0) if self.form == "routed" else place.slot


def swizzled(token: Int32, piece: Int32) -> Int32:
    """Returns the place of a piece in its token's row, such that eight lanes that read at once access all banks."""
    return piece ^ (piece // 8 % 2 * 2) ^ (token % 2)


def load_or_zeros(address: Int64, is_there: Boolean, opcode: str, count: int = VECTOR_WORDS) -> list:
    """Loads consecutive words if ``is_there``; otherwise returns zeros."""
    names = [f"{{$w{i}}}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    return list(
        inline_ptx(
            "{ .reg .pred p; .reg .b32 t; mov.b32 t, {$r1}; setp.ne.b32 p, t, 0; "
            f"{zeros} @p {opcode}.v{count}.b32 {{{', '.join(names)}}}, [{{$r0}}]; }}",
            write_only_types=[Uint32] * count,
            read_only_args=[address, select(is_there, Int32(1), Int32(0))],
        )
    )
