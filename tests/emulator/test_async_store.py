"""st.async, red.async and st.bulk in small kernels, with early and late completion."""

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.errors import EmulatorError

MODES = ("eager", "lazy", "random:3")
SHARED = ".extern .shared .align 1024 .b8 smem[];"
SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
WAIT = """WAITING:
mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0, 10000000;
@!%p3 bra WAITING;
"""


def to_the_other_cta(ptx_kernel, send: str, *, expected: int, words: int) -> str:
    """Rank 0 runs `send` (%r3 = smem of rank 1, %r0 = thread); rank 1 waits for the bytes and dumps `words`.

    The mbarrier is at smem and the data at smem+64, where every thread of rank 1 first stores 100 + its index.
    """
    body = f"""mov.u32 %r0, %tid.x;
    mov.u32 %r1, smem;
    mov.u32 %r2, %cluster_ctarank;
    mapa.shared::cluster.u32 %r3, %r1, 1;
    setp.eq.u32 %p0, %r2, 0;
    setp.eq.u32 %p1, %r0, 0;
    @!%p1 bra STARTED;
    mbarrier.init.shared.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
    @!%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {expected};
    STARTED:
    shl.b32 %r4, %r0, 2;
    add.u32 %r5, %r1, %r4;
    add.u32 %r6, %r0, 100;
    st.shared.b32 [%r5+64], %r6;
    {SYNC}
    @!%p0 bra RECEIVE;
    add.u32 %r7, %r3, %r4;
    {send}
    bra DONE;
    RECEIVE:
    {WAIT}
    setp.ge.u32 %p2, %r0, {words};
    @%p2 bra DONE;
    ld.shared.b32 %r8, [%r5+64];
    cvt.u64.u32 %rd5, %r4;
    add.u64 %rd5, %rd5, %rd0;
    st.global.b32 [%rd5], %r8;
    DONE:
    {SYNC}"""
    return ptx_kernel(body, module=SHARED)


def run(ptx: str, words: int, mode: str, check: bool = False) -> np.ndarray:
    out = np.zeros(words, np.uint32)
    run_ptx(ptx, grid=2, cluster=2, block=32, args=[out], smem_bytes=1024, mode=mode, check=check)
    return out


@pytest.mark.parametrize("mode", MODES)
def test_stores_arrive_before_their_barrier_completes(mode: str, ptx_kernel) -> None:
    send = """mul.lo.u32 %r9, %r0, 7;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7+64], %r9, [%r3];"""
    got = run(to_the_other_cta(ptx_kernel, send, expected=128, words=32), 32, mode, check=True)
    np.testing.assert_array_equal(got, 7 * np.arange(32))


@pytest.mark.parametrize("mode", MODES)
def test_vectors(mode: str, ptx_kernel) -> None:
    """Lanes 0 and 1 send four words each, lane 2 two of 64 bits."""
    send = """mad.lo.u32 %r10, %r0, 16, %r3;
    add.u32 %r11, %r0, 1000;
    mov.b64 %rd6, 0x0000000200000001;
    mov.b64 %rd7, 0x0000000400000003;
    setp.lt.u32 %p4, %r0, 2;
    setp.eq.u32 %p5, %r0, 2;
    @%p4 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r10+64], {%r11, %r0, %r11, 5}, [%r3];
    @%p5 st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%r10+64], {%rd6, %rd7}, [%r3];"""
    got = run(to_the_other_cta(ptx_kernel, send, expected=48, words=16), 16, mode)
    assert got.tolist() == [1000, 0, 1000, 5, 1001, 1, 1001, 5, 1, 2, 3, 4, 112, 113, 114, 115]


REDUCTIONS = [
    ("add", "u32", lambda i: (i, 3 * i), lambda old, values: old + sum(values)),
    ("min", "s32", lambda i: (i, -i & 0xFFFFFFFF), lambda old, values: -31 & 0xFFFFFFFF),
    ("max", "u32", lambda i: (i, 7 * i), lambda old, values: max(old, *values)),
    ("and", "b32", lambda i: (i, ~(1 << i) & 0xFFFFFFFF), lambda old, values: 0),
    ("or", "b32", lambda i: (i, 1 << i), lambda old, values: 0xFFFFFFFF),
    ("xor", "b32", lambda i: (i, 1 << i), lambda old, values: old ^ 0xFFFFFFFF),
    ("inc", "u32", lambda i: (i, 110), lambda old, values: (old + 32) % 111),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation, type_, value, expected", REDUCTIONS, ids=[r[0] for r in REDUCTIONS])
def test_reductions_of_all_lanes_to_one_word(operation, type_, value, expected, mode, ptx_kernel) -> None:
    values = [value(i)[1] for i in range(32)]
    table = f".global .align 4 .b32 TABLE[32] = {{{', '.join(map(str, values))}}};"
    send = f"""mov.u64 %rd8, TABLE;
    mad.wide.u32 %rd9, %r0, 4, %rd8;
    ld.global.b32 %r9, [%rd9];
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}.{type_} [%r3+68], %r9, [%r3];"""
    ptx = to_the_other_cta(ptx_kernel, send, expected=128, words=3).replace(SHARED, SHARED + table)
    got = run(ptx, 3, mode, check=True)
    assert got.tolist() == [100, expected(101, values) & 0xFFFFFFFF, 102]


def test_a_store_and_its_barrier_are_in_one_cta(ptx_kernel) -> None:
    send = "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7+64], %r0, [%r1];"
    with pytest.raises(EmulatorError, match="both must be in one CTA"):
        run(to_the_other_cta(ptx_kernel, send, expected=128, words=1), 1, "eager")


def test_a_misaligned_vector_is_an_error(ptx_kernel) -> None:
    send = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r7+68], {%r0, %r0}, [%r3];"
    with pytest.raises(EmulatorError, match="must be a multiple of 8"):
        run(to_the_other_cta(ptx_kernel, send, expected=128, words=1), 1, "eager")


@pytest.mark.parametrize("mode", MODES)
def test_release_forms_go_to_global_memory(mode: str, ptx_kernel) -> None:
    body = """mov.u32 %r0, %tid.x;
    mad.wide.u32 %rd5, %r0, 4, %rd0;
    st.async.release.sys.global.u32 [%rd5], %r0;
    red.async.release.gpu.global.add.u32 [%rd0+128], %r0;"""
    out = np.zeros(33, np.uint32)
    run_ptx(ptx_kernel(body), block=32, args=[out], mode=mode)
    assert out.tolist() == [*range(32), sum(range(32))]


@pytest.mark.parametrize(
    "line, message",
    [
        ("st.async.shared::cluster.b32 [%r0], %r1, [%r2];", "completion mechanism"),
        ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.f32 [%r0], %r1, [%r2];", "add on .f32"),
        ("red.async.release.gpu.global.min.u32 [%rd0], %r1;", "min on .u32"),
        ("st.bulk.shared::cta [%r0], 16, 1;", "initial value other than 0"),
    ],
)  # fmt: skip
def test_refusals(line: str, message: str, ptx_kernel) -> None:
    with pytest.raises(EmulatorError, match=message):
        run_ptx(ptx_kernel(line, 0))


def test_bulk_fill(ptx_kernel) -> None:
    """Fills bytes 8 to 40 of 64 bytes that hold -1."""
    body = """mov.u32 %r0, %tid.x;
    mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r0, 4, %r1;
    st.shared.b32 [%r2], -1;
    bar.sync 0;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 st.bulk.weak.shared::cta [%r1+8], 32, 0;
    bar.sync 0;
    ld.shared.b32 %r3, [%r2];
    mad.wide.u32 %rd5, %r0, 4, %rd0;
    st.global.b32 [%rd5], %r3;"""
    out = np.zeros(32, np.int32)
    run_ptx(ptx_kernel(body, module=SHARED), block=32, args=[out], smem_bytes=256, mode="lazy", check=True)
    np.testing.assert_array_equal(out, np.where((np.arange(32) >= 2) & (np.arange(32) < 10), 0, -1))
