"""Probes of tensor memory: where scales of a block-scaled MMA may begin, which N it takes, and who allocates when."""

from .body import CLUSTER_SYNC, Body, init, wait

ONES = 0x22222222  # eight e2m1 ones
SFA_AT, A_AT, B_AT = 1024, 4096, 8192
SFA_BYTES, SFB_BYTES = 512, 1024
# Columns of tensor memory: D, then the scales of A and of B.
SFA_COLUMN, SFB_COLUMN, COLUMNS = 256, 264, 512
ROW_WORDS = 256  # of a row of D in ``out``
OPERAND_HIGH = 1 << 14 | 256 >> 4  # no swizzle: 256 bytes to the next eight rows
OPERAND_LOW = (128 >> 4) << 16  # 128 bytes to the next 16 bytes of K
# Descriptors of both operands, in d2 and d3.
OPERANDS = f"""mov.b32 r10, {OPERAND_HIGH};
add.u32 r11, smem, {A_AT};
shr.u32 r11, r11, 4;
or.b32 r11, r11, {OPERAND_LOW};
mov.b64 d2, {{r11, r10}};
add.u32 r11, smem, {B_AT};
shr.u32 r11, r11, 4;
or.b32 r11, r11, {OPERAND_LOW};
mov.b64 d3, {{r11, r10}};
"""
SCALE_HIGH = 1 << 14 | 128 >> 4


def scaled_mma(n: int, column: int) -> Body:
    """128 x n results of 64 ones times 64 ones, whose B scales begin ``column`` columns, 32 rows each, further on.

    data: the scales of A and two blocks of B's in the 128x4 layout. out: fp32 [128, 256], the first n columns.
    """
    instruction = 1 << 7 | 1 << 10 | n >> 3 << 17 | 1 << 27
    chunks = "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{', '.join(f'v{i}' for i in range(32))}}}, [r20+{first}];\n"
        "tcgen05.wait::ld.sync.aligned;\n"
        + "".join(f"st.global.b32 [d5+{4 * (first + i)}], v{i};\n" for i in range(32))
        for first in range(0, n, 32)
    )
    text = f"""
{init(1, 1)}
setp.eq.u32 p2, warp, 0;
@!p2 bra FILL;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+64], {COLUMNS};
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
FILL:
@p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], {SFA_BYTES + SFB_BYTES};
add.u32 r1, smem, {SFA_AT};
@p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [r1], [data], {SFA_BYTES + SFB_BYTES}, [smem];
mov.b32 r2, {ONES:#x};
mad.lo.u32 r3, tid, 32, smem;
st.shared.v4.b32 [r3+{A_AT}], {{r2, r2, r2, r2}};
st.shared.v4.b32 [r3+{A_AT + 16}], {{r2, r2, r2, r2}};
mad.lo.u32 r3, tid, 64, smem;
st.shared.v4.b32 [r3+{B_AT}], {{r2, r2, r2, r2}};
st.shared.v4.b32 [r3+{B_AT + 16}], {{r2, r2, r2, r2}};
st.shared.v4.b32 [r3+{B_AT + 32}], {{r2, r2, r2, r2}};
st.shared.v4.b32 [r3+{B_AT + 48}], {{r2, r2, r2, r2}};
fence.proxy.async.shared::cta;
{wait(0, "0", "LOADED")}
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 r9, [smem+64];
@!p0 bra COMPUTED;
mov.b32 r10, {SCALE_HIGH};
shr.u32 r11, r1, 4;
mov.b64 d1, {{r11, r10}};
add.u32 r12, r9, {SFA_COLUMN};
tcgen05.cp.cta_group::1.32x128b.warpx4 [r12], d1;
add.u32 r11, r11, {SFA_BYTES >> 4};
mov.b64 d1, {{r11, r10}};
add.u32 r13, r9, {SFB_COLUMN};
tcgen05.cp.cta_group::1.32x128b.warpx4 [r13], d1;
add.u32 r11, r11, {SFB_BYTES >> 5};
mov.b64 d1, {{r11, r10}};
add.u32 r14, r13, 4;
tcgen05.cp.cta_group::1.32x128b.warpx4 [r14], d1;
{OPERANDS}add.u32 r13, r13, {column};
mov.b32 r15, {instruction};
setp.ne.u32 p4, tid, tid;
tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [r9], d2, d3, r15, [r12], [r13], p4;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+8];
COMPUTED:
{wait(8, "0", "DONE")}
tcgen05.fence::after_thread_sync;
shl.b32 r20, warp, 21;
add.u32 r20, r20, r9;
mul.wide.u32 d5, tid, {4 * ROW_WORDS};
add.u64 d5, d5, out;
bar.warp.sync -1;
{chunks}
tcgen05.fence::before_thread_sync;
bar.sync 0;
@!p2 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 r9, {COLUMNS};
FREED:
"""
    return Body(text, smem_bytes=B_AT + 8192)


def pair_alloc() -> Body:
    """A pair allocates tensor memory before its cluster barrier; the odd CTA comes late.

    arg0: ns that it sleeps. out[rank]: the first column, plus one.
    """
    text = f"""
setp.ne.u32 p2, rank, 0;
@p2 nanosleep.u32 arg0;
setp.eq.u32 p3, warp, 0;
@!p3 bra ALLOCATED;
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [smem+64], 256;
tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
ALLOCATED:
{CLUSTER_SYNC}
ld.shared.b32 r9, [smem+64];
add.u32 r10, r9, 1;
mul.wide.u32 d1, rank, 4;
add.u64 d1, d1, out;
@p0 st.global.b32 [d1], r10;
{CLUSTER_SYNC}
@!p3 bra FREED;
tcgen05.dealloc.cta_group::2.sync.aligned.b32 r9, 256;
FREED:
"""
    return Body(text, cluster=2)
