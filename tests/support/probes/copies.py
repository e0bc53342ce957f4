"""Probes of asynchronous copies: tensor copies (TMA), bulk copies, reductions, edits of tensor maps."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probes.backends import HEADER, Backend, Map, Probe, Results, aligned

BITS = {"u8": 8, "u16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64, "f16": 16, "f32": 32, "f32.ftz": 32, "f64": 64, "bf16": 16, "tf32": 32, "tf32.ftz": 32}  # fmt: skip
POISON = 0xA5A5A5A5


def entry(params: dict[str, str], body: str) -> str:
    """A module with one kernel; parameters by name and type, dynamic shared memory `smem`."""
    kinds = {"map": ".param .align 64 .b8 {}[128]", "ptr": ".param .u64 {}", "u32": ".param .u32 {}"}
    text = ", ".join(kinds[kind].format(name) for name, kind in params.items())
    return f"""{HEADER}.extern .shared .align 1024 .b8 smem[];
.visible .entry k({text})
{{
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<64>;
.reg .b32 %c<5>;
.reg .b64 %rd<32>;
{body}
ret;
}}
"""


COPY_IN = """
COPY_IN:
setp.ge.u32 %p1, %r3, %r2;
@%p1 bra COPIED_IN;
cvt.u64.u32 %rd4, %r3; add.u64 %rd4, %rd4, %rd3;
ld.global.b32 %r4, [%rd4]; add.u32 %r5, %r1, %r3; st.shared.b32 [%r5], %r4;
add.u32 %r3, %r3, %r6;
bra COPY_IN;
COPIED_IN:
"""
"""%r2 bytes from global %rd3 to shared %r1, by a CTA of %r6 / 4 threads; %r3 = 4 * thread."""

COPY_OUT = """
mov.u32 %r3, %tid.x; shl.b32 %r3, %r3, 2;
COPY_OUT:
setp.ge.u32 %p1, %r3, %r2;
@%p1 bra COPIED_OUT;
cvt.u64.u32 %rd4, %r3; add.u64 %rd4, %rd4, %rd2;
add.u32 %r5, %r1, %r3; ld.shared.b32 %r4, [%r5]; st.global.b32 [%rd4], %r4;
add.u32 %r3, %r3, %r6;
bra COPY_OUT;
COPIED_OUT:
"""
"""Inverse of COPY_IN: to global %rd2."""

START = """
mov.u32 %r0, %tid.x; mov.u32 %r1, smem; ld.param.u32 %r2, [nbytes]; shl.b32 %r3, %r0, 2; mov.u32 %r6, %ntid.x; shl.b32 %r6, %r6, 2;
ld.param.u64 %rd2, [out]; add.u32 %r7, %r1, %r2; setp.eq.u32 %p0, %r0, 0;
"""
"""%r1 shared memory, %r2 its bytes, %r7 the mbarrier behind it, %rd2 where it is copied in the end, %p0 first thread."""

FILL = """
FILL:
setp.ge.u32 %p1, %r3, %r2;
@%p1 bra FILLED;
add.u32 %r5, %r1, %r3; mov.u32 %r4, 0xA5A5A5A5; st.shared.b32 [%r5], %r4; add.u32 %r3, %r3, %r6;
bra FILL;
FILLED:
@%p0 mbarrier.init.shared.b64 [%r7], 1;
@%p0 fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
bar.sync 0;
"""

POLL = """
mov.u32 %r10, 0;
POLL:
mbarrier.test_wait.parity.shared.b64 %p2, [%r7], 0;
@%p2 bra DONE;
add.u32 %r10, %r10, 1; setp.lt.u32 %p3, %r10, %r9;
@%p3 bra POLL;
DONE:
bar.sync 0;
"""
"""At most %r9 polls; %p2: the barrier completed."""

FLAG = """
selp.u32 %r11, 1, 0, %p2; add.u64 %rd5, %rd2, %rd6; @%p0 st.global.b32 [%rd5], %r11;
"""


def coordinates(rank: int) -> str:
    """Instructions that load %c0.. from the array `at`."""
    return "ld.param.u64 %rd1, [at];" + "".join(f"ld.global.b32 %c{i}, [%rd1+{4 * i}];" for i in range(rank))


def _list(rank: int) -> str:
    return ", ".join(f"%c{i}" for i in range(rank))


def load_text(rank: int) -> str:
    """Load a tile at shared offset `offset` of poisoned memory, expecting `expected` bytes."""
    body = START + FILL + coordinates(rank) + f"""
ld.param.u32 %r8, [expected]; ld.param.u32 %r9, [spins]; ld.param.u32 %r12, [offset]; add.u32 %r12, %r12, %r1;
mov.b64 %rd7, map; cvta.param.u64 %rd7, %rd7;
@!%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 %rd8, [%r7], %r8;
cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r12], [%rd7, {{{_list(rank)}}}], [%r7];
WAIT:
bar.warp.sync -1;
""" + POLL + COPY_OUT + "cvt.u64.u32 %rd6, %r2;" + FLAG  # fmt: skip
    params = {
        "map": "map",
        "at": "ptr",
        "out": "ptr",
        "nbytes": "u32",
        "expected": "u32",
        "offset": "u32",
        "spins": "u32",
    }
    return entry(params, body)


def store_text(rank: int, opcode: str) -> str:
    """Store (or reduce) a tile from shared memory filled with `data`."""
    body = f"""
mov.u32 %r0, %tid.x; mov.u32 %r1, smem; ld.param.u32 %r2, [nbytes]; shl.b32 %r3, %r0, 2; mov.u32 %r6, %ntid.x; shl.b32 %r6, %r6, 2;
setp.eq.u32 %p0, %r0, 0; ld.param.u64 %rd3, [data];
{COPY_IN}
fence.proxy.async.shared::cta; bar.sync 0;
{coordinates(rank)}
ld.param.u32 %r12, [offset]; add.u32 %r12, %r12, %r1; mov.b64 %rd7, map; cvta.param.u64 %rd7, %rd7;
@!%p0 bra END;
{opcode} [%rd7, {{{_list(rank)}}}], [%r12];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END:
bar.warp.sync -1;
"""
    return entry({"map": "map", "at": "ptr", "data": "ptr", "nbytes": "u32", "offset": "u32"}, body)


# ---- tensor loads and stores ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tile:
    """One tensor copy: the map's fields, the coordinates, the offset in shared memory."""

    dims: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    element: str = "u16"
    options: tuple[tuple[str, Any], ...] = ()
    offset: int = 0
    pitch: int = 0
    missing: int = 0

    @property
    def label(self) -> str:
        words = [
            f"{self.element} {self.dims} box {self.box} at {self.at}",
            *(f"{k} {v}" for k, v in self.options),
        ]
        words += [f"offset {self.offset}"] * bool(self.offset) + [f"expect {-self.missing:+}"] * bool(
            self.missing
        )
        return ", ".join(words)

    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours in dimensions 1, 2, ...: rows are padded to 16 bytes or to `pitch`."""
        size = BITS[self.element] // 8
        result = [self.pitch or -(-self.dims[0] * size // 16) * 16]
        for d in self.dims[1:-1]:
            result.append(result[-1] * d)
        return tuple(result[: len(self.dims) - 1])

    @property
    def end(self) -> int:
        """Bytes from the tensor's first element to the end of its last."""
        return (
            sum((d - 1) * s for d, s in zip(self.dims[1:], self.strides(), strict=True))
            + self.dims[0] * BITS[self.element] // 8
        )

    def tensor(self) -> np.ndarray:
        """uint8 storage whose elements all differ, as far as their width allows."""
        size = BITS[self.element] // 8
        nbytes = self.strides()[-1] * self.dims[-1] if len(self.dims) > 1 else self.dims[0] * size
        count = -(-nbytes // size)
        if self.element in ("f32", "f32.ftz", "tf32", "tf32.ftz"):
            rng = np.random.default_rng(count)
            codes = rng.integers(0, 1 << 32, count, np.uint32)
            codes[::3] &= 0x807FFFFF  # subnormals
            codes[::7] |= 0x7F800000
            data: np.ndarray = codes
        else:
            data = (np.arange(count, dtype=np.uint64) * 0x0101010101 + 1).astype(f"u{size}")
        out = aligned(nbytes, np.uint8)
        out[:] = data.view(np.uint8)[:nbytes]
        return out

    def map(self, storage: np.ndarray) -> Map:
        return Map(storage, self.element, self.dims, self.strides(), self.box, dict(self.options))

    @property
    def box_bytes(self) -> int:
        """Bytes of the whole box in shared memory."""
        steps = dict(self.options).get("element_strides", (1,) * len(self.box))
        return (
            int(np.prod([-(-b // s) for b, s in zip(self.box, steps, strict=True)])) * BITS[self.element] // 8
        )

    @property
    def shared_bytes(self) -> int:
        return -(-(self.offset + self.box_bytes) // 1024) * 1024


def loads(tiles: list[Tile]) -> Probe:
    """Tensor loads: the shared memory around the tile, and whether the barrier completed."""

    def probe(backend: Backend) -> Results:
        results = {}
        for tile in tiles:
            storage, nbytes = tile.tensor(), tile.shared_bytes
            out = aligned(nbytes + 16, np.uint8)
            at = np.array(tile.at, np.int32)
            args = [
                tile.map(storage),
                at,
                out,
                nbytes,
                tile.box_bytes - tile.missing,
                tile.offset,
                backend.spins,
            ]
            backend.launch(load_text(len(tile.dims)), args, smem_bytes=nbytes + 16)
            results[tile.label] = out[: nbytes + 4].view(np.uint32)
        return results

    return probe


def stores(tiles: list[Tile], operation: str = "") -> Probe:
    """Tensor stores and reductions: the tensor afterwards."""

    def probe(backend: Backend) -> Results:
        results = {}
        for tile in tiles:
            tensor, nbytes = tile.tensor(), tile.shared_bytes
            rng = np.random.default_rng(nbytes)
            data = _operands(rng, nbytes, tile.element, tensor if operation else None)
            kind = f"cp.reduce.async.bulk.tensor.{len(tile.dims)}d.global.shared::cta.{operation}.tile.bulk_group"
            opcode = (
                kind
                if operation
                else f"cp.async.bulk.tensor.{len(tile.dims)}d.global.shared::cta.tile.bulk_group"
            )
            at = np.array(tile.at, np.int32)
            backend.launch(
                store_text(len(tile.dims), opcode),
                [tile.map(tensor), at, data, nbytes, tile.offset],
                smem_bytes=nbytes,
            )
            results[f"{operation} {tile.label}"] = tensor[: tile.end]
        return results

    return probe


FLOAT_CORNERS = {
    "f16": (np.uint16, [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0x0200]),
    "bf16": (np.uint16, [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0040]),
    "f32": (np.uint32, [0, 1 << 31, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
        0xFFC00001, 0x7F800001, 0x00400000]),
}  # fmt: skip


def float_pairs(element: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Two operand lists: all pairs of corners as far as they fit, then random values."""
    dtype, corners = FLOAT_CORNERS[element]
    rng = np.random.default_rng(count)
    x, y = (v.reshape(-1) for v in np.meshgrid(corners, corners))
    width = 16 if dtype is np.uint16 else 32
    top = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}[element]
    spread = 1 << (width - 6)
    random = [
        (rng.integers(top - spread, top + spread, count) | rng.integers(0, 2, count) << width - 1)
        for _ in range(2)
    ]
    lists = [np.concatenate([c, r])[:count].astype(dtype) for c, r in zip((x, y), random, strict=True)]
    return lists[0], lists[1]


def _operands(rng: np.random.Generator, nbytes: int, element: str, tensor: np.ndarray | None) -> np.ndarray:
    """Contents of shared memory. For a float reduction, this also sets the tensor, so that operands are corner cases."""
    out = aligned(nbytes, np.uint8)
    out[:] = rng.integers(0, 256, nbytes, np.uint8)
    if tensor is not None and element in FLOAT_CORNERS:
        size = BITS[element] // 8
        old, new = float_pairs(element, max(nbytes, tensor.size) // size)
        tensor[:] = old.view(np.uint8)[: tensor.size]
        out[:] = new.view(np.uint8)[:nbytes]
    return out


def _swizzle_tiles() -> list[Tile]:
    """Every swizzle at every 128-byte offset of its pattern, also with boxes narrower than its span."""
    tiles = []
    for swizzle, span in (("none", 64), ("32B", 32), ("64B", 64), ("128B", 128)):
        options = (("swizzle", swizzle),)
        offsets = (0, 128, 256, 384, 640, 896) if swizzle != "none" else (128,)
        tiles += [
            Tile((80, 24), (span // 2, 16), (8, 2), options=options, offset=offset) for offset in offsets
        ]
        if span == 64:
            tiles.append(Tile((80, 24), (span // 4, 8), (8, 1), options=options, offset=128))
    tiles.append(Tile((40, 6, 5), (32, 4, 3), (4, 1, 1), "u32", (("swizzle", "128B"),)))
    tiles.append(Tile((100, 6, 4), (96, 2, 3), (16, 1, 1), "u8", (("swizzle", "128B"),)))
    return tiles


def _edge_tiles() -> list[Tile]:
    """Boxes partly and wholly outside, ranks 1 to 5, every element type, zero and NaN fill."""
    tiles = [
        Tile((50,), (32,), (c,)) for c in (0, -8, 32, 56, -32, -24, 48, 1 << 30, -(1 << 31), (1 << 31) - 8)
    ]
    tiles += [
        Tile((20, 10), (16, 8), at)
        for at in ((-8, -2), (8, 6), (0, 10), (24, 0), (-16, 0), (0, -8), (-8, 9), (16, -7))
    ]
    tiles.append(Tile((20, 10), (16, 8), (8, 6), missing=-16))
    tiles.append(Tile((20, 10), (16, 8), (0, 4), pitch=64))
    tiles += [Tile((12, 5, 4), (8, 3, 2), at) for at in ((8, 3, 3), (-8, -1, -1), (0, 0, 4))]
    tiles += [Tile((12, 5, 4, 3), (8, 3, 2, 2), at) for at in ((8, 3, 3, 2), (0, -1, -1, -1), (0, 0, 0, -2))]
    tiles += [
        Tile((12, 3, 4, 3, 3), (8, 2, 2, 2, 2), at)
        for at in ((8, 2, 3, 2, 2), (0, -1, -1, -1, -1), (0, 0, 0, 0, 3))
    ]
    for element, bits in BITS.items():
        box = 256 // bits
        nan = (("nan_fill", True),) if element[0] in "fbt" else ()
        tiles.append(Tile((2 * box, 6), (box, 4), (box + box // 2, -1), element, nan))
    tiles.append(Tile((20, 10), (16, 8), (8, 6), "f16"))
    strides = lambda *s: (("element_strides", s),)
    for at in ((0, 0), (-8, -3), (0, -1), (8, 4), (0, 5), (16, -4)):
        tiles += [Tile((20, 11), (16, 8), at, options=strides(1, s)) for s in (2, 3)]
    tiles += [
        Tile((12, 9, 7), (8, 7, 5), at, options=strides(1, 3, 2))
        for at in ((0, 1, 1), (-8, -1, -1), (8, 6, 5), (0, -2, 4))
    ]
    return tiles


def _store_tiles() -> list[Tile]:
    """Stores inside and clipped, all swizzles, strided elements."""
    tiles = [Tile((20, 10), (16, 8), at) for at in ((0, 0), (8, 1), (8, 6), (24, 0), (16, 9))]
    tiles += [
        Tile((40, 24), (span // 2, 16), (8, 10), options=(("swizzle", s),), offset=128)
        for s, span in (("32B", 32), ("64B", 64), ("128B", 128))
    ]
    tiles += [Tile((40, 24), (16, 8), (8, 10), options=(("swizzle", s),)) for s in ("64B", "128B")]
    tiles += [
        Tile((50,), (32,), (32,)),
        Tile((12, 5, 4), (8, 3, 2), (8, 3, 3)),
        Tile((12, 3, 4, 3, 3), (8, 2, 2, 2, 2), (8, 2, 3, 2, 2)),
    ]
    tiles += [Tile((20, 11), (16, 8), (8, 4), options=(("element_strides", (1, 2)),))]
    tiles += [Tile((16, 6), (8, 4), (12, 4), e) for e in ("f32", "f32.ftz", "tf32", "f64")]
    return tiles


REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32"), "min": ("u32", "s32", "u64", "s64", "f16", "bf16"), "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",), "dec": ("u32",), "and": ("u32", "u64"), "or": ("u32", "u64"), "xor": ("u32", "u64"),
}  # fmt: skip


def tensor_reductions(backend: Backend) -> Results:
    """Every reduction, with a clipped box; for floats all pairs of corner cases."""
    results: Results = {}
    for operation, elements in REDUCTIONS.items():
        for element in elements:
            box = 512 // BITS[element]
            tile = Tile((box, 20), (box, 18), (0, 3), element)
            results |= stores([tile], operation)(backend)
    return results


# ---- bulk copies ------------------------------------------------------------------------------------------------------
def bulk_text(instructions: str) -> str:
    """The first thread runs `instructions`: %rd3 global data, %r1 shared memory (a copy of the data), %r7 mbarrier."""
    body = START + "ld.param.u64 %rd3, [data];" + COPY_IN + """
@%p0 mbarrier.init.shared.b64 [%r7], 1;
fence.proxy.async; bar.sync 0;
ld.param.u32 %r9, [spins]; ld.param.u32 %r8, [expected]; ld.param.u64 %rd10, [target];
@!%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 %rd8, [%r7], %r8;
""" + instructions + "\nWAIT:\nbar.warp.sync -1;" + POLL + COPY_OUT + "cvt.u64.u32 %rd6, %r2;" + FLAG  # fmt: skip
    params = {
        "data": "ptr",
        "target": "ptr",
        "out": "ptr",
        "nbytes": "u32",
        "expected": "u32",
        "spins": "u32",
    }
    return entry(params, body)


BULK_REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"), "min": ("u32", "s32", "u64", "s64", "f16", "bf16"), "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",), "dec": ("u32",), "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"),
}  # fmt: skip
_BULK = {
    "load": ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd3+64], 208, [%r7];", 208),
    "load nothing": ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+16], [%rd3+64], 0, [%r7];", 0),
    "store": ("cp.async.bulk.global.shared::cta.bulk_group [%rd10+32], [%r1+16], 96; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", 0),
}  # fmt: skip


def bulk_copies(backend: Backend) -> Results:
    """cp.async.bulk in all directions within one CTA, and every reduction to global memory."""
    results: Results = {}
    cases = dict(_BULK)
    for operation, types in BULK_REDUCTIONS.items():
        for t in types:
            rounding = ".noftz" if t in ("f16", "bf16") and operation == "add" else ""
            cases[f"{operation}.{t}"] = (
                f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}{rounding}.{t} [%rd10], [%r1], 1024; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", 0,
            )  # fmt: skip
    for label, (instructions, expected) in cases.items():
        rng = np.random.default_rng(len(label))
        data, target, out = aligned(1024, np.uint8), aligned(1024, np.uint8), aligned(1040, np.uint8)
        data[:], target[:] = rng.integers(0, 256, (2, 1024), np.uint8)
        element = label.rpartition(".")[2]
        if element in FLOAT_CORNERS:
            old, new = float_pairs(element, 1024 // (BITS[element] // 8))
            data[:], target[:] = new.view(np.uint8), old.view(np.uint8)
        elif element == "f64":
            data.view(np.float64)[:], target.view(np.float64)[:] = rng.normal(0, 1, (2, 128))
        backend.launch(
            bulk_text(instructions), [data, target, out, 1024, expected, backend.spins], smem_bytes=1040
        )
        reduction = "." in label
        results[label] = target if reduction or label == "store" else out[:1028]
    return results


SMALL_COPIES = """
mov.u32 %r0, %tid.x; mov.u32 %r1, smem; mad.lo.u32 %r1, %r0, 64, %r1; ld.param.u64 %rd3, [data]; ld.param.u64 %rd2, [out];
mul.wide.u32 %rd4, %r0, 64; add.u64 %rd3, %rd3, %rd4; add.u64 %rd2, %rd2, %rd4; mov.u32 %r2, 0xA5A5A5A5;
""" + "".join(f"st.shared.b32 [%r1+{4 * i}], %r2;\n" for i in range(16)) + """
rem.u32 %r3, %r0, 17; rem.u32 %r4, %r0, 5; rem.u32 %r5, %r0, 9; setp.lt.u32 %p0, %r0, 7;
cp.async.ca.shared.global [%r1], [%rd3], 4; cp.async.ca.shared.global [%r1+4], [%rd3+4], 4, %r4;
cp.async.ca.shared.global [%r1+8], [%rd3+8], 8, %r5; cp.async.cg.shared.global [%r1+16], [%rd3+16], 16, %r3;
cp.async.cg.shared.global [%r1+32], [%rd3+32], 16, %p0; cp.async.ca.shared.global [%r1+48], [%rd3+48], 16;
cp.async.wait_all; bar.sync 0;
""" + "".join(f"ld.shared.b32 %r6, [%r1+{4 * i}]; st.global.b32 [%rd2+{4 * i}], %r6;\n" for i in range(16))  # fmt: skip


def small_copies(backend: Backend) -> Results:
    """cp.async of 4, 8 and 16 bytes, with source sizes and with an ignored source."""
    data, out = aligned(32 * 64, np.uint8), aligned(32 * 64, np.uint8)
    data[:] = np.arange(data.size) % 251
    backend.launch(entry({"data": "ptr", "out": "ptr"}, SMALL_COPIES), [data, out], smem_bytes=32 * 64)
    return {"cp.async": out}


# ---- clusters ----------------------------------------------------------------------------------------------------------
def cluster_text(instructions: str) -> str:
    """Two CTAs. The first thread of each expects `expected` bytes; then rank 0 runs `instructions` (%rd7 is the map)."""
    body = START + "mov.u32 %r20, %cluster_ctarank; mov.u32 %r21, %ctaid.x; add.u32 %r22, %r2, 16; mul.lo.u32 %r22, %r22, %r21; cvt.u64.u32 %rd9, %r22; add.u64 %rd2, %rd2, %rd9;" + FILL + """
ld.param.u32 %r8, [expected]; ld.param.u32 %r9, [spins]; mov.b64 %rd7, map; cvta.param.u64 %rd7, %rd7; ld.param.u64 %rd3, [data];
@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd8, [%r7], %r8;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
setp.eq.and.u32 %p4, %r20, 0, %p0; mov.u32 %r23, 1; mapa.shared::cluster.u32 %r24, %r1, %r23; mapa.shared::cluster.u32 %r25, %r7, %r23;
@!%p4 bra WAIT;
""" + instructions + "\nWAIT:\nbarrier.cluster.arrive; barrier.cluster.wait;" + POLL + """
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
""" + COPY_OUT + "cvt.u64.u32 %rd6, %r2;" + FLAG  # fmt: skip
    params = {"map": "map", "data": "ptr", "out": "ptr", "nbytes": "u32", "expected": "u32", "spins": "u32"}
    return entry(params, body)


_TENSOR = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_CLUSTER = {
    "both": f"mov.b16 %h0, 3; {_TENSOR}.multicast::cluster [%r1+128], [%rd7, {{8, -2}}], [%r7], %h0;",
    "the other by multicast": f"mov.b16 %h0, 2; {_TENSOR}.multicast::cluster [%r1], [%rd7, {{0, 1}}], [%r7], %h0;",
    "the other by address": f"{_TENSOR} [%r24], [%rd7, {{0, 1}}], [%r25];",
    "bulk to both": "mov.b16 %h0, 3; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd3], 256, [%r7], %h0;",
    "bulk to the other's shared memory": "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r24+512], [%r1+64], 256, [%r25];",
    "reduce in the other's shared memory": "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r24+512], [%r1+64], 256, [%r25];",
    "bulk to its own shared memory": "mov.u32 %r23, 0; mapa.shared::cluster.u32 %r24, %r1, %r23; cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r24+512], [%r1+64], 256, [%r7];",
}  # fmt: skip


def cluster_copies(backend: Backend) -> Results:
    """Multicast, and copies to another CTA: both shared memories, and which barriers completed."""
    tile, results = Tile((20, 10), (16, 8), (0, 0)), {}
    for label, instructions in _CLUSTER.items():
        storage, data, out = tile.tensor(), aligned(256, np.uint8), aligned(2 * 1040, np.uint8)
        data[:] = np.arange(256)
        backend.launch(
            cluster_text(instructions), [tile.map(storage), data, out, 1024, 256, backend.spins], grid=2, cluster=2, smem_bytes=1040
        )  # fmt: skip
        results[label] = np.concatenate([out[:1028], out[1040:2068]])
    return results


# ---- tensor maps in memory ----------------------------------------------------------------------------------------------
REPLACEMENTS = {
    "global_address.b64": (None, ["%rd9"]),
    "rank.b32": (None, [1, 4]),
    "box_dim.b32": (range(5), [1, 7, 256]),
    "global_dim.b32": (range(5), [1, 1000, 0xFFFFFFFF]),
    "global_stride.b64": (range(4), [16, 0x123456780, 0x8123456780]),
    "element_stride.b32": (range(5), [1, 3, 8]),
    "elemtype.b32": (None, list(range(13))),
    "interleave_layout.b32": (None, [1, 2]),
    "swizzle_mode.b32": (None, [0, 1, 2, 3]),
    "fill_mode.b32": (None, [0, 1]),
}
IMMEDIATE = ("elemtype.b32", "interleave_layout.b32", "swizzle_mode.b32", "fill_mode.b32")


def replacement_cases() -> dict[str, str]:
    """tensormap.replace of every field, by label."""
    cases = {}
    for field, (ordinals, values) in REPLACEMENTS.items():
        name, type_ = field.split(".")
        for ordinal in [None] if ordinals is None else ordinals:
            for value in values:
                load = (
                    ""
                    if field in IMMEDIATE
                    else "mov.b64 %rd11, 0x123456789A0;"
                    if value == "%rd9"
                    else f"mov.{type_} %{'rd11' if type_ == 'b64' else 'r11'}, {value};"
                )
                operand = value if field in IMMEDIATE else "%rd11" if type_ == "b64" else "%r11"
                where = "" if ordinal is None else f"{ordinal}, "
                cases[f"{name} {where}{value}"] = (
                    f"{load} tensormap.replace.tile.{name}.shared::cta.b1024.{type_} [%r1], {where}{operand};"
                )
    return cases


def replacements(backend: Backend) -> Results:
    """The 128 bytes of a tensor map after each tensormap.replace."""
    cases = replacement_cases()
    restore = "".join(
        f"ld.param.b64 %rd4, [map+{8 * i}]; st.shared.b64 [%r1+{8 * i}], %rd4;\n" for i in range(16)
    )
    dump = "".join(
        f"ld.shared.b64 %rd4, [%r1+{8 * i}]; st.global.b64 [%rd2+{8 * i}], %rd4;\n" for i in range(16)
    )
    body = "mov.u32 %r1, smem; ld.param.u64 %rd2, [out];\n"
    body += "".join(f"{restore}{text}\n{dump}add.u64 %rd2, %rd2, 128;\n" for text in cases.values())
    storage, out = aligned(1 << 12, np.uint8), aligned((len(cases), 128), np.uint8)
    options = {"swizzle": "64B", "element_strides": (1, 2, 2, 1, 1)}
    template = Map(storage, "f16", (64, 5, 5, 3, 2), (128, 640, 3200, 9600), (16, 4, 3, 2, 2), options)
    backend.launch(entry({"map": "map", "out": "ptr"}, body), [template, out], block=1, smem_bytes=128)
    return {label: row[8:] for label, row in zip(cases, out, strict=True)} | {"global_address": out[0, :8]}


EDITED = START + FILL + """
ld.param.u32 %r8, [expected]; ld.param.u32 %r9, [spins]; ld.param.u64 %rd9, [data]; ld.param.u64 %rd12, [place];
add.u32 %r20, %r7, 128; and.b32 %r20, %r20, 0xFFFFFF80;
@!%p0 bra COPIED;
""" + "".join(f"ld.param.b64 %rd4, [map+{8 * i}]; st.shared.b64 [%r20+{8 * i}], %rd4;\n" for i in range(16)) + """
tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r20], %rd9;
mov.b32 %r21, 9; tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r20], 1, %r21;
mov.b64 %rd13, 64; tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r20], 0, %rd13;
COPIED:
bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd12], [%r20], 128;
fence.proxy.tensormap::generic.acquire.gpu [%rd12], 128;
@!%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 %rd8, [%r7], %r8;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd12, {8, 3}], [%r7];
WAIT:
bar.warp.sync -1;
""" + POLL + COPY_OUT + "cvt.u64.u32 %rd6, %r2;" + FLAG  # fmt: skip


def edited_map(backend: Backend) -> Results:
    """A tile loaded through a map edited in shared memory and published with tensormap.cp_fenceproxy."""
    tile = Tile((20, 10), (16, 8), (0, 0), "f16", (("nan_fill", True),))
    storage, data = tile.tensor(), replace(tile, dims=(20, 10), pitch=64).tensor()
    place, out = aligned(128, np.uint8), aligned(1040, np.uint8)
    params = {
        "map": "map",
        "data": "ptr",
        "place": "ptr",
        "out": "ptr",
        "nbytes": "u32",
        "expected": "u32",
        "spins": "u32",
    }
    args = [tile.map(storage), data, place, out, 1024, tile.box_bytes, backend.spins]
    backend.launch(entry(params, EDITED), args, smem_bytes=1024 + 256)
    return {"edited": out[:1028]}


PROBES: dict[str, Probe] = {
    "tensor loads, swizzles": loads(_swizzle_tiles()),
    "tensor loads, edges": loads(_edge_tiles()),
    "tensor stores": stores(_store_tiles()),
    "tensor reductions": tensor_reductions,
    "bulk copies": bulk_copies,
    "small copies": small_copies,
    "cluster copies": cluster_copies,
    "tensor map fields": replacements,
    "edited tensor map": edited_map,
}
