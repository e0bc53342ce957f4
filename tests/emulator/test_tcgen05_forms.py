"""Less common forms of tcgen05.mma: K=96, integers, column masks, and A and scales at various places in tensor memory."""

import numpy as np
import pytest
from tensor_memory_kernels import (
    DATA,
    K_MAJOR,
    commit,
    dense_body,
    dense_idesc,
    descriptor,
    dump,
    four_bit,
    fp4,
    k_major,
    normal_codes,
    run,
    scale_tile,
    scale_type,
    six_bit,
    words,
)

from nvfp4_cute.emulator import numerics
from nvfp4_cute.errors import EmulatorError


def block_scaled_96(n: int, arch: str = "sm_103a") -> tuple[np.ndarray, np.ndarray]:
    """Returns (result, expected) of D = A*B with K=96.

    The scales start at byte 2 of their words and continue in the next words.
    """
    rng = np.random.default_rng(n)
    a, b = (rng.integers(0, 256, (rows, 48), dtype=np.uint8) for rows in (128, n))
    sfa, sfb = scale_type(rng, (128, 8)), scale_type(rng, (256, 8))
    tiles = -(-n // 128)
    scales = [scale_tile(sfa[:, :4]), scale_tile(sfa[:, 4:])]
    scales += [scale_tile(sfb[128 * i :][:128, 4 * half :][:, :4]) for half in (0, 1) for i in range(tiles)]
    parts = [chunks_of_48(a), chunks_of_48(b), *scales]
    b_at, sf_at = 48 * 128, 48 * (128 + n)
    layout = {"leading": 128, "stride": 384}
    body = words(descriptor(0, **layout), descriptor(b_at, **layout), descriptor(sf_at, stride=128))
    idesc = 0x80000480 | 8 << 24 | n // 8 << 17 | 2 << 29 | 2 << 4
    body += f"mov.b32 %r20, {idesc:#x};\nadd.u32 %r21, %r9, 256;\nadd.u32 %r22, %r9, 264;\nsetp.ne.u32 %p4, 0, 0;\n@!%p1 bra ISSUED;\n"
    for i in range(len(scales)):
        body += f"add.u32 %r23, %r9, {256 + 4 * i};\nadd.u64 %rd13, %rd12, {32 * i};\n"
        body += "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r23], %rd13;\n"
    body += "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r9], %rd10, %rd11, %r20, [%r21], [%r22], %p4;\n"
    body += "ISSUED:\n" + commit() + dump(n)
    got = run(body, np.concatenate(parts), arch=arch)[0, :, :n]
    want = numerics.mma_block_scaled(a, b, sfa[:, 2:], sfb[:n, 2:], None)
    return got, want.view(np.uint32)


def chunks_of_48(rows: np.ndarray) -> np.ndarray:
    """Bytes (rows, 48) in the unswizzled K-major layout with stride 384 and leading offset 128."""
    return rows.reshape(-1, 8, 3, 16).transpose(0, 2, 1, 3).reshape(-1)


@pytest.mark.parametrize("n", [64, 256])
def test_96_elements_of_k(n):
    got, want = block_scaled_96(n)
    assert (got == want).all()


def test_96_elements_of_k_need_sm_103():
    with pytest.raises(EmulatorError, match="K=96 needs sm_103a"):
        block_scaled_96(64, "sm_100a")


def test_scales_of_b_for_a_pair_with_m_128():
    """Scales of B's two halves are in the lanes of D's two halves."""
    rng = np.random.default_rng(3)
    n = 64
    a, b = fp4(rng, 128), fp4(rng, n)
    sfa, sfb = scale_type(rng, (128, 4)), scale_type(rng, (n, 4))
    halves = np.concatenate(
        [np.tile(half, (2, 1)) for half in np.split(sfb, 2)]
    )  # lanes 0..127 of one column
    parts = []
    for c in (0, 1):
        own = np.zeros((128, 4), np.uint8)
        own[:64] = sfa[64 * c :][:64]
        parts.append(
            np.concatenate(
                [k_major(a[64 * c :][:64]), k_major(b[32 * c :][:32]), scale_tile(own), halves.reshape(-1)]
            )
        )
    b_at, sfa_at, sfb_at = 2048, 3072, 3584
    body = words(descriptor(0, **K_MAJOR), descriptor(b_at, **K_MAJOR), descriptor(sfa_at, stride=128))
    body += (
        f"mov.b32 %r20, {0x08000480 | n // 8 << 17:#x};\nadd.u32 %r21, %r9, 256;\nadd.u32 %r22, %r9, 264;\n"
    )
    body += "@!%p1 bra ISSUED;\ntcgen05.cp.cta_group::2.32x128b.warpx4 [%r21], %rd12;\nISSUED:\n" + commit(2)
    # each thread stores the scale word of its own lane
    body += f"mad.lo.u32 %r24, %r0, 4, %r1;\nld.shared.b32 %v0, [%r24+{DATA + sfb_at}];\n"
    body += "shl.b32 %r24, %r7, 21;\nadd.u32 %r24, %r24, %r22;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r24], {%v0};\n"
    body += "tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;\nbarrier.cluster.arrive.aligned;\n"
    body += "barrier.cluster.wait.aligned;\ntcgen05.fence::after_thread_sync;\nsetp.ne.u32 %p4, 0, 0;\n"
    body += "@%p1 tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%r9], %rd10, %rd11, %r20, [%r21], [%r22], %p4;\n"
    body += commit(2).replace("%r1+8], 0,", "%r1+8], 1,").replace("LAB_WAIT", "LAB_WAIT_2").replace(
        "DONE", "DONE_2"
    ) + dump(32)
    out = run(body, np.stack(parts), grid=2)
    got = np.concatenate([np.concatenate([o[:64, :32], o[64:, :32]], 1) for o in out])
    assert (got == numerics.mma_block_scaled(a, b, sfa, sfb, None).view(np.uint32)).all()


@pytest.mark.parametrize("fmt_a, fmt_b", [("s8", "u8"), ("u8", "s8")])
@pytest.mark.parametrize("saturate", [False, True])
def test_integers(fmt_a, fmt_b, saturate):
    """D = A*B + D in int32, wrapped or clamped. D starts near the largest value."""
    rng = np.random.default_rng(1)
    n, start = 32, 0x7FFF0000
    types = {"s8": np.int8, "u8": np.uint8}
    a, b = (
        rng.integers(np.iinfo(types[f]).min, np.iinfo(types[f]).max + 1, (rows, 32)).astype(types[f])
        for f, rows in ((fmt_a, 128), (fmt_b, n))
    )
    idesc = dense_idesc(128, n, fmt_a == "s8", fmt_b == "s8", d=2) | saturate << 3
    before = f"shl.b32 %r21, %r7, 21;\nadd.u32 %r21, %r21, %r9;\nmov.b32 %v0, {start};\n"
    before += f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r21], {{{', '.join(['%v0'] * n)}}};\n"
    before += "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n"
    body = dense_body(idesc, n, "i8", b_offset=4096, before=before)
    got = run(body, np.concatenate([k_major(a), k_major(b)]))[0, :, :n].view(np.int32)
    total = a.astype(np.int64) @ b.astype(np.int64).T + start
    assert total.max() > 2**31, "the case must overflow"
    assert (got == (total.clip(-(2**31), 2**31 - 1) if saturate else total).astype(np.int32)).all()


def test_zero_column_masks():
    """Columns of B that the mask zeroes contribute nothing: from the first column, 2 are zeroed and 3 used, repeatedly."""
    rng = np.random.default_rng(4)
    m, n = 128, 64
    a, b = normal_codes(rng, (m, 16), np.float16), normal_codes(rng, (n, 16), np.float16)
    mask = 1 << 39 | 1 << 40 | 2 << 48 | 1 << 32
    before = f"mov.b64 %rd14, {mask:#x};\n"
    body = dense_body(dense_idesc(m, n, 0, 0), n, "ws.f16", b_offset=32 * m, before=before, tail=", %rd14")
    body = body.replace("setp.ne.u32 %p4, 1, 0;", "setp.ne.u32 %p4, 0, 0;")
    got = run(body, np.concatenate([k_major(a), k_major(b)]))[0, :, :n]
    b[np.arange(n) % 5 < 2] = 0
    want = numerics.mma_fused(a, b, None, a_format="f16", b_format="f16")
    assert (got == want.view(np.uint32)).all() and (want[:, :2] == 0).all() and want[:, 2:5].all()


# ---- A in tensor memory ------------------------------------------------------------------------------------------
def a_in_tensor_memory(idesc: int, n: int, kind: str, b_at: int, copies: str) -> str:
    """A body whose A is at column 256, where `copies` (with %rd10 to %r21) put it."""
    before = words(descriptor(0, **K_MAJOR)) + "add.u32 %r21, %r9, 256;\n" + copies
    body = dense_body(idesc, n, kind, b_offset=b_at, a="[%r21]", before=before)
    return body.replace("setp.ne.u32 %p4, 1, 0;", "setp.ne.u32 %p4, 0, 0;")


COPY = "@%p1 tcgen05.cp.cta_group::1.128x256b{unpack} [%r21], %rd10;\n"


@pytest.mark.parametrize("lanes", ["low", "high"])
def test_a_of_64_rows_lies_in_every_other_16_lanes(lanes):
    rng = np.random.default_rng(9)
    n, first = 32, 16 if lanes == "high" else 0
    a, b = normal_codes(rng, (64, 16), np.float16), normal_codes(rng, (n, 16), np.float16)
    stored = np.full((128, 16), 0x7E00, np.uint16)  # NaN: the other lanes are not A
    stored.reshape(4, 32, 16)[:, first : first + 16] = a.reshape(4, 16, 16)
    body = a_in_tensor_memory(dense_idesc(64, n, 0, 0), n, "f16", 4096, COPY.format(unpack=""))
    if first:
        body = body.replace("[%r9], [%r21]", "[%r22], [%r24]").replace(
            "@%p1 tcgen05.mma",
            f"add.u32 %r22, %r9, {16 << 16};\nadd.u32 %r24, %r21, {16 << 16};\n@%p1 tcgen05.mma",
        )
    out = run(body, np.concatenate([k_major(stored), k_major(b)]))[0, :, :n]
    got = out.reshape(4, 32, n)[:, first : first + 16].reshape(64, n)
    assert (got == numerics.mma_fused(a, b, None, a_format="f16", b_format="f16").view(np.uint32)).all()


@pytest.mark.parametrize("same", [True, False])
def test_a_for_weight_stationary_is_needed_by_every_group_of_lanes(same):
    rng = np.random.default_rng(10)
    m, n = 32, 64
    a, b = normal_codes(rng, (m, 16), np.float16), normal_codes(rng, (n, 16), np.float16)
    stored = np.tile(a, (4, 1))
    stored[100, 0] ^= not same
    body = a_in_tensor_memory(dense_idesc(m, n, 0, 0), n, "ws.f16", 4096, COPY.format(unpack=""))
    data = np.concatenate([k_major(stored), k_major(b)])
    if not same:
        with pytest.raises(EmulatorError, match="differs between the groups of 32 lanes"):
            run(body, data)
        return
    out = run(body, data)[0]
    got = np.concatenate([out[m * i : m * i + m, : n // 4] for i in range(4)], 1)
    assert (got == numerics.mma_fused(a, b, None, a_format="f16", b_format="f16").view(np.uint32)).all()


@pytest.mark.parametrize(
    "fmt, bits, pack, name", [("e2m1", 4, four_bit, "b4x16_p64"), ("e3m2", 6, six_bit, "b6x16_p32")]
)
def test_narrow_elements_of_a_fill_a_byte_each(fmt, bits, pack, name):
    rng = np.random.default_rng(bits)
    n = 32
    a, b = (rng.integers(0, 1 << bits, (rows, 32)).astype(np.uint8) for rows in (128, n))
    code = {"e2m1": 5, "e3m2": 4}[fmt]
    copies = COPY.format(unpack=f".b8x16.{name}")
    body = a_in_tensor_memory(dense_idesc(128, n, code, code), n, "f8f6f4", 4096, copies)
    got = run(body, np.concatenate([k_major(pack(a)), k_major(pack(b))]))[0, :, :n]
    assert (got == numerics.mma_fused(a, b, None, a_format=fmt, b_format=fmt).view(np.uint32)).all()
