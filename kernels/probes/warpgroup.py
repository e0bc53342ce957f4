"""Probes of what warps of one CTA see of each other: releases, register counts, waits for wgmma."""

from .body import Body, count_wrong, init, wait

ROUND_BYTES = 4096
STAGE = 1024


def early_release(waits: bool) -> Body:
    """A warp reads a stage and gives it back at once; another one has it overwritten by a bulk copy.

    data: ``arg0`` rounds of ``ROUND_BYTES``, word w of round r being r * 4096 + w. out[0]: words of another round.

    Args:
        waits: whether what was read is used before the stage is given back.
    """
    loads = 8
    read = "".join(
        f"ld.shared.v4.b32 {{v{4 * i}, v{4 * i + 1}, v{4 * i + 2}, v{4 * i + 3}}}, [r3+{512 * i}];\n"
        for i in range(loads)
    )
    # A store of what was read: the only use that the assembler leaves in front of the arrival.
    use = "".join(f"st.shared.b32 [r7+{128 * i}], v{4 * i + 3};\n" for i in range(loads)) if waits else ""
    compare = "".join(
        f"add.u32 r11, r10, {128 * (i // 4) + i % 4};\nsetp.ne.u32 p3, v{i}, r11;\n{count_wrong('p3')}"
        for i in range(4 * loads)
    )
    text = f"""
{init(1, 1)}
mov.u32 r1, 0;
mad.lo.u32 r3, lane, 16, smem;
add.u32 r3, r3, {STAGE};
mad.lo.u32 r7, lane, 4, smem;
add.u32 r7, r7, {STAGE + ROUND_BYTES};
add.u32 r8, smem, {STAGE};
setp.eq.u32 p2, warp, 0;
@!p2 bra PRODUCE;
CONSUME:
and.b32 r5, r1, 1;
{wait(0, "r5", "FULL")}
{read}{use}
bar.warp.sync -1;
@p1 mbarrier.arrive.shared.b64 _, [smem+8];
mul.lo.u32 r10, r1, 4096;
mad.lo.u32 r10, lane, 4, r10;
{compare}
add.u32 r1, r1, 1;
setp.lt.u32 p4, r1, arg0;
@p4 bra CONSUME;
bra DONE;
PRODUCE:
@!p1 bra DONE;
NEXT:
and.b32 r5, r1, 1;
xor.b32 r6, r5, 1;
mul.wide.u32 d1, r1, {ROUND_BYTES};
add.u64 d1, d1, data;
{wait(8, "r6", "EMPTY")}
mbarrier.arrive.expect_tx.shared.b64 _, [smem], {ROUND_BYTES};
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [r8], [d1], {ROUND_BYTES}, [smem];
add.u32 r1, r1, 1;
setp.lt.u32 p4, r1, arg0;
@p4 bra NEXT;
DONE:
"""
    return Body(text, threads=64, smem_bytes=STAGE + ROUND_BYTES + 2048)


def register_counts() -> Body:
    """A warpgroup gives registers away, another one takes them, in a CTA of 256 threads. out[0]: wrong sums, of 256."""
    reads = "".join(f"ld.volatile.shared.b32 v{i}, [r3];\n" for i in range(96))
    sums = "".join(f"add.u32 r1, r1, v{i};\n" for i in range(96))
    text = f"""
setp.lt.u32 p2, tid, 128;
@p2 bra GIVE;
setmaxnreg.inc.sync.aligned.u32 224;
bra COUNT;
GIVE:
setmaxnreg.dec.sync.aligned.u32 56;
COUNT:
mad.lo.u32 r3, tid, 4, smem;
st.shared.b32 [r3], tid;
mov.u32 r1, 0;
bar.sync 0;
{reads}{sums}
mul.lo.u32 r2, tid, 96;
setp.ne.u32 p3, r1, r2;
{count_wrong("p3")}
"""
    return Body(text, threads=256)


ONE_F16X2, TWO_F16X2 = 0x3C003C00, 0x40004000
A_AT, B_AT = 1024, 4096
DESCRIPTOR_HIGH = 16  # eight rows of 16 bytes, then 256 bytes, to the next ones: all values are equal anyway


def wgmma_wait() -> Body:
    """Warp 3 comes late; warp 0 waits for its own wgmma and overwrites B, ones, with twos.

    64 x 16 by 16 x 8, all ones: 16 where B was read before the wait ended. arg0: ns that warp 3 sleeps. out[0]: results of
    warp 3 that are not 16: its part was not covered by warp 0's wait. out[1]: wrong results of warp 0.
    """
    text = f"""
mad.lo.u32 r3, tid, 16, smem;
mov.b32 r4, {ONE_F16X2:#x};
st.shared.v4.b32 [r3+{A_AT}], {{r4, r4, r4, r4}};
setp.lt.u32 p2, tid, 16;
@p2 st.shared.v4.b32 [r3+{B_AT}], {{r4, r4, r4, r4}};
fence.proxy.async;
bar.sync 0;
add.u32 r5, smem, {A_AT};
shr.u32 r5, r5, 4;
or.b32 r5, r5, {8 << 16};
add.u32 r6, smem, {B_AT};
shr.u32 r6, r6, 4;
or.b32 r6, r6, {8 << 16};
mov.b32 r7, {DESCRIPTOR_HIGH};
mov.b64 d1, {{r5, r7}};
mov.b64 d2, {{r6, r7}};
mov.b32 v0, 0;
mov.b32 v1, 0;
mov.b32 v2, 0;
mov.b32 v3, 0;
setp.eq.u32 p4, warp, 3;
@p4 nanosleep.u32 arg0;
bar.warp.sync -1;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{v0, v1, v2, v3}}, d1, d2, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
setp.ne.u32 p5, warp, 0;
@p5 bra COMPARE;
mov.b32 r4, {TWO_F16X2:#x};
mad.lo.u32 r3, lane, 8, smem;
st.shared.v2.b32 [r3+{B_AT}], {{r4, r4}};
fence.proxy.async;
COMPARE:
setp.ne.b32 p6, v0, 0x41800000;
and.pred p7, p6, p4;
{count_wrong("p7")}
setp.eq.u32 p8, warp, 0;
and.pred p8, p8, p6;
@p8 red.global.add.u32 [out+4], 1;
"""
    return Body(text, threads=128, smem_bytes=8192)
