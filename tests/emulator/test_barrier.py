"""Named barriers, the cluster barrier, and mbarrier phases."""

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.memory import Mbarrier
from nvfp4_cute.errors import EmulatorError

MODULE = ".shared .align 8 .b64 bars[4]; .shared .align 16 .b8 buffer[1024];"
PROLOGUE = "mov.u32 %r50, %tid.x; shr.u32 %r51, %r50, 5; mov.b32 %r52, bars; mov.b32 %r53, buffer;"


def run(ptx_kernel, body: str, threads: int = 64, out: np.ndarray | None = None, **launch) -> np.ndarray:
    out = np.zeros(threads, np.uint32) if out is None else out
    run_ptx(ptx_kernel(PROLOGUE + body, module=MODULE), None, launch.pop("grid", 1), threads, [out], **launch)
    return out


STORE = "mul.wide.u32 %rd1, %r50, 4; add.s64 %rd2, %rd0, %rd1; st.global.b32 [%rd2], %r0;"


@pytest.mark.parametrize("sync", ["bar.sync 0;", "barrier.sync.aligned 3, 64;", "bar.cta.sync 1, 64;"])
def test_values_written_before_a_barrier_are_seen_after_it(ptx_kernel, sync: str) -> None:
    body = f"""
    mad.lo.u32 %r1, %r50, 4, %r53; st.shared.b32 [%r1], %r50;
    {sync}
    xor.b32 %r2, %r50, 63; mad.lo.u32 %r1, %r2, 4, %r53; ld.shared.b32 %r0, [%r1];
    {STORE}"""
    assert run(ptx_kernel, body).tolist() == [63 - i for i in range(64)]


def test_barrier_is_reusable(ptx_kernel) -> None:
    """Two warps alternately increment a counter. Each increment needs a new phase of the barrier."""
    body = f"""
    mov.b32 %r1, 0; st.shared.b32 [%r53], 0; bar.sync 0;
    LOOP: and.b32 %r2, %r1, 1; setp.ne.u32 %p1, %r2, %r51; @%p1 bra SKIP;
    ld.shared.b32 %r3, [%r53]; add.u32 %r3, %r3, 1; st.shared.b32 [%r53], %r3;
    SKIP: bar.sync 0; add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 10; @%p2 bra LOOP;
    ld.shared.b32 %r0, [%r53]; {STORE}"""
    assert set(run(ptx_kernel, body).tolist()) == {10}


def test_arrive_does_not_wait(ptx_kernel) -> None:
    body = f"""
    setp.eq.u32 %p1, %r51, 0; @%p1 bra CONSUMER;
    st.shared.b32 [%r53], 42; bar.arrive 2, 64; mov.b32 %r0, 1; bra END;
    CONSUMER: bar.sync 2, 64; ld.shared.b32 %r0, [%r53];
    END: {STORE}"""
    assert run(ptx_kernel, body).tolist() == [42] * 32 + [1] * 32


def test_barrier_reduction(ptx_kernel) -> None:
    body = f"""
    setp.lt.u32 %p1, %r50, 40; bar.red.popc.u32 %r0, 0, %p1; bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, !%p1;
    @%p2 add.u32 %r0, %r0, 100; @%p3 add.u32 %r0, %r0, 1000; {STORE}"""
    assert set(run(ptx_kernel, body).tolist()) == {1040}


def test_exited_warps_count_for_a_barrier_of_all(ptx_kernel) -> None:
    body = f"setp.eq.u32 %p1, %r51, 1; @%p1 exit; bar.sync 0; mov.b32 %r0, 1; {STORE}"
    assert run(ptx_kernel, body).tolist() == [1] * 32 + [0] * 32


@pytest.mark.parametrize(
    "body, message",
    [
        ("bar.sync 1, 33;", "not a positive multiple of 32"),
        ("bar.sync 16;", "barrier 16 does not exist"),
        ("shl.b32 %r1, %r51, 5; add.u32 %r1, %r1, 64; bar.sync 1, %r1;", "expects"),
        ("bar.sync %r50;", "barrier number differs between the lanes"),
        ("bar.sync 1, 96;", r"barrier 1: 2 of 3 warps arrived \(warps \[0, 1\]\)"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "twice without"),
        ("barrier.cluster.wait;", "without barrier.cluster.arrive"),
    ],
)
def test_misuse(ptx_kernel, body: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(ptx_kernel, body)


def test_cluster_barrier_orders_ctas(ptx_kernel) -> None:
    body = f"""
    mov.u32 %r1, %cluster_ctarank; add.u32 %r2, %r1, 7; st.shared.b32 [%r53], %r2;
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
    add.u32 %r3, %r1, 1; and.b32 %r3, %r3, 3; mapa.shared::cluster.u32 %r4, %r53, %r3;
    ld.shared::cluster.b32 %r0, [%r4];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mad.lo.u32 %r50, %r1, 32, %r50; {STORE}"""
    out = run(ptx_kernel, body, 32, np.zeros((4, 32), np.uint32), grid=4, cluster=4)
    assert out[:, 0].tolist() == [8, 9, 10, 7]


# ---- mbarrier -------------------------------------------------------------------------------------

WAIT = """{{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [{bar}], {parity}, 10000000;
@P1 bra.uni DONE; bra.uni LAB_WAIT; DONE: }}"""


def test_producer_consumer_ring(ptx_kernel) -> None:
    """Warp 0 sends 9 values through a ring of one slot with full and empty barriers, and warp 1 sums them."""
    body = f"""
    setp.ne.u32 %p1, %r50, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r52], 1; mbarrier.init.shared.b64 [%r52+8], 32;
    READY: fence.mbarrier_init.release.cluster; bar.sync 0;
    mov.b32 %r1, 0; mov.b32 %r0, 0; setp.eq.u32 %p2, %r51, 1; @%p2 bra CONSUMER;
    PRODUCER: and.b32 %r2, %r1, 1; xor.b32 %r2, %r2, 1; add.u32 %r10, %r52, 8;
    {WAIT.format(bar="%r10", parity="%r2")}
    add.u32 %r3, %r1, 1; st.shared.b32 [%r53], %r3;
    elect.sync %r4|%p3, -1; @%p3 mbarrier.arrive.shared.b64 %rd5, [%r52];
    add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 9; @%p4 bra PRODUCER; bra END;
    CONSUMER: and.b32 %r2, %r1, 1;
    {WAIT.format(bar="%r52", parity="%r2")}
    ld.shared.b32 %r3, [%r53]; add.u32 %r0, %r0, %r3; mbarrier.arrive.shared.b64 _, [%r52+8];
    add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 9; @%p4 bra CONSUMER;
    END: {STORE}"""
    assert run(ptx_kernel, body).tolist() == [0] * 32 + [45] * 32


def test_parity_of_a_fresh_barrier_and_state_tokens(ptx_kernel) -> None:
    body = f"""
    mbarrier.init.shared.b64 [%r52], 2;
    mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [%r52], 1;
    mbarrier.test_wait.parity.shared.b64 %p2, [%r52], 0;
    mbarrier.arrive.shared.b64 %rd5, [%r52];
    mbarrier.test_wait.shared.b64 %p3, [%r52], %rd5;
    mbarrier.arrive.release.cta.shared::cta.b64 %rd6, [%r52], 1;
    mbarrier.test_wait.shared.b64 %p4, [%r52], %rd5;
    mbarrier.test_wait.parity.shared.b64 %p5, [%r52], 0;
    mov.b32 %r0, 0;
    @%p1 add.u32 %r0, %r0, 1; @%p2 add.u32 %r0, %r0, 2; @%p3 add.u32 %r0, %r0, 4;
    @%p4 add.u32 %r0, %r0, 8; @%p5 add.u32 %r0, %r0, 16;
    {STORE}"""
    assert run(ptx_kernel, body, 1).tolist() == [1 + 8 + 16]


def test_transactions_hold_the_phase_open(ptx_kernel) -> None:
    body = f"""
    mbarrier.init.shared.b64 [%r52], 1;
    mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r52], 48;
    mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%r52], 32;
    mbarrier.test_wait.parity.shared.b64 %p1, [%r52], 0;
    mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%r52], 16;
    mbarrier.test_wait.parity.shared.b64 %p2, [%r52], 0;
    selp.b32 %r0, 1, 0, %p1; @%p2 add.u32 %r0, %r0, 2; {STORE}""".replace(
        ".shared::cluster.relaxed.cluster", ".relaxed.cluster.shared::cluster"
    )
    assert run(ptx_kernel, body, 1).tolist() == [2]


def test_remote_arrival(ptx_kernel) -> None:
    """Both CTAs arrive on the barrier of rank 0, which waits for them."""
    body = f"""
    mov.u32 %r1, %cluster_ctarank; mbarrier.init.shared.b64 [%r52], 2;
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r2, %r52, 0; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
    setp.ne.u32 %p1, %r1, 0; mov.b32 %r0, 5; @%p1 bra END;
    {WAIT.format(bar="%r52", parity="0")}
    mov.b32 %r0, 9;
    END: mov.b32 %r50, %r1; {STORE}"""
    assert run(ptx_kernel, body, 1, np.zeros(2, np.uint32), grid=2, cluster=2).tolist() == [9, 5]


def test_barrier_by_generic_address(ptx_kernel) -> None:
    body = f"""
    cvt.u64.u32 %rd5, %r52; cvta.shared.u64 %rd6, %rd5; mbarrier.init.b64 [%rd6], 1; mbarrier.arrive.b64 %rd7, [%rd6];
    mbarrier.test_wait.parity.b64 %p1, [%rd6], 0; selp.b32 %r0, 1, 0, %p1; {STORE}"""
    assert run(ptx_kernel, body, 1).tolist() == [1]


@pytest.mark.parametrize(
    "body, message",
    [
        ("mbarrier.arrive.shared.b64 %rd5, [%r52];", r"no mbarrier was initialised at smem\+0x400"),
        ("mbarrier.init.shared.b64 [%r52], 1; mbarrier.arrive.shared.b64 _, [%r52], 2;", "more arrivals than the barrier expects"),
        ("mbarrier.init.shared.b64 [%r52], 0;", "init count 0"),
        ("mbarrier.init.shared.b64 [%r52+4], 1;", "not a multiple of 8"),
        ("mbarrier.init.shared.b64 [%r52], 1; mbarrier.inval.shared.b64 [%r52]; mbarrier.arrive.shared.b64 _, [%r52];", "no mbarrier"),
        ("mbarrier.init.shared.b64 [%r52], 1; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r52], 0x100000;", "tx-count"),
    ],
)  # fmt: skip
def test_mbarrier_misuse(ptx_kernel, body: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(ptx_kernel, body, 1)


def test_arrive_drop_lowers_the_count() -> None:
    barrier = Mbarrier(1024, 3)
    barrier.arrive_drop()
    barrier.arrive(2)
    assert (barrier.phase, barrier.pending) == (1, 2)
