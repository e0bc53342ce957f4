"""Faults of visibility between proxies, lanes and CTAs."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.arch import inline_ptx

from .pieces import *


@cute.jit
def put_global(at, value):
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[Int64(at), Int32(value)])


# ---- proxies ---------------------------------------------------------------------------------------------------------------
@cute.kernel
def loaded_over_zeros(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Threads fill a stage with zeros and a bulk copy loads over them; the zeros may arrive after the data."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    put(buffer + 4 * tidx, 0)
    put(buffer + 256 + 4 * tidx, 0)
    if cutlass.const_expr(fixed):
        fence_async()
    cute.arch.sync_threads()
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
    wait(bars, 0)
    out[tidx] = get(buffer + 4 * tidx)
    out[64 + tidx] = get(buffer + 256 + 4 * tidx)


@cute.kernel
def stored_over_zeros(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Threads clear a result in global memory and a bulk store writes it; the zeros may arrive after the result."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    put_global(address(out, tidx), 0)
    if cutlass.const_expr(fixed):
        inline_ptx("fence.proxy.async;")
    cute.arch.sync_threads()
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
        wait(bars, 0)
        store(address(out, 0), buffer, 256)
        stored(read="")


@cute.kernel
def fence_of_shared_memory(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Threads store to global memory and a bulk copy loads the data after a proxy fence of only shared memory."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    put_global(address(src, 512 + tidx), 3 * tidx)
    if cutlass.const_expr(fixed):
        inline_ptx("fence.proxy.async.global;")
    else:
        fence_async()
    cute.arch.sync_threads()
    if tidx == 0:
        load(buffer, address(src, 512), bars, 256)
    wait(bars, 0)
    out[tidx] = get(buffer + 4 * tidx)


@cute.kernel
def fence_of_global_memory(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Threads store to shared memory and a bulk store reads the data after a proxy fence of only global memory."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    put(buffer + 4 * tidx, tidx)
    if cutlass.const_expr(fixed):
        fence_async()
    else:
        inline_ptx("fence.proxy.async.global;")
    cute.arch.sync_threads()
    if tidx == 0:
        store(address(out, 0), buffer, 256)
        stored()


@cute.kernel
def map_of_ordinary_stores(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Ordinary stores write a tensor map to global memory, followed by a fence of only memory."""
    tidx, warp, lane = place()
    buffer, draft, bars = shared(NBYTES), shared(128), barriers(1, (1,))
    live = (address(src, 1024) + 127) & -128
    if warp == 0:
        if lane == 0:
            make_map(draft, src, 3)
        cute.arch.sync_warp()
        put_global(live + 4 * lane, get(draft + 4 * lane))
        if cutlass.const_expr(fixed):
            inline_ptx("fence.proxy.tensormap::generic.release.gpu;")
        else:
            inline_ptx("fence.acq_rel.gpu;")
        cute.arch.sync_warp()
        acquire_map(live)
        if lane == 0:
            load_row(buffer, live, bars)
    wait(bars, 0)
    out[tidx] = get(buffer + 4 * tidx)


# ---- lanes of a warp -----------------------------------------------------------------------------------------------------------
@cute.kernel
def elected_lane_waits(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """One lane waits for a stage that all lanes read."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
    if lane == 0:
        wait(bars, 0)
    if cutlass.const_expr(fixed):
        cute.arch.sync_warp()
    out[tidx] = get(buffer + 4 * tidx)


@cute.kernel
def small_copies_of_other_lanes(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """cp.async.wait_group covers only the copies of its lane, but a warp reads what other lanes copied."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;\ncp.async.commit_group;\ncp.async.wait_group 0;",
        read_only_args=[Int32(buffer + 4 * tidx), address(src, tidx)],
    )
    if cutlass.const_expr(fixed):
        cute.arch.sync_warp()
    out[tidx] = get(buffer + 4 * (tidx ^ 1))


@cute.kernel
def elected_lane_frees_a_stage(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """One lane waits until a bulk store has read its source, and all lanes store there."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES) + 256 * warp
    for turn in cutlass.range(2, unroll=1):
        put(buffer + 4 * lane, tidx + 100 * turn)
        fence_async()
        cute.arch.sync_warp()
        if lane == 0:
            store(address(out, 64 * turn + 32 * warp), buffer, 128)
            stored()
        if cutlass.const_expr(fixed):
            cute.arch.sync_warp()
    if lane == 0:
        stored()


# ---- barriers
# --------------------------------------------------------------------------------------------------------------------
@cute.kernel
def expected_too_early(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A warp expects bytes on a barrier that another warp initialises."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), shared(8, 8)
    if tidx == 0:
        init(bars, 1)
        fence_init()
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    if tidx == WARP:
        inline_ptx("mbarrier.expect_tx.relaxed.cta.shared.b64 [{$r0}], 256;", read_only_args=[Int32(bars)])
    cute.arch.sync_threads()
    if tidx == 0:
        arrive(bars)
        inline_ptx(
            "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], 256, [{$r2}];",
            read_only_args=[Int32(buffer), address(src, 0), Int32(bars)],
        )
    wait(bars, 0)
    out[tidx] = get(buffer + 4 * tidx)


@cute.kernel
def expected_in_another_cta(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A CTA expects bytes on another CTA's barrier whose initialisation no fence made visible."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    bars = shared(8, 8)
    if tidx == 0:
        init(bars, 1)
        if cutlass.const_expr(fixed):
            fence_init()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    if tidx == 0:
        inline_ptx(
            "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [{$r0}], 16;\n"
            "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [{$r0}], 16;",
            read_only_args=[remote(bars, rank ^ 1)],
        )
    cluster_barrier()
    if tidx == 0:
        arrive(bars)
    wait(bars, 0)
    out[64 * rank + tidx] = tidx


@cute.kernel
def relaxed_barrier_of_a_cluster(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """CTAs store to global memory before a relaxed cluster barrier, and others read the data after it."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    put_global(address(src, 512 + 64 * rank + tidx), 100 * rank + tidx)
    if cutlass.const_expr(fixed):
        cute.arch.cluster_arrive()
    else:
        cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    out[64 * rank + tidx] = inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address(src, 512 + 64 * (rank ^ 1) + tidx)],
    )


@cute.kernel
def stored_again_behind_a_relaxed_barrier(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """One CTA clears a result, and another stores it after a relaxed cluster barrier."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    if rank == 0:
        put_global(address(out, tidx), 0)
    if cutlass.const_expr(fixed):
        cute.arch.cluster_arrive()
    else:
        cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    if rank == 1:
        put_global(address(out, tidx), tidx)


@cute.jit
def try_wait(bar, parity, repeat: cutlass.Constexpr):
    """A wait with a time limit."""
    again = "@P bra.uni DONE; bra.uni AGAIN; DONE:" if repeat else ""
    inline_ptx(
        "{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared.b64 P, [{$r0}], {$r1}, 1000; " + again + " }",
        read_only_args=[Int32(bar), Int32(parity)],
    )


@cute.kernel
def wait_that_may_give_up(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A wait with a time limit is not followed by a check that the phase is complete."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
    try_wait(bars, 0, fixed)
    out[tidx] = get(buffer + 4 * tidx)
    cute.arch.sync_threads()
    wait(bars, 0)


@cute.kernel
def waits_twice_at_most(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A second wait follows one that gave up, but no third one."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
    if not cute.arch.mbarrier_try_wait(cute.make_ptr(cutlass.Int64, bars, cute.AddressSpace.smem), 0):
        try_wait(bars, 0, fixed)
    out[tidx] = get(buffer + 4 * tidx)
    cute.arch.sync_threads()
    wait(bars, 0)
