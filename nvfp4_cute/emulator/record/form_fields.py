"""Text of the fields that instructions use: descriptors, columns of tensor memory, tensor maps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvfp4_cute.emulator.descriptors import (
    BLOCK_SCALED_KINDS,
    decode_instruction_descriptor,
    decode_smem_descriptor,
)
from nvfp4_cute.emulator.isa.tma import load_map
from nvfp4_cute.emulator.isa.wgmma import as_tcgen05
from nvfp4_cute.emulator.ptx import Address, Inst

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Warp

COLUMN_MASK = 0xFFFF
SCALE_STEP = 4  # columns per block of scales
ACCUMULATOR_STEP = 16
SWIZZLE_SPAN = 128

Texts = Iterator[tuple[str, str]]


def matrix(descriptor: int, mn_major: bool, *, narrow: bool = False) -> str:
    """Returns a shared-memory matrix descriptor without its address and without offsets that its layout does not use.

    narrow: rows of 16 bytes, so there is no second chunk for the leading offset.
    """
    d = decode_smem_descriptor(descriptor)
    swizzle = "no swizzle" if d.swizzle.mode == "none" else f"swizzle {d.swizzle.mode} of {d.swizzle.atom}"
    start = "" if d.swizzle.mode == "none" else f", start mod {SWIZZLE_SPAN} = {d.start % SWIZZLE_SPAN}"
    more = (f", base offset {d.pattern // 128}" if d.pattern else "") + (", absolute" if d.absolute else "")
    major = "MN-major" if mn_major else "K-major"
    has_leading = mn_major or d.absolute or (d.swizzle.mode == "none" and not narrow)
    leading = f", leading {'anywhere' if d.absolute else d.leading}" if has_leading else ""
    return f"{major}, {swizzle}{leading}, stride {d.stride}{start}{more}"


def shares(mask: int, warp: "Warp") -> str:
    """Returns the CTAs of a multicast mask as text."""
    return f"{mask.bit_count()} of {len(warp.cta.cluster.ctas)} CTAs"


@dataclass(frozen=True)
class Mma:
    """A tcgen05.mma, by its modifiers."""

    kind: str
    group: int
    ws: bool
    a_in_tmem: bool
    block: int | None

    @staticmethod
    def of(inst: Inst) -> "Mma":
        """Reads the modifiers of an instruction."""
        kind = next(m for m in inst.mods if m.startswith("kind::")).removeprefix("kind::")
        group = 2 if "cta_group::2" in inst.mods else 1
        block = None
        if kind in BLOCK_SCALED_KINDS:
            words = set(inst.mods)
            block = 16 if words & {"scale_vec::4X", "block16"} else 32
        return Mma(kind, group, "ws" in inst.mods, isinstance(inst.operands[1], Address), block)

    @property
    def is_scaled(self) -> bool:
        """Whether operands have scale factors."""
        return self.block is not None

    @property
    def name(self) -> str:
        """The name, without fields."""
        block = f".block{self.block}" if self.block else ""
        return f"tcgen05.mma{'.ws' if self.ws else ''}.kind::{self.kind}{block}.cta_group::{self.group}"

    def texts(self, warp: "Warp", d: int, a: int, b: int, idesc: int, sfa: int = 0, sfb: int = 0) -> Texts:
        """Returns texts of shape and types, columns, and matrices."""
        x = decode_instruction_descriptor(
            idesc, self.kind, cta_group=self.group, scale_block=self.block, ws=self.ws
        )
        negated = "".join(f", negated {n}" for n, flag in (("A", x.negate_a), ("B", x.negate_b)) if flag)
        types = f"{x.a_format} x {x.b_format} -> {x.d_type}"
        scales = f", {x.scale_type} scales, ids {x.a_sf_id} and {x.b_sf_id}" if self.is_scaled else ""
        k = "" if x.row_bytes == 32 else ", K=96"
        shape = f"M={x.m} N={x.n}"
        yield "mma", f"{self.name} {shape}{k}, {types}{scales}{negated}"
        column = (d & COLUMN_MASK) % ACCUMULATOR_STEP
        yield "mma", f"{self.name} accumulator column mod {ACCUMULATOR_STEP} = {column}"
        if self.is_scaled:
            places = f"mod {SCALE_STEP} = {(sfa & COLUMN_MASK) % SCALE_STEP} of A, {(sfb & COLUMN_MASK) % SCALE_STEP} of B"
            yield "scale columns", f"{self.name} {shape}, columns {places}"
        if not self.a_in_tmem:
            yield "matrix", f"A of {self.name}: {matrix(a, x.a_mn_major)}"
        yield "matrix", f"B of {self.name}: {matrix(b, x.b_mn_major)}"


@dataclass(frozen=True)
class TensorMemoryCopy:
    """A tcgen05.cp, by its modifiers."""

    name: str

    def texts(self, warp: "Warp", address: int, descriptor: int) -> Texts:
        """Returns texts of source and column."""
        yield "matrix", f"source of {self.name}: {matrix(descriptor, False, narrow='32x128b' in self.name)}"
        column = (address & COLUMN_MASK) % SCALE_STEP
        yield "scale columns", f"{self.name}, column mod {SCALE_STEP} = {column}"


@dataclass(frozen=True)
class Wgmma:
    """A wgmma, by its element types."""

    types: str

    def texts(self, warp: "Warp", b: int, a: int | None = None) -> Texts:
        """Returns texts of the matrices. Their offsets are unchanged, because no descriptor says whether they are MN-major."""
        for side, descriptor in (("B", b), ("A", a)):
            if descriptor is not None:
                yield "matrix", f"{side} of wgmma {self.types}: {matrix(as_tcgen05(descriptor), False)}"


@dataclass(frozen=True)
class TensorCopy:
    """A copy with a tensor map, by its modifiers."""

    name: str
    has_hint: bool
    is_multicast: bool

    @staticmethod
    def of(inst: Inst, name: str) -> "TensorCopy":
        """Reads the modifiers of an instruction with this name."""
        return TensorCopy(name, "L2::cache_hint" in inst.mods, "multicast::cluster" in inst.mods)

    def texts(self, warp: "Warp", address: int, shared: int, hint: int, mask: int) -> Texts:
        """Returns texts of the map's fields, the place in shared memory, the cache policy, and the receiving CTAs."""
        m = load_map(warp.cta, address)
        swizzle = "no swizzle" if m.swizzle == "none" else f"swizzle {m.swizzle} of {m.atom}"
        inner = m.box[0] * m.element.bits // 8
        steps = "" if set(m.element_strides) == {1} else f", element strides {m.element_strides}"
        fill = ", NaN fill" if m.nan_fill else ""
        what = "prefetch" if "prefetch" in self.name else "store" if ".global.shared" in self.name else "load"
        yield (
            "tensor map",
            f"{what}: rank {m.rank}, {m.element.name}, {swizzle}, rows of {inner} B{steps}{fill}",
        )
        if self.has_hint:
            yield "tensor map", f"{what}: L2 policy {hint:#018x}"
        if self.is_multicast:
            yield "tensor map", f"{self.name} to {shares(mask, warp)}"
