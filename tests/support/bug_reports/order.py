"""Faults of order: scopes and semantics of barriers, proxies, and reused storage."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.arch import inline_ptx

from .pieces import *


# ---- barriers --------------------------------------------------------------------------------------------------------------
@cute.kernel
def relaxed_cluster_barrier(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """CTAs read data after a relaxed cluster barrier that others stored before it."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    buffer = shared(NBYTES)
    put(buffer + 4 * tidx, 100 * rank + tidx)
    if cutlass.const_expr(fixed):
        cute.arch.cluster_arrive()
    else:
        cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    out[64 * rank + tidx] = inline_ptx(
        "ld.shared::cluster.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[remote(buffer + 4 * tidx, rank ^ 1)],
    )
    cluster_barrier()


@cute.kernel
def one_lane_announces(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """All lanes of a warp store a tile, and an elected one arrives for them."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if warp == 0:
        put(buffer + 4 * tidx, tidx + 5)
        if cutlass.const_expr(fixed):
            cute.arch.sync_warp()
        with cute.arch.elect_one():
            arrive(bars)
    else:
        wait(bars, 0)
        out[tidx] = get(buffer + 4 * (tidx - WARP))


@cute.kernel
def copies_announced_to_the_peer(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A CTA announces its cp.async copies to the other one by arrivals of CTA scope."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    buffer, bars = shared(NBYTES), barriers(1, (64,))
    cluster_barrier()
    if rank == 1:
        inline_ptx(
            "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;\ncp.async.wait_all;",
            read_only_args=[Int32(buffer + 4 * tidx), address(src, tidx)],
        )
        scope = "cluster" if fixed else "cta"
        inline_ptx(
            f"mbarrier.arrive.release.{scope}.shared::cluster.b64 _, [{{$r0}}];",
            read_only_args=[remote(bars, 0)],
        )
    else:
        inline_ptx(
            "{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P, [{$r0}], 0, 1000000;\n"
            "@P bra.uni DONE; bra.uni AGAIN; DONE: }",
            read_only_args=[Int32(bars)],
        )
        out[tidx] = inline_ptx(
            "ld.shared::cluster.b32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[remote(buffer + 4 * tidx, 1)],
        )
    cluster_barrier()


@cute.kernel
def relaxed_wait(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A relaxed wait finds that data has arrived, but nothing makes the data visible."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
    inline_ptx(
        "{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 P, [{$r0}], 0, 1000000;\n"
        "@P bra.uni DONE; bra.uni AGAIN; DONE: }",
        read_only_args=[Int32(bars)],
    )
    if cutlass.const_expr(fixed):
        inline_ptx("fence.acq_rel.cluster;")
    out[tidx] = get(buffer + 4 * tidx)


@cute.kernel
def receiver_does_not_expect(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A multicast copy signals two CTAs, but only the issuing one expects the bytes; the other one only arrives."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    cluster_barrier()
    if tidx == 0:
        if cutlass.const_expr(fixed):
            inline_ptx("mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], 256;", read_only_args=[Int32(bars)])
        elif rank == 0:
            inline_ptx("mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], 256;", read_only_args=[Int32(bars)])
        else:
            arrive(bars)
        if rank == 0:
            inline_ptx(
                "{ .reg .b16 MASK; mov.b16 MASK, 3;\n"
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                "[{$r0}], [{$r1}], 256, [{$r2}], MASK; }",
                read_only_args=[Int32(buffer), address(src, 0), Int32(bars)],
            )
    wait(bars, 0)
    out[64 * rank + tidx] = get(buffer + 4 * tidx)
    cluster_barrier()


@cute.kernel
def data_over_barrier(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The storage of an unneeded barrier is reused for data without invalidating the barrier."""
    tidx, warp, lane = place()
    buffer, bars = shared(NBYTES), barriers(1, (1,))
    if tidx == 0:
        load(buffer, address(src, 0), bars, 256)
    wait(bars, 0)
    cute.arch.sync_threads()
    if tidx == 0:
        if cutlass.const_expr(fixed):
            inline_ptx("mbarrier.inval.shared.b64 [{$r0}];", read_only_args=[Int32(bars)])
        put(bars, 17)
    cute.arch.sync_threads()
    out[tidx] = get(buffer + 4 * tidx) + get(bars)


@cute.kernel
def invalid_too_early(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A CTA invalidates its barrier before another CTA's arrival on it."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    bars = barriers(1, (1,))
    cluster_barrier()
    if tidx == 0:
        if rank == 0:
            inline_ptx(
                "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
                read_only_args=[remote(bars, 1)],
            )
        else:
            if cutlass.const_expr(fixed):
                wait(bars, 0)
            inline_ptx("mbarrier.inval.shared.b64 [{$r0}];", read_only_args=[Int32(bars)])
    out[64 * rank + tidx] = tidx
    cluster_barrier()


@cute.kernel
def rewritten_scalar(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A leader publishes a scalar in a loop; all threads read it after the barrier while the leader rewrites it."""
    tidx, warp, lane = place()
    slot = shared(16, 16)
    for turn in cutlass.range(3, unroll=1):
        if tidx == 0:
            put(slot, turn * 5)
        cute.arch.sync_threads()
        out[64 * turn + tidx] = get(slot)
        if cutlass.const_expr(fixed):
            cute.arch.sync_threads()


@cute.kernel
def next_chunk(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """Warps of a role store factors at the top of a loop and read all factors at its end, with only one barrier in between."""
    tidx, warp, lane = place()
    factors = shared(NBYTES)
    if warp > 0:
        for chunk in cutlass.range(2, unroll=1):
            put(factors + 4 * tidx, tidx + chunk)
            sync(1, 64)
            out[128 * chunk + tidx] = get(factors + 4 * (tidx ^ 96))
            if cutlass.const_expr(fixed):
                sync(1, 64)


@cute.kernel
def copies_of_others(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """One warp copies for both warps and arrives at their barrier before its copies are complete."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    if warp == 0:
        inline_ptx(
            "cp.async.ca.shared.global [{$r0}], [{$r1}], 8;",
            read_only_args=[Int32(buffer + 8 * lane), address(src, 2 * lane)],
        )
        if cutlass.const_expr(fixed):
            inline_ptx("cp.async.wait_all;")
    cute.arch.sync_threads()
    inline_ptx("cp.async.wait_all;")
    out[tidx] = get(buffer + 4 * tidx)


# ---- global memory ---------------------------------------------------------------------------------------------------------
@cute.kernel
def read_only_path(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A kernel loads its own output with loads for constant data."""
    tidx, warp, lane = place()
    out[tidx] = tidx + 3
    cute.arch.sync_threads()
    form = "ld.global.b32" if fixed else "ld.global.nc.L1::no_allocate.b32"
    out[64 + tidx] = inline_ptx(
        f"{form} {{$w0}}, [{{$r0}}];", write_only_types=[Int32], read_only_args=[address(out, tidx ^ WARP)]
    )


@cute.kernel
def map_in_flight(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A tensor map is edited in place for the next group while loads of the current group use it."""
    tidx, warp, lane = place()
    buffer, draft, bars = shared(2 * NBYTES), shared(128), barriers(2, (1, 1))
    live = (address(src, 1024) + 127) & -128
    if warp == 0:
        for group in cutlass.range_constexpr(2):
            if lane == 0:
                make_map(draft, src, group)
            cute.arch.sync_warp()
            if cutlass.const_expr(fixed and group == 1):
                wait(bars, 0)
            publish_map(live, draft)
            acquire_map(live)
            if lane == 0:
                load_row(buffer + NBYTES * group, live, bars + 8 * group)
            cute.arch.sync_warp()
    for group in cutlass.range_constexpr(2):
        wait(bars + 8 * group, 0)
        out[64 * group + tidx] = get(buffer + NBYTES * group + 4 * tidx)


@cute.kernel
def map_not_acquired(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """After a barrier, a warp uses a tensor map that another warp published, without a fence of the map's proxy."""
    tidx, warp, lane = place()
    buffer, draft, bars = shared(NBYTES), shared(128), barriers(1, (1,))
    live = (address(src, 1024) + 127) & -128
    if warp == 0:
        if lane == 0:
            make_map(draft, src, 3)
        cute.arch.sync_warp()
        publish_map(live, draft)
    cute.arch.sync_threads()
    if tidx == WARP:
        if cutlass.const_expr(fixed):
            acquire_map(live)
        load_row(buffer, live, bars)
    wait(bars, 0)
    out[tidx] = get(buffer + 4 * tidx)


# ---- tensor memory -----------------------------------------------------------------------------------------------------------
@cute.kernel
def statistics_not_stored(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A warpgroup stores statistics to tensor memory and signals another one without waiting for the stores."""
    tidx, warp, lane = place()
    slot, bars = shared(16, 16), barriers(1, (128,))
    if warp == 0:
        allocate(slot)
    cute.arch.sync_threads()
    tmem = get(slot)
    at = tmem + ((warp % 4) << 21)
    if warp < 4:
        inline_ptx(
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [{$r0}], {{$r1}};", read_only_args=[Int32(at), Int32(tidx)]
        )
        if cutlass.const_expr(fixed):
            inline_ptx("tcgen05.wait::st.sync.aligned;")
        arrive(bars)
    else:
        wait(bars, 0)
        out[tidx] = inline_ptx(
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{$w0}}, [{$r0}];\ntcgen05.wait::ld.sync.aligned;",
            write_only_types=[Int32],
            read_only_args=[Int32(at)],
        )
    inline_ptx("tcgen05.wait::st.sync.aligned;")
    cute.arch.sync_threads()
    if warp == 0:
        free(tmem)


@cute.kernel
def slot_released_while_loading(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A slot of tensor memory is released after a load that has not been awaited; another warp stores to it."""
    tidx, warp, lane = place()
    slot, bars = shared(16, 16), barriers(2, (128, 128))
    if warp == 0:
        allocate(slot)
    cute.arch.sync_threads()
    tmem = get(slot)
    at = tmem + ((warp % 4) << 21)
    if warp < 4:
        for turn in cutlass.range_constexpr(2):
            if cutlass.const_expr(turn == 1):
                wait(bars + 8, 0)
            inline_ptx(
                "tcgen05.st.sync.aligned.32x32b.x1.b32 [{$r0}], {{$r1}};\ntcgen05.wait::st.sync.aligned;",
                read_only_args=[Int32(at), Int32(tidx + 1000 * turn)],
            )
            arrive(bars)
    else:
        for turn in cutlass.range_constexpr(2):
            wait(bars, turn)
            value = inline_ptx(
                "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{$w0}}, [{$r0}];",
                write_only_types=[Int32],
                read_only_args=[Int32(at)],
            )
            if cutlass.const_expr(fixed):
                inline_ptx("tcgen05.wait::ld.sync.aligned;")
            if cutlass.const_expr(turn == 0):
                arrive(bars + 8)
            if cutlass.const_expr(not fixed):
                inline_ptx("tcgen05.wait::ld.sync.aligned;")
            out[256 * turn + tidx] = value
    cute.arch.sync_threads()
    if warp == 0:
        free(tmem)


# ---- persistent kernels --------------------------------------------------------------------------------------------------------
@cute.kernel
def response_overwritten(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """The next answer of clusterlaunchcontrol overwrites the current one before every CTA has said that it read it."""
    tidx, warp, lane = place()
    rank = cute.arch.block_idx_in_cluster()
    response, bars = shared(16, 16), barriers(2, (1, 4 if fixed else 2))
    cluster_barrier()
    first = cute.arch.block_idx()[0]
    if tidx == 0:
        out[first] = 1
    working = Int32(1)
    turn = Int32(0)
    while working != 0:
        if warp == 0:
            if lane == 0:
                if rank == 0:
                    if turn > 0:
                        wait(bars + 8, (turn - 1) & 1)
                    inline_ptx(
                        "mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], 16;", read_only_args=[Int32(bars)]
                    )
                    inline_ptx(
                        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 "
                        "[{$r0}], [{$r1}];",
                        read_only_args=[Int32(response), Int32(bars)],
                    )
                else:
                    inline_ptx(
                        "mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], 16;", read_only_args=[Int32(bars)]
                    )
            cute.arch.sync_warp()
        wait(bars, turn & 1)
        working = get(response + 8)
        x = get(response)
        fence_async()
        if working != 0:
            if tidx == 0:
                out[x + rank] = 1
        cute.arch.sync_warp()
        if lane == 0:
            if cutlass.const_expr(fixed):
                inline_ptx(
                    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];",
                    read_only_args=[remote(bars + 8, 0)],
                )
            elif rank == 0:
                arrive(bars + 8)
        turn += 1
    cluster_barrier()


@cute.kernel
def asks_again(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A CTA calls clusterlaunchcontrol again after an answer that no cluster is left."""
    tidx, warp, lane = place()
    response, bars = shared(16, 16), barriers(1, (1,))
    if tidx == 0:
        for turn in cutlass.range_constexpr(1 if fixed else 2):
            inline_ptx("mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], 16;", read_only_args=[Int32(bars)])
            inline_ptx(
                "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [{$r0}], [{$r1}];",
                read_only_args=[Int32(response), Int32(bars)],
            )
            wait(bars, turn)
            fence_async()
        out[0] = get(response + 8)


# ---- bulk groups
# -----------------------------------------------------------------------------------------------------------------
@cute.kernel
def another_lane_waits(src: cute.Tensor, out: cute.Tensor, fixed: cutlass.Constexpr):
    """A lane other than the issuing one waits for a bulk store."""
    tidx, warp, lane = place()
    buffer = shared(NBYTES)
    for turn in cutlass.range(2, unroll=1):
        put(buffer + 4 * tidx, tidx + turn)
        fence_async()
        cute.arch.sync_threads()
        if tidx == 0:
            store(address(out, 256 * turn), buffer, 256)
        if tidx == (0 if fixed else 1):
            stored()
        cute.arch.sync_threads()
    if tidx == 0:
        stored()
