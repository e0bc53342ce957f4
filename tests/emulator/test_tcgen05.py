"""Tensor memory and the matrix multiply, in small kernels whose operands come by bulk copy to shared memory."""

import numpy as np
import pytest
from tensor_memory_kernels import (
    DATA,
    K_MAJOR,
    V64,
    block_scaled_body,
    commit,
    dense_body,
    dense_idesc,
    descriptor,
    dump,
    four_bit,
    fp4,
    k_major,
    kernel,
    normal_codes,
    run,
    scale_tile,
    scale_type,
    six_bit,
    words,
)

from nvfp4_cute.emulator import numerics
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.errors import EmulatorError


# ---- allocation --------------------------------------------------------------------------------------------------
def test_alloc_blocks_until_columns_are_free():
    """Warp 1 requests 512 columns while warp 0 holds 32, and gets them when warp 0 frees its own."""
    body = """setp.eq.u32 %p3, %r7, 1;
    @!%p3 bra NOT1;
    bar.sync 2, 64;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+20], 512;
    bra DONE1;
    NOT1:
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+24], 32;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+28], 64;
    bar.sync 2, 64;
    ld.shared.b32 %r30, [%r1+24];
    ld.shared.b32 %r31, [%r1+28];
    bar.sync 1, 32;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r31, 64;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;
    st.global.b32 [%rd1], %r30;
    st.global.b32 [%rd1+4], %r31;
    DONE1:
    bar.sync 0;
    ld.shared.b32 %r32, [%r1+20];
    @%p0 st.global.b32 [%rd1+8], %r32;
    @%p3 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r32, 512;"""
    out = run(body, np.zeros(16, np.uint8), block=64, alloc=False)
    assert out[0, 0, 0] == 0 and out[0, 0, 1] >= 32 and out[0, 0, 2] == 0


def test_alloc_that_can_never_succeed_is_a_hang():
    body = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+20], 32;"
    with pytest.raises(EmulatorError, match=r"after tcgen05\.relinquish_alloc_permit"):
        run(body, np.zeros(16, np.uint8), block=32)
    ptx = kernel(body, nbytes=16).replace("tcgen05.relinquish", "//").replace("// tcgen05", "//")
    with pytest.raises(
        EmulatorError, match=r"hangs(.|\n)*tcgen05.alloc of 32 columns while \{0: 512\} are live"
    ):
        run_ptx(ptx, args=[np.zeros(16, np.uint8), np.zeros(4, np.uint32)], smem_bytes=4096)


PAIRED_ALLOC = """.version 8.8
.target sm_100a
.visible .entry k(.param .u64 out) {{
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>;
.shared .align 16 .b8 smem[16];
ld.param.b64 %rd1, [out];
mov.u32 %r1, smem;
mov.u32 %r6, %cluster_ctarank;
setp.eq.u32 %p1, %r6, 1;
{rank_1}
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 64;
ld.shared.b32 %r3, [%r1];
{before_dealloc}
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r3, 64;
DONE:
ret;
}}"""


BOTH = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"


def test_paired_alloc():
    """The even CTA allocates for both and continues; the odd one takes the allocation, or waits for it."""
    out = np.zeros(2, np.uint32)
    store = "mad.wide.u32 %rd1, %r6, 4, %rd1;\nadd.u32 %r4, %r3, 7;\nst.global.b32 [%rd1], %r4;\n"

    def run_pair(rank_1="", before_dealloc="", cluster=2):
        text = PAIRED_ALLOC.format(rank_1=rank_1, before_dealloc=before_dealloc)
        run_ptx(text, grid=cluster, cluster=cluster, args=[out])

    run_pair(before_dealloc=store + BOTH)
    assert out.tolist() == [7, 7]
    with pytest.raises(EmulatorError, match=r"pair-dealloc-order: the CTA of rank 0 frees .* that of rank 1"):
        run_pair()
    with pytest.raises(EmulatorError, match="hangs(.|\n)*the CTA of rank 0 has not executed it"):
        run_pair(rank_1="@!%p1 bra DONE;", before_dealloc=BOTH)
    with pytest.raises(EmulatorError, match="of 64 columns, where the other CTA of the pair allocated 32"):
        text = PAIRED_ALLOC.format(rank_1="", before_dealloc=BOTH)
        run_ptx(
            text.replace("], 64;", "], %r5;")
            .replace("mov.u32 %r6", "mov.u32 %r5, 32;\nmov.u32 %r6")
            .replace("setp.eq.u32 %p1, %r6, 1;", "setp.eq.u32 %p1, %r6, 1;\n@%p1 mov.u32 %r5, 64;"),
            grid=2,
            cluster=2,
            args=[out],
        )
    with pytest.raises(EmulatorError, match="has no peer"):
        run_pair(cluster=1)


@pytest.mark.parametrize(
    "code,words_",
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r9+64];", "not allocated"),
        (f"tcgen05.ld.sync.aligned.32x32b.x64.b32 {{{V64}}}, [%r9+32];", "not allocated"),
        ("add.u32 %r30, %r9, 0x200000;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r30];", "lanes 32..63 from warp 0"),
        ("add.u32 %r30, %r9, 0x50000;\ntcgen05.ld.sync.aligned.16x64b.x1.b32 {%r30}, [%r30];", "lane 5"),
        ("tcgen05.ld.sync.aligned.32x32b.x3.b32 {%r30, %r31, %r32}, [%r9];", r"\.x3"),
        ("tcgen05.ld.sync.aligned.16x128b.x128.b32 {%r30}, [%r9];", r"\.x128"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r30}, [%r9];", "1 registers where 2"),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 32;", "dealloc of 32 columns"),
        ("tcgen05.cp.cta_group::1.32x128b [%r9], %rd1;", "shape 32x128b"),
        ("tcgen05.cp.cta_group::1.128x128b.b4x16_p64 [%r9], %rd1;", "b4x16_p64"),
        ("tcgen05.shift.cta_group::1 [%r9];", "not .down"),
        ("add.u32 %r30, %r9, 0x200000;\n@%p0 tcgen05.shift.cta_group::1.down [%r30];", "only lane 0"),
    ],
)  # fmt: skip
def test_misuse(code, words_):
    with pytest.raises(EmulatorError, match=words_):
        run(code, np.zeros(16, np.uint8), block=32, columns=64)


# ---- loads and stores --------------------------------------------------------------------------------------------
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
PLACES = {
    "32x32b": lambda t, r: (t, r),
    "16x64b": lambda t, r: (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2),
    "16x128b": lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)),
    "16x256b": lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)),
    "16x32bx2": lambda t, r: (t % 16, r + 8 * (t // 16)),
}


@pytest.mark.parametrize("shape", PLACES)
@pytest.mark.parametrize("packed", [False, True])
def test_stores_and_loads(shape, packed):
    """Stores distinct values with one shape, reads the raw words, and loads them back with the same shape."""
    repeat = 4
    count = REGISTERS[shape] * repeat
    lane = 16 if shape.startswith("16") else 0
    extra = ", 8" if shape == "16x32bx2" else ""
    registers = ", ".join(f"%v{i}" for i in range(count))
    back = ", ".join(f"%v{100 + i}" for i in range(count))
    body = f"shl.b32 %r20, %r7, 21;\nadd.u32 %r20, %r20, %r9;\nadd.u32 %r21, %r20, {lane << 16};\n"
    for i in range(count):
        body += f"mad.lo.u32 %v{i}, %r0, 0x10001, {i << 24 | i << 8};\n"
    body += f"tcgen05.st.sync.aligned.{shape}.x{repeat}{'.unpack::16b' if packed else ''}.b32 [%r21]{extra}, {{{registers}}};\n"
    body += "tcgen05.wait::st.sync.aligned;\n"
    body += f"tcgen05.ld.sync.aligned.{shape}.x{repeat}{'.pack::16b' if packed else ''}.b32 {{{back}}}, [%r21]{extra};\n"
    body += "tcgen05.wait::ld.sync.aligned;\n" + dump(64)
    for i in range(count):
        body += f"st.global.b32 [%rd8+{4 * (256 + i)}], %v{100 + i};\n"
    out = run(body, np.zeros(16, np.uint8))[0]
    want = np.full((128, 64), 0xFFFFFFFF, np.uint32)
    for warp in range(4):
        for t in range(32):
            for r in range(count):
                value = (32 * warp + t) * 0x10001 + (r << 24 | r << 8)
                row, column = PLACES[shape](t, r)
                row += 32 * warp + lane
                if packed:
                    want[row, 2 * column], want[row, 2 * column + 1] = value & 0xFFFF, value >> 16
                else:
                    want[row, column] = value
                assert out[32 * warp + t, 256 + r] == value
    assert (out[:, :64] == want).all()


def test_a_store_of_registers_that_nobody_wrote_leaves_poison():
    body = "shl.b32 %r20, %r7, 21;\nadd.u32 %r20, %r20, %r9;\nmov.b32 %v0, 7;\n"
    body += (
        "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r20], {%v0, %v1};\ntcgen05.wait::st.sync.aligned;\n"
        + dump(64)
    )
    out = run(body, np.zeros(16, np.uint8))[0]
    assert (out[:, 0] == 7).all() and (out[:, 1] == 0xFFFFFFFF).all()


RED_VALUES = np.array(
    [0x00000000, 0x80000000, 0x3F800000, 0xC0400000, 0x7FC00000, 0x7F800000, 0xFF800000, 0x00000001],
    np.uint32,
)
"""As f32: +-0, 1, -3, NaN, +-infinity, the least subnormal."""


def canonical(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32))


@pytest.mark.parametrize(
    "operation, reduce",
    [
        ("min.u32", lambda x: x.min(0)),
        ("max.s32", lambda x: x.view(np.int32).max(0).view(np.uint32)),
        ("min.f32", lambda x: canonical(np.fmin.reduce(x.view(np.float32)))),
        ("max.abs.f32", lambda x: canonical(np.fmax.reduce(np.abs(x.view(np.float32))))),
        ("min.NaN.f32", lambda x: canonical(np.minimum.reduce(x.view(np.float32)))),
    ],
)
def test_loads_that_reduce(operation, reduce):
    """Each thread gets its four words and their minimum or maximum."""
    values = np.random.default_rng(0).choice(RED_VALUES[1:], (4, 128))
    values[:, :7] = RED_VALUES[1:8]  # four equal words
    body = "shl.b32 %r20, %r7, 21;\nadd.u32 %r20, %r20, %r9;\nmul.wide.u32 %rd8, %r0, 2048;\nadd.u64 %rd8, %rd8, %rd1;\n"
    body += f"mad.lo.u32 %r21, %r0, 16, %r1;\nld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%r21+{DATA}];\n"
    body += "tcgen05.st.sync.aligned.32x32b.x4.b32 [%r20], {%v0, %v1, %v2, %v3};\ntcgen05.wait::st.sync.aligned;\n"
    body += f"tcgen05.ld.red.sync.aligned.32x32b.x4.{operation} {{%v4, %v5, %v6, %v7}}, %v8, [%r20];\n"
    body += "tcgen05.wait::ld.sync.aligned;\n" + "".join(
        f"st.global.b32 [%rd8+{4 * i}], %v{4 + i};\n" for i in range(5)
    )
    out = run(body, np.ascontiguousarray(values.T), arch="sm_103a")[0, :, :5].T
    assert (out[:4] == values).all()
    assert (out[4] == reduce(values)).all()


@pytest.mark.parametrize(
    "form, words_",
    [("32x32b.x2.min.f16", "operation or type"), ("32x32b.x2.min.abs.u32", "operation or type"), ("16x64b.x2.min.u32", "shape .32x32b")],
)  # fmt: skip
def test_bad_loads_that_reduce(form, words_):
    code = f"tcgen05.ld.red.sync.aligned.{form} {{%r30, %r31}}, %r32, [%r9];"
    with pytest.raises(EmulatorError, match=words_):
        run(code, np.zeros(16, np.uint8), block=32, columns=64, arch="sm_103a")


# ---- copies ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape,rows,width,lanes",
    [
        ("128x256b", 128, 8, lambda r: [r]),
        ("128x128b", 128, 4, lambda r: [r]),
        ("4x256b", 4, 8, lambda r: [32 * r + 5]),
        ("64x128b.warpx2::02_13", 64, 4, lambda r: [r, r + 64]),
        ("64x128b.warpx2::01_23", 64, 4, lambda r: [r + 32 * (r // 32), r + 32 * (r // 32) + 32]),
        ("32x128b.warpx4", 32, 4, lambda r: [r, r + 32, r + 64, r + 96]),
    ],
)
def test_copies(shape, rows, width, lanes):
    source = np.arange(max(rows, 8) * width, dtype=np.uint32).reshape(-1, width)
    chunks = source.reshape(-1, 8, width // 4, 4).transpose(0, 2, 1, 3)  # groups of 8 rows, 16-byte columns
    value = descriptor(0, leading=128, stride=32 * width)
    lane = 5 if shape == "4x256b" else 0
    body = words(value) + f"add.u32 %r20, %r9, {(lane << 16) + 4};\n"
    body += f"@%p0 tcgen05.cp.cta_group::1.{shape} [%r20], %rd10;\n" + commit() + dump(32)
    out = run(body, chunks)[0]
    want = np.full((128, 32), 0xFFFFFFFF, np.uint32)
    for r in range(rows):
        want[lanes(r), 4 : 4 + width] = source[r]
    assert (out[:, :32] == want).all()


@pytest.mark.parametrize("name, bits, pack", [("b4x16_p64", 4, four_bit), ("b6x16_p32", 6, six_bit)])
def test_copies_that_unpack(name, bits, pack):
    """Groups of 16 narrow elements in 16 bytes become one byte each: e2m1 in bits 2 to 5, six-bit ones in 0 to 5."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (128, 32)).astype(np.uint8)
    body = (
        words(descriptor(0, **K_MAJOR))
        + f"@%p0 tcgen05.cp.cta_group::1.128x256b.b8x16.{name} [%r9], %rd10;\n"
    )
    out = run(body + commit() + dump(8), k_major(pack(codes)))[0, :, :8]
    assert (np.ascontiguousarray(out).view(np.uint8) == codes << (2 if bits == 4 else 0)).all()


def test_shift():
    """Each lane gets 8 columns of the next lane. The last of 32 lanes, and all other columns, stay unchanged."""
    source = np.arange(128 * 8, dtype=np.uint32).reshape(128, 8)
    body = words(descriptor(0, **K_MAJOR))
    body += "add.u32 %r20, %r9, 4;\nadd.u32 %r21, %r9, 8;\n"
    body += "@%p0 tcgen05.cp.cta_group::1.128x256b [%r20], %rd10;\n@%p0 tcgen05.cp.cta_group::1.128x256b [%r21], %rd10;\n"
    body += "@%p0 tcgen05.shift.cta_group::1.down [%r20];\n" + commit() + dump(16)
    out = run(body, k_major(source))[0]
    before = np.concatenate([source[:, :4], source], 1)
    want = before.reshape(4, 32, 12).copy()
    want[:, :-1, :8] = want[:, 1:, :8]
    assert (out[:, 4:16] == want.reshape(128, 12)).all() and (out[:, :4] == 0xFFFFFFFF).all()


# ---- block-scaled matrix multiply --------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [8, 64, 128, 256])
@pytest.mark.parametrize(
    "scales", ["mxf4nvf4.block_scale.block16", "mxf4nvf4.block_scale.scale_vec::2X", "mxf4.block_scale"]
)
def test_fp4_multiply(n, scales):
    """One MMA with D = A*B and one with D = A*B + D, random codes and scales, compared in all bits."""
    rng = np.random.default_rng(n)
    a, b = fp4(rng, 128), fp4(rng, n)
    ue4m3 = scales.endswith("block16")
    sfa, sfb = (scale_type if ue4m3 else lambda g, s: g.integers(100, 140, s).astype(np.uint8))(
        rng, (2, 256, 4)
    )
    parts = [k_major(a), k_major(b), scale_tile(sfa[:128]), scale_tile(sfb)]
    offsets = tuple(int(x) for x in np.cumsum([0] + [p.size for p in parts[:-1]]))
    sf_id = 0 if ue4m3 else 2
    idesc = 0x08000480 | n // 8 << 17 | (not ue4m3) << 23 | sf_id << 29 | sf_id << 4
    body = block_scaled_body(idesc, offsets, n, scales, twice=True)
    got = run(body, np.concatenate(parts))[0, :, :n]
    kwargs = {"scale_type": "ue4m3" if ue4m3 else "ue8m0"}
    picked = (sfa[:128], sfb[:n]) if ue4m3 else (sfa[:128, 2:], sfb[:n, 2:])
    want = numerics.mma_block_scaled(a, b, *picked, None, **kwargs)
    want = numerics.mma_block_scaled(a, b, *picked, want, **kwargs)
    assert (got == want.view(np.uint32)).all()


def test_fp4_multiply_with_the_128_byte_swizzle_and_k_steps():
    """K=256 tiles of A and B in the layout that TMA writes; four K steps advance the descriptors by 32 bytes."""
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 256, (2, 128, 128), dtype=np.uint8)
    smem = tiles.reshape(2, 16, 8, 8, 16)
    order = np.arange(8)[:, None] ^ np.arange(8)  # chunk c of row r is at c ^ r
    smem = np.take_along_axis(smem, order[None, None, :, :, None], 3)
    sf = scale_type(rng, (2, 4, 128, 4))
    scales = np.concatenate([scale_tile(s) for s in sf.reshape(8, 128, 4)])
    body = words(
        descriptor(0, stride=1024, code=2),
        descriptor(16384, stride=1024, code=2),
        descriptor(32768, stride=128),
    )
    body += "@!%p1 bra ISSUED;\nmov.b32 %r20, 0x08200480;\n"
    for i in range(8):
        body += f"add.u32 %r23, %r9, {256 + 4 * i};\nadd.u64 %rd13, %rd12, {32 * i};\n"
        body += "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r23], %rd13;\n"
    for k in range(4):
        body += f"setp.ne.u32 %p4, {k}, 0;\nadd.u64 %rd14, %rd10, {2 * k};\nadd.u64 %rd15, %rd11, {2 * k};\n"
        body += f"add.u32 %r21, %r9, {256 + 4 * k};\nadd.u32 %r22, %r9, {272 + 4 * k};\n"
        body += "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r9], %rd14, %rd15, %r20, [%r21], [%r22], %p4;\n"
    body += "ISSUED:\n" + commit() + dump(128)
    got = run(body, np.concatenate([smem.reshape(-1), scales]))[0, :, :128]
    want = None
    for k in range(4):
        step = slice(32 * k, 32 * k + 32)
        want = numerics.mma_block_scaled(tiles[0, :, step], tiles[1, :, step], sf[0, k], sf[1, k], want)
    assert (got == want.view(np.uint32)).all()


def test_cta_pair():
    """M=256: rows of A and B from the shared memory of both CTAs, with each CTA's own scales and results in both."""
    rng = np.random.default_rng(1)
    n = 128
    a, b = fp4(rng, 256), fp4(rng, n)
    sfa, sfb = scale_type(rng, (256, 4)), scale_type(rng, (n, 4))
    parts = [
        np.concatenate([k_major(a[128 * c :][:128]), k_major(b[64 * c :][:64]), scale_tile(sfa[128 * c :][:128]), scale_tile(sfb)])
        for c in (0, 1)
    ]  # fmt: skip
    idesc = 0x10000480 | n // 8 << 17
    offsets = (0, 4096, 6144, 6656)
    body = block_scaled_body(idesc, offsets, n, "mxf4nvf4.block_scale.block16", group=2)
    got = run(body, np.stack(parts), grid=2)[:, :, :n].reshape(256, n)
    assert (got == numerics.mma_block_scaled(a, b, sfa, sfb, None).view(np.uint32)).all()


def test_mxf8f6f4():
    """8-bit elements with one ue8m0 scale per row; the scale id selects the byte."""
    rng = np.random.default_rng(2)
    n = 64
    a, b = rng.integers(0, 0x7F, (128, 32)).astype(np.uint8), rng.integers(0, 0x7B, (n, 32)).astype(np.uint8)
    sfa, sfb = rng.integers(120, 134, (2, 128, 4)).astype(np.uint8)
    parts = [k_major(a), k_major(b), scale_tile(sfa), scale_tile(sfb)]
    offsets = (0, 4096, 4096 + 32 * n, 4096 + 32 * n + 512)
    idesc = 0x08000000 | 1 << 10 | n // 8 << 17 | 1 << 23 | 3 << 29 | 1 << 4
    got = run(block_scaled_body(idesc, offsets, n, "mxf8f6f4.block_scale.block32"), np.concatenate(parts))[
        0, :, :n
    ]
    want = numerics.mma_fused(a, b, None, a_format="e4m3", b_format="e5m2", sfa=sfa[:, 3], sfb=sfb[:n, 1])
    assert (got == want.view(np.uint32)).all()


def test_unreplicated_scales_are_refused():
    body = words(descriptor(0, **K_MAJOR), descriptor(4096, **K_MAJOR), descriptor(8192, **K_MAJOR))
    body += "add.u32 %r21, %r9, 256;\nmov.b32 %r20, 0x08200480;\nsetp.ne.u32 %p4, 0, 0;\n"
    body += "@%p1 tcgen05.cp.cta_group::1.128x128b [%r21], %rd12;\n"
    body += "@%p1 tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r9], %rd10, %rd11, %r20, [%r21], [%r21], %p4;"
    with pytest.raises(EmulatorError, match=r"not the same in all(.|\n)*") as error:
        run(body, np.random.default_rng(0).integers(0, 256, 8192 + 4096, dtype=np.uint8))
    assert "tcgen05.mma" in str(error.value)


# ---- dense kinds -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind,fmt,code,dtype",
    [("f16", "f16", 0, np.float16), ("f16", "bf16", 1, np.uint16), ("tf32", "tf32", 2, np.uint32)],
)
@pytest.mark.parametrize("m", [128, 64])
def test_dense(kind, fmt, code, dtype, m):
    rng = np.random.default_rng(m)
    n = 48
    k = 8 if kind == "tf32" else 16
    a, b = normal_codes(rng, (m, k), dtype), normal_codes(rng, (n, k), dtype)
    data = np.concatenate([k_major(a), k_major(b)])
    body = dense_body(dense_idesc(m, n, code, code), n, kind, b_offset=32 * m).replace(dump(48), dump(64))
    got = run(body, data)[0, :, :n]
    if m == 64:
        got = got.reshape(4, 32, n)[:, :16].reshape(64, n)
    want = numerics.mma_fused(a, b, None, a_format=fmt, b_format=fmt)
    assert (got == want.view(np.uint32)).all()


def test_half_precision_accumulator_with_scale_and_masked_lanes():
    """D is f16 in the low half of each word; D = A*B + D * 2**-2; lanes 0, 33 and 127 keep their words."""
    rng = np.random.default_rng(5)
    n = 32
    a, b = normal_codes(rng, (128, 16), np.float16), normal_codes(rng, (n, 16), np.float16)
    before = (
        "shl.b32 %r20, %r7, 21;\nadd.u32 %r20, %r20, %r9;\nmov.b32 %v0, 0x12344400;\n"  # 4.0 in the low half
    )
    before += f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r20], {{{', '.join(['%v0'] * n)}}};\n"
    before += "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n"
    idesc = dense_idesc(128, n, 0, 0, d=0)
    before += f"mov.b32 %r20, {idesc:#x};\nmov.b32 %r30, 1;\nmov.b32 %r31, 2;\nmov.b32 %r32, 0;\nmov.b32 %r33, 0x80000000;\n"
    body = dense_body(
        idesc, n, "f16", b_offset=4096, extra="{%r30, %r31, %r32, %r33}, ", tail=", 2", before=before
    )
    got = run(body, np.concatenate([k_major(a), k_major(b)]))[0, :, :n]
    c = np.full((128, n), 4.0, np.float16)
    want = numerics.mma_fused(a, b, c, a_format="f16", b_format="f16", d_type="f16", scale_c=2)
    expected = want.view(np.uint16).astype(np.uint32)
    expected[[0, 33, 127]] = 0x12344400
    assert (got == expected).all()
    plain = numerics.mma_fused(a, b, None, a_format="f16", b_format="f16").astype(np.float64)
    assert np.abs(want - (plain + 1)).max() < 0.01


@pytest.mark.parametrize("m", [32, 64])
def test_weight_stationary(m):
    rng = np.random.default_rng(6)
    n = 64
    a, b = normal_codes(rng, (m, 16), np.float16), normal_codes(rng, (n, 16), np.float16)
    body = dense_body(dense_idesc(m, n, 0, 0), n, "ws.f16", b_offset=32 * m)
    out = run(body, np.concatenate([k_major(a), k_major(b)]))[0]
    width = n * m // 128
    got = np.concatenate([out[m * i : m * i + m, :width] for i in range(128 // m)], 1)
    assert (got == numerics.mma_fused(a, b, None, a_format="f16", b_format="f16").view(np.uint32)).all()


@pytest.mark.parametrize(
    "fmt_a,fmt_b", [("e4m3", "e5m2"), ("e2m3", "e3m2"), ("e2m1", "e4m3"), ("e3m2", "e2m1")]
)
def test_f8f6f4(fmt_a, fmt_b):
    rng = np.random.default_rng(7)
    n = 32
    number = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
    bits = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m3": 64, "e3m2": 64, "e2m1": 16}
    pack = {"e2m3": six_bit, "e3m2": six_bit, "e2m1": four_bit}
    a, b = (rng.integers(0, bits[f], (rows, 32)).astype(np.uint8) for f, rows in ((fmt_a, 128), (fmt_b, n)))
    stored = [pack.get(f, lambda x: x)(x) for f, x in ((fmt_a, a), (fmt_b, b))]
    body = dense_body(dense_idesc(128, n, number[fmt_a], number[fmt_b]), n, "f8f6f4", b_offset=4096)
    got = run(body, np.concatenate([k_major(x) for x in stored]))[0, :, :n]
    assert (got == numerics.mma_fused(a, b, None, a_format=fmt_a, b_format=fmt_b).view(np.uint32)).all()


def test_mn_major_operands():
    """bf16 with both operands transposed in shared memory and 128-byte swizzle: a row has 64 elements of M or N."""
    rng = np.random.default_rng(8)
    a, b = normal_codes(rng, (128, 16), np.uint16), normal_codes(rng, (64, 16), np.uint16)

    def tile(
        x: np.ndarray,
    ) -> np.ndarray:  # (mn, k) -> [mn / 64][k / 8][k % 8][chunk of 8 elements], swizzled
        t = x.reshape(-1, 8, 8, 2, 8).transpose(0, 3, 4, 1, 2)  # mn/64, k/8, k%8, chunk, element
        return np.take_along_axis(
            t, (np.arange(8)[:, None] ^ np.arange(8))[None, None, :, :, None], 3
        ).reshape(-1)

    mn_major = {"leading": 2048, "stride": 1024, "code": 2}
    idesc = dense_idesc(128, 64, 1, 1) | 3 << 15
    body = dense_body(idesc, 64, "f16", b_offset=4096, a_desc=mn_major, b_desc=mn_major)
    got = run(body, np.concatenate([tile(a), tile(b)]).view(np.uint8))[0, :, :64]
    assert (got == numerics.mma_fused(a, b, None, a_format="bf16", b_format="bf16").view(np.uint32)).all()


def test_a_from_tensor_memory():
    rng = np.random.default_rng(9)
    n = 32
    a, b = normal_codes(rng, (128, 16), np.float16), normal_codes(rng, (n, 16), np.float16)
    before = words(descriptor(0, **K_MAJOR)) + "add.u32 %r21, %r9, 256;\n"
    before += "@%p1 tcgen05.cp.cta_group::1.128x256b [%r21], %rd10;\n"
    body = dense_body(dense_idesc(128, n, 0, 0), n, "f16", b_offset=4096, a="[%r21]", before=before)
    body = body.replace("setp.ne.u32 %p4, 1, 0;", "setp.ne.u32 %p4, 0, 0;")
    got = run(body, np.concatenate([k_major(a), k_major(b)]))[0, :, :n]
    assert (got == numerics.mma_fused(a, b, None, a_format="f16", b_format="f16").view(np.uint32)).all()


@pytest.mark.parametrize("m", [128, 256])
def test_dense_pair(m):
    rng = np.random.default_rng(10)
    n = 64
    a, b = normal_codes(rng, (m, 16), np.float16), normal_codes(rng, (n, 16), np.float16)
    half = m // 2
    parts = [np.concatenate([k_major(a[half * c :][:half]), k_major(b[32 * c :][:32])]) for c in (0, 1)]
    body = dense_body(dense_idesc(m, n, 0, 0), n, "f16", b_offset=32 * half, group=2)
    out = run(body, np.stack(parts), grid=2)
    if m == 256:
        got = out[:, :, :n].reshape(256, n)
    else:
        got = np.concatenate([np.concatenate([o[:64, :32], o[64:, :32]], 1) for o in out])
    assert (got == numerics.mma_fused(a, b, None, a_format="f16", b_format="f16").view(np.uint32)).all()


@pytest.mark.parametrize(
    "code,words_",
    [
        ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r9], %rd1, %rd1, %r0, [%r9], [%r9], %p0;", "needs .block16"),
        ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block16 [%r9], %rd1, %rd1, %r0, [%r9], [%r9], %p0;", "block16 with kind::mxf4"),
        ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block16 [%r9], %rd1, %rd1, %r0, [%r9], [%r9], %p0;", "without .block_scale"),
        ("tcgen05.mma.cta_group::1.kind::i4 [%r9], %rd1, %rd1, %r0, %p0;", "cta_group or kind"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift [%r9], %rd1, %rd1, %r0, %p0;", "ashift"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r9], %rd1, %rd1, [%r9], %r0, %p0;", "sp"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r9], %rd1, %rd1, %r0, %p0, 16;", "scale-input-d 16"),
        ("mov.b32 %r20, 0x08000010;\ntcgen05.mma.cta_group::1.kind::f16 [%r9], %rd1, %rd1, %r20, %p0;", "instruction descriptor 0x08000010 of kind::f16: shape 128x0"),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+24];", "no mbarrier"),
    ],
)  # fmt: skip
def test_refusals(code, words_):
    with pytest.raises(EmulatorError, match=words_) as error:
        run(code, np.zeros(16, np.uint8), block=32)
    assert "PTX line" in str(error.value) and "tcgen05" in str(error.value)
