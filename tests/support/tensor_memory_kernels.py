"""Kernels that use tensor memory: a bulk copy brings operands to shared memory, and the results are dumped."""

import numpy as np
from small_kernels import wait

from nvfp4_cute.emulator.fronts.driver import run_ptx

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
REGS = """.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<64>;
.reg .b32 %v<256>;
.reg .b64 %rd<32>;
"""
DATA = 1024  # offset of the operands in dynamic shared memory
V64 = ", ".join(f"%v{i}" for i in range(64))
SMEM_BASE = 1024  # of the shared window


def kernel(body: str, *, nbytes: int, columns: int = 512, cluster: bool = False, alloc: bool = True) -> str:
    """Allocate tensor memory (%r9 = base), load `nbytes` of `src` to smem+DATA, run `body`, free.

    %r0 thread, %r1 smem, %r6 rank, %r7 warp, %p0 thread 0 of the CTA, %p1 the same in rank 0, %rd1 out.
    In a cluster each CTA loads its own `nbytes` and has its own part of `out` (128 x 512 words).
    """
    sync = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" if cluster else "bar.sync 0;\n"
    group = 2 if cluster else 1
    allocate = f"""tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r1+16], {columns};
    tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;"""
    free = f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r9, {columns};"
    if not alloc:
        allocate = free = ""
    lines = f"""mov.u32 %r1, smem;
    mov.u32 %r0, %tid.x;
    shr.u32 %r7, %r0, 5;
    mov.u32 %r6, %cluster_ctarank;
    setp.eq.u32 %p0, %r0, 0;
    setp.eq.and.u32 %p1, %r6, 0, %p0;
    ld.param.u64 %rd1, [out];
    mul.wide.u32 %rd3, %r6, {128 * 512 * 4};
    add.u64 %rd1, %rd1, %rd3;
    ld.param.u64 %rd2, [src];
    mul.wide.u32 %rd3, %r6, {nbytes};
    add.u64 %rd2, %rd2, %rd3;
    @%p0 mbarrier.init.shared.b64 [%r1], 1;
    @%p0 mbarrier.init.shared.b64 [%r1+8], 1;
    setp.eq.u32 %p2, %r7, 0;
    @!%p2 bra ALLOCATED;
    {allocate}
    ALLOCATED:
    {sync}
    ld.shared.b32 %r9, [%r1+16];
    @!%p0 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {nbytes};
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+{DATA}], [%rd2], {nbytes}, [%r1];
    LOADED:
    {wait(0)}
    {sync}
    {body}
    {sync}
    @!%p2 bra FREED;
    {free}
    FREED:
    ret;
    """
    return f"{HEAD}.visible .entry k(.param .u64 src, .param .u64 out)\n{{\n{REGS}{lines}}}\n"


def dump(columns: int) -> str:
    """Every warp loads its 32 lanes of the first `columns` columns and stores them to out[lane, column] (row 512)."""
    step = min(columns, 64)
    lines = [
        "shl.b32 %r20, %r7, 21;",
        "add.u32 %r20, %r20, %r9;",
        "mul.wide.u32 %rd8, %r0, 2048;",
        "add.u64 %rd8, %rd8, %rd1;",
    ]
    for first in range(0, columns, step):
        registers = ", ".join(f"%v{i}" for i in range(step))
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {{{registers}}}, [%r20+{first}];")
        lines.append("tcgen05.wait::ld.sync.aligned;")
        lines += [f"st.global.b32 [%rd8+{4 * (first + i)}], %v{i};" for i in range(step)]
    return "\n".join(lines)


def commit(group: int = 1) -> str:
    code = f"@%p1 tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 [%r1+8];\n"
    if group == 2:
        code = "mov.b16 %h1, 3;\n" + code.replace(".b64 [%r1+8]", ".multicast::cluster.b64 [%r1+8], %h1")
    return code + wait(8) + "tcgen05.fence::after_thread_sync;\n"


def run(
    body: str, src: np.ndarray, *, grid: int = 1, block: int = 128, arch: str = "sm_100a", **kwargs
) -> np.ndarray:
    """Words of tensor memory that the kernel dumped, uint32 (grid, 128, 512)."""
    src = np.ascontiguousarray(src).view(np.uint8).reshape(grid, -1)
    out = np.zeros((grid, 128, 512), np.uint32)
    ptx = kernel(body, nbytes=src.shape[1], cluster=grid > 1, **kwargs).replace("sm_100a", arch)
    run_ptx(ptx, args=[src, out], grid=grid, cluster=grid, block=block, smem_bytes=DATA + src.shape[1] + 1024)
    return out


def descriptor(offset: int, leading: int = 0, stride: int = 0, code: int = 0) -> int:
    """Shared-memory matrix descriptor of data at smem+DATA+offset."""
    start = SMEM_BASE + DATA + offset
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | code << 61


def k_major(rows: np.ndarray) -> np.ndarray:
    """Bytes (rows, 32) in the unswizzled K-major layout with stride 256 and leading offset 128."""
    rows = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), 32)
    return rows.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).reshape(-1)


K_MAJOR = {"leading": 128, "stride": 256}


def scale_tile(scales: np.ndarray) -> np.ndarray:
    """uint8 (128 n, 4) in blocks of 512 bytes: [m % 32, m / 32, k]."""
    return scales.reshape(-1, 4, 32, 4).transpose(0, 2, 1, 3).reshape(-1)


def scale_type(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0x20, 0x50, shape).astype(np.uint8)


def words(*values: int) -> str:
    """Put 64-bit values into %rd10, %rd11, ..."""
    return "".join(f"mov.b64 %rd{10 + i}, {value:#x};\n" for i, value in enumerate(values))


def fp4(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(0, 256, (rows, 32), dtype=np.uint8)


SFA_COLUMN, SFB_COLUMN = 256, 264


def block_scaled_body(
    idesc: int, offsets: tuple[int, int, int, int], n: int, kind: str, *, group: int = 1, twice: bool = False
) -> str:
    """Copies the scales and executes one or two MMAs into column 0. Offsets of A, B, SFA, SFB are relative to DATA."""
    a, b, sfa, sfb = offsets
    body = words(descriptor(a, **K_MAJOR), descriptor(b, **K_MAJOR), descriptor(sfa, stride=128))
    copies = [(SFA_COLUMN, 0)] + [(SFB_COLUMN + 4 * i, sfb - sfa + 512 * i) for i in range(-(-n // 128))]
    body += f"mov.b32 %r20, {idesc:#x};\nadd.u32 %r21, %r9, {SFA_COLUMN};\nadd.u32 %r22, %r9, {SFB_COLUMN};\n"
    body += "@!%p1 bra ISSUED;\n"
    for column, offset in copies:
        body += f"add.u32 %r23, %r9, {column};\nadd.u64 %rd13, %rd12, {offset >> 4};\n"
        body += f"tcgen05.cp.cta_group::{group}.32x128b.warpx4 [%r23], %rd13;\n"
    for enable in (0, 1)[: 1 + twice]:
        body += f"setp.eq.u32 %p4, {enable}, 1;\n"
        body += f"tcgen05.mma.cta_group::{group}.kind::{kind}.collector::a::discard [%r9], %rd10, %rd11, %r20, [%r21], [%r22], %p4;\n"
    return body + "ISSUED:\n" + commit(group) + dump(n)


def dense_body(
    idesc: int, n: int, kind: str, *, b_offset: int, a: str = "%rd10", extra: str = "", tail: str = "",
    group: int = 1, a_desc: dict | None = None, b_desc: dict | None = None, before: str = "",
) -> str:  # fmt: skip
    body = words(descriptor(0, **(a_desc or K_MAJOR)), descriptor(b_offset, **(b_desc or K_MAJOR)))
    body += f"mov.b32 %r20, {idesc:#x};\n{before}"
    body += f"setp.ne.u32 %p4, {int(bool(before))}, 0;\n"
    ws = ".ws" if kind.startswith("ws.") else ""
    body += f"@%p1 tcgen05.mma{ws}.cta_group::{group}.kind::{kind.removeprefix('ws.')} [%r9], {a}, %rd11, %r20, {extra}%p4{tail};\n"
    return body + commit(group) + dump(max(n, 32))


def dense_idesc(m: int, n: int, a: int, b: int, d: int = 1) -> int:
    return d << 4 | a << 7 | b << 10 | n // 8 << 17 | m // 16 << 24


def normal_codes(rng: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    values = rng.normal(size=shape).astype(np.float32)
    if dtype == np.float16:
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else values.view(np.uint32)


def six_bit(codes: np.ndarray) -> np.ndarray:
    """Codes (rows, 32) in groups of 16: 12 bytes of data, 4 of padding."""
    quads = codes.reshape(-1, 4).astype(np.uint32)
    word = quads[:, 0] | quads[:, 1] << 6 | quads[:, 2] << 12 | quads[:, 3] << 18
    packed = np.stack([word & 255, word >> 8 & 255, word >> 16 & 255], -1).astype(np.uint8).reshape(-1, 12)
    return np.concatenate([packed, np.full((len(packed), 4), 0xEE, np.uint8)], 1).reshape(len(codes), 32)


def four_bit(codes: np.ndarray) -> np.ndarray:
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(-1, 8)
    return np.concatenate([packed, np.full_like(packed, 0xEE)], 1).reshape(len(codes), 32)
