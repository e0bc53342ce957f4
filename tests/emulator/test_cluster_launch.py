"""Work stealing: a running cluster cancels clusters that have not started and does their work."""

import dataclasses

import numpy as np
import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.timing.clock import time_ptx

MODULE = ".shared .align 16 .b8 response[16]; .shared .align 8 .b64 bar;"
TRY = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{multicast}.b128 [response], [bar];"
QUERY = """
mov.b128 %q, {%rd10, %rd11};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %q;
clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r2, %q;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r4, %r5, %r3, _}, %q;
"""
BODY = """
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mov.u32 %r20, %cluster_ctarank; mov.b32 %r30, bar;
mov.u32 %r6, %nctaid.x; mov.u32 %r7, %nctaid.y; mov.u32 %r8, %ctaid.x; sub.u32 %r1, %r1, %r20;
mov.b32 %r9, 0; mbarrier.init.shared.b64 [bar], 1; barrier.cluster.arrive; barrier.cluster.wait;
LOOP:
mad.lo.u32 %r10, %r3, %r7, %r2; add.u32 %r11, %r1, %r20; mad.lo.u32 %r10, %r10, %r6, %r11;
mul.wide.u32 %rd1, %r10, 4; add.s64 %rd2, %rd0, %rd1; add.u32 %r12, %r8, 1; st.global.b32 [%rd2], %r12;
mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16; barrier.cluster.arrive; barrier.cluster.wait;
setp.eq.u32 %p2, %r20, 0; @%p2 {try}
L: mbarrier.try_wait.parity.shared.b64 %p3, [bar], %r9, 10000000; @!%p3 bra L;
xor.b32 %r9, %r9, 1; ld.shared.v2.b64 {{%rd10, %rd11}}, [response]; barrier.cluster.arrive; barrier.cluster.wait;
{query}
@%p1 bra LOOP;
"""


@pytest.mark.parametrize("cluster", [1, 2])
def test_the_first_cluster_does_all_the_work(ptx_kernel, cluster: int) -> None:
    """The CTAs of cluster 0 do the work of every CTA of the grid (4, 3, 2) exactly once."""
    out = np.zeros((2, 3, 4), np.uint32)
    multicast = ".multicast::cluster::all" if cluster == 2 else ""
    body = BODY.format(**{"try": TRY.format(multicast=multicast), "query": QUERY})
    text = ptx_kernel(body, declarations=".reg .b128 %q;", module=MODULE)
    stats = run_ptx(text, None, (4, 3, 2), 1, [out], cluster=cluster)
    assert out.reshape(-1, cluster).tolist() == [list(range(1, cluster + 1))] * (24 // cluster)
    assert stats.launches == 1


def test_resident_clusters_share_the_work_where_times_are_modelled(ptx_kernel) -> None:
    out = np.zeros((2, 3, 4), np.uint32)
    constants = dataclasses.replace(constants_of(lookup("B200")), num_sms=1, gpcs=(1,))
    body = BODY.format(**{"try": TRY.format(multicast=""), "query": QUERY})
    text = ptx_kernel(body, declarations=".reg .b128 %q;", module=MODULE)
    timing = time_ptx(constants, text, None, (4, 3, 2), 1, [out], smem_bytes=100 << 10)  # two fit on an SM
    assert len(np.unique(out)) == 2
    assert timing.cycles > constants.launch + 12 * 2 * constants.l2_latency


def test_misaligned_response(ptx_kernel) -> None:
    body = "mbarrier.init.shared.b64 [bar], 1;" + TRY.format(multicast="").replace(
        "[response]", "[response+8]"
    )
    with pytest.raises(EmulatorError, match="not 16-byte aligned"):
        run_ptx(ptx_kernel(body, 0, module=MODULE), None, 1, 1)
