"""Tokens decoded once, before the GEMM, from packed NVFP4 to fp16 in global memory: what ACTIVATIONS would write.

Decoded rows are K long, rounded up to whole K tiles, and follow each other as those of ``a`` do; those of a list's groups
follow each other by slot. A K tile is 256 bytes of a row: two slabs of eight 16-byte chunks, in the order of K of
``activations``, so that TMA, which swizzles chunks within 128 bytes, makes of them the stages that MATH reads. Values
behind K are zeros. Rows of no group are neither read nor written.

Work: a warp takes a K tile of eight rows whose scales share a sector (r, r + 32, r + 64, r + 96 for two neighbouring r),
four lanes a row. All four read the row's 64 bytes; of the four chunks that the word w of every 16-byte unit makes, lane i
writes the one of pairs i: together they write 64 bytes in a row.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Int64, Uint32

from nvfp4_cute.arch.sm90 import HANDOVER_FLAG_BYTES, SF_BLOCK_ROWS, SLABS, TILE_K

from ..common.device_groups import DeviceGroups
from ..common.global_access import KEEP, load_words, store_word, store_words
from ..common.group_table import GroupTable, WorkTile, ceil_div, select_slot
from ..common.launch_args import OperandView
from ..common.operand_maps import rows_atom
from .activations import SLAB_ROW_BYTES, UNITS
from .decode import decode_pair, decode_scales
from .math import SLAB_WORDS, UNIT_WORDS
from .operands import ROW_BYTES, SF_ATOM_BYTES, SF_ATOMS, UNIT_BYTES
from .warp_schedule import WARP_SIZE

NUM_WARPS = 8
LANES_OF_ROW = 4
WARP_ROWS = WARP_SIZE // LANES_OF_ROW
UNITS_OF_BLOCK = SF_BLOCK_ROWS // WARP_ROWS
FP16_BYTES = 2
# Values of K are in blocks of 16, two words, of which a row may end with an odd number.
BLOCK_VALUES, BLOCK_WORDS = 16, 2
# Rows of a block of scales, whatever K is: groups are walked as if they had one column.
BLOCK_TILE = (SF_BLOCK_ROWS, 1, TILE_K)


@dataclass(frozen=True)
class TokenRows:
    """Where rows are read and written: an entry a slot, or one for all groups.

    Attributes:
        data, scale, decoded: addresses.
        k: values of a row.
        pitch, batch_pitch: of ``data``, in values.
        batch_rows, sf_batch_blocks: from batch to batch, of decoded rows and of blocks of scales.
    """

    data: list
    scale: list
    decoded: list
    k: list
    pitch: list
    batch_pitch: list
    batch_rows: list
    sf_batch_blocks: list


@dataclass(frozen=True)
class Flags:
    """So many int32 in global memory."""

    address: Int64
    count: Int32


def decoded_views(views: list, workspace: Int64) -> list:
    """Decoded rows of every slot, one behind the other's. views: of the packed tokens."""
    found = []
    for view in views:
        k = cute.ceil_div(view.k, TILE_K) * TILE_K
        batch_pitch = Int64(view.rows) * k
        found.append(replace(view, data=workspace, k=k, pitch=Int64(k), batch_pitch=batch_pitch))
        workspace += batch_pitch * view.batch * FP16_BYTES
    return found


def decoded_atom(view: OperandView, box_rows: int):
    """TMA atom for boxes of so many rows of a slab."""
    return rows_atom(view, Float16, 1, SLAB_ROW_BYTES // FP16_BYTES, box_rows)


class DecodeTokens:
    """The launch before a GEMM whose tokens come decoded.

    Args:
        form: how the operands arrive.
        name: what the kernel is called in profilers and in the emulator's reports.
    """

    def __init__(self, form: Literal["list", "ragged", "masked", "batched"], name: str):
        self.form = form
        self.name = name

    @cute.jit
    def __call__(self, groups: object, views: list, decoded: list, flags: Flags, queue):
        """Launch: K tiles along x, blocks of 128 rows along y.

        Args:
            groups: of the GEMM: ``GroupTable`` or ``DeviceGroups``.
            views, decoded: of the tokens, packed and decoded, an entry a slot.
            flags: what is set to 0 besides, for the GEMM.
            queue: CUstream.
        """
        num_blocks, walked = self.walk(groups, views)
        k_tiles = cute.ceil_div(views[0].k, TILE_K)
        for view in views[1:]:
            k_tiles = cutlass.max(k_tiles, cute.ceil_div(view.k, TILE_K))
        rows = TokenRows(
            data=[view.data for view in views],
            scale=[view.scale for view in views],
            decoded=[view.data for view in decoded],
            k=[view.k for view in views],
            pitch=[view.pitch for view in views],
            batch_pitch=[view.batch_pitch for view in views],
            batch_rows=[view.rows for view in views],
            sf_batch_blocks=[view.sf_batch_blocks for view in views],
        )
        self.kernel.set_name_prefix(self.name)
        self.kernel(walked, rows, flags).launch(
            grid=(cute.ceil_div(k_tiles * UNITS_OF_BLOCK, NUM_WARPS), num_blocks, 1),
            block=(NUM_WARPS * WARP_SIZE, 1, 1),
            stream=queue,
        )

    def walk(self, groups: GroupTable | DeviceGroups, views: list) -> tuple:
        """The most blocks of 128 rows that there can be, and the groups with a tile for each of theirs."""
        if self.form != "list":
            view = views[0]
            num_blocks = cute.ceil_div(view.rows, SF_BLOCK_ROWS) * view.batch
            if self.form == "ragged":  # Every group may end with a part of a block.
                num_blocks += groups.num_groups
            return num_blocks, replace(groups, n=Int32(1))
        ends = [*groups.tile_offsets[1:], groups.num_tiles]
        m = [rows_of_slot(*slot) for slot in zip(groups.m, groups.tile_offsets, ends, strict=True)]
        *offsets, num_blocks = accumulate((ceil_div(rows, SF_BLOCK_ROWS) for rows in m), initial=Int32(0))
        return num_blocks, GroupTable.of(m, [Int32(1)] * len(m), groups.k, offsets, num_blocks, BLOCK_TILE[0])

    @cute.kernel
    def kernel(self, groups: object, rows: TokenRows, flags: Flags):
        """Find the rows, and decode."""
        # The GEMM may start, and load weights, as soon as there is room.
        cute.arch.griddepcontrol_launch_dependents()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block_x, block_y, _ = cute.arch.block_idx()
        if block_x + block_y == 0:
            for i in cutlass.range(cute.arch.thread_idx()[0], flags.count, NUM_WARPS * WARP_SIZE, unroll=1):
                store_word(flags.address + i * HANDOVER_FLAG_BYTES, Uint32(0))
        cursor = groups.first_cursor(block_y, BLOCK_TILE)
        if groups.has_tile(cursor):
            tile = groups.tile(cursor, BLOCK_TILE)
            # Neighbouring warps take neighbouring K tiles of the same rows.
            work = block_x * NUM_WARPS + warp
            unit, k_tile = work // tile.k_tile_cnt, work % tile.k_tile_cnt
            row_in_block = unit * 2 + lane // 16 + lane // LANES_OF_ROW % 4 * 32
            row = tile.tile_m_idx * SF_BLOCK_ROWS + row_in_block
            if unit < UNITS_OF_BLOCK and row < tile.m:
                decode_row(rows, tile, row, k_tile)


@cute.jit
def rows_of_slot(m: Int32, first_tile: Int32, end_tile: Int32) -> Int32:
    """Rows of a list's group: none where it has no tiles, whose ``m`` is that of a well-formed tensor map."""
    return m if end_tile > first_tile else Int32(0)


@cute.jit
def decode_row(rows: TokenRows, tile: WorkTile, row: Int32, k_tile: Int32):
    """A lane's quarter of a K tile of a row of the group."""
    slot, part = tile.slot, cute.arch.lane_idx() % LANES_OF_ROW
    batch, k = Int64(tile.a_batch), select_slot(rows.k, slot)
    words = _load_values(
        select_slot(rows.data, slot)
        + (
            batch * select_slot(rows.batch_pitch, slot)
            + Int64(tile.a_row + row) * select_slot(rows.pitch, slot)
        )
        // 2
        + k_tile * ROW_BYTES,
        k - k_tile * TILE_K,
    )
    sf_k_blocks = cute.ceil_div(k, TILE_K // SF_ATOMS)
    block = batch * select_slot(rows.sf_batch_blocks, slot) + tile.a_sf_block + row // SF_BLOCK_ROWS
    codes = _load_scales(
        select_slot(rows.scale, slot)
        + (block * sf_k_blocks + k_tile * SF_ATOMS) * SF_ATOM_BYTES
        + (row % 32 * 16 + row // 32 % 4 * 4),
        sf_k_blocks - k_tile * SF_ATOMS,
    )
    pitch = cute.ceil_div(k, TILE_K) * (SLABS * SLAB_ROW_BYTES)
    target = (
        select_slot(rows.decoded, slot)
        + (batch * select_slot(rows.batch_rows, slot) + tile.a_row + row) * pitch
        + (k_tile * (SLABS * SLAB_ROW_BYTES) + part * UNIT_BYTES)
    )
    for slab in cutlass.range_constexpr(SLABS):
        # Of every unit the scale of the slab.
        chosen = Uint32(cute.arch.prmt(codes[0], codes[1], 0x6420 + slab * 0x1111))
        scales = [decode_scales(chosen), decode_scales(chosen >> 16)]
        for word in cutlass.range_constexpr(SLAB_WORDS):
            at = SLAB_WORDS * slab + word
            chunk = [
                decode_pair(words[UNIT_WORDS * t + at], scales[t // 2], t % 2 == 1, part)
                for t in range(UNITS)
            ]
            store_words(target + slab * SLAB_ROW_BYTES + word * (LANES_OF_ROW * UNIT_BYTES), chunk)


@cute.jit
def _load_values(address: Int64, count: Int32) -> cute.Tensor:
    """The 16 words of a row's K tile, zeros from value ``count`` on."""
    words = cute.make_rmem_tensor(UNITS * UNIT_WORDS, Uint32)
    words.fill(Uint32(0))
    if count >= TILE_K:
        for unit in cutlass.range_constexpr(UNITS):
            loaded = load_words(address + unit * UNIT_BYTES, UNIT_WORDS, KEEP)
            for i in cutlass.range_constexpr(UNIT_WORDS):
                words[unit * UNIT_WORDS + i] = loaded[i]
    else:
        for block in cutlass.range_constexpr(TILE_K // BLOCK_VALUES):
            if block * BLOCK_VALUES < count:
                loaded = load_words(address + block * (BLOCK_WORDS * 4), BLOCK_WORDS, KEEP)
                for i in cutlass.range_constexpr(BLOCK_WORDS):
                    words[block * BLOCK_WORDS + i] = loaded[i]
    return words


@cute.jit
def _load_scales(address: Int64, count: Int32) -> list:
    """Four scales each of two atoms, zeros for one that does not exist. count: atoms from the first on."""
    first, second = load_words(address, 1, KEEP)[0], Uint32(0)
    if count > 1:
        second = load_words(address + SF_ATOM_BYTES, 1, KEEP)[0]
    return [first, second]
