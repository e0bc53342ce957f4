"""Microbenchmarks that give the timing model its constants. out[0]: cycles of the SM clock."""

from .body import CLUSTER_SYNC, Body, init, wait
from .tensor_memory import B_AT, COLUMNS, ONES, OPERANDS, SFA_COLUMN, SFB_COLUMN

START, STOP = "mov.u64 d30, %clock64;\n", "mov.u64 d31, %clock64;\n"
SAVE = "sub.u64 d31, d31, d30;\ncvt.u32.u64 r60, d31;\n@p0 st.global.b32 [out], r60;\n"
CHUNK_BYTES, STAGES, RING_AT = 16384, 4, 1024
WARM_UP = 16  # wgmma before those that are timed
ACCUMULATORS = 64


def empty(smem_bytes: int = 1024) -> Body:
    """Does nothing."""
    return Body("", smem_bytes=smem_bytes)


def chase() -> Body:
    """Chases arg0 pointers through ``data``; each load returns the next byte offset."""
    text = f"""
@!p0 bra DONE;
mov.u32 r1, 0;
mov.u32 r2, 0;
{START}
NEXT:
cvt.u64.u32 d1, r2;
add.u64 d1, d1, data;
ld.global.cg.b32 r2, [d1];
add.u32 r1, r1, 1;
setp.lt.u32 p2, r1, arg0;
@p2 bra NEXT;
{STOP}
st.global.b32 [out+4], r2;
{SAVE}
DONE:
"""
    return Body(text, threads=32)


def remote_chase() -> Body:
    """Chases arg0 pointers through the shared memory of the other CTA of a pair."""
    text = f"""
@p0 st.shared.b32 [smem], 0;
{CLUSTER_SYNC}
xor.b32 r4, rank, 1;
mapa.shared::cluster.u32 r5, smem, r4;
mov.u32 r1, 0;
mov.u32 r2, 0;
setp.ne.u32 p3, rank, 0;
@p3 bra DONE;
@!p0 bra DONE;
{START}
NEXT:
add.u32 r3, r5, r2;
ld.shared::cluster.b32 r2, [r3];
add.u32 r1, r1, 1;
setp.lt.u32 p2, r1, arg0;
@p2 bra NEXT;
{STOP}
st.global.b32 [out+4], r2;
{SAVE}
DONE:
bar.warp.sync -1;
{CLUSTER_SYNC}"""
    return Body(text, threads=32, cluster=2)


def barriers(threads: int) -> Body:
    """arg0 barriers of the CTA's threads."""
    text = f"""
mov.u32 r1, 0;
bar.sync 0;
{START}
NEXT:
bar.sync 0;
add.u32 r1, r1, 1;
setp.lt.u32 p2, r1, arg0;
@p2 bra NEXT;
{STOP}{SAVE}"""
    return Body(text, threads=threads)


def cluster_barriers() -> Body:
    """arg0 barriers of a pair of CTAs."""
    text = f"""
mov.u32 r1, 0;
{CLUSTER_SYNC}
{START}
NEXT:
{CLUSTER_SYNC}
add.u32 r1, r1, 1;
setp.lt.u32 p2, r1, arg0;
@p2 bra NEXT;
{STOP}
setp.eq.u32 p3, rank, 0;
and.pred p0, p0, p3;
{SAVE}"""
    return Body(text, cluster=2)


def bulk_reads() -> Body:
    """arg0 bulk copies of 16 KB into a ring of four stages; copy i of CTA c is of chunk (c * arg0 + i) mod arg1 of ``data``."""
    refill = f"""
setp.lt.u32 p3, r1, arg0;
@!p3 bra FILLED_TAG;
and.b32 r3, r1, {STAGES - 1};
mad.lo.u32 r4, r3, 8, smem;
mad.lo.u32 r5, r3, {CHUNK_BYTES}, smem;
add.u32 r5, r5, {RING_AT};
rem.u32 r6, r7, arg1;
mul.wide.u32 d1, r6, {CHUNK_BYTES};
add.u64 d1, d1, data;
mbarrier.arrive.expect_tx.shared.b64 _, [r4], {CHUNK_BYTES};
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [r5], [d1], {CHUNK_BYTES}, [r4];
add.u32 r1, r1, 1;
add.u32 r7, r7, 1;
FILLED_TAG:
"""
    text = f"""
{init(*[1] * STAGES)}
@!p0 bra DONE;
mov.u32 r1, 0;
mul.lo.u32 r7, cta, arg0;
{START}
{"".join(refill.replace("TAG", str(i)) for i in range(STAGES))}
mov.u32 r2, 0;
NEXT:
and.b32 r3, r2, {STAGES - 1};
mad.lo.u32 r4, r3, 8, smem;
shr.u32 r8, r2, 2;
and.b32 r8, r8, 1;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 p15, [r4], r8;
@!p15 bra WAIT;
{refill.replace("TAG", "LOOP")}
add.u32 r2, r2, 1;
setp.lt.u32 p4, r2, arg0;
@p4 bra NEXT;
{STOP}
setp.eq.u32 p5, cta, 0;
and.pred p0, p0, p5;
{SAVE}
DONE:
"""
    return Body(text, smem_bytes=RING_AT + STAGES * CHUNK_BYTES)


def wgmma_run() -> Body:
    """Issues arg0 wgmma of 64 x 128 x 16 back to back and waits for the last, after a warm-up of WARM_UP more.

    The warm-up has a fixed length: two launches then differ in time by what they count, which gives the clock.
    """
    names = ", ".join(f"v{i}" for i in range(ACCUMULATORS))
    zeros = "".join(f"mov.b32 v{i}, 0;\n" for i in range(ACCUMULATORS))
    once = f"""
mov.u32 r1, 0;
wgmma.fence.sync.aligned;
NEXT_TAG:
wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {{{names}}}, d1, d2, 1, 1, 1, 0, 0;
add.u32 r1, r1, 1;
setp.lt.u32 p2, r1, COUNT;
@p2 bra NEXT_TAG;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""
    text = f"""
mad.lo.u32 r3, tid, 64, smem;
mov.b32 r4, 0x3C003C00;
st.shared.v4.b32 [r3+1024], {{r4, r4, r4, r4}};
st.shared.v4.b32 [r3+1040], {{r4, r4, r4, r4}};
st.shared.v4.b32 [r3+1056], {{r4, r4, r4, r4}};
st.shared.v4.b32 [r3+1072], {{r4, r4, r4, r4}};
fence.proxy.async;
bar.sync 0;
add.u32 r5, smem, 1024;
shr.u32 r5, r5, 4;
or.b32 r5, r5, {8 << 16};
mov.b32 r7, 16;
mov.b64 d1, {{r5, r7}};
mov.b64 d2, {{r5, r7}};
{zeros}
{once.replace("TAG", "WARM").replace("COUNT", str(WARM_UP))}
{START}
{once.replace("TAG", "TIMED").replace("COUNT", "arg0")}
{STOP}{SAVE}
st.global.b32 [out+4], v0;
"""
    return Body(text, smem_bytes=1024 + 128 * 64)


def scaled_run(count: int) -> Body:
    """``count`` block-scaled MMAs of 128 x 256 x 64 by one thread, and the wait for their commit. The operands are arbitrary.

    Unrolled, because ptxas of CuTe DSL 4.8.1 crashes on a loop of them in a branch of one thread.
    """
    mma = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [r9], d2, d3, r15, [r12], [r13], p4;\n"
    instruction = 1 << 7 | 1 << 10 | 256 >> 3 << 17 | 1 << 27
    text = f"""
{init(1)}
setp.eq.u32 p2, warp, 0;
@!p2 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+64], {COLUMNS};
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
mov.b32 r2, {ONES:#x};
mov.u32 r1, tid;
FILL:
mad.lo.u32 r3, r1, 16, smem;
st.shared.v4.b32 [r3+1024], {{r2, r2, r2, r2}};
add.u32 r1, r1, 128;
setp.lt.u32 p3, r1, {(B_AT + 8192 - 1024) // 16};
@p3 bra FILL;
fence.proxy.async.shared::cta;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 r9, [smem+64];
@!p0 bra COMPUTED;
add.u32 r12, r9, {SFA_COLUMN};
add.u32 r13, r9, {SFB_COLUMN};
mov.b32 r10, {1 << 14 | 8};
add.u32 r11, smem, 1024;
shr.u32 r11, r11, 4;
mov.b64 d1, {{r11, r10}};
tcgen05.cp.cta_group::1.32x128b.warpx4 [r12], d1;
tcgen05.cp.cta_group::1.32x128b.warpx4 [r13], d1;
add.u32 r14, r13, 4;
tcgen05.cp.cta_group::1.32x128b.warpx4 [r14], d1;
{OPERANDS}mov.b32 r15, {instruction};
setp.ne.u32 p4, tid, tid;
{START}
{mma * count}
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem];
{wait(0, "0", "DONE")}
{STOP}{SAVE}
COMPUTED:
tcgen05.fence::before_thread_sync;
bar.sync 0;
@!p2 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 r9, {COLUMNS};
FREED:
"""
    return Body(text, smem_bytes=B_AT + 8192)


def scaled_sync_run() -> Body:
    """arg0 times four independent block-scaled mma.sync of 16 x 8 x 64 by each of four warps."""
    mma = "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"
    lines = "".join(
        f"{mma} {{v{4 * i}, v{4 * i + 1}, v{4 * i + 2}, v{4 * i + 3}}}, {{r2, r2, r2, r2}}, {{r2, r2}}, "
        f"{{v{4 * i}, v{4 * i + 1}, v{4 * i + 2}, v{4 * i + 3}}}, r3, {{h0, h0}}, r3, {{h0, h0}};\n"
        for i in range(4)
    )
    zeros = "".join(f"mov.b32 v{i}, 0;\n" for i in range(16))
    saves = "".join(f"add.u32 r4, r4, v{i};\n" for i in range(16))
    text = f"""
mov.b32 r2, {ONES:#x};
mov.b32 r3, 0x38383838;
mov.b16 h0, 0;
mov.u32 r1, 0;
mov.u32 r4, 0;
{zeros}
bar.sync 0;
{START}
NEXT:
{lines}
add.u32 r1, r1, 1;
setp.lt.u32 p2, r1, arg0;
@p2 bra NEXT;
bar.sync 0;
{STOP}{SAVE}
{saves}
@p0 st.global.b32 [out+4], r4;
"""
    return Body(text)
