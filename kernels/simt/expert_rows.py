"""Common parts of kernels that write rows of experts: the rows of a token, and the storing of a block of 16 values."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from nvfp4_cute.formats.scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS
from nvfp4_cute.planning.arch.simt import WARP_SIZE

from ..common.global_access import global_scalar, store_word, store_words
from ..common.select import select

OUTPUT_BYTES = 8
PLAIN_BYTES = 32
STORE_WORDS = 4
FULL = 0xFFFFFFFF
NO_EXPERT = 0x7FFFFFFF


@dataclass(frozen=True)
class Choices:
    """Choices of one token, choice k in lane k: its row, its place (-1 for none), and its expert."""

    row: Int32
    place: Int32
    expert: Int32


@dataclass(frozen=True)
class Ids:
    """Choices of all tokens.

    Attributes:
        address, id_bytes: int32 or int64 (tokens, top_k).
        first_expert, experts: range of the experts that count.
    """

    address: Int64
    id_bytes: Int32
    top_k: Int32
    first_expert: Int32
    experts: Int32

    @cute.jit
    def local_expert(self, slot: Int32, num_slots: Int32) -> Int32:
        """Returns the expert of a slot, counted from the first one; ``NO_EXPERT`` for none."""
        expert = Int32(NO_EXPERT)
        if slot < num_slots:
            local = global_scalar(Int32, self.address + Int64(slot) * self.id_bytes)[0] - self.first_expert
            if local >= 0 and local < self.experts:
                expert = local
        return expert


@dataclass(frozen=True)
class FewIds:
    """The experts of at most 64 slots, in the registers of a warp.

    Attributes:
        low, high: experts of the slots ``lane`` and ``lane + 32``.
        is_first_low, is_first_high: whether no earlier slot has the same expert.
    """

    low: Int32
    high: Int32
    is_first_low: Boolean
    is_first_high: Boolean


@cute.jit
def few_ids(ids: Ids, num_slots: Int32) -> FewIds:
    """Reads the experts of the slots."""
    lane = cute.arch.lane_idx()
    low, high = ids.local_expert(lane, num_slots), ids.local_expert(lane + WARP_SIZE, num_slots)
    earlier = (Uint32(1) << Uint32(lane)) - 1
    is_first_low = (cute.arch.match_sync(FULL, low, "any") & earlier) == 0
    is_first_high = (cute.arch.match_sync(FULL, high, "any") & earlier) == 0
    if num_slots > WARP_SIZE:
        for i in cutlass.range_constexpr(WARP_SIZE):
            is_first_high = is_first_high & (cute.arch.shuffle_sync(low, i) != high)
    return FewIds(low, high, is_first_low & (low != NO_EXPERT), is_first_high & (high != NO_EXPERT))


@cute.jit
def few_choices(few: FewIds, token: Int32, top_k: Int32) -> Choices:
    """Returns the choices of a token: rows by counting earlier slots; an expert has at most one block of 128 rows."""
    lane = cute.arch.lane_idx()
    row, place, chosen = Int32(-1), Int32(-1), Int32(NO_EXPERT)
    for k in cutlass.range(top_k, unroll=1):
        slot = token * top_k + k
        in_low, in_high = (
            cute.arch.shuffle_sync(few.low, slot % WARP_SIZE),
            cute.arch.shuffle_sync(few.high, slot % WARP_SIZE),
        )
        expert = select(slot < WARP_SIZE, in_low, in_high)
        start = num_lanes(few.low < expert) + num_lanes(few.high < expert)
        earlier = num_lanes((few.low == expert) & (lane < slot)) + num_lanes(
            (few.high == expert) & (lane + WARP_SIZE < slot)
        )
        block = num_lanes(few.is_first_low & (few.low < expert)) + num_lanes(
            few.is_first_high & (few.high < expert)
        )
        if lane == k and expert != NO_EXPERT:
            row, place, chosen = start + earlier, block * ATOM_ROWS + earlier, expert
    return Choices(row, place, chosen)


@cute.jit
def few_end(few: FewIds, expert: Int32) -> Int32:
    """Returns the end of the rows of a lane's expert."""
    end = Int32(0)
    for i in cutlass.range(WARP_SIZE, unroll=4):
        is_low = cute.arch.shuffle_sync(few.low, i) <= expert
        is_high = cute.arch.shuffle_sync(few.high, i) <= expert
        end = end + select(is_low, Int32(1), Int32(0)) + select(is_high, Int32(1), Int32(0))
    return end


@dataclass(frozen=True)
class Order:
    """Addresses of an order of rows that kernels compute themselves; see ``permute``."""

    rows: Int64
    places: Int64
    offs: Int64
    slots: Int64

    @cute.jit
    def find(
        self, ids: Ids, num_slots: Int32, token: Int32, work: Int32, num_work: Int32, tells: Boolean
    ) -> Choices:
        """Returns the choices of a token, with at most 64 slots. The warp writes them if it ``tells``, and its part of ``offs``.

        work: number of the warp.
        num_work: number of warps.
        """
        lane = cute.arch.lane_idx()
        few = few_ids(ids, num_slots)
        found = few_choices(few, token, ids.top_k)
        if tells and lane < ids.top_k:
            slot = token * ids.top_k + lane
            global_scalar(Int32, self.rows + Int64(slot) * 4)[0] = found.row
            global_scalar(Int32, self.places + Int64(slot) * 4)[0] = found.place
            if found.row >= 0:
                global_scalar(Int32, self.slots + Int64(found.row) * 4)[0] = slot
        for first in cutlass.range(work * WARP_SIZE, ids.experts, num_work * WARP_SIZE, unroll=1):
            end = few_end(few, first + lane)
            if first + lane < ids.experts:
                global_scalar(Int32, self.offs + Int64(first + lane) * 4)[0] = end
        return found


@cute.jit
def num_lanes(condition: Boolean) -> Int32:
    """Returns the number of lanes of the warp for which the condition holds."""
    return Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(condition))))


@cute.jit
def scale_word(code: Uint32, lanes: cutlass.Constexpr = 1) -> Uint32:
    """Returns the codes of four neighbouring blocks as one word, in each of their lanes. ``lanes``: lanes per block and code."""
    block = cute.arch.lane_idx()
    if cutlass.const_expr(lanes > 1):
        block = block // lanes
    word = code << Uint32(block % ATOM_COLS * 8)
    word = word | cute.arch.shuffle_sync_bfly(word, lanes)
    return word | cute.arch.shuffle_sync_bfly(word, 2 * lanes)


@dataclass(frozen=True)
class QuantizedRows:
    """Destination of quantized rows: data (rows, bytes of K) and blocked scales, ``k_blocks`` times 16 values per row."""

    data: Int64
    scale: Int64
    k_blocks: Int32

    @cute.jit
    def store(
        self,
        row: Int32,
        place: Int32,
        block: Int32,
        words: list,
        scales: Uint32,
        lanes: cutlass.Constexpr = 1,
    ):
        """Stores 16 values of a row per lane, and by one lane of four blocks their scales.

        Padding columns get those in ``scales``.

        Args:
            lanes: lanes that share a block of the format.
        """
        self.store_at(*self.addresses(row, place, 4 * len(words), lanes), block, words, scales, lanes)

    def addresses(
        self, row: Int32, place: Int32, nbytes: cutlass.Constexpr, lanes: cutlass.Constexpr = 1
    ) -> tuple:
        """Returns the addresses of a row's data and of its first word of scales. ``nbytes``: bytes of 16 values."""
        atoms_k = cute.ceil_div(self.k_blocks, ATOM_COLS * lanes)
        scale = self.scale + Int64(place // ATOM_ROWS) * atoms_k * ATOM_BYTES
        return (
            self.data + Int64(row) * self.k_blocks * nbytes,
            scale + place % 32 * 16 + place % ATOM_ROWS // 32 * 4,
        )

    @cute.jit
    def store_at(
        self,
        data: Int64,
        scale: Int64,
        block: Int32,
        words: list,
        scales: Uint32,
        lanes: cutlass.Constexpr = 1,
    ):
        """Stores like ``store``, into a row whose addresses are known."""
        if block < self.k_blocks:
            store_words(data + block * (4 * len(words)), words)
        atom_parts = ATOM_COLS * lanes
        if block % atom_parts == 0 and block < self.k_blocks:
            store_word(scale + block // atom_parts * ATOM_BYTES, scales)


@dataclass(frozen=True)
class PlainRows:
    """Destination of rows with 16 bits per value: data (rows, K), ``k_blocks`` blocks of 16 per row."""

    data: Int64
    k_blocks: Int32

    @cute.jit
    def store(self, row: Int32, block: Int32, words: list):
        """Stores a block of a row per lane."""
        if block < self.k_blocks:
            store_plain_block(self.data + (Int64(row) * self.k_blocks + block) * PLAIN_BYTES, words)


def store_plain_block(address: Int64, words: list) -> None:
    """Stores a block of 16 values of 16 bits."""
    for first in range(0, PLAIN_BYTES // 4, STORE_WORDS):
        store_words(address + first * 4, words[first : first + STORE_WORDS])
