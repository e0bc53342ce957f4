"""Tensor maps (the 128-byte TMA descriptors): decode, encode, and the tile copies that they describe.

A tile in shared memory is the box in row-major order, dimension 0 innermost and contiguous, whose 16-byte chunks are
permuted by the swizzle: an XOR of chunk-address bits with higher bits of the absolute shared-memory address (PTX ISA
"Tensors", swizzling modes). Copies therefore move full 16-byte chunks through cached index maps.

Details that PTX leaves open follow an H200 (recorded 2026-11-21):

* rows of a swizzled tile are a full span apart even if the box is narrower;
* copies start at multiples of 16 bytes in a row, or the kernel faults;
* a store writes the last 16-byte chunk of a row completely, over the bytes after the row's last element;
* NaN fill is 0x7FF7 in every 16 bits, whatever the type;
* loads of tf32 round to nearest (ties were not recorded: away from zero, like cvt.rna).

Only the first 64 bytes of the descriptor are used (see `TensorMap.decode`).
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from nvfp4_cute.emulator.faults import AlignmentFault
from nvfp4_cute.emulator.reductions import reduce_elements
from nvfp4_cute.errors import EmulatorError

DESCRIPTOR_BYTES = 128
CHUNK_BYTES = 16
ADDRESSES = 1 << 64
MAX_RANK = 5

GlobalView = Callable[[int, int], np.ndarray]
"""(address, number of bytes) -> contiguous uint8 view of global memory."""


@dataclass(frozen=True)
class ElementType:
    """An element type of a tensor map.

    Attributes:
        name: PTX spelling.
        bits: size in global memory.
        is_float: whether the map may request NaN for out-of-bounds elements.
        padded: (data bytes, bytes in shared memory) of each group of 16 elements that is unpacked on load.
    """

    name: str
    bits: int
    is_float: bool = False
    padded: tuple[int, int] | None = None


_NAN_FILL = 0x7FF7
_ELEMENT_TYPES = {
    0: ElementType("u8", 8),
    1: ElementType("u16", 16),
    2: ElementType("u32", 32),
    3: ElementType("s32", 32),
    4: ElementType("u64", 64),
    5: ElementType("s64", 64),
    6: ElementType("f16", 16, True),
    7: ElementType("f32", 32, True),
    8: ElementType("f32.ftz", 32, True),
    9: ElementType("f64", 64, True),
    10: ElementType("bf16", 16, True),
    11: ElementType("b4x16", 4),
    12: ElementType("b4x16_p64", 4, padded=(8, 16)),
    13: ElementType("b6x16_p32", 6, padded=(12, 16)),
}
_TF32 = {7: ElementType("tf32", 32, True), 8: ElementType("tf32.ftz", 32, True)}
_TYPE_CODES = {t.name: (code, 0) for code, t in _ELEMENT_TYPES.items()}
_TYPE_CODES |= {t.name: (code, 1) for code, t in _TF32.items()}

SWIZZLES = ("none", "32B", "64B", "128B")
_SWIZZLE_SPAN = {"none": None, "32B": 32, "64B": 64, "128B": 128}
ATOMS = ("16B", "32B", "32B_flip_8B", "64B")


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map.

    Attributes:
        address: global address of element (0, ..., 0).
        element: type of the elements.
        dims: size of each dimension in elements, innermost first.
        strides: bytes between neighbours in dimensions 1, 2, ... (dimension 0 is contiguous).
        box: number of elements of the tile along each dimension, before element strides.
        element_strides: distance of loaded elements along each dimension.
        swizzle: "none", "32B", "64B" or "128B".
        atom: unit that the 128B swizzle moves: "16B", "32B" or "64B".
        nan_fill: out-of-bounds elements read as NaN instead of zero.
    """

    address: int
    element: ElementType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str = "none"
    atom: str = "16B"
    nan_fill: bool = False

    @staticmethod
    def decode(descriptor: bytes) -> "TensorMap":
        """Decodes and checks a descriptor (at least its first 64 bytes).

        Little endian: 0x00 address; 0x08 type and mode bits; 0x0C.. low 32 bits of stride/16 of dimensions 1 to 4,
        with 4 more bits each at 0x1C; 0x20.. dim-1; 0x34 element strides-1 (3 bits each) and box0-1 in the top
        byte; 0x38.. box1-1 to box4-1.

        Raises:
            EmulatorError: an unsupported mode, or a descriptor that breaks a rule of the format.
        """
        return _decode(bytes(descriptor[:64]))

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @cached_property
    def tile_shape(self) -> tuple[int, ...]:
        """Elements loaded along each dimension, outermost first."""
        return tuple(-(-b // s) for b, s in zip(self.box, self.element_strides, strict=True))[::-1]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of an innermost row of the tile in shared memory, padding included."""
        if self.element.padded:
            return self.tile_shape[-1] // 16 * self.element.padded[1]
        return self.tile_shape[-1] * self.element.bits // 8

    @cached_property
    def row_pitch(self) -> int:
        """Bytes from one innermost row of the tile to the next in shared memory."""
        return _SWIZZLE_SPAN[self.swizzle] or self.row_bytes

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes that a tile writes to shared memory, including padding of the element type and out-of-bounds parts."""
        return int(np.prod(self.tile_shape[:-1], dtype=np.int64)) * self.row_bytes

    def shared_extent(self, boxes: int = 1) -> int:
        """Returns the bytes from the start to the end of `boxes` consecutive tiles in shared memory."""
        rows = boxes * math.prod(self.tile_shape[:-1])
        return (rows - 1) * self.row_pitch + self.row_bytes

    @cached_property
    def transaction_bytes(self) -> int:
        """Bytes that a load reports to its barrier: out-of-bounds parts count, padding does not.

        We infer that padding does not count: kernels for SM120 that mix fp8 and fp4 operands expect it.
        """
        data, total = self.element.padded or (1, 1)
        return self.tile_bytes * data // total

    def chunk_index(self, offset: int) -> np.ndarray:
        """Returns the indices of the tile's 16-byte chunks in shared memory, shape (outer dims..., chunks per row).

        Args:
            offset: absolute shared-memory offset of the tile.

        Raises:
            EmulatorError: the offset is not a multiple of 128.
        """
        if offset % 128:
            raise AlignmentFault(f"TMA tile at shared offset {offset:#x}: must be a multiple of 128 bytes")
        return self._chunks(offset)

    def row_chunk_index(self, offset: int, row: int) -> np.ndarray:
        """Like `chunk_index`, for a box of one row that is written to row `row` of a tile at `offset` (gather4)."""
        return self._chunks(offset + row * self.row_pitch)

    def _chunks(self, offset: int) -> np.ndarray:
        shape = (*self.tile_shape[:-1], self.row_pitch // CHUNK_BYTES)
        return _chunk_index(offset, shape, self.swizzle, self.atom)[..., : self.row_bytes // CHUNK_BYTES]

    def read_tile(self, coords: tuple[int, ...], view: GlobalView) -> np.ndarray:
        """Reads the box at `coords` (elements, innermost first; may lie outside the tensor).

        Returns:
            complex128 (outer dims..., chunks per row): the tile's 16-byte chunks before swizzling. May be a view of
            global memory, so use it at once.
        """
        whole = self._contiguous_rows(coords, view)
        if whole is not None:
            return _as_loaded(self.element, whole).view(np.complex128)
        region = self._clip(coords)
        shape = (*self.tile_shape[:-1], self.row_bytes // CHUNK_BYTES)
        tile = self._filled()
        if region is not None:
            source = _as_loaded(self.element, self._global_rows(region, view))
            packed = self.element.padded
            if packed:
                groups = tile.reshape(*tile.shape[:-1], -1, packed[1])[..., : packed[0]]
                groups = groups[region.tile_slices]
                groups[..., region.group_slice(packed[0]), :] = source.reshape(
                    *source.shape[:-1], -1, packed[0]
                )
            else:
                tile[
                    (*region.tile_slices, slice(region.first_byte, region.first_byte + source.shape[-1]))
                ] = source
        return tile.reshape(-1).view(np.complex128).reshape(shape)

    def write_tile(
        self, coords: tuple[int, ...], tile: np.ndarray, view: GlobalView, reduce: str | None = None
    ) -> None:
        """Stores a tile; elements outside the tensor are dropped.

        Args:
            coords: coordinates of the box in elements, innermost first; not negative.
            tile: complex128 chunks, shaped like the result of `read_tile`.
            view: returns a writable view of global memory.
            reduce: operation that combines memory and tile, or None to store.

        Raises:
            EmulatorError: negative coordinates, or an unsupported operation or type.
        """
        if min(coords) < 0:
            raise EmulatorError(f"TMA store at coordinates {coords}: negative coordinates are not allowed")
        if self.element.padded:
            raise EmulatorError(f"TMA store of {self.element.name}: the padded types can only be loaded")
        region = self._clip(coords)
        if region is None:
            return
        rows = np.ascontiguousarray(tile).view(np.uint8)
        count = region.row_bytes
        source = rows[(*region.tile_slices, slice(region.first_byte, region.first_byte + count))]
        target = self._global_rows(region, view)
        if reduce is None:
            target[...] = source
            self._write_last_chunks(coords, region, rows, view)
        else:
            source = np.ascontiguousarray(source)
            target[...] = reduce_elements(reduce, self.element.name, np.ascontiguousarray(target), source)

    def _write_last_chunks(
        self, coords: tuple[int, ...], region: "_Region", rows: np.ndarray, view: GlobalView
    ) -> None:
        """Writes the bytes after the last element of rows that end within a 16-byte chunk, up to the next row."""
        end = region.first_byte + region.row_bytes
        extra = -end % CHUNK_BYTES
        if not extra or self.element.bits % 8:
            return
        behind = rows[(*region.tile_slices, slice(end, end + extra))].reshape(-1, extra)
        last = self.address + sum((n - 1) * s for n, s in zip(self.dims[1:], self.strides, strict=True))
        for address, data in zip(self.rows_at(coords)[0].tolist(), behind, strict=True):
            if address < last:  # memory may end after the last row
                view(address + region.row_bytes, extra)[:] = data

    def rows_at(self, coords: tuple[int, ...]) -> tuple[np.ndarray, int]:
        """Returns global addresses (int64) of the rows of the box at `coords` that lie in the tensor, and bytes per row."""
        region = self._clip(coords)
        if region is None:
            return np.empty(0, np.int64), 0
        steps = zip(region.count[1:], self.strides, self.element_strides[1:], strict=True)
        rows = np.zeros(1, np.int64)
        for count, stride, step in steps:
            rows = (np.arange(count, dtype=np.int64)[:, None] * (step * stride) + rows).reshape(-1)
        # Both sums are modulo 2^64, like sums of int64 arrays.
        return (rows.view(np.uint64) + np.uint64(self._first_address(region))).view(
            np.int64
        ), region.row_bytes

    def extent(self, coords: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Returns the part of the box at `coords` inside the tensor: address, rows, bytes per row, bytes from row to row.

        The last is 0 if the rows are not evenly spaced, or if there is only one.
        """
        region = self._clip(coords)
        if region is None:
            return self.address, 0, 0, 0
        steps = zip(region.count[1:], self.strides, self.element_strides[1:], strict=True)
        pitches = [stride * step for count, stride, step in steps if count > 1]
        pitch = pitches[0] if len(pitches) == 1 else 0
        return self._first_address(region), math.prod(region.count[1:]), region.row_bytes, pitch

    def _first_address(self, region: "_Region") -> int:
        """Returns the global address of a region's first byte. It wraps modulo 2^64; maps of ragged tensors rely on that."""
        offset = region.start[0] * self.element.bits // 8
        offset += sum(c * s for c, s in zip(region.start[1:], self.strides, strict=True))
        return (self.address + offset) % ADDRESSES

    def chunks_inside(self, coords: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Returns which of a tile's chunks, arranged as by `chunk_index`, hold elements inside the tensor."""
        region = self._clip(coords)
        if region is None:
            return None
        first, end = region.first_byte, region.first_byte + region.row_bytes
        return (*region.tile_slices, slice(first // CHUNK_BYTES, -(-end // CHUNK_BYTES)))

    def _filled(self) -> np.ndarray:
        """uint8 (outer dims..., row bytes) of the fill value; padding bytes are poison."""
        shape = (*self.tile_shape[:-1], self.row_bytes)
        if self.nan_fill:
            return np.full((*shape[:-1], shape[-1] // 2), _NAN_FILL, np.uint16).view(np.uint8)
        tile = np.zeros(shape, np.uint8)
        if self.element.padded:
            data, total = self.element.padded
            tile.reshape(*shape[:-1], -1, total)[..., data:] = 0xFF
        return tile

    def _clip(self, coords: tuple[int, ...]) -> "_Region | None":
        """Returns the part of the box inside the tensor, or None if the box lies outside."""
        if len(coords) != self.rank:
            raise EmulatorError(f"TMA with {len(coords)} coordinates on a tensor map of rank {self.rank}")
        if self.element.bits % 8 == 0 and coords[0] * self.element.bits // 8 % CHUNK_BYTES:
            raise AlignmentFault(
                f"TMA coordinate {coords[0]} of {self.element.name}: {coords[0] * self.element.bits // 8} bytes into "
                f"a row, must be a multiple of {CHUNK_BYTES} (an H200 faults)"
            )
        if self.element.bits % 8 and (coords[0] * self.element.bits) % 8:
            raise EmulatorError(f"TMA coordinate {coords[0]} of {self.element.name}: must start a whole byte")
        if self.element.padded and coords[0] % 128:
            raise EmulatorError(
                f"TMA coordinate {coords[0]} of {self.element.name}: must be a multiple of 128"
            )
        first, count, start = [], [], []
        for c, dim, step, n in zip(
            coords, self.dims, self.element_strides, self.tile_shape[::-1], strict=True
        ):
            low = -(-max(0, -c) // step)
            high = min(n, -(-(dim - c) // step))
            if low >= high:
                return None
            first.append(low)
            count.append(high - low)
            start.append(c + low * step)
        return _Region(self, tuple(first), tuple(count), tuple(start))

    @cached_property
    def _whole(self) -> tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]:
        """Geometry of boxes that lie fully inside the tensor.

        Returns last coordinates, shape and pitches of the rows in bytes (outermost first), and bytes from the start of
        the first row to the end of the last.
        """
        tile, steps = self.tile_shape[::-1], self.element_strides
        last = tuple(d - (n - 1) * e - 1 for d, n, e in zip(self.dims, tile, steps, strict=True))
        pitches = tuple(s * e for s, e in zip(self.strides, steps[1:], strict=True))
        span = self.row_bytes + sum((n - 1) * p for n, p in zip(tile[1:], pitches, strict=True))
        return last, (*self.tile_shape[:-1], self.row_bytes), span, (*pitches[::-1], 1)

    def _contiguous_rows(self, coords: tuple[int, ...], view: GlobalView) -> np.ndarray | None:
        """Like `_global_rows`, for an aligned box that lies inside the tensor; None for other boxes."""
        last, shape, span, pitches = self._whole
        bits = coords[0] * self.element.bits
        if bits % (8 * CHUNK_BYTES) or self.element.padded or len(coords) != len(last):
            return None
        address = self.address + bits // 8
        for c, most in zip(coords, last, strict=True):
            if c < 0 or c > most:
                return None
        for c, stride in zip(coords[1:], self.strides, strict=True):
            address += c * stride
        return np.ndarray(shape, np.uint8, view(address % ADDRESSES, span), 0, pitches)

    def _global_rows(self, region: "_Region", view: GlobalView) -> np.ndarray:
        """Returns a strided uint8 view (outer dims..., row bytes) of the region in global memory."""
        steps = [s * e for s, e in zip(self.strides, self.element_strides[1:], strict=True)]
        row_bytes = region.row_bytes
        address = self._first_address(region)
        span = row_bytes + sum((n - 1) * s for n, s in zip(region.count[1:], steps, strict=True))
        shape = (*region.count[:0:-1], row_bytes)
        return np.ndarray(shape, np.uint8, view(address, span), 0, (*steps[::-1], 1))


@dataclass(frozen=True)
class _Region:
    """The in-bounds part of a box. All tuples are innermost first: index in the tile, elements, tensor coordinate."""

    map: TensorMap
    first: tuple[int, ...]
    count: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def tile_slices(self) -> tuple[slice, ...]:
        """Slices of the outer dimensions of the tile."""
        return tuple(slice(f, f + n) for f, n in zip(self.first[:0:-1], self.count[:0:-1], strict=True))

    @property
    def first_byte(self) -> int:
        return self.first[0] * self.map.element.bits // 8

    @property
    def row_bytes(self) -> int:
        """Bytes per row in global memory."""
        return self.count[0] * self.map.element.bits // 8

    def group_slice(self, group_bytes: int) -> slice:
        """Returns the groups of 16 elements of a padded type."""
        first = self.first_byte // group_bytes
        return slice(first, first + self.row_bytes // group_bytes)


def _as_loaded(element: ElementType, data: np.ndarray) -> np.ndarray:
    """Converts elements to their form in shared memory (uint8, innermost contiguous): tf32 is rounded, others are copied."""
    if not element.name.startswith("tf32"):
        return data
    codes = np.ascontiguousarray(data).view(np.uint32)
    nan = (codes & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, np.uint32(0x7FFFE000), codes + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(
        np.uint8
    )


# ---- index maps --------------------------------------------------------------------------------------------------
def swizzle_address(address: np.ndarray, swizzle: str, atom: str = "16B") -> np.ndarray:
    """Permutes absolute shared-memory byte addresses by a swizzle mode (integer arrays or scalars)."""
    if swizzle == "none":
        return address
    if atom == "16B":
        bits = {"32B": 1, "64B": 3, "128B": 7}[swizzle]
        return address ^ (((address >> 7) & bits) << 4)
    if atom == "32B":
        return address ^ (((address >> 7) & 3) << 5)
    return address ^ (((address >> 7) & 1) << 6)


@lru_cache(4096)
def _chunk_index(offset: int, shape: tuple[int, ...], swizzle: str, atom: str) -> np.ndarray:
    """Returns chunk numbers (address / 16) of a tile at an absolute offset; read-only."""
    linear = offset + CHUNK_BYTES * np.arange(int(np.prod(shape)))
    index = (swizzle_address(linear, swizzle, atom) // CHUNK_BYTES).reshape(shape)
    index.setflags(write=False)
    return index


# ---- the binary format -------------------------------------------------------------------------------------------
@lru_cache(1024)
def _decode(data: bytes) -> TensorMap:
    word = struct.unpack_from("<16I", data)
    mode = word[2]
    rank = (mode >> 4 & 7) + 1
    if rank > MAX_RANK:
        raise EmulatorError(f"tensor map of rank {rank}: at most {MAX_RANK}")
    element = (_TF32 if mode >> 16 & 1 else _ELEMENT_TYPES).get(mode >> 7 & 15)
    if element is None:
        raise EmulatorError(f"tensor map with unknown element type code {mode >> 7 & 15}")
    if mode >> 11 & 3:
        raise EmulatorError("tensor map with an interleaved layout: not modelled")
    if mode >> 22 & 1:
        raise EmulatorError("tensor map with the 96B swizzle mode: not modelled")
    strides = [(((word[7] >> 4 * i) & 15) << 32 | word[3 + i]) << 4 for i in range(rank - 1)]
    box = [(word[13] >> 24) + 1] + [data[0x38 + i] + 1 for i in range(rank - 1)]
    result = TensorMap(
        address=word[0] | word[1] << 32,
        element=element,
        dims=tuple(word[8 + i] + 1 for i in range(rank)),
        strides=tuple(strides),
        box=tuple(box),
        element_strides=tuple((word[13] >> 3 * i & 7) + 1 for i in range(rank)),
        swizzle=SWIZZLES[mode >> 13 & 3],
        atom=ATOMS[mode >> 19 & 3],
        nan_fill=bool(mode >> 15 & 1),
    )
    _check(result)
    return result


def _check(m: TensorMap) -> None:
    """Raises EmulatorError for the first broken rule of the format."""
    for broken, rule in (
        (m.address % 16, f"global address {m.address:#x} is not a multiple of 16"),
        (m.element_strides[0] != 1, f"element stride {m.element_strides[0]} of dimension 0 must be 1"),
        (
            m.box[0] * m.element.bits % 128,
            f"box of {m.box[0]} x {m.element.name} is not a multiple of 16 bytes",
        ),
        (m.atom == "32B_flip_8B", "swizzle atomicity 32B with 8B flip is not modelled"),
        (m.atom != "16B" and m.swizzle != "128B", f"swizzle atomicity {m.atom} needs the 128B swizzle"),
        (m.nan_fill and not m.element.is_float, f"NaN fill needs a float type, not {m.element.name}"),
    ):
        if broken:
            raise EmulatorError(f"tensor map: {rule}")
    span = _SWIZZLE_SPAN[m.swizzle]
    if span and m.row_bytes > span:
        raise EmulatorError(
            f"tensor map: inner box of {m.row_bytes} bytes exceeds the {m.swizzle} swizzle span"
        )
    if m.element.padded:
        _check_padded(m)
    elif m.element.bits == 4 and m.dims[0] % 2:
        raise EmulatorError(f"tensor map: dimension 0 of {m.dims[0]} x b4x16 must be even")


def _check_padded(m: TensorMap) -> None:
    for broken, rule in (
        (m.address % 32 or any(s % 32 for s in m.strides), "address and strides must be multiples of 32"),
        (m.dims[0] % 128, f"dimension 0 of {m.dims[0]} must be a multiple of 128"),
        (m.box[0] != 128, f"box of {m.box[0]} must be 128 along dimension 0"),
        (
            m.swizzle not in ("none", "128B") or m.atom == "64B",
            f"swizzle {m.swizzle}/{m.atom} is not allowed",
        ),
    ):
        if broken:
            raise EmulatorError(f"tensor map of {m.element.name}: {rule}")


# PTX numbers the element types of tensormap.replace differently from the descriptor: (code, tf32 flag).
_REPLACE_TYPES = [(i, 0) for i in range(11)] + [(7, 1), (8, 1), (11, 0), (12, 0), (13, 0)]
_MODE_FIELDS = {  # position and width in the mode word
    "rank": (4, 3),
    "interleave_layout": (11, 2),
    "swizzle_mode": (13, 2),
    "fill_mode": (15, 1),
    "swizzle_atomicity": (19, 2),
}


def replace_field(data: np.ndarray, field: str, ordinal: int, value: int) -> None:
    """Rewrites one field of a descriptor in place, like tensormap.replace.tile.

    Args:
        data: uint8 (128,), modified.
        field: PTX name of the field.
        ordinal: dimension, for a field with one value per dimension (for global_stride: 0 is the stride of dimension
            1).
        value: the operand: sizes are true values, rank is the number of dimensions minus one.

    Raises:
        EmulatorError: an unknown field, or a value that does not fit it.
    """
    words, wide = data[:64].view("<u4"), data[:8].view("<u8")
    refuse = lambda: EmulatorError(f"tensormap.replace .{field}, dimension {ordinal}: bad value {value:#x}")
    limits = {"box_dim": 256, "global_dim": 1 << 32, "element_stride": 8}
    if field in limits and not (1 <= value <= limits[field] and 0 <= ordinal < MAX_RANK):
        raise refuse()
    if field == "global_address":
        wide[0] = value
    elif field == "global_dim":
        words[8 + ordinal] = value - 1
    elif field == "box_dim":
        data[0x38 + ordinal - 1] = value - 1  # box0 is the byte before the others
    elif field == "element_stride":
        _put_bits(words, 13, 3 * ordinal, 3, value - 1)
    elif field == "global_stride":
        if value % 16 or value >> 40 or not 0 <= ordinal < MAX_RANK - 1:
            raise refuse()
        words[3 + ordinal] = value >> 4 & 0xFFFFFFFF
        _put_bits(words, 7, 4 * ordinal, 4, value >> 36)
    elif field == "elemtype":
        if value >= len(_REPLACE_TYPES):
            raise refuse()
        _put_bits(words, 2, 7, 4, _REPLACE_TYPES[value][0])
        _put_bits(words, 2, 16, 1, _REPLACE_TYPES[value][1])
    elif field in _MODE_FIELDS:
        low, width = _MODE_FIELDS[field]
        if value >> width:
            raise refuse()
        _put_bits(words, 2, low, width, value)
    else:
        raise EmulatorError(f"tensormap.replace: unknown field .{field}")


def _put_bits(words: np.ndarray, index: int, low: int, width: int, value: int) -> None:
    words[index] = int(words[index]) & ~(((1 << width) - 1) << low) | value << low


def encode(
    address: int,
    element: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    element_strides: tuple[int, ...] | None = None,
    swizzle: str = "none",
    atom: str = "16B",
    nan_fill: bool = False,
) -> bytes:
    """Builds a 128-byte descriptor. Arguments are the fields of `TensorMap`, the element by its PTX name.

    Raises:
        ValueError: a size outside its field.
        EmulatorError: see `TensorMap.decode`.
    """
    rank = len(dims)
    if not 1 <= rank <= MAX_RANK or len(strides) != rank - 1 or len(box) != rank:
        raise ValueError(
            f"rank {rank} with {len(strides)} strides and {len(box)} box sizes; need rank 1 to 5, rank-1, rank"
        )
    if any(s % 16 or not 0 <= s < 1 << 40 for s in strides):
        raise ValueError(f"strides {strides}: must be multiples of 16 bytes below 2**40")
    if not all(1 <= b <= 256 for b in box) or not all(1 <= d <= 1 << 32 for d in dims):
        raise ValueError(f"box {box}, dims {dims}: boxes are 1 to 256, dimensions 1 to 2**32 elements")
    steps = element_strides or (1,) * rank
    code, tf32 = _TYPE_CODES[element]
    mode = 2 | (rank - 1) << 4 | code << 7 | SWIZZLES.index(swizzle) << 13 | nan_fill << 15 | tf32 << 16
    mode |= ATOMS.index(atom) << 19
    high = sum((s >> 36) << 4 * i for i, s in enumerate(strides))
    low = [(s >> 4) & 0xFFFFFFFF for s in strides] + [0] * (5 - rank)
    sizes = [d - 1 for d in dims] + [0] * (5 - rank)
    steps_word = sum((s - 1) << 3 * i for i, s in enumerate(steps)) | (box[0] - 1) << 24
    outer_box = [b - 1 for b in box[1:]] + [0] * (5 - rank)
    data = struct.pack("<QI4II5II4B4x", address, mode, *low, high, *sizes, steps_word, *outer_box)
    data += bytes(DESCRIPTOR_BYTES - len(data))
    TensorMap.decode(data)
    return data


# Meanings of the numbers in the driver's cuTensorMapEncodeTiled.
_DRIVER_TYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz", "b4x16",
    "b4x16_p64", "b6x16_p32",
)  # fmt: skip
_DRIVER_SWIZZLES = (
    ("none", "16B"), ("32B", "16B"), ("64B", "16B"), ("128B", "16B"), ("128B", "32B"), ("128B", "32B_flip_8B"),
    ("128B", "64B"),
)  # fmt: skip


def driver_element(number: int) -> ElementType:
    """Returns the element type with the driver's number (CUtensorMapDataType)."""
    name = _DRIVER_TYPES[number]
    code, tf32 = _TYPE_CODES[name]
    return (_TF32 if tf32 else _ELEMENT_TYPES)[code]


def encode_tiled(
    address: int,
    element: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    element_strides: tuple[int, ...],
    *,
    interleave: int,
    swizzle: int,
    fill: int,
) -> bytes:
    """Returns the descriptor that cuTensorMapEncodeTiled makes; enumerations are the driver's numbers.

    Raises:
        ValueError, EmulatorError: the driver would refuse it, or it is not modelled.
    """
    if element >= len(_DRIVER_TYPES) or swizzle >= len(_DRIVER_SWIZZLES) or fill > 1:
        raise ValueError(f"tensor map: no element type {element}, swizzle {swizzle} or fill {fill}")
    if interleave:
        raise EmulatorError("tensor map with an interleaved layout: not modelled")
    mode, atom = _DRIVER_SWIZZLES[swizzle]
    options = {"element_strides": element_strides, "swizzle": mode, "atom": atom, "nan_fill": bool(fill)}
    return encode(address, _DRIVER_TYPES[element], dims, strides, box, **options)  # type: ignore[arg-type]
