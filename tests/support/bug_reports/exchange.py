"""Faults of CTAs that exchange data through global memory, and of their stages."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.arch import inline_ptx

from .pieces import *


# ---- CTAs that exchange through global memory ------------------------------------------------------------------------------
@cute.kernel
def split_without_fence(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A semaphore announces partial sums without a fence after their stores."""
    tidx, warp, lane = place()
    flag = address(out, 1024)
    if cute.arch.block_idx()[0] == 0:
        out[tidx] = tidx + 5
        if cutlass.const_expr(fixed):
            inline_ptx("fence.acq_rel.gpu;")
        cute.arch.sync_threads()
        if tidx == 0:
            inline_ptx("st.relaxed.gpu.global.b32 [{$r0}], 1;", read_only_args=[flag])
    else:
        poll(flag)
        out[128 + tidx] = out[tidx] * 2


@cute.kernel
def flag_after_read_wait(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A flag announces the end of a bulk store after a wait for only its reads."""
    tidx, warp, lane = place()
    buffer, flag = shared(NBYTES), address(out, 1024)
    if cute.arch.block_idx()[0] == 0:
        put(buffer + 4 * tidx, tidx + 5)
        fence_async()
        cute.arch.sync_threads()
        if tidx == 0:
            store(address(out, 0), buffer, 256)
            stored(0, "" if fixed else ".read")
            inline_ptx("fence.proxy.async;")
            inline_ptx("st.release.gpu.global.b32 [{$r0}], 1;", read_only_args=[flag])
    else:
        poll(flag)
        out[128 + tidx] = out[tidx] * 2


# ---- shared memory and its copies ---------------------------------------------------------------------------------------
@cute.kernel
def box_of_more_bytes(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The barrier expects the bytes of a small batch, but the copy delivers a full box."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        nbytes = 256 if fixed else 128
        inline_ptx(
            f"mbarrier.arrive.expect_tx.shared.b64 _, [{{$r2}}], {nbytes};\n"
            "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], 256, [{$r2}];",
            read_only_args=[Int32(buffer), address(src, 0), Int32(bars)],
        )
    wait(bars, 0)
    out[tidx] = get(buffer + 4 * tidx)


@cute.kernel
def zeros_without_barrier(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """st.bulk clears a buffer that other warps still read."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    put(buffer + 4 * tidx, tidx + 1)
    cute.arch.sync_threads()
    out[tidx] = get(buffer + 4 * (63 - tidx))
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    if tidx == 0:
        inline_ptx("st.bulk.weak.shared::cta [{$r0}], 256, 0;", read_only_args=[Int64(buffer)])
    cute.arch.sync_threads()
    out[64 + tidx] = get(buffer + 4 * tidx)


@cute.kernel
def commit_after_wait(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A group of cp.async is closed after the wait that should cover it, so the wait covers nothing."""
    tidx, warp, lane = place()
    at = Int32(shared(NBYTES) + 4 * tidx)
    inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[at, address(src, 63 - tidx)])
    if cutlass.const_expr(fixed):
        inline_ptx("cp.async.commit_group;\ncp.async.wait_group 0;")
    else:
        inline_ptx("cp.async.wait_group 0;\ncp.async.commit_group;")
    out[tidx] = get(at)
    inline_ptx("cp.async.wait_all;")


@cute.kernel
def one_barrier_in_a_loop(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A loop fills and reads a tile with one barrier per iteration, so a fast warp refills it while a slow one reads."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    for turn in cutlass.range(2, unroll=1):
        put(buffer + 4 * tidx, tidx + 100 * turn)
        cute.arch.sync_threads()
        out[64 * turn + tidx] = get(buffer + 4 * (tidx ^ WARP))
        if cutlass.const_expr(fixed):
            cute.arch.sync_threads()


@cute.kernel
def refill_under_loads(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A tile is loaded again after a barrier that follows the issue of its loads but not their completion."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
    wait(bars, 0)
    value = get(buffer + 4 * tidx)
    if cutlass.const_expr(fixed):
        fence_async()
    cute.arch.sync_threads()
    if tidx == 0:
        load(buffer, address(src, 64), bars, 256)
    out[tidx] = value
    wait(bars, 1)
    out[64 + tidx] = get(buffer + 4 * tidx)


@cute.kernel
def released_before_store(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A consumer releases a stage and then stores from it, while the producer loads it again."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(2, (1, 1))
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
        wait(bars + 8, 0)
        load(buffer, address(src, 64), bars, 256)
    if tidx == WARP:
        for turn in cutlass.range_constexpr(2):
            wait(bars, turn)
            if cutlass.const_expr(not fixed and turn == 0):
                arrive(bars + 8)
            store(address(out, 64 * turn), buffer, 256)
            stored()
            if cutlass.const_expr(fixed and turn == 0):
                arrive(bars + 8)


@cute.kernel
def no_warp_barrier(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Lanes of a warp read what other lanes wrote, without a warp barrier."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    put(buffer + 4 * tidx, tidx + 1)
    if cutlass.const_expr(fixed):
        cute.arch.sync_warp()
    out[tidx] = get(buffer + 4 * (tidx ^ 1))


# ---- clusters -----------------------------------------------------------------------------------------------------------
@cute.kernel
def mask_beyond_cluster(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The mask of a multicast copy names a CTA that the cluster does not have."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if tidx == 0:
        inline_ptx("mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], 256;", read_only_args=[Int32(bars)])
        if rank == 0:
            inline_ptx(
                f"{{ .reg .b16 MASK; mov.b16 MASK, {3 if fixed else 7};\n"
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                "[{$r0}], [{$r1}], 256, [{$r2}], MASK; }",
                read_only_args=[Int32(buffer), address(src, 0), Int32(bars)],
            )
    wait(bars, 0)
    out[64 * rank + tidx] = get(buffer + 4 * tidx)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.kernel
def half_of_the_peer(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Each CTA loads its half and waits for it; the leader reads the peer's half without waiting for its arrival."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    buffer, bars = shared(NBYTES), barriers(2, (1, 1))
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if tidx == 0:
        load(buffer, address(src, 64 * rank), bars, 256)
    wait(bars, 0)
    if rank == 1:
        if tidx == 0:
            if cutlass.const_expr(fixed):
                inline_ptx(
                    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
                    read_only_args=[remote(bars + 8, 0)],
                )
    else:
        if cutlass.const_expr(fixed):
            inline_ptx(
                "{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P, [{$r0}], 0, 1000000;\n"
                "@P bra.uni DONE; bra.uni AGAIN; DONE: }",
                read_only_args=[Int32(bars + 8)],
            )
        out[tidx] = inline_ptx(
            "ld.shared::cluster.b32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[remote(buffer + 4 * tidx, 1)],
        )
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
