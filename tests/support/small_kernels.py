"""Pieces of small PTX kernels whose warps communicate through mbarriers, TMA and tensor memory."""

from zlib import crc32

HEAD = """.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 src, .param .u64 out)
{{
.reg .pred %p<16>;
.reg .b16 %h<8>;
.reg .b32 %r<64>;
.reg .b32 %v<256>;
.reg .b64 %rd<64>;
mov.u32 %r1, smem;
mov.u32 %r0, %tid.x;
shr.u32 %r7, %r0, 5;
and.b32 %r8, %r0, 31;
mov.u32 %r6, %cluster_ctarank;
ld.param.u64 %rd1, [src];
ld.param.u64 %rd2, [out];
setp.eq.u32 %p0, %r0, 0;
setp.eq.u32 %p1, %r8, 0;
"""

DATA = 1024
"""Offset of operands in dynamic shared memory; barriers and the tensor-memory address lie below."""

SMEM_BASE = 1024
"""Offset of dynamic shared memory in the shared window."""


def kernel(body: str, target: str = "sm_100a") -> str:
    """A kernel k(src, out). %r0 thread, %r1 smem, %r6 rank, %r7 warp, %r8 lane, %rd1 src, %rd2 out; %p0 first thread
    of the CTA, %p1 first thread of each warp.
    """
    return f"{HEAD.format(target=target)}{body}\nret;\n}}\n"


def init(*counts: int, fence: str = "fence.mbarrier_init.release.cluster;", sync: str = "bar.sync 0;") -> str:
    """Thread 0 initialises mbarriers at smem+0, +8, ...; then fence and synchronisation."""
    lines = [f"@%p0 mbarrier.init.shared.b64 [%r1+{8 * i}], {count};" for i, count in enumerate(counts)]
    return "\n".join([*lines, fence, sync, ""])


def wait(at: int, parity: int | str = 0) -> str:
    """Block until the phase of `parity` of the mbarrier at smem+`at` has completed."""
    return f"""{{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [%r1+{at}], {parity}, 10000000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}}
"""


def in_warp(index: int, body: str) -> str:
    """`body` in one warp, all its lanes. Uses %p2."""
    return f"setp.ne.u32 %p2, %r7, {index};\n@%p2 bra AFTER_{index}_{crc32(body.encode())};\n{body}\nAFTER_{index}_{crc32(body.encode())}:\n"


def in_thread(index: int, body: str) -> str:
    """`body` in the first lane of one warp. Uses %p3."""
    label = f"SKIP_{index}_{crc32(body.encode())}"
    return f"setp.ne.u32 %p3, %r0, {32 * index};\n@%p3 bra {label};\n{body}\n{label}:\nbar.warp.sync -1;\n"


def load(nbytes: int, at: int = 0, to: int = DATA, *, expect: int | None = None) -> str:
    """Announce and issue a bulk copy of src to smem+`to` that signals the mbarrier at smem+`at`."""
    return f"""mbarrier.arrive.expect_tx.shared.b64 _, [%r1+{at}], {nbytes if expect is None else expect};
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+{to}], [%rd1], {nbytes}, [%r1+{at}];
"""


def save(to: str = "%rd2", offset: int = DATA) -> str:
    """Each thread copies its word of smem+`offset` to out."""
    return f"""mad.lo.u32 %r9, %r0, 4, %r1;
ld.shared.b32 %r10, [%r9+{offset}];
mad.wide.u32 %rd10, %r0, 4, {to};
st.global.b32 [%rd10], %r10;
"""


def commit(at: int, group: int = 1) -> str:
    """Arrive on the mbarrier at smem+`at` when the thread's earlier tcgen05 operations are complete."""
    return f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 [%r1+{at}];\n"


def alloc(columns: int, at: int = 512) -> str:
    """Warp 0 allocates tensor memory; every thread gets its address in %r20."""
    return (
        in_warp(0, f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+{at}], {columns};")
        + f"bar.sync 0;\nld.shared.b32 %r20, [%r1+{at}];\n"
    )


def dealloc(columns: int) -> str:
    """Warp 0 frees the allocation at %r20."""
    return in_warp(0, f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, {columns};")


def descriptor(offset: int, leading: int = 128, stride: int = 256, code: int = 0) -> int:
    """K-major shared-memory matrix descriptor (no swizzle unless `code` says so) of data at smem+DATA+offset."""
    start = SMEM_BASE + DATA + offset
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | code << 61


F16_128x64 = 0x08100010
"""Instruction descriptor: fp16 operands, fp32 accumulator, M = 128, N = 64."""

A_BYTES, B_BYTES = 128 * 32, 64 * 32
"""One instruction's operands of that shape, at DATA and DATA + A_BYTES."""


def mma(accumulate: int = 0, at: int = 0, column: int = 0) -> str:
    """D[%r20 + column] (+)= A @ B^T with A at smem+DATA+at and B directly after it. Uses %r21, %r22, %rd20, %rd21, %p4."""
    return f"""mov.b64 %rd20, {descriptor(at)};
mov.b64 %rd21, {descriptor(at + A_BYTES)};
mov.b32 %r21, {F16_128x64};
add.u32 %r22, %r20, {column};
setp.ne.u32 %p4, {accumulate}, 0;
tcgen05.mma.cta_group::1.kind::f16 [%r22], %rd20, %rd21, %r21, %p4;
"""


def read_tmem(column: int = 0, *, wait_ld: bool = True) -> str:
    """Every warp reads 16 columns of its quadrant into %v0..15."""
    registers = ", ".join(f"%v{i}" for i in range(16))
    text = f"""shl.b32 %r23, %r7, 21;
add.u32 %r23, %r23, %r20;
tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%r23+{column}];
"""
    return text + ("tcgen05.wait::ld.sync.aligned;\n" if wait_ld else "")


def save_registers(count: int = 16) -> str:
    """Thread t stores %v0.. to out[t, 0..count]."""
    lines = [f"mad.wide.u32 %rd10, %r0, {4 * count}, %rd2;"]
    return "\n".join(lines + [f"st.global.b32 [%rd10+{4 * i}], %v{i};" for i in range(count)]) + "\n"
