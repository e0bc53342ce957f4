"""Faults of tensor memory, tensor cores and their operands."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.arch import inline_ptx

from .pieces import *

A_BYTES = 128 * 32
"""A of one product in tensor memory's shape: 128 rows of 16 halves; B has 64 rows."""


# ---- pieces ----------------------------------------------------------------------------------------------------------------
@cute.jit
def tensor_memory(slot, columns: cutlass.Constexpr):
    """Warp 0 allocates; every thread gets the first column."""
    if cute.arch.thread_idx()[0] < WARP:
        allocate(slot, columns)
    cute.arch.sync_threads()
    return get(slot)


@cute.jit
def operand(at, version: cutlass.Constexpr):
    """Descriptor of a K-major operand with 16 halves along K, without swizzle. `version` is 1 for tcgen05 and 0 for wgmma."""
    return (Int64(at) >> 4) | Int64(128 >> 4 << 16 | 256 >> 4 << 32 | version << 46)


@cute.jit
def multiply(d, a, b):
    """One tcgen05.mma of 128 x 64 x 16 halves that does not accumulate; `a`, `b`: addresses in shared memory."""
    inline_ptx(
        "{ .reg .pred P; .reg .b32 I; setp.ne.b32 P, 0, 0; mov.b32 I, 0x08100010;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [{$r0}], {$r1}, {$r2}, I, P; }",
        read_only_args=[Int32(d), operand(a, 1), operand(b, 1)],
    )


@cute.jit
def multiply_tmem(d, a, b):
    """Like ``multiply``, with A in tensor memory from column `a` on."""
    inline_ptx(
        "{ .reg .pred P; .reg .b32 I; setp.ne.b32 P, 0, 0; mov.b32 I, 0x08100010;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [{$r0}], [{$r1}], {$r2}, I, P; }",
        read_only_args=[Int32(d), Int32(a), operand(b, 1)],
    )


@cute.jit
def commit(bar):
    inline_ptx(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];",
        read_only_args=[Int32(bar)],
    )


@cute.jit
def store_tmem(at, value):
    """Stores one column with tcgen05.st, without a wait."""
    inline_ptx(
        "{ .reg .b32 V; mov.b32 V, {$r1}; tcgen05.st.sync.aligned.32x32b.x1.b32 [{$r0}], {V}; }",
        read_only_args=[Int32(at), Int32(value)],
    )


@cute.jit
def load_tmem(at):
    """Loads one column with tcgen05.ld, without a wait."""
    return inline_ptx(
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{$w0}}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[Int32(at)],
    )


# ---- tensor memory -----------------------------------------------------------------------------------------------------------
@cute.kernel
def lanes_without_use(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Half of the lanes use the result of tcgen05.ld; then all lanes report completion, and the columns are freed."""
    tidx, warp, lane = place()
    slot, bars = shared(16, 16), barriers(1, (128,))
    tmem = tensor_memory(slot, 32)
    at = tmem + (warp << 21)
    write_tmem(at, tidx)
    value = load_tmem(at)
    if cutlass.const_expr(fixed):
        inline_ptx("tcgen05.wait::ld.sync.aligned;")
    if lane < 16:
        out[tidx] = value
    arrive(bars)
    if warp == 0:
        wait(bars, 0)
        free(tmem, 32)


@cute.kernel
def packed_over_others(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Two warps of a quadrant each load half of the columns; one packs its result over the other's half."""
    tidx, warp, lane = place()
    slot = shared(16, 16)
    tmem = tensor_memory(slot, 32)
    at = tmem + ((warp % 4) << 21)
    half = warp // 4
    write_tmem(at + half, tidx)
    cute.arch.sync_threads()
    value = read_tmem(at + half)
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    if half == 1:
        write_tmem(at, value + 5)
    out[tidx] = value
    cute.arch.sync_threads()
    if warp == 0:
        free(tmem, 32)


@cute.kernel
def next_product(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The next product overwrites an accumulator after an older generation of it was read, not the current one."""
    tidx, warp, lane = place()
    slot, operands, bars = shared(16, 16), shared(6144), barriers(3, (1, 1, 128))
    tmem = tensor_memory(slot, 64)
    if warp == 4:
        if lane == 0:
            load(operands, address(src, 0), bars, 6144)
            wait(bars, 0)
            for turn in cutlass.range_constexpr(2):
                wait(bars + 16, 1 if turn == 0 or not fixed else 0)
                multiply(tmem, operands, operands + A_BYTES)
                commit(bars + 8)
    else:
        for turn in cutlass.range_constexpr(2):
            wait(bars + 8, turn)
            out[128 * turn + tidx] = read_tmem(tmem + (warp << 21))
            arrive(bars + 16)
    cute.arch.sync_threads()
    if warp == 0:
        free(tmem, 64)


@cute.kernel
def operand_under_product(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Columns that a product reads are stored again before the commit says that the product is complete."""
    tidx, warp, lane = place()
    slot, operands, bars = shared(16, 16), shared(2048), barriers(2, (1, 1))
    tmem = tensor_memory(slot, 128)
    at = tmem + 64 + (warp << 21)
    if tidx == 0:
        load(operands, address(src, 0), bars, 2048)
    wait(bars, 0)
    for turn in cutlass.range_constexpr(2):
        for column in cutlass.range_constexpr(8):
            store_tmem(at + column, 0x3C003C00)
        inline_ptx("tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;")
        cute.arch.sync_threads()
        if tidx == 0:
            inline_ptx("tcgen05.fence::after_thread_sync;")
            multiply_tmem(tmem, tmem + 64, operands)
            commit(bars + 8)
        if cutlass.const_expr(fixed or turn == 1):
            wait(bars + 8, turn if fixed else 1)
    out[tidx] = read_tmem(tmem + (warp << 21))
    cute.arch.sync_threads()
    if warp == 0:
        free(tmem, 128)


@cute.kernel
def operand_past_the_end(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The descriptor of an operand with few rows has the shape of the full tile, which ends beyond shared memory."""
    tidx, warp, lane = place()
    slot, operands, bars = shared(16, 16), shared(6144), barriers(2, (1, 1))
    tmem = tensor_memory(slot, 64)
    if tidx == 0:
        load(operands, address(src, 0), bars, 6144)
        wait(bars, 0)
        multiply(tmem, operands, operands + (A_BYTES if fixed else 6144))
        commit(bars + 8)
    wait(bars + 8, 0)
    out[tidx] = read_tmem(tmem + (warp << 21))
    cute.arch.sync_threads()
    if warp == 0:
        free(tmem, 64)


@cute.kernel
def widened_not_fenced(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Threads widen an operand in shared memory and synchronise; the tensor core reads it through another proxy without fence."""
    tidx, warp, lane = place()
    slot, operands, bars = shared(16, 16), shared(6144), barriers(1, (1,))
    tmem = tensor_memory(slot, 64)
    for word in cutlass.range_constexpr(12):
        put(operands + 4 * (tidx + 128 * word), 0x3C003C00)
    if cutlass.const_expr(fixed):
        fence_async()
    cute.arch.sync_threads()
    if tidx == 0:
        multiply(tmem, operands, operands + A_BYTES)
        commit(bars)
    wait(bars, 0)
    out[tidx] = read_tmem(tmem + (warp << 21))
    cute.arch.sync_threads()
    if warp == 0:
        free(tmem, 64)


# ---- wgmma -------------------------------------------------------------------------------------------------------------------
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D0, D1, D2, D3}"
REGISTERS = (
    "{ .reg .pred P; .reg .b32 D<4>, A<4>; setp.ne.b32 P, 0, 0;\n"
    + "".join(f"mov.b32 A{i}, {{$r1}};\n" for i in range(4))
    + "".join(f"mov.b32 D{i}, 0;\n" for i in range(4))
)


@cute.kernel
def operand_rewritten(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A register with a part of A receives the next part while wgmma may still read it."""
    tidx, warp, lane = place()
    operands, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        load(operands, address(src, 0), bars, 256)
    wait(bars, 0)
    update, done = "xor.b32 A1, A1, 0x4000;\n", "wgmma.wait_group.sync.aligned 0;\n"
    product = f"{WGMMA}, {{A0, A1, A2, A3}}, {{$r0}}, P, 1, 1, 0;\nwgmma.commit_group.sync.aligned;\n"
    out[tidx] = inline_ptx(
        REGISTERS
        + "wgmma.fence.sync.aligned;\n"
        + product
        + (done + update if fixed else update)
        + f"wgmma.fence.sync.aligned;\n{product}{done}mov.b32 {{$w0}}, D1; }}",
        write_only_types=[Int32],
        read_only_args=[operand(operands, 0), Int32(0x3C003C00)],
    )


@cute.kernel
def written_behind_the_fence(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Registers of A are written between wgmma.fence and the product that reads them."""
    tidx, warp, lane = place()
    operands, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        load(operands, address(src, 0), bars, 256)
    wait(bars, 0)
    update, fence = "xor.b32 A1, A1, 0x4000;\n", "wgmma.fence.sync.aligned;\n"
    out[tidx] = inline_ptx(
        REGISTERS
        + (update + fence if fixed else fence + update)
        + f"{WGMMA}, {{A0, A1, A2, A3}}, {{$r0}}, P, 1, 1, 0;\n"
        + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\nmov.b32 {$w0}, D1; }",
        write_only_types=[Int32],
        read_only_args=[operand(operands, 0), Int32(0x3C003C00)],
    )


@cute.jit
def multiply_shared(a, b):
    """Multiplies 64 x 8 x 16 halves in shared memory and waits. Returns one word of the result."""
    return inline_ptx(
        "{ .reg .pred P; .reg .b32 D<4>; setp.ne.b32 P, 0, 0;\n"
        + "".join(f"mov.b32 D{i}, 0;\n" for i in range(4))
        + f"wgmma.fence.sync.aligned;\n{WGMMA}, {{$r0}}, {{$r1}}, P, 1, 1, 0, 0;\n"
        + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\nmov.b32 {$w0}, D1; }",
        write_only_types=[Int32],
        read_only_args=[operand(a, 0), operand(b, 0)],
    )


@cute.kernel
def operand_not_fenced(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Threads store an operand, synchronise and multiply; wgmma reads it through another proxy without a fence."""
    tidx, warp, lane = place()
    operands = shared(2304)
    for word in cutlass.range_constexpr(5):
        if word < 4 or tidx < 64:
            put(operands + 4 * (tidx + 128 * word), 0x3C003C00)
    if cutlass.const_expr(fixed):
        fence_async()
    cute.arch.sync_threads()
    out[tidx] = multiply_shared(operands, operands + 2048)


@cute.kernel
def no_barrier_back(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Two warpgroups multiply one tile, and the faster one fills it for the next iteration."""
    tidx, warp, lane = place()
    operands = shared(2304)
    for turn in cutlass.range(2, unroll=1):
        for word in cutlass.range_constexpr(3):
            if word < 2 or tidx < 64:
                put(operands + 4 * (tidx + 256 * word), 0x3C003C00 + turn)
        fence_async()
        cute.arch.sync_threads()
        out[256 * turn + tidx] = multiply_shared(operands, operands + 2048)
        if cutlass.const_expr(fixed):
            cute.arch.sync_threads()


@cute.jit
def start_product(a, b):
    """Starts a product of 64 x 8 x 16 halves in shared memory in its own group. Its result is not used."""
    inline_ptx(
        "{ .reg .pred P; .reg .b32 D<4>; setp.ne.b32 P, 0, 0;\n"
        + "".join(f"mov.b32 D{i}, 0;\n" for i in range(4))
        + f"wgmma.fence.sync.aligned;\n{WGMMA}, {{$r0}}, {{$r1}}, P, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned; }}",
        read_only_args=[operand(a, 0), operand(b, 0)],
    )


@cute.kernel
def released_under_product(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A stage is released and loaded again directly after the wgmma that reads it, without a wait."""
    tidx, warp, lane = place()
    operands, bars = shared(2304), barriers(2, (1, 128))
    for turn in cutlass.range_constexpr(2):
        if tidx == 128:
            if cutlass.const_expr(turn == 1):
                wait(bars + 8, 0)
            load(operands, address(src, 64 * turn), bars, 2304)
        if warp < 4:
            wait(bars, turn)
            start_product(operands, operands + 2048)
            if cutlass.const_expr(fixed):
                inline_ptx("wgmma.wait_group.sync.aligned 0;")
            arrive(bars + 8)
    if warp < 4:
        inline_ptx("wgmma.wait_group.sync.aligned 0;")
        out[tidx] = tidx


@cute.kernel
def other_warpgroup_multiplies(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A thread waits for the wgmma of its warpgroup, and loads over an operand that the other warpgroup also reads."""
    tidx, warp, lane = place()
    operands, bars = shared(2304), barriers(1, (1,))
    if tidx == 0:
        load(operands, address(src, 0), bars, 2304)
    wait(bars, 0)
    start_product(operands, operands + 2048)
    inline_ptx("wgmma.wait_group.sync.aligned 0;")
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    if tidx == 0:
        load(operands, address(src, 64), bars, 2304)
    wait(bars, 1)
    out[tidx] = get(operands + 4 * tidx)
