"""Matrix descriptors, instruction descriptors, and the places of matrices in tensor memory.

Everything here is a pure function of immediate values; the results that matter for speed (index maps) are cached.
Sections of the PTX ISA: "Shared memory descriptor", "Instruction descriptor", "Canonical layouts", "Data path layout
organization", "Matrix fragments for tcgen05.ld/st", "tcgen05.cp".
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nvfp4_cute.emulator.tensormap import swizzle_address
from nvfp4_cute.errors import EmulatorError

OPERAND_ROW_BYTES = 32
"""Bytes of K that one tcgen05.mma reads of each row, for every kind; 48 for the 4-bit kinds with K=96."""

BLOCK_SCALED_KINDS = ("mxf4nvf4", "mxf4", "mxf8f6f4")
DENSE_KINDS = ("f16", "tf32", "f8f6f4", "i8")


# ---- shared-memory matrix descriptors ----------------------------------------------------------------------------
class _Swizzle(NamedTuple):
    mode: str
    atom: str
    row_bytes: int  # bytes per row of the swizzle atom


_SWIZZLE_CODES = {
    0: _Swizzle("none", "16B", 16),
    1: _Swizzle("128B", "32B", 128),
    2: _Swizzle("128B", "16B", 128),
    4: _Swizzle("64B", "16B", 64),
    6: _Swizzle("32B", "16B", 32),
}


class SmemDescriptor(NamedTuple):
    """A decoded shared-memory matrix descriptor; byte units.

    Attributes:
        start: address of the first row.
        leading, stride: the two offsets; their meaning depends on the layout.
        swizzle: permutation of 16- or 32-byte units.
        pattern: distance of the swizzle pattern from an aligned one in bytes, 128 * the base offset.
        absolute: `leading` is the address of the rows that continue after the end of the swizzle row.
    """

    start: int
    leading: int
    stride: int
    swizzle: _Swizzle
    pattern: int = 0
    absolute: bool = False

    def place(self, linear: np.ndarray) -> np.ndarray:
        """Returns the shared-memory addresses of bytes at linear addresses, swizzled relative to the start of the pattern."""
        return swizzle_address(linear - self.pattern, self.swizzle.mode, self.swizzle.atom) + self.pattern


@lru_cache(4096)
def decode_smem_descriptor(value: int) -> SmemDescriptor:
    """Decodes a 64-bit descriptor.

    Bits: 0-13 start/16, 16-29 leading-dimension offset/16, 32-45 stride-dimension offset/16, 46-48 constant 1, 49-51
    base offset, 52 absolute leading dimension, 61-63 swizzle (0 none, 1 128B with 32B atom, 2 128B, 4 64B, 6 32B). The
    base offset is (address of the pattern / 128) mod 8 if a swizzle pattern does not start at a multiple of its size.
    The ISA gives only this formula; we assume that the permutation is relative to the pattern.

    Raises:
        EmulatorError: a reserved value.
    """
    code = value >> 61 & 7
    if value >> 46 & 7 != 1:
        raise EmulatorError(f"matrix descriptor {value:#018x}: bits 46-48 are {value >> 46 & 7}, must be 1")
    if code not in _SWIZZLE_CODES:
        raise EmulatorError(f"matrix descriptor {value:#018x}: swizzle code {code} is reserved")
    if value >> 53 & 0xFF:
        raise EmulatorError(f"matrix descriptor {value:#018x}: reserved bits 53-60 are set")
    field = lambda low: (value >> low & 0x3FFF) << 4
    pattern, absolute = (value >> 49 & 7) << 7, bool(value >> 52 & 1)
    return SmemDescriptor(field(0), field(16), field(32), _SWIZZLE_CODES[code], pattern, absolute)


class Gather(NamedTuple):
    """An index map into shared memory and the byte range that it touches, for the bounds check.

    The range is that of the final addresses, because a swizzle may reach a little beyond the linear range.
    """

    indices: np.ndarray
    first_byte: int
    nbytes: int

    @classmethod
    def of(cls, addresses: np.ndarray, unit: int) -> "Gather":
        """Returns the map of units of `unit` bytes at the given byte addresses; read-only."""
        indices = addresses // unit
        indices.setflags(write=False)
        low, high = int(addresses.min()), int(addresses.max())
        return cls(indices, low, high - low + unit)


@lru_cache(4096)
def k_major_chunks(descriptor: int, rows: int, row_bytes: int = OPERAND_ROW_BYTES) -> Gather:
    """Returns the 16-byte chunks of a K-major operand: indices (address / 16) of shape (rows, row_bytes / 16).

    Swizzled: start + (r/8)*stride + (r%8)*W + kb with W = 32, 64 or 128, then the swizzle XOR on the absolute address.
    Not swizzled: start + (r/8)*stride + (r%8)*16 + (kb/16)*leading. With an absolute leading dimension, the bytes after
    the first W-byte row are those at the start of the rows of a second matrix at that address.
    """
    d = decode_smem_descriptor(descriptor)
    if d.swizzle.atom != "16B":
        raise EmulatorError(
            f"matrix descriptor {descriptor:#018x}: the 32B atom is for MN-major operands only"
        )
    row, chunk = np.arange(rows)[:, None], np.arange(row_bytes // 16)
    pitch = d.leading if d.swizzle.mode == "none" else 16
    within = row // 8 * d.stride + row % 8 * d.swizzle.row_bytes
    address = d.start + within + chunk * pitch
    if d.absolute:
        left = d.swizzle.row_bytes - d.start % d.swizzle.row_bytes
        address = np.where(chunk * pitch < left, address, d.leading + within + chunk * pitch - left)
    return Gather.of(d.place(address), 16)


@lru_cache(4096)
def mn_major_bytes(descriptor: int, rows: int, element_bytes: int) -> Gather:
    """Returns the bytes of an MN-major operand: indices (address) of shape (rows, 32 / element_bytes, element_bytes).

    With b = mn * element_bytes. Swizzled: start + (b/W)*leading + (k/8)*stride + (k%8)*W + b%W, then the XOR. The
    128-byte swizzle with 32-byte atom has groups of 4 in k. Not swizzled: the roles of the two offsets are swapped,
    start + (b/16)*stride + (k/8)*leading + (k%8)*16 + b%16.
    """
    d = decode_smem_descriptor(descriptor)
    byte = (np.arange(rows)[:, None] * element_bytes + np.arange(element_bytes))[:, None, :]
    k = np.arange(OPERAND_ROW_BYTES // element_bytes)[:, None]
    group = 4 if d.swizzle.atom == "32B" else 8
    over_mn, over_k = (d.stride, d.leading) if d.swizzle.mode == "none" else (d.leading, d.stride)
    width = d.swizzle.row_bytes
    address = d.start + byte // width * over_mn + k // group * over_k + k % group * width + byte % width
    return Gather.of(d.place(address), 1)


# ---- instruction descriptors -------------------------------------------------------------------------------------
class InstructionDescriptor(NamedTuple):
    """A decoded and checked 32-bit instruction descriptor.

    Attributes:
        m: rows of D over all CTAs of the group.
        n: columns of D.
        a_format: element format of A, a name of `numerics.ElementType`.
        b_format: element format of B.
        d_type: "f32", "f16", or "s32".
        negate_a: use -A.
        negate_b: use -B.
        a_mn_major: A is MN-major in shared memory.
        b_mn_major: B is MN-major.
        scale_type: "ue4m3" or "ue8m0" (block-scaled kinds), else None.
        a_sf_id: first scale byte of A in its tensor-memory words.
        b_sf_id: first scale byte of B in its tensor-memory words.
        saturate: clamp integer sums to the range of int32.
        row_bytes: bytes of a row of A or B in shared memory along K.
    """

    m: int
    n: int
    a_format: str
    b_format: str
    d_type: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    scale_type: str | None = None
    a_sf_id: int = 0
    b_sf_id: int = 0
    saturate: bool = False
    row_bytes: int = OPERAND_ROW_BYTES


_F8F6F4_FORMATS = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4_FORMATS,
    "mxf8f6f4": _F8F6F4_FORMATS,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}
_D_TYPES = {"f16": {0: "f16", 1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "i8": {2: "s32"}}


@lru_cache(1024)
def decode_instruction_descriptor(
    value: int, kind: str, *, cta_group: int = 1, scale_block: int | None = None, ws: bool = False
) -> InstructionDescriptor:
    """Decodes the instruction descriptor of a tcgen05.mma and checks it against the rules of its kind.

    Dense kinds: 2 sparse, 3 saturate, 4-5 D format, 7-9/10-12 A/B format, 13/14 negate, 15/16 MN-major, 17-22 N/8,
    24-28 M/16, 30-31 a hint for the reuse of B. Block-scaled kinds: 4-5 B scale id, 23 scale type (0 ue4m3, 1 ue8m0),
    29-30 A scale id, 31 K=96.

    Args:
        value: the descriptor.
        kind: one of DENSE_KINDS or BLOCK_SCALED_KINDS.
        cta_group: 1 or 2.
        scale_block: elements that share a scale (16 or 32) for block-scaled kinds.
        ws: a weight-stationary instruction.

    Raises:
        EmulatorError: a field that is reserved or not modelled, or a shape that the kind does not have.
    """
    refuse = lambda why: EmulatorError(f"instruction descriptor {value:#010x} of kind::{kind}: {why}")
    scaled, fp4 = kind in BLOCK_SCALED_KINDS, kind in ("mxf4", "mxf4nvf4")
    if value >> 2 & 1:
        raise refuse("sparse matrices are not modelled")
    if value & 3 or value >> 6 & 1 or (value >> 3 & 1 and kind != "i8") or (not scaled and value >> 23 & 1):
        raise refuse("a reserved bit is set")
    if (not scaled and (value >> 29 & 1 or (value >> 30 and not ws))) or (kind == "mxf8f6f4" and value >> 31):
        raise refuse("a reserved bit is set, or B reuse shifts without .ws")
    # The B format of the 4-bit kinds has two bits. The next bit is reserved, but kernels set it.
    formats, codes = _FORMATS[kind], (value >> 7 & 7, value >> 10 & (3 if fp4 else 7))
    if any(code not in formats for code in codes):
        raise refuse(f"element format codes {codes}, legal are {sorted(formats)}")
    result = InstructionDescriptor(
        m=(value >> 24 & 31) * 16,
        n=(value >> 17 & 63) * 8,
        a_format=formats[codes[0]],
        b_format=formats[codes[1]],
        d_type="f32" if scaled else _D_TYPES[kind].get(value >> 4 & 3, ""),
        negate_a=bool(value >> 13 & 1),
        negate_b=bool(value >> 14 & 1),
        a_mn_major=bool(value >> 15 & 1),
        b_mn_major=bool(value >> 16 & 1),
        scale_type=("ue8m0" if value >> 23 & 1 else "ue4m3") if scaled else None,
        a_sf_id=value >> 29 & 3 if scaled else 0,
        b_sf_id=value >> 4 & 3 if scaled else 0,
        saturate=kind == "i8" and bool(value >> 3 & 1),
        row_bytes=48 if fp4 and value >> 31 else OPERAND_ROW_BYTES,
    )
    _check_operands(result, kind, value >> 4 & 3, cta_group, refuse)
    if scaled:
        _check_scales(result, kind, scale_block, refuse)
    reason = shape_reason(kind, result.m, result.n, cta_group=cta_group, ws=ws)
    if reason:
        raise refuse(reason)
    return result


def _check_operands(
    d: InstructionDescriptor, kind: str, d_code: int, cta_group: int, refuse: Callable[[str], EmulatorError]
) -> None:
    """Raises EmulatorError for formats, majors and signs that a kind does not have."""
    if not d.d_type:
        raise refuse(f"D format code {d_code}")
    if (d.a_mn_major or d.b_mn_major) and kind in ("mxf4", "mxf4nvf4"):
        raise refuse("4-bit operands are K-major only")
    for name, fmt, mn_major in (("A", d.a_format, d.a_mn_major), ("B", d.b_format, d.b_mn_major)):
        if mn_major and fmt in ("e2m3", "e3m2", "e2m1"):
            raise refuse(f"MN-major {name} of {fmt} elements is not modelled")
    step = 16 * cta_group
    if d.b_mn_major and d.b_format in ("e4m3", "e5m2", "u8", "s8") and d.n % step:
        raise refuse(f"an N-major B of 8-bit elements needs N in steps of {step}, N is {d.n}")
    if kind == "i8" and (d.negate_a or d.negate_b):
        raise refuse("integers cannot be negated")
    if d.row_bytes != OPERAND_ROW_BYTES and (cta_group, d.m) not in ((1, 128), (2, 256)):
        raise refuse(f"K=96 with M={d.m} and cta_group::{cta_group}")


def _check_scales(
    d: InstructionDescriptor, kind: str, scale_block: int | None, refuse: Callable[[str], EmulatorError]
) -> None:
    """Raises EmulatorError for scale types that a kind lacks, and for byte selectors that leave no room for all scales."""
    types = {
        ("mxf8f6f4", 32): ("ue8m0",),
        ("mxf4", 32): ("ue8m0",),
        ("mxf4nvf4", 32): ("ue8m0",),
        ("mxf4nvf4", 16): ("ue8m0", "ue4m3"),
    }.get((kind, scale_block or 0), ())
    if d.scale_type not in types:
        raise refuse(f"scale type {d.scale_type} with blocks of {scale_block}; legal are {types or 'none'}")
    ids: tuple[int, ...] = (0,) if scale_block == 16 else (0, 2) if kind != "mxf8f6f4" else (0, 1, 2, 3)
    if d.row_bytes != OPERAND_ROW_BYTES:  # the scales of K=96 may continue in the next words
        ids = (0, 2) if scale_block == 16 else (0, 1, 2, 3)
    if d.a_sf_id not in ids or d.b_sf_id not in ids:
        raise refuse(f"scale ids {d.a_sf_id}, {d.b_sf_id}; legal are {ids}")


FLOAT_KINDS = ("f16", "tf32", "f8f6f4")
_EIGHTS, _SIXTEENS, _THIRTYTWOS = range(8, 257, 8), range(16, 257, 16), range(32, 257, 32)

SHAPES: tuple[tuple[tuple[str, ...], int, tuple[int, ...], Sequence[int]], ...] = (
    (FLOAT_KINDS, 1, (64, 128), _EIGHTS),
    (FLOAT_KINDS, 2, (128, 256), _SIXTEENS),
    (("i8",), 1, (64, 128), (8, 16, 24, *range(32, 257, 16))),
    (("i8",), 2, (128, 256), _THIRTYTWOS),
    (BLOCK_SCALED_KINDS, 1, (128,), _EIGHTS),
    (BLOCK_SCALED_KINDS, 2, (128, 256), _SIXTEENS),
)
"""Dense shapes: kinds, cta_group, M, N (PTX ISA 9.7.16.2.1, "Various combinations of .kind and shapes").

`_check_operands` has the wider steps of an N-major B of 8-bit elements.
"""

WS_SHAPES = (32, 64, 128), (64, 128, 256)
"""M and N of weight-stationary instructions (rows with .ws of the same table)."""


def shape_reason(kind: str, m: int, n: int, *, cta_group: int, ws: bool = False) -> str | None:
    """Returns why M x N is not a shape of this kind, or None if it is."""
    if ws:
        if cta_group != 1 or kind in BLOCK_SCALED_KINDS:
            return "weight-stationary instructions are dense and of cta_group::1"
        ok = m in WS_SHAPES[0] and n in WS_SHAPES[1]
        return None if ok else f"shape {m}x{n}; legal are M in {WS_SHAPES[0]}, N in {WS_SHAPES[1]}"
    rows, legal = next(
        (rows, columns) for kinds, group, rows, columns in SHAPES if kind in kinds and group == cta_group
    )
    if m in rows and n in legal:
        return None
    return (
        f"shape {m}x{n} with cta_group::{cta_group}; legal are M in {rows}, N in {legal[0]}..256 in steps of "
        f"{legal[-1] - legal[-2]}"
    )


# ---- accumulators ------------------------------------------------------------------------------------------------
class AccumulatorBlock(NamedTuple):
    """A rectangle of D: the place of its rows and columns in the tensor memory of one CTA of the group."""

    cta: int
    rows: slice
    columns: slice
    lanes: slice
    column_offset: int


@lru_cache(256)
def accumulator_blocks(
    m: int, n: int, cta_group: int, ws: bool, base_lane: int
) -> tuple[AccumulatorBlock, ...]:
    """Returns the rectangles that make up D (layouts A to G of the PTX ISA), with one 32-bit column per element.

    Raises:
        EmulatorError: a base lane that the layout does not allow.
    """
    s = slice
    if base_lane and not (m == 64 and cta_group == 1 and not ws and base_lane == 16):
        raise EmulatorError(f"accumulator of M={m} at tensor-memory lane {base_lane}: must start at lane 0")
    if cta_group == 2 and m == 256:
        return tuple(AccumulatorBlock(c, s(128 * c, 128 * c + 128), s(0, n), s(0, 128), 0) for c in (0, 1))
    if cta_group == 2:
        half = n // 2
        return tuple(
            AccumulatorBlock(
                c, s(64 * c, 64 * c + 64), s(half * h, half * h + half), s(64 * h, 64 * h + 64), 0
            )
            for c in (0, 1)
            for h in (0, 1)
        )
    if m == 128:
        return (AccumulatorBlock(0, s(0, 128), s(0, n), s(0, 128), 0),)
    if ws:
        width = n * m // 128
        return tuple(
            AccumulatorBlock(0, s(0, m), s(width * i, width * i + width), s(m * i, m * i + m), 0)
            for i in range(128 // m)
        )
    return tuple(
        AccumulatorBlock(
            0, s(16 * i, 16 * i + 16), s(0, n), s(32 * i + base_lane, 32 * i + base_lane + 16), 0
        )
        for i in range(4)
    )


@lru_cache(64)
def tensor_operand_lanes(m: int, cta_group: int, ws: bool, base_lane: int) -> np.ndarray:
    """Returns the lanes of the rows of A in one CTA's tensor memory: int (replicas, rows). All replicas must be equal.

    The rows have the lanes of D's rows. If a row of D is spread over several groups of lanes (M=128 of a pair, .ws with
    M below 128), each group needs all of A. For .ws this is inferred from the pair, whose layout CUTLASS gives.

    Raises:
        EmulatorError: a base lane that the layout does not allow.
    """
    if base_lane and not (m == 64 and cta_group == 1 and not ws and base_lane == 16):
        raise EmulatorError(f"A of M={m} at tensor-memory lane {base_lane}: must start at lane 0")
    rows = np.arange(m // cta_group)
    if m == 64 and cta_group == 1 and not ws:
        lanes = (rows % 16 + 32 * (rows // 16) + base_lane)[None]
    else:
        lanes = np.stack([rows + first for first in range(0, 128, len(rows))])
    lanes.setflags(write=False)
    return lanes


@lru_cache(256)
def zero_columns(descriptor: int, m: int, n: int) -> np.ndarray:
    """Returns the columns of B that a zero-column mask descriptor replaces by zeros: bool (N,).

    Each sub-mask covers N * M / 128 columns. It starts with `first span` (1: zeros) and alternates spans of `skip + 1`
    zeros and `use + 1` used columns; its first `start count` columns are dropped. As in the ISA's examples, zeros come
    in runs of the skip span and used columns in runs of the use span.

    Raises:
        EmulatorError: a column shift, whose effect the ISA leaves open, or a reserved bit.
    """
    if descriptor >> 36 & 7:
        raise EmulatorError(f"zero-column mask {descriptor:#018x}: reserved bits 36-38 are set")
    if not descriptor >> 39 & 1:
        return np.zeros(n, bool)
    if descriptor >> 56 & 63:
        raise EmulatorError(f"zero-column mask {descriptor:#018x}: column shifts are not modelled")
    skip, use = (descriptor >> 40 & 0xFF) + 1, (descriptor >> 48 & 0xFF) + 1
    width, parts = n * m // 128, []
    for i in range(128 // m):
        zeros_first, start = descriptor >> 32 + i & 1, descriptor >> 8 * i & 0xFF
        spans = [np.ones(skip, bool), np.zeros(use, bool)]
        period = np.concatenate(spans if zeros_first else spans[::-1])
        parts.append(np.resize(period, start + width)[start:])
    return np.concatenate(parts)


# ---- scale factors -----------------------------------------------------------------------------------------------
class ScalePlaces(NamedTuple):
    """Places of the scale bytes of an operand in tensor memory.

    Attributes:
        columns: number of columns from the first to the last that is read.
        words: int (replicas, rows, count): flat index, 128 lanes by `columns`, of each scale's word.
        bytes: int (count,): index of the scale's byte in its word.
        first: int (rows, count): flat index of each scale's byte in the first replica.
        replicas: shape (groups, replicas, 32) of lanes: all lanes of a group hold the same rows.
        words_of_rows: the scales of a row are the four bytes of one word.
    """

    columns: int
    words: np.ndarray
    bytes: np.ndarray
    first: np.ndarray
    replicas: tuple[int, int, int]
    words_of_rows: bool


@lru_cache(512)
def scale_places(rows: int, count: int, sf_id: int, halves: bool = False) -> ScalePlaces:
    """Returns the places of the `count` scales of each of `rows` rows; the first scale is byte `sf_id` of its word.

    Row r has its words in lane r % 32 and column r / 32, repeated in all four groups of 32 lanes. Four scales fill a
    word. Further scales (K=96) continue in the words of the next 4 columns per 128 rows. `halves`: the rows of B of a
    pair with M=128, whose two halves lie in lanes 0 to 63 and 64 to 127, each twice.
    """
    index = np.arange(count) + sf_id
    later = index // 4 * 4 * -(-rows // 128)
    row = np.arange(rows)[:, None]
    if halves:
        half = rows // 2
        lane, column = row % half % 32 + 64 * (row // half), row % half // 32 + later
        lanes = np.stack([lane, lane + 32])
    else:
        lane, column = row % 32, row // 32 + later
        lanes = np.stack([lane + 32 * quadrant for quadrant in range(4)])
    columns = int(column.max()) + 1
    words = lanes * columns + column
    first = words[0] * 4 + index % 4
    for array in (words, index, first):
        array.setflags(write=False)
    replicas = (2, 2, 32) if halves else (1, 4, 32)
    return ScalePlaces(columns, words, index % 4, first, replicas, not halves and count == 4 and not sf_id)


def read_scales(words: np.ndarray, column: int, places: ScalePlaces) -> np.ndarray:
    """Scale bytes of an operand.

    Args:
        words: uint32 (128, 512) tensor memory.
        column: first column.
        places: places of the bytes, relative to that column.

    Returns:
        uint8 (rows, count).

    Raises:
        EmulatorError: the copies in the groups of 32 lanes differ. Each group feeds its own part of the data path.
    """
    near = words[:, column : column + places.columns].tobytes()
    groups, replicas, _ = places.replicas
    size = len(near) // groups
    # Compares bytes objects, because NumPy takes ten times as long to compare arrays of this size.
    parts = [near[start : start + size] for start in range(0, len(near), size)]
    if all(part == part[: size // replicas] * replicas for part in parts):
        return np.frombuffer(near, np.uint8).take(places.first)
    # Words without a scale may differ.
    found = np.frombuffer(near, np.uint32)[places.words]
    if (found[1:] != found[0]).any():
        raise EmulatorError(
            f"scale factors in tensor-memory columns {column}..{column + places.columns - 1} are not the same in all "
            "groups of 32 lanes that need them: copy them with a tcgen05.cp that multicasts to warps"
        )
    return (found[0] >> (8 * places.bytes).astype(np.uint32)).astype(np.uint8)


# ---- tcgen05.cp --------------------------------------------------------------------------------------------------
class CopyShape(NamedTuple):
    """A shape of tcgen05.cp: source rows, bytes per row, and the destination lane of each row in each replica."""

    rows: int
    row_bytes: int
    lanes: np.ndarray


def _copy_shapes() -> dict[str, CopyShape]:
    r = np.arange(128)
    low = np.arange(32)
    return {
        "128x256b": CopyShape(128, 32, r[None]),
        "128x128b": CopyShape(128, 16, r[None]),
        "4x256b": CopyShape(4, 32, 32 * np.arange(4)[None]),
        "64x128b.warpx2::02_13": CopyShape(64, 16, np.stack([r[:64], r[:64] + 64])),
        "64x128b.warpx2::01_23": CopyShape(
            64, 16, np.stack([np.r_[low, low + 64], np.r_[low + 32, low + 96]])
        ),
        "32x128b.warpx4": CopyShape(32, 16, np.stack([low + 32 * w for w in range(4)])),
    }


COPY_SHAPES = _copy_shapes()


def unpack_elements(data: np.ndarray, bits: int) -> np.ndarray:
    """Returns the codes of 4- or 6-bit elements, which fill the first bytes of each group of 16: uint8 (..., 16 n), same shape.

    Each group of 16 elements takes 16 bytes: 8 of data and 8 of padding, or 12 and 4.
    """
    groups = data.reshape(*data.shape[:-1], -1, 16)
    if bits == 4:
        packed = groups[..., :8]
        return np.stack([packed & 15, packed >> 4], -1).reshape(data.shape)
    triples = groups[..., :12].reshape(*groups.shape[:-1], 4, 3).astype(np.uint32)
    word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    codes = word[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63
    return codes.astype(np.uint8).reshape(data.shape)


CONTAINER_SHIFT = {"e2m1": 2, "e2m3": 0, "e3m2": 0}
"""Lowest bit of an element of A in tensor memory within its 8-bit container.

The ISA shows it only in figures. These values are those of mma.sync registers, where the exponent of e2m1 coincides
with that of e2m3. An example in CUTLASS says bit 1 for e3m2; a kernel that fills tensor memory by tcgen05.cp cannot see
the difference.
"""


# ---- tcgen05.ld and .st ------------------------------------------------------------------------------------------
class LoadShape(NamedTuple):
    """A shape of tcgen05.ld/st: registers per repetition, the largest repetition, and the lanes that it covers."""

    registers: int
    most: int
    lanes: int


LOAD_SHAPES = {
    "32x32b": LoadShape(1, 128, 32),
    "16x64b": LoadShape(1, 128, 16),
    "16x128b": LoadShape(2, 64, 16),
    "16x256b": LoadShape(4, 32, 16),
    "16x32bx2": LoadShape(1, 128, 16),
}


@lru_cache(256)
def load_map(shape: str, repeat: int, half_split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns lane and column, relative to the address, of register r of thread t: two arrays (registers, 32).

    Args:
        shape: a key of LOAD_SHAPES.
        repeat: N of ``.xN``.
        half_split: column offset of the upper 16 threads (16x32bx2 only).
    """
    t = np.arange(32)
    r = np.arange(LOAD_SHAPES[shape].registers * repeat)[:, None]
    if shape == "32x32b":
        lane, column = t + 0 * r, r + 0 * t
    elif shape == "16x64b":
        lane, column = (t >> 2) + 8 * (t & 1) + 0 * r, 2 * r + (t >> 1 & 1)
    elif shape == "16x128b":
        lane, column = (t >> 2) + 8 * (r & 1), (t & 3) + 4 * (r >> 1)
    elif shape == "16x256b":
        lane, column = (t >> 2) + 8 * (r >> 1 & 1), 2 * (t & 3) + (r & 1) + 8 * (r >> 2)
    else:
        lane, column = (t & 15) + 0 * r, r + half_split * (t >> 4)
    lane.setflags(write=False)
    column.setflags(write=False)
    return lane, column
