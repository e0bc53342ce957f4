"""Faults of copies and their barriers, of addresses, warps, CTAs and launches."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.arch import inline_ptx

from nvfp4_cute.emulator.tensormap import encode

from .pieces import *

SWIZZLED = encode(0, "s32", (32, 64), (128,), (32, 8), swizzle="128B")
"""A tensor of 64 rows of 32 words, and a box of 8 rows in a swizzle."""


# ---- pieces ----------------------------------------------------------------------------------------------------------------
@cute.jit
def expect(bar, nbytes: cutlass.Constexpr):
    inline_ptx(f"mbarrier.arrive.expect_tx.shared.b64 _, [{{$r0}}], {nbytes};", read_only_args=[Int32(bar)])


@cute.jit
def copy(to, source, bar, nbytes: cutlass.Constexpr):
    """Issues a bulk load without announcing its bytes to the barrier."""
    inline_ptx(
        f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{{$r0}}], [{{$r1}}], {nbytes}, [{{$r2}}];",
        read_only_args=[Int32(to), Int64(source), Int32(bar)],
    )


# ---- copies and their barriers -------------------------------------------------------------------------------------------------
@cute.kernel
def lanes_still_load(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A lane of each warp releases a slot of mask words after loads by all lanes, without a fence."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(2, (1, 64 if fixed else 2))
    for turn in cutlass.range_constexpr(2):
        if tidx == 0:
            if cutlass.const_expr(turn == 1):
                wait(bars + 8, 0)
            load(buffer, address(src, 64 * turn), bars, 256)
        wait(bars, turn)
        value = get(buffer + 4 * tidx)
        if cutlass.const_expr(fixed):
            fence_async()
            arrive(bars + 8)
        elif lane == 0:
            arrive(bars + 8)
        out[64 * turn + tidx] = value


@cute.kernel
def staging_of_a_reduction(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The thread that issues a bulk reduction waits for it; the others store the next rows without a signal."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    for turn in cutlass.range(2, unroll=1):
        put(buffer + 4 * tidx, tidx + turn)
        fence_async()
        cute.arch.sync_threads()
        if tidx == 0:
            inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [{$r0}], [{$r1}], 256;\ncp.async.bulk.commit_group;",
                read_only_args=[address(out, 0), Int32(buffer)],
            )
            stored()
        if cutlass.const_expr(fixed):
            cute.arch.sync_threads()
    if tidx == 0:
        stored(0, "")


@cute.kernel
def never_initialised(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The call that announces bytes is used in place of the call that initialises the barrier."""
    tidx, warp, lane = place()
    buffer, bar = shared(NBYTES), shared(8, 8)
    if tidx == 0:
        if cutlass.const_expr(fixed):
            inline_ptx("mbarrier.init.shared.b64 [{$r0}], 1;", read_only_args=[Int32(bar)])
        else:
            expect(bar, 256)
        inline_ptx("fence.mbarrier_init.release.cluster;")
    cute.arch.sync_threads()
    if tidx == 0:
        load(buffer, address(src, 0), bar, 256)
    wait(bar, 0)
    out[tidx] = get(buffer + 4 * tidx)


@cute.kernel
def bytes_of_the_cluster(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A barrier expects the bytes of every CTA of the cluster, but only a pair of CTAs signals it."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    cluster_barrier()
    if tidx == 0:
        expect(bars, 512 if fixed else 1024)
        if rank % 2 == 0:
            for half in cutlass.range_constexpr(2):
                inline_ptx(
                    "{ .reg .b16 MASK; .reg .b32 SHIFT; mov.b32 SHIFT, 3; shl.b32 SHIFT, SHIFT, {$r3}; cvt.u16.u32 MASK, SHIFT;\n"
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                    "[{$r0}], [{$r1}], 256, [{$r2}], MASK; }",
                    read_only_args=[
                        Int32(buffer + 256 * half),
                        address(src, 64 * half),
                        Int32(bars),
                        Int32(rank),
                    ],
                )
    wait(bars, 0)
    out[64 * rank + tidx] = get(buffer + 4 * tidx)
    cluster_barrier()


@cute.kernel
def bytes_without_arrival(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Bytes are announced without an arrival, so the phase never completes."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        inline_ptx(
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{$r0}], 256;", read_only_args=[Int32(bars)]
        )
        copy(buffer, address(src, 0), bars, 256)
        if cutlass.const_expr(fixed):
            arrive(bars)
    wait(bars, 0)
    out[tidx] = get(buffer + 4 * tidx)


@cute.kernel
def leader_signals_early(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The first warp of a role releases a slot before the others may have found it full."""
    tidx, warp, lane = place()
    bars = barriers(2, (1, 1))
    for turn in cutlass.range(3, unroll=1):
        if warp == 0:
            if lane == 0:
                wait(bars + 8, (turn & 1) ^ 1)
                arrive(bars)
        elif warp >= 4:
            wait(bars, turn & 1)
            if cutlass.const_expr(fixed):
                sync(1, 160)
            if tidx == 4 * WARP:
                arrive(bars + 8)
    out[tidx] = tidx


@cute.kernel
def bytes_of_the_tail(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The size of a bulk store is not a multiple of 16."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    put(buffer + 4 * tidx, tidx + 1)
    fence_async()
    cute.arch.sync_threads()
    if tidx == 0:
        inline_ptx(
            "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};\ncp.async.bulk.commit_group;",
            read_only_args=[address(out, 0), Int32(buffer), Int32(256 if fixed else 252) + warp],
        )
        stored()


@cute.kernel
def slot_of_64_bytes(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Slots of a ring are as small as their rows, so every second slot starts where no tensor copy may write."""
    tidx, warp, lane = place()
    buffer, draft, bars = shared(NBYTES), shared(128), barriers(2, (1, 1))
    live = (address(src, 1024) + 127) & -128
    if warp == 0:
        if lane == 0:
            make_map(draft, src, 0)
        cute.arch.sync_warp()
        publish_map(live, draft)
        acquire_map(live)
        if lane == 0:
            for turn in cutlass.range_constexpr(2):
                expect(bars + 8 * turn, 256)
                inline_ptx(
                    "{ .reg .b32 Z; mov.b32 Z, 0;\n"
                    "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}, {Z, {$r3}}], [{$r2}]; }",
                    read_only_args=[
                        Int32(buffer + (256 if fixed else 320) * turn),
                        Int64(live),
                        Int32(bars + 8 * turn),
                        Int32(turn),
                    ],
                )
        cute.arch.sync_warp()
    for turn in cutlass.range_constexpr(2):
        wait(bars + 8 * turn, 0)
        out[64 * turn + tidx] = get(buffer + (256 if fixed else 320) * turn + 4 * tidx)


@cute.kernel
def tile_off_the_pattern(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A swizzled tile starts 128 bytes after the start of a swizzle pattern, but its reader counts rows from the tile."""
    tidx, warp, lane = place()
    buffer, draft, bars = shared(2048, 1024), shared(128), barriers(1, (1,))
    live = (address(src, 1024) + 127) & -128
    tile = buffer + (0 if fixed else 128)
    if warp == 0:
        if lane == 0:
            make_map(draft, src, 0, SWIZZLED)
        cute.arch.sync_warp()
        publish_map(live, draft)
        acquire_map(live)
        if lane == 0:
            expect(bars, 1024)
            inline_ptx(
                "{ .reg .b32 Z; mov.b32 Z, 0;\n"
                "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}, {Z, Z}], [{$r2}]; }",
                read_only_args=[Int32(tile), Int64(live), Int32(bars)],
            )
        cute.arch.sync_warp()
    wait(bars, 0)
    row, chunk = tidx // 8, tidx % 8
    out[tidx] = get(tile + 128 * row + 16 * (chunk ^ row))


@cute.kernel
def offset_of_the_box(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A tensor store of a part of the rows starts at byte 20 of each row."""
    tidx, warp, lane = place()
    buffer, draft = shared(NBYTES), shared(128)
    live = (address(src, 1024) + 127) & -128
    put(buffer + 4 * tidx, tidx + 1)
    fence_async()
    cute.arch.sync_threads()
    if warp == 0:
        if lane == 0:
            make_map(draft, out, 0)
        cute.arch.sync_warp()
        publish_map(live, draft)
        acquire_map(live)
        if lane == 0:
            inline_ptx(
                "{ .reg .b32 Z; mov.b32 Z, 0;\n"
                "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{$r0}, {{$r2}, Z}], [{$r1}];\n"
                "cp.async.bulk.commit_group; }",
                read_only_args=[Int64(live), Int32(buffer), Int32(4 if fixed else 5)],
            )
            stored(0, "")
        cute.arch.sync_warp()


@cute.kernel
def fence_of_another_thread(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """One thread initialises a barrier, and another one executes the fence that should make it visible."""
    tidx, warp, lane = place()
    buffer, bar = shared(NBYTES), shared(8, 8)
    if tidx == 0:
        inline_ptx("mbarrier.init.shared.b64 [{$r0}], 1;", read_only_args=[Int32(bar)])
    if tidx == (0 if fixed else WARP):
        inline_ptx("fence.mbarrier_init.release.cluster;")
    cute.arch.sync_threads()
    if tidx == 0:
        load(buffer, address(src, 0), bar, 256)
    wait(bar, 0)
    out[tidx] = get(buffer + 4 * tidx)


@cute.kernel
def misaligned_barriers(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A branch of one warp contains an extra barrier, so the warp is one barrier ahead from there on."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    for turn in cutlass.range(2, unroll=1):
        if warp == (0 if turn == 0 else 1):
            if cutlass.const_expr(not fixed):
                cute.arch.sync_threads()
        put(buffer + 4 * tidx, tidx + 100 * turn)
        cute.arch.sync_threads()
        out[64 * turn + tidx] = get(buffer + 4 * (tidx ^ WARP))
        cute.arch.sync_threads()


@cute.kernel
def counts_over_zeros(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Some threads clear counters in shared memory and all threads count, so an addition may precede the clearing."""
    tidx, warp, lane = place()
    counters = shared(NBYTES)
    if warp == 1:
        put(counters + 4 * lane, 0)
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    inline_ptx("red.shared.add.u32 [{$r0}], 1;", read_only_args=[Int32(counters + 4 * lane)])
    cute.arch.sync_threads()
    if warp == 0:
        out[tidx] = get(counters + 4 * lane)


@cute.kernel
def release_of_one_thread(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """All threads add to a histogram of several CTAs, and one thread releases before it has synchronised with the others."""
    tidx, warp, lane = place()
    counter = address(out, 1024)
    if cute.arch.block_idx()[0] == 0:
        inline_ptx("red.global.add.u32 [{$r0}], 1;", read_only_args=[address(out, tidx)])
        if cutlass.const_expr(fixed):
            cute.arch.sync_threads()
        if tidx == 0:
            inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[counter])
    else:
        poll(counter)
        out[128 + tidx] = out[tidx] * 2


# ---- addresses
# -------------------------------------------------------------------------------------------------------------------
@cute.kernel
def rows_of_92_bytes(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Vectors of 16 bytes are stored to rows whose pitch is not a multiple of 16; only the source was checked."""
    tidx, warp, lane = place()
    for row in cutlass.range(2, unroll=1):
        if tidx < 4:
            at = address(out, 23 * row + 4 * tidx)
            if cutlass.const_expr(fixed):
                for word in cutlass.range_constexpr(4):
                    out[23 * row + 4 * tidx + word] = tidx + word
            else:
                inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
                    read_only_args=[at, Int32(tidx)],
                )


@cute.kernel
def vector_behind_sums(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Vectors in shared memory directly follow one word of each of two warps."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES + 64)
    rows = buffer + (16 if fixed else 8)
    if lane == 0:
        put(buffer + 4 * warp, tidx)
    for word in cutlass.range_constexpr(4):
        put(rows + 16 * tidx + 4 * word, tidx * word)
    out[tidx] = inline_ptx(
        "{ .reg .b32 A, B, C; ld.shared.v4.b32 {A, B, C, {$w0}}, [{$r0}]; }",
        write_only_types=[Int32],
        read_only_args=[Int32(rows + 16 * tidx)],
    )


@cute.kernel
def over_the_next_row(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Rows of 62 words are stored as vectors of four, so the last vector overwrites the next CTA's first words."""
    tidx, warp, lane = place()
    row = cute.arch.block_idx()[0]
    if tidx < (62 if fixed else 64):
        out[62 * row + tidx] = 1000 * row + tidx


@cute.kernel
def row_times_stride(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The offset of a row in a large tensor is computed in 32 bits."""
    tidx, warp, lane = place()
    row, stride = Int32(40000) + warp * 0, Int32(1 << 16)
    first = address(src, 0) - Int64(40000 << 18)  # address of a tensor whose row 40000 is `src`
    offset = Int64(row) * Int64(stride) if fixed else Int64(row * stride)
    out[tidx] = inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[first + (offset + Int64(tidx)) * 4],
    )


@cute.kernel
def load_after_store(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Threads of a CTA store all offsets to global memory, and each loads one that another warp stored."""
    tidx, warp, lane = place()
    out[tidx] = 3 * tidx
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    out[64 + tidx] = out[tidx ^ WARP] + 1


@cute.kernel
def fill_over_copy(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A tile is stored, and threads other than those that stored a part of it refill that part."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    put(buffer + 4 * tidx, src[tidx])
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    if tidx < WARP:
        put(buffer + 4 * (tidx + WARP), 7)
    cute.arch.sync_threads()
    out[tidx] = get(buffer + 4 * tidx)


# ---- warps
# -------------------------------------------------------------------------------------------------------------------------
@cute.kernel
def mask_of_the_first_half(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Groups of 16 lanes reduce, and the upper group shuffles with the mask of the lower one."""
    tidx, warp, lane = place()
    mask = Int32(0xFFFF)
    if cutlass.const_expr(fixed):
        mask = Int32(0xFFFF) << (lane & 16)
    out[tidx] = inline_ptx(
        "shfl.sync.bfly.b32 {$w0}, {$r0}, 8, 31, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(tidx), mask],
    )


@cute.kernel
def elected_in_a_branch(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """elect.sync is executed by only one lane of the warp."""
    tidx, warp, lane = place()
    elect = "{ .reg .pred P; .reg .b32 L; elect.sync L|P, 0xffffffff; selp.b32 {$w0}, 1, 0, P; }"
    chosen = Int32(0)
    if cutlass.const_expr(fixed):
        chosen = inline_ptx(elect, write_only_types=[Int32])
    elif lane == 0:
        chosen = inline_ptx(elect, write_only_types=[Int32])
    cute.arch.sync_warp()
    out[tidx] = chosen


# ---- CTAs
# --------------------------------------------------------------------------------------------------------------------------
@cute.kernel
def leader_exits(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The CTA that holds the result of an atomic publishes it and exits while others still load it."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    buffer = shared(NBYTES)
    if rank == 0:
        put(buffer + 4 * tidx, tidx + 9)
    cluster_barrier()
    if rank == 1:
        out[tidx] = inline_ptx(
            "ld.shared::cluster.b32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[remote(buffer + 4 * tidx, 0)],
        )
    if cutlass.const_expr(fixed):
        cluster_barrier()


@cute.kernel
def last_block(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The last CTA to increment a counter adds the partial sums of the others without a fence after the atomic."""
    tidx, warp, lane = place()
    cta = cute.arch.block_idx()[0]
    last = shared(16, 16)
    out[64 * cta + tidx] = 100 * cta + tidx
    inline_ptx("fence.acq_rel.gpu;")
    cute.arch.sync_threads()
    if tidx == 0:
        before = inline_ptx(
            "atom.global.add.u32 {$w0}, [{$r0}], 1;",
            write_only_types=[Int32],
            read_only_args=[address(out, 1024)],
        )
        put(last, before)
    cute.arch.sync_threads()
    if get(last) == 1:
        if cutlass.const_expr(fixed):
            inline_ptx("fence.acq_rel.gpu;")
        out[256 + tidx] = out[tidx] + out[64 + tidx]


@cute.kernel
def counted_without_fence(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A counter announces a partial result of a bulk store without a fence between the wait and the count."""
    tidx, warp, lane = place()
    buffer, counter = shared(NBYTES), address(out, 1024)
    if cute.arch.block_idx()[0] == 0:
        put(buffer + 4 * tidx, tidx + 5)
        fence_async()
        cute.arch.sync_threads()
        if tidx == 0:
            store(address(out, 0), buffer, 256)
            stored(0, "")
            if cutlass.const_expr(fixed):
                inline_ptx("fence.proxy.async;\nfence.acq_rel.gpu;")
            inline_ptx("red.global.add.u32 [{$r0}], 1;", read_only_args=[counter])
    else:
        poll(counter)
        out[128 + tidx] = out[tidx] * 2


# ---- launches
# ----------------------------------------------------------------------------------------------------------------------
@cute.jit
def lets_dependents_start():
    inline_ptx("griddepcontrol.launch_dependents;")


@cute.jit
def waits_for_launches():
    inline_ptx("griddepcontrol.wait;")


@cute.kernel
def preprocess(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """First launch: lets the next one start, then stores the data that it needs."""
    tidx, warp, lane = place()
    lets_dependents_start()
    out[tidx] = 5 * tidx


@cute.kernel
def partition(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Second launch: lets the next one start, and stores without a wait for the first one."""
    tidx, warp, lane = place()
    if cutlass.const_expr(fixed):
        waits_for_launches()
    lets_dependents_start()
    out[256 + tidx] = tidx


@cute.kernel
def one_warp_waits(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The loading warp waits for the previous launch; another warp reads that launch's statistics at once."""
    tidx, warp, lane = place()
    if warp == 0 or cutlass.const_expr(fixed):
        waits_for_launches()
    out[512 + tidx] = out[tidx] + 1


@cute.kernel
def merge(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A launch waits for the previous one, which did not wait for its own predecessor, whose stores may be under way."""
    tidx, warp, lane = place()
    waits_for_launches()
    out[512 + tidx] = out[tidx] + 1
