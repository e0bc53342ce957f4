"""Dequantizes tokens once, before the GEMM, to 16 bits in global memory.

Writes what ACTIVATIONS would write to shared memory.

Dequantized rows have K values rounded up to whole K tiles, in the order of the rows of ``a``; groups of a list follow each
other by slot. A K tile takes 256 bytes of a row: two slabs of eight 16-byte chunks in the K order of ``activations``. TMA,
which swizzles chunks within 128 bytes, then produces the stages that MATH reads. Values after K are zeros. Rows of no group are
neither read nor written.

Work per warp: a strip of eight neighbouring rows of a group and up to ``MOST_TILES`` neighbouring K tiles, all read before the
first is dequantized. Four lanes share a row. Lane 2s + h reads slab s: two times eight values of every block of 32. Each eight
yields four chunks across the blocks; the lane writes the two chunks with half h of the eight, so that neighbouring lanes write
a sector together.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Int64, Uint32

from nvfp4_cute.planning.arch.sm90 import SF_BLOCK_ROWS, SLABS, TILE_K

from ..common.decode import SIGN_BITS
from ..common.device_groups import DeviceGroups
from ..common.global_access import KEEP, load_words, store_words
from ..common.group_table import GroupTable, ceil_div
from ..common.launch_args import OperandView
from ..common.operand_maps import rows_atom
from ..common.ptx import keep_before
from ..common.select import select
from .activations import SLAB_ROW_BYTES
from .math import SLAB_EIGHTS
from .opaque import opaque
from .operands import SF_ATOM_BYTES, UNIT_BYTES
from .packed import BLOCK_VALUES, BLOCKS, NEXT_SLAB, SLAB_SCALES, Packed
from .warp_schedule import WARP_SIZE

NUM_WARPS = 4
LANES_OF_ROW = 4
STRIP_ROWS = WARP_SIZE // LANES_OF_ROW
# Groups are walked as if they had one column.
STRIP_TILE = (STRIP_ROWS, 1, TILE_K)
# K tiles per warp. More amortize the search for the rows; fewer let more warps wait for memory at once. With four, 4096 rows of
# K = 4096 took 1.7 us longer on an H200, and other cases took equally long.
MOST_TILES = 2
# A warp gets a second K tile only once there are this many warps: sixteen per SM of an H200.
WANTED_WARPS = 16 * 132
FP16_BYTES = 2
TILE_BYTES = TILE_K * FP16_BYTES
# Values of a block in a lane's slab.
SLAB_VALUES = BLOCK_VALUES // SLABS
# Bytes of a dequantized row that neighbouring lanes write at once, and that eight values of every block produce.
SECTOR_BYTES = 2 * UNIT_BYTES
EIGHT_BYTES = 2 * SECTOR_BYTES
FLAG_BYTES, FLAGS_OF_STORE = 4, 4


@dataclass(frozen=True)
class Strip:
    """Neighbouring rows of a group, or none.

    Attributes:
        first_row: first row of the strip, counted in the group.
        m, k: rows of the group (0 without a strip) and values per row.
        data, scale, decoded: addresses of the group's first row in each array.
        pitch: bytes between rows of ``data``.
    """

    first_row: Int32
    m: Int32
    k: Int32
    data: Int64
    scale: Int64
    decoded: Int64
    pitch: Int64


@dataclass(frozen=True)
class ListRows:
    """Rows of a list's groups, one entry per slot: the fields of ``Strip`` and the number of strips in all earlier slots."""

    first_strip: list
    m: list
    k: list
    data: list
    scale: list
    decoded: list
    pitch: list

    @cute.jit
    def strip(self, index: Int32, format: cutlass.Constexpr) -> Strip:
        """Returns strip ``index``, which is below the number of CTAs along x."""
        first_strip, *found = self._slot_of(index, 0, len(self.m))
        return Strip((index - first_strip) * STRIP_ROWS, *found)

    @cute.jit
    def _slot_of(self, index: Int32, first: cutlass.Constexpr, last: cutlass.Constexpr) -> tuple:
        """Returns the entry of a strip among entries first <= i < last.

        Bisects with branches; with selects every warp would read all entries.
        """
        lists = (self.first_strip, self.m, self.k, self.data, self.scale, self.decoded, self.pitch)
        entry = tuple(values[first] for values in lists)
        if cutlass.const_expr(last - first == 1):
            keep_before(entry)
        else:
            middle = (first + last) // 2
            if index < self.first_strip[middle]:
                entry = self._slot_of(index, first, middle)
            else:
                entry = self._slot_of(index, middle, last)
        return entry


@dataclass(frozen=True)
class SharedRows:
    """Rows of groups that are parts of shared operands (ragged, masked, batched). decoded: address of the dequantized rows."""

    groups: DeviceGroups
    view: OperandView
    decoded: Int64

    @cute.jit
    def strip(self, index: Int32, format: cutlass.Constexpr) -> Strip:
        """Returns strip ``index``. All lanes of a warp must call it. format: ``Packed``."""
        groups, view = self.groups, self.view
        cursor = groups.first_cursor(index, STRIP_TILE)
        tile, local_idx = groups.group_at(cursor, STRIP_TILE)
        batch, pitch = Int64(tile.a_batch), format.bytes_of(view.pitch)
        sf_block = batch * view.sf_batch_blocks + tile.a_sf_block
        return Strip(
            first_row=local_idx * STRIP_ROWS,
            m=select(groups.has_tile(cursor), tile.m, Int32(0)),
            k=view.k,
            data=view.data + batch * format.bytes_of(view.batch_pitch) + tile.a_row * pitch,
            scale=view.scale + sf_block * ceil_div(view.k, format.atom_values) * SF_ATOM_BYTES,
            decoded=self.decoded + (batch * view.rows + tile.a_row) * ceil_div(view.k, TILE_K) * TILE_BYTES,
            pitch=pitch,
        )


@dataclass(frozen=True)
class Selectors:
    """prmt selectors of a lane: its slab's scales among the eight of a K tile, and its half of eight values."""

    scales: Uint32
    halves: Uint32


@dataclass(frozen=True)
class Flags:
    """``count`` int32 in global memory: a multiple of ``FLAGS_OF_STORE``, with that alignment."""

    address: Int64
    count: Int32


def decoded_views(views: list, workspace: Int64) -> list:
    """Returns views of the dequantized rows of every slot, consecutive in ``workspace``. views: the packed tokens."""
    found = []
    for view in views:
        k = cute.ceil_div(view.k, TILE_K) * TILE_K
        batch_pitch = Int64(view.rows) * k
        found.append(replace(view, data=workspace, k=k, pitch=Int64(k), batch_pitch=batch_pitch))
        workspace += batch_pitch * view.batch * FP16_BYTES
    return found


def decoded_atom(view: OperandView, box_rows: int):
    """Returns the TMA atom for boxes of ``box_rows`` rows of a slab."""
    return rows_atom(view, Float16, 1, SLAB_ROW_BYTES // FP16_BYTES, box_rows)


class DecodeTokens:
    """The launch that dequantizes tokens before a GEMM with ``KernelConfig.decode_first``.

    Args:
        form: form of the operands.
        name: kernel name in profilers and in the emulator's reports.
        format: format of the packed tokens.
    """

    def __init__(self, form: Literal["list", "ragged", "masked", "batched"], name: str, format: Packed):
        self.form = form
        self.name = name
        self.format = format

    @cute.jit
    def __call__(self, groups: object, views: list, decoded: list, flags: Flags, stream):
        """Launches strips along x and K tiles along y.

        Args:
            groups: ``GroupTable`` or ``DeviceGroups`` of the GEMM.
            views, decoded: views of the packed and of the dequantized tokens, one per slot.
            flags: stream-K flags that this launch sets to 0 for the GEMM.
            stream: CUstream.
        """
        num_strips, rows = self.rows(groups, views, [view.data for view in decoded])
        k_tiles = ceil_div(views[0].k, TILE_K)
        for view in views[1:]:
            k_tiles = cutlass.max(k_tiles, ceil_div(view.k, TILE_K))
        # Not more than leave every warp of a CTA some work.
        most = cutlass.min(ceil_div(k_tiles, NUM_WARPS), MOST_TILES)
        tiles = Int32(cutlass.min(Int64(num_strips) * k_tiles // WANTED_WARPS + 1, Int64(most)))
        self.kernel.set_name_prefix(self.name)
        self.kernel(rows, flags, tiles).launch(
            grid=(num_strips, cute.ceil_div(k_tiles, NUM_WARPS * tiles), 1),
            block=(NUM_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
        )

    def rows(self, groups: GroupTable | DeviceGroups, views: list, decoded: list) -> tuple:
        """Returns the largest possible number of strips, and the record with which the device finds them. decoded: addresses."""
        if self.form != "list":
            view = views[0]
            num_strips = ceil_div(view.rows, STRIP_ROWS) * view.batch
            if self.form == "ragged":  # Every group may end with a part of a strip, but each strip has a row.
                num_strips = cutlass.min(num_strips + groups.num_groups, view.rows)
            return num_strips, SharedRows(replace(groups, n=Int32(1)), view, decoded[0])
        ends = [*groups.tile_offsets[1:], groups.num_tiles]
        m = [rows_of_slot(*slot) for slot in zip(groups.m, groups.tile_offsets, ends, strict=True)]
        *first_strip, num_strips = accumulate((ceil_div(rows, STRIP_ROWS) for rows in m), initial=Int32(0))
        return num_strips, ListRows(
            first_strip=first_strip,
            m=m,
            k=[view.k for view in views],
            data=[view.data for view in views],
            scale=[view.scale for view in views],
            decoded=decoded,
            pitch=[self.format.bytes_of(view.pitch) for view in views],
        )

    @cute.kernel
    def kernel(self, rows: object, flags: Flags, tiles: Int32):
        """Finds the rows of each warp and dequantizes ``tiles`` K tiles of them.

        Args:
            rows: ``ListRows`` or ``SharedRows``.
        """
        # The GEMM may start and prefetch weights as soon as SMs have room.
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        index, part, _ = cute.arch.block_idx()
        if index + part == 0:
            first = thread * FLAGS_OF_STORE
            for i in cutlass.range(first, flags.count, NUM_WARPS * WARP_SIZE * FLAGS_OF_STORE, unroll=1):
                store_words(flags.address + i * FLAG_BYTES, [Uint32(0)] * FLAGS_OF_STORE)
        strip = rows.strip(index, self.format)
        first_tile = (part * NUM_WARPS + thread // WARP_SIZE) * tiles
        row = strip.first_row + cute.arch.lane_idx() // LANES_OF_ROW
        count = cutlass.min(strip.k - first_tile * TILE_K, tiles * TILE_K)
        # ``opaque`` is a shuffle: all lanes must take part, so it comes before the branch.
        sign_bits = opaque(Uint32(SIGN_BITS))
        if count > 0 and row < strip.m:
            decode_row(strip, row, first_tile, count, sign_bits, self.format)


@cute.jit
def rows_of_slot(m: Int32, first_tile: Int32, end_tile: Int32) -> Int32:
    """Returns the rows of a list's group. An empty group has no tiles, but its ``m`` is that of a well-formed tensor map."""
    return m if end_tile > first_tile else Int32(0)


@cute.jit
def decode_row(
    strip: Strip,
    row: Int32,
    first_tile: Int32,
    count: Int32,
    sign_bits: Uint32,
    format: cutlass.Constexpr,
):
    """Dequantizes a lane's part of ``count`` values of a row from K tile ``first_tile`` on. Only K's last tile may be partial."""
    lane = Uint32(cute.arch.lane_idx())
    slab, half = lane // 2 % SLABS, lane % 2
    first_byte = first_tile * format.row_bytes + slab * (format.block_bytes // SLABS)
    data = strip.data + row * strip.pitch + Int64(first_byte)
    block, block_row = Int64(Uint32(row) // SF_BLOCK_ROWS), Uint32(row) % SF_BLOCK_ROWS
    atom = block * ceil_div(strip.k, format.atom_values) + first_tile * format.atoms
    scale = strip.scale + atom * SF_ATOM_BYTES + Int64(block_row % 32 * 16 + block_row // 32 * 4)
    target = strip.decoded + (Int64(row) * ceil_div(strip.k, TILE_K) + first_tile) * TILE_BYTES
    target += Int64(slab * SLAB_ROW_BYTES + half * UNIT_BYTES)
    selectors = Selectors(scales=SLAB_SCALES + slab * NEXT_SLAB, halves=format.half_selector(half))

    # K tiles of which this lane reads everything. Counted per lane on purpose: a warp-wide count puts predicates into uniform
    # registers, from which they are moved for every load.
    num_whole = Int32((count + (SLABS - 1 - slab) * SLAB_VALUES) // TILE_K)
    rest = count - num_whole * TILE_K
    sf_tile_bytes = format.atoms * SF_ATOM_BYTES
    num_words = data_words(format) + format.atoms
    packed = [cute.make_rmem_tensor(num_words, Uint32) for _ in range(MOST_TILES + 1)]
    for i in cutlass.range_constexpr(MOST_TILES):
        if i < num_whole:
            _load_tile(packed[i], data + i * format.row_bytes, scale + i * sf_tile_bytes, format)
    if rest > 0:
        _load_rest(
            packed[MOST_TILES],
            data + num_whole * format.row_bytes,
            scale + num_whole * sf_tile_bytes,
            rest - Int32(slab) * SLAB_VALUES,
            format,
        )
    for i in cutlass.range_constexpr(MOST_TILES):
        if i < num_whole:
            decode_tile(packed[i], selectors, sign_bits, target + i * TILE_BYTES, format)
    if rest > 0:
        decode_tile(packed[MOST_TILES], selectors, sign_bits, target + num_whole * TILE_BYTES, format)


@cute.jit
def decode_tile(
    packed: cute.Tensor, selectors: Selectors, sign_bits: Uint32, target: Int64, format: cutlass.Constexpr
):
    """Dequantizes what a lane has read of a K tile: two times eight values of each block, and the scales."""
    num_words, size = data_words(format), format.words
    eights = [[packed[i + j] for j in range(size)] for i in range(0, num_words, size)]
    # The slab's scale of every block.
    codes = [packed[num_words + i] for i in range(format.atoms)]
    scales = format.slab_scales(codes, selectors.scales)
    for eight in cutlass.range_constexpr(SLAB_EIGHTS):
        # Each entry combines the halves of two blocks.
        halves = [
            format.halves(eights[i + eight], eights[i + SLAB_EIGHTS + eight], selectors.halves)
            for i in range(0, BLOCKS * SLAB_EIGHTS, 2 * SLAB_EIGHTS)
        ]
        pairs = [
            format.decode_halves(half, scale, (False, True), sign_bits)
            for half, scale in zip(halves, scales, strict=True)
        ]
        for i in cutlass.range_constexpr(2):
            chunk = [pair for four in pairs for pair in four[2 * i : 2 * i + 2]]
            store_words(target + (eight * EIGHT_BYTES + i * SECTOR_BYTES), chunk)


def data_words(format: Packed) -> int:
    """Returns the words of values that a lane reads per K tile."""
    return BLOCKS * SLAB_EIGHTS * format.words


@cute.jit
def _load_tile(packed: cute.Tensor, data: Int64, scale: Int64, format: cutlass.Constexpr):
    """Loads a lane's values and scales of a whole K tile."""
    words = []
    for block in cutlass.range_constexpr(BLOCKS):
        words += load_words(data + block * format.block_bytes, SLAB_EIGHTS * format.words, KEEP)
    for atom in cutlass.range_constexpr(format.atoms):
        words += load_words(scale + atom * SF_ATOM_BYTES, 1, KEEP)
    for i in cutlass.range_constexpr(len(words)):
        packed[i] = words[i]


@cute.jit
def _load_rest(packed: cute.Tensor, data: Int64, scale: Int64, count: Int32, format: cutlass.Constexpr):
    """Loads a lane's values and scales of a partial K tile: zeros from value ``count`` of the lane's slab on."""
    packed.fill(Uint32(0))
    num_words = SLAB_EIGHTS * format.words
    for block in cutlass.range_constexpr(BLOCKS):
        if block * BLOCK_VALUES < count:
            words = load_words(data + block * format.block_bytes, num_words, KEEP)
            for i in cutlass.range_constexpr(num_words):
                packed[block * num_words + i] = words[i]
    for atom in cutlass.range_constexpr(format.atoms):
        if atom * format.atom_values < count:
            packed[data_words(format) + atom] = load_words(scale + atom * SF_ATOM_BYTES, 1, KEEP)[0]
