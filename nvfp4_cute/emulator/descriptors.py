"""Matrix descriptors, instruction descriptors, and where matrices lie in tensor memory.

Everything here is a pure function of immediate values; the results that matter for speed (index maps) are cached.
Sections of the PTX ISA: "Shared memory descriptor", "Instruction descriptor", "Canonical layouts", "Data path layout
organization", "Matrix fragments for tcgen05.ld/st", "tcgen05.cp".
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nvfp4_cute.emulator.tensormap import swizzle_address
from nvfp4_cute.errors import EmulatorError

OPERAND_ROW_BYTES = 32
"""Bytes of K that one tcgen05.mma reads of each row, for every kind."""

BLOCK_SCALED_KINDS = ("mxf4nvf4", "mxf4", "mxf8f6f4")
DENSE_KINDS = ("f16", "tf32", "f8f6f4")


# ---- shared-memory matrix descriptors ----------------------------------------------------------------------------
class _Swizzle(NamedTuple):
    mode: str
    atom: str
    row_bytes: int  # of a row of the swizzle atom


_SWIZZLE_CODES = {
    0: _Swizzle("none", "16B", 16),
    1: _Swizzle("128B", "32B", 128),
    2: _Swizzle("128B", "16B", 128),
    4: _Swizzle("64B", "16B", 64),
    6: _Swizzle("32B", "16B", 32),
}


class SmemDescriptor(NamedTuple):
    """A decoded shared-memory matrix descriptor; byte units."""

    start: int
    leading: int
    stride: int
    swizzle: _Swizzle


@lru_cache(4096)
def decode_smem_descriptor(value: int) -> SmemDescriptor:
    """Decode a 64-bit descriptor.

    Bits: 0-13 start/16, 16-29 leading-dimension offset/16, 32-45 stride-dimension offset/16, 46-48 constant 1,
    49-51 base offset, 52 absolute leading dimension, 61-63 swizzle (0 none, 1 128B with 32B atom, 2 128B, 4 64B,
    6 32B).

    Raises:
        EmulatorError: a reserved value, or a mode that is not modelled.
    """
    code = value >> 61 & 7
    if value >> 46 & 7 != 1:
        raise EmulatorError(f"matrix descriptor {value:#018x}: bits 46-48 are {value >> 46 & 7}, must be 1")
    if code not in _SWIZZLE_CODES:
        raise EmulatorError(f"matrix descriptor {value:#018x}: swizzle code {code} is reserved")
    if value >> 49 & 7 or value >> 52 & 1 or value >> 53 & 0xFF:
        raise EmulatorError(
            f"matrix descriptor {value:#018x}: base offset, absolute leading dimension (bits 49-60) not modelled"
        )
    field = lambda low: (value >> low & 0x3FFF) << 4
    return SmemDescriptor(field(0), field(16), field(32), _SWIZZLE_CODES[code])


class Gather(NamedTuple):
    """An index map into shared memory and the byte range that it touches, for the bounds check.

    A swizzle may reach a little beyond the linear range, so the range is that of the final addresses.
    """

    indices: np.ndarray
    first_byte: int
    nbytes: int

    @classmethod
    def of(cls, addresses: np.ndarray, unit: int) -> "Gather":
        """Map of units of `unit` bytes at the given byte addresses; read-only."""
        indices = addresses // unit
        indices.setflags(write=False)
        low, high = int(addresses.min()), int(addresses.max())
        return cls(indices, low, high - low + unit)


@lru_cache(4096)
def k_major_chunks(descriptor: int, rows: int, row_bytes: int = OPERAND_ROW_BYTES) -> Gather:
    """The 16-byte chunks of a K-major operand; indices (address / 16) of shape (rows, row_bytes / 16).

    Swizzled: start + (r/8)*stride + (r%8)*W + kb with W = 32, 64 or 128, then the swizzle XOR on the absolute
    address. Not swizzled: start + (r/8)*stride + (r%8)*16 + (kb/16)*leading.
    """
    d = decode_smem_descriptor(descriptor)
    if d.swizzle.atom != "16B":
        raise EmulatorError(
            f"matrix descriptor {descriptor:#018x}: the 32B atom is for MN-major operands only"
        )
    row, chunk = np.arange(rows)[:, None], np.arange(row_bytes // 16)
    pitch = d.leading if d.swizzle.mode == "none" else 16
    address = d.start + row // 8 * d.stride + row % 8 * d.swizzle.row_bytes + chunk * pitch
    return Gather.of(swizzle_address(address, d.swizzle.mode), 16)


@lru_cache(4096)
def mn_major_bytes(descriptor: int, rows: int, element_bytes: int) -> Gather:
    """The bytes of an MN-major operand; indices (address) of shape (rows, 32 / element_bytes, element_bytes).

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
    return Gather.of(swizzle_address(address, d.swizzle.mode, d.swizzle.atom), 1)


# ---- instruction descriptors -------------------------------------------------------------------------------------
class InstructionDescriptor(NamedTuple):
    """A decoded and checked 32-bit instruction descriptor.

    Attributes:
        m: rows of D over all CTAs of the group.
        n: columns of D.
        a_format: element format of A, as `numerics.ElementType` names it.
        b_format: element format of B.
        d_type: "f32" or "f16".
        negate_a: use -A.
        negate_b: use -B.
        a_mn_major: A is MN-major in shared memory.
        b_mn_major: B is MN-major.
        scale_type: "ue4m3" or "ue8m0" (block-scaled kinds), else None.
        a_sf_id: first scale byte of A in its tensor-memory words.
        b_sf_id: the same for B.
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


_F8F6F4_FORMATS = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4_FORMATS,
    "mxf8f6f4": _F8F6F4_FORMATS,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}


@lru_cache(1024)
def decode_instruction_descriptor(
    value: int, kind: str, *, cta_group: int = 1, scale_block: int | None = None, ws: bool = False
) -> InstructionDescriptor:
    """Decode the instruction descriptor of a tcgen05.mma and check it against the rules of its kind.

    Dense kinds: 2 sparse, 3 saturate, 4-5 D format, 7-9/10-12 A/B format, 13/14 negate, 15/16 MN-major, 17-22 N/8,
    24-28 M/16. Block-scaled kinds: 4-5 B scale id, 23 scale type (0 ue4m3, 1 ue8m0), 29-30 A scale id, 31 K=96.

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
    scaled = kind in BLOCK_SCALED_KINDS
    if value >> 2 & 1:
        raise refuse("sparse matrices are not modelled")
    if value & 3 or value >> 6 & 1 or (value >> 3 & 1 if scaled else value >> 23 & 1):
        raise refuse("a reserved bit is set")
    if not scaled and (value >> 3 & 1 or value >> 30):
        raise refuse("saturation and B reuse shifts are not modelled")
    if scaled and value >> 31:
        raise refuse("K=96 needs sm_103a and is not modelled")
    formats, codes = _FORMATS[kind], (value >> 7 & 7, value >> 10 & 7)
    if any(code not in formats for code in codes):
        raise refuse(f"element format codes {codes}, legal are {sorted(formats)}")
    result = InstructionDescriptor(
        m=(value >> 24 & 31) * 16,
        n=(value >> 17 & 63) * 8,
        a_format=formats[codes[0]],
        b_format=formats[codes[1]],
        d_type="f32" if scaled else {0: "f16", 1: "f32"}.get(value >> 4 & 3, ""),
        negate_a=bool(value >> 13 & 1),
        negate_b=bool(value >> 14 & 1),
        a_mn_major=bool(value >> 15 & 1),
        b_mn_major=bool(value >> 16 & 1),
        scale_type=("ue8m0" if value >> 23 & 1 else "ue4m3") if scaled else None,
        a_sf_id=value >> 29 & 3 if scaled else 0,
        b_sf_id=value >> 4 & 3 if scaled else 0,
    )
    if not result.d_type or (result.d_type == "f16" and kind == "tf32"):
        raise refuse(f"D format code {value >> 4 & 3}")
    if (result.a_mn_major or result.b_mn_major) and kind in ("mxf4", "mxf4nvf4"):
        raise refuse("4-bit operands are K-major only")
    if scaled:
        _check_scales(result, kind, scale_block, refuse)
    reason = shape_reason(kind, result.m, result.n, cta_group=cta_group, ws=ws)
    if reason:
        raise refuse(reason)
    return result


def _check_scales(
    d: InstructionDescriptor, kind: str, scale_block: int | None, refuse: Callable[[str], EmulatorError]
) -> None:
    """Legal scale types and byte selectors: (kind, block) -> types, and the selectors that leave room for all."""
    types = {
        ("mxf8f6f4", 32): ("ue8m0",),
        ("mxf4", 32): ("ue8m0",),
        ("mxf4nvf4", 32): ("ue8m0",),
        ("mxf4nvf4", 16): ("ue8m0", "ue4m3"),
    }.get((kind, scale_block or 0), ())
    if d.scale_type not in types:
        raise refuse(f"scale type {d.scale_type} with blocks of {scale_block}; legal are {types or 'none'}")
    ids: tuple[int, ...] = (0,) if scale_block == 16 else (0, 2) if kind != "mxf8f6f4" else (0, 1, 2, 3)
    if d.a_sf_id not in ids or d.b_sf_id not in ids:
        raise refuse(f"scale ids {d.a_sf_id}, {d.b_sf_id}; legal are {ids}")


def shape_reason(kind: str, m: int, n: int, *, cta_group: int, ws: bool = False) -> str | None:
    """Why M x N is not a shape of this kind, or None."""
    if ws:
        if cta_group != 1 or kind in BLOCK_SCALED_KINDS:
            return "weight-stationary instructions are dense and of cta_group::1"
        ok = m in (32, 64, 128) and n in (64, 128, 256)
        return None if ok else f"shape {m}x{n}; legal are M in (32, 64, 128), N in (64, 128, 256)"
    legal_m = (128, 256) if cta_group == 2 else (128,) if kind in BLOCK_SCALED_KINDS else (64, 128)
    step = 16 if cta_group == 2 or (m == 128 and kind not in BLOCK_SCALED_KINDS) else 8
    if m in legal_m and step <= n <= 256 and n % step == 0:
        return None
    return (
        f"shape {m}x{n} with cta_group::{cta_group}; legal are M in {legal_m}, N in {step}..256 step {step}"
    )


# ---- accumulators ------------------------------------------------------------------------------------------------
class AccumulatorBlock(NamedTuple):
    """A rectangle of D: where its rows and columns lie in the tensor memory of one CTA of the group."""

    cta: int
    rows: slice
    columns: slice
    lanes: slice
    column_offset: int


@lru_cache(256)
def accumulator_blocks(
    m: int, n: int, cta_group: int, ws: bool, base_lane: int
) -> tuple[AccumulatorBlock, ...]:
    """The rectangles that make up D (layouts A to G of the PTX ISA), one 32-bit column per element.

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


# ---- scale factors -----------------------------------------------------------------------------------------------
def scale_columns(rows: int) -> int:
    """Tensor-memory columns that hold the scale words of `rows` rows: row r lies in lane r%32, column r/32."""
    return -(-rows // 32)


def read_scales(words: np.ndarray, column: int, rows: int, count: int, sf_id: int) -> np.ndarray:
    """Scale bytes of an operand.

    Args:
        words: uint32 (128, 512) tensor memory.
        column: first column.
        rows: rows of the operand.
        count: scales per row of one instruction: 4, 2 or 1.
        sf_id: first byte of the word.

    Returns:
        uint8 (rows, count).

    Raises:
        EmulatorError: the four groups of 32 lanes, each of which feeds its own part of the data path, disagree.
    """
    columns = scale_columns(rows)
    quadrants = words.reshape(4, 32, -1)[:, :, column : column + columns]
    needed = quadrants.transpose(0, 2, 1).reshape(4, -1)[:, :rows]  # (4, rows)
    if (needed[1:] != needed[0]).any():
        raise EmulatorError(
            f"scale factors in tensor-memory columns {column}..{column + columns - 1} are not the same in all four "
            "groups of 32 lanes: copy them with tcgen05.cp.32x128b.warpx4"
        )
    return np.ascontiguousarray(needed[0]).view(np.uint8).reshape(-1, 4)[:, sf_id : sf_id + count]


# ---- tcgen05.cp --------------------------------------------------------------------------------------------------
class CopyShape(NamedTuple):
    """A shape of tcgen05.cp: source rows, bytes of each, and for each replica the destination lane of each row."""

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


# ---- tcgen05.ld and .st ------------------------------------------------------------------------------------------
class LoadShape(NamedTuple):
    """A shape of tcgen05.ld/st: registers per repetition, the largest repetition, and the lanes it covers."""

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
    """Lane and column, relative to the address, of register r of thread t: two arrays (registers, 32).

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
