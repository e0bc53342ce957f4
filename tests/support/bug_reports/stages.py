"""Faults of stages, barriers, clusters and the allocation of tensor memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.arch import inline_ptx

from .pieces import *


# ---- shared memory and its copies ---------------------------------------------------------------------------------------
@cute.kernel
def issuer_waits(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A warp waits for bulk groups that another thread issued. Groups belong to their thread, so the wait covers nothing."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    for turn in cutlass.range(2, unroll=1):
        put(buffer + 4 * tidx, tidx + turn)
        fence_async()
        cute.arch.sync_threads()
        if tidx == 0:
            store(address(out, 256 * turn), buffer, 256)
        if cutlass.const_expr(fixed):
            if tidx == 0:
                stored()
        elif tidx == WARP:
            stored()
        cute.arch.sync_threads()
    if tidx == 0:
        stored()


@cute.kernel
def groups_off_by_one(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A stage is loaded again although the one pending group that the wait allows is its own."""
    tidx, warp, lane = place()
    buffer, bars = shared(2 * NBYTES), barriers(2, (1, 1))
    if tidx == 0:
        load(buffer, address(src, 0), bars)
        load(buffer + NBYTES, address(src, 256), bars + 8)
        for turn in cutlass.range_constexpr(2):
            stage = buffer + turn * NBYTES
            wait(bars + 8 * turn, 0)
            store(address(out, 256 * turn), stage)
            stored(0 if fixed else 1)
            load(stage, address(src, 512 + 256 * turn), bars + 8 * turn)
        for turn in cutlass.range_constexpr(2):
            wait(bars + 8 * turn, 1)
            store(address(out, 512 + 256 * turn), buffer + turn * NBYTES)
        stored()


@cute.kernel
def store_in_a_loop(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A loop reuses buffers of bulk stores, and the wait for the stores comes after the loop."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    for turn in cutlass.range(2, unroll=1):
        put(buffer + 4 * tidx, tidx * turn)
        fence_async()
        cute.arch.sync_threads()
        if tidx == 0:
            store(address(out, 256 * turn), buffer, 256)
            if cutlass.const_expr(fixed):
                stored()
        cute.arch.sync_threads()
    if tidx == 0:
        stored()


@cute.kernel
def no_proxy_fence(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A barrier orders threads, but not their writes with the reads of a bulk copy."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    put(buffer + 4 * tidx, tidx)
    if cutlass.const_expr(fixed):
        fence_async()
    cute.arch.sync_threads()
    if tidx == 0:
        store(address(out, 0), buffer, 256)
        stored()


@cute.kernel
def epilogue_alias(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The output tile overlaps an input of the epilogue that a slower warp still reads."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
    wait(bars, 0)
    value = get(buffer + 4 * (63 - tidx)) + 1
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    put(buffer + 4 * tidx, value)
    fence_async()
    cute.arch.sync_threads()
    if tidx == 0:
        store(address(out, 0), buffer, 256)
        stored()


@cute.kernel
def copies_after_the_loop(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The last, unneeded prefetch of a loop is under way when its stage is reused for something else."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    at = Int32(buffer + 4 * tidx)
    copy = "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;\ncp.async.commit_group;"
    inline_ptx(copy, read_only_args=[at, address(src, tidx)])
    inline_ptx("cp.async.wait_group 0;")
    value = get(at)
    inline_ptx(copy, read_only_args=[at, address(src, 64 + tidx)])
    if cutlass.const_expr(fixed):
        inline_ptx("cp.async.wait_group 0;")
    put(at, value * 2)
    out[tidx] = get(at)
    inline_ptx("cp.async.wait_group 0;")


@cute.kernel
def mailbox(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A slot has only a "full" barrier, so the next tile may overwrite one that some threads still read."""
    tidx, warp, lane = place()
    slot, bars = shared(16, 16), barriers(2, (1, 1))
    for turn in cutlass.range(3, unroll=1):
        if tidx == 0:
            if cutlass.const_expr(fixed):
                wait(bars + 8, (turn & 1) ^ 1)
            put(slot, turn + 7)
            arrive(bars)
        if warp == 1:
            wait(bars, turn & 1)
            tile = get(slot)
            if lane == 0:
                out[turn] = tile
                if cutlass.const_expr(fixed):
                    arrive(bars + 8)


# ---- mbarriers and named barriers ----------------------------------------------------------------------------------------
@cute.kernel
def parity_of_a_ring(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A wait for a barrier that completes once per iteration uses the parity of a ring of two stages."""
    tidx, warp, lane = place()
    buffer, bars = shared(2 * NBYTES), barriers(2, (1, 1))
    for turn in cutlass.range_constexpr(4):
        if tidx == 0:
            if cutlass.const_expr(turn > 0):
                wait(bars + 8, (turn - 1) % 2 if fixed else (turn // 2 + 1) % 2)
            load(buffer, address(src, 64 * turn), bars, 128)
        if warp == 1:
            wait(bars, turn % 2)
            value = get(buffer + 4 * lane)
            out[32 * turn + lane] = value
            cute.arch.sync_warp()
            if lane == 0:
                arrive(bars + 8)


@cute.kernel
def producer_overtakes(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The producer completes the next phase when one of two consumers is ready, so the other consumer may miss a phase."""
    tidx, warp, lane = place()
    bars = barriers(2, (1, 2 if fixed else 1))
    for turn in cutlass.range(3, unroll=1):
        if tidx == 0:
            wait(bars + 8, (turn & 1) ^ 1)
            arrive(bars)
        if warp % 4 == 0:
            if warp >= 4:
                wait(bars, turn & 1)
                if lane == 0:
                    if cutlass.const_expr(fixed):
                        arrive(bars + 8)
                    elif warp == 4:
                        arrive(bars + 8)
    out[tidx] = tidx


@cute.kernel
def every_lane_arrives(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """All lanes arrive on a barrier that expects one arrival."""
    tidx, warp, lane = place()
    bars = barriers(1, (1,))
    if warp == 0:
        if cutlass.const_expr(fixed):
            if lane == 0:
                arrive(bars)
        else:
            arrive(bars)
    wait(bars, 0)
    out[tidx] = tidx


@cute.kernel
def two_initialisers(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """One thread per warp initialises the barriers, instead of one per CTA."""
    tidx, warp, lane = place()
    bar = shared(8, 8)
    if (tidx if fixed else lane) == 0:
        init(bar, 64)
        fence_init()
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    arrive(bar)
    wait(bar, 0)
    out[tidx] = tidx


@cute.kernel
def no_init_fence(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The async proxy uses a barrier whose initialisation was not made visible to it."""
    tidx, warp, lane = place()
    buffer, bar = shared(NBYTES), shared(8, 8)
    if tidx == 0:
        init(bar, 1)
        if cutlass.const_expr(fixed):
            fence_init()
    cute.arch.sync_threads()
    if tidx == 0:
        load(buffer, address(src, 0), bar, 256)
    wait(bar, 0)
    out[tidx] = get(buffer + 4 * tidx)


@cute.kernel
def barrier_of_more_threads(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A named barrier for all threads is in a branch that only half of them execute."""
    tidx, warp, lane = place()
    if warp == 0:
        sync(1, WARP if fixed else 2 * WARP)
    out[tidx] = tidx


@cute.kernel
def two_arrivals(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A warp without work arrives for two tiles, while the loader waits for each tile."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    for turn in cutlass.range(2, unroll=1):
        if warp == 0:
            if cutlass.const_expr(fixed):
                sync(1, 2 * WARP)
            else:
                inline_ptx("barrier.arrive 1, 64;")
        else:
            put(buffer + 4 * lane, turn)
            sync(1, 2 * WARP)
    out[tidx] = tidx


@cute.kernel
def one_barrier_for_two_pairs(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Two pairs of warps share one named barrier, so a warp may continue with the wrong partner."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    if warp < 2:
        put(buffer + 4 * tidx, tidx)
        sync(1, 2 * WARP)
        out[tidx] = get(buffer + 4 * (tidx ^ WARP))
    elif cutlass.const_expr(fixed):
        put(buffer + 4 * tidx, tidx)
        sync(2, 2 * WARP)
        out[tidx] = get(buffer + 4 * (tidx ^ WARP))
    else:
        put(buffer + 4 * tidx, tidx)
        sync(1, 2 * WARP)
        out[tidx] = get(buffer + 4 * (tidx ^ WARP))


# ---- clusters -----------------------------------------------------------------------------------------------------------
@cute.kernel
def peer_not_started(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A CTA stores to another CTA's shared memory before it knows that this CTA runs."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    buffer = shared(NBYTES)
    if cutlass.const_expr(fixed):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    inline_ptx(
        "st.shared::cluster.b32 [{$r0}], {$r1};",
        read_only_args=[remote(buffer + 4 * tidx, rank ^ 1), Int32(tidx + 100 * rank)],
    )
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    out[64 * rank + tidx] = get(buffer + 4 * tidx)


@cute.kernel
def peer_barrier_not_ready(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A CTA arrives at another CTA's barrier before it knows that the barrier is initialised."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    bars = barriers(1, (1,))
    if cutlass.const_expr(fixed):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    if tidx == 0:
        inline_ptx(
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
            read_only_args=[remote(bars, rank ^ 1)],
        )
    wait(bars, 0)
    out[64 * rank + tidx] = tidx
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.kernel
def local_arrival_elsewhere(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """An arrival instruction for the own CTA is given the address of another CTA's barrier."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    bars = barriers(1, (1,))
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if tidx == 0:
        form = "release.cluster.shared::cluster" if fixed else "shared"
        inline_ptx(f"mbarrier.arrive.{form}.b64 _, [{{$r0}}];", read_only_args=[remote(bars, rank ^ 1)])
    wait(bars, 0)
    out[64 * rank + tidx] = tidx
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.kernel
def peer_still_reads(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A multicast copy writes to two CTAs, but only the issuing CTA has said that its epilogue is over."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    buffer, bars = shared(NBYTES), barriers(2, (1, 2 if fixed else 1))
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    for turn in cutlass.range_constexpr(2):
        if tidx == 0:
            inline_ptx("mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], 256;", read_only_args=[Int32(bars)])
            if rank == 0:
                if cutlass.const_expr(turn > 0):
                    wait(bars + 8, 0)
                inline_ptx(
                    "{ .reg .b16 MASK; mov.b16 MASK, 3;\n"
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                    "[{$r0}], [{$r1}], 256, [{$r2}], MASK; }",
                    read_only_args=[Int32(buffer), address(src, 64 * turn), Int32(bars)],
                )
        wait(bars, turn)
        out[128 * turn + 64 * rank + tidx] = get(buffer + 4 * tidx)
        cute.arch.sync_threads()
        if tidx == 0:
            if cutlass.const_expr(fixed):
                inline_ptx(
                    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
                    read_only_args=[remote(bars + 8, 0)],
                )
            elif rank == 0:
                arrive(bars + 8)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


# ---- global memory and the async proxy ------------------------------------------------------------------------------------
@cute.kernel
def flag_then_bulk_copy(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A bulk copy loads data that another CTA stored and announced, without a fence between the proxies."""
    tidx, warp, lane = place()
    cta = cute.arch.block_idx()[0]
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    flag = address(out, 1024)
    if cta == 0:
        out[tidx] = tidx + 5
        cute.arch.sync_threads()
        if tidx == 0:
            inline_ptx("st.release.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[flag, Int32(1)])
    else:
        if tidx == 0:
            inline_ptx(
                "{ .reg .pred P; .reg .b32 V; POLL: ld.acquire.gpu.global.b32 V, [{$r0}]; setp.eq.u32 P, V, 0; @P bra POLL; }",
                read_only_args=[flag],
            )
            if cutlass.const_expr(fixed):
                inline_ptx("fence.proxy.async;")
            load(buffer, address(out, 0), bars, 256)
        wait(bars, 0)
        out[128 + tidx] = get(buffer + 4 * tidx)


# ---- tensor memory ----------------------------------------------------------------------------------------------------------


@cute.kernel
def address_not_published(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The address of an allocation is read before a barrier says that it was written."""
    tidx, warp, lane = place()
    slot = shared(16, 16)
    if cutlass.const_expr(not fixed):
        cute.arch.sync_threads()
    if warp == 0:
        allocate(slot)
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    out[tidx] = get(slot)
    cute.arch.sync_threads()
    if warp == 0:
        free(get(slot))


@cute.kernel
def freed_by_the_first(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The allocating warp frees tensor memory after its own work, without waiting for the other warps."""
    tidx, warp, lane = place()
    slot = shared(16, 16)
    if warp == 0:
        allocate(slot)
    cute.arch.sync_threads()
    tmem = get(slot)
    at = tmem + (warp << 21)
    write_tmem(at, tidx)
    out[tidx] = read_tmem(at)
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    if warp == 0:
        free(tmem)


@cute.kernel
def not_allocated(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A kernel uses tensor memory from column 0 on without an allocation."""
    tidx, warp, lane = place()
    slot = shared(16, 16)
    tmem = Int32(0)
    if cutlass.const_expr(fixed):
        if warp == 0:
            allocate(slot)
        cute.arch.sync_threads()
        tmem = get(slot)
    at = tmem + (warp << 21)
    write_tmem(at, tidx)
    out[tidx] = read_tmem(at)
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
        if warp == 0:
            free(tmem)
