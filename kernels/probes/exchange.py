"""Probes of clusters: stores and arrivals in another CTA, exits, dependent launches."""

from .body import CLUSTER_SYNC, Body, count_wrong, init, wait

SLOTS = 128  # offset of values in shared memory, after the barriers


def st_async(is_vector: bool) -> Body:
    """Odd CTAs send 16 bytes a thread with st.async, round after round; even ones wait with .acquire.cta and compare.

    arg0: rounds. out[0]: words that were not those of their round. A pair of CTAs a cluster.
    """
    words = ("r10", "r11", "r12", "r13")
    if is_vector:
        send = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [r20], {r10, r11, r12, r13}, [r21];\n"
    else:
        send = "".join(
            f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [r20+{4 * i}], {word}, [r21];\n"
            for i, word in enumerate(words)
        )
    values = "".join(
        f"mad.lo.u32 {word}, r1, 4099, r2;\nadd.u32 {word}, {word}, {i};\n" for i, word in enumerate(words)
    )
    compare = "".join(
        f"setp.ne.u32 p3, r{14 + i}, {word};\n{count_wrong('p3')}" for i, word in enumerate(words)
    )
    text = f"""
{init(1, 128, sync=CLUSTER_SYNC)}
mul.lo.u32 r2, tid, 4;
mov.u32 r1, 0;
mad.lo.u32 r3, tid, 16, smem;
add.u32 r3, r3, {SLOTS};
xor.b32 r4, rank, 1;
mapa.shared::cluster.u32 r20, r3, r4;
mapa.shared::cluster.u32 r21, smem, r4;
add.u32 r22, smem, 8;
mapa.shared::cluster.u32 r22, r22, r4;
setp.eq.u32 p2, rank, 1;
NEXT:
and.b32 r5, r1, 1;
xor.b32 r6, r5, 1;
{values}
@p2 bra SEND;
@p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 2048;
{wait(0, "r5", "FULL")}
ld.shared.v4.b32 {{r14, r15, r16, r17}}, [r3];
{compare}
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r22];
bra AGAIN;
SEND:
{wait(8, "r6", "EMPTY", ".acquire.cluster")}
{send}
AGAIN:
add.u32 r1, r1, 1;
setp.lt.u32 p4, r1, arg0;
@p4 bra NEXT;
{CLUSTER_SYNC}"""
    return Body(text, cluster=2, smem_bytes=4096)


def arrives_in_order() -> Body:
    """One thread of the odd CTA arrives at two barriers of the even one; whoever sees the second has to see the first.

    arg0: rounds. out[0]: times that it was not so.
    """
    text = f"""
{init(1, 1, 1, sync=CLUSTER_SYNC)}
mov.u32 r1, 0;
xor.b32 r4, rank, 1;
mapa.shared::cluster.u32 r20, smem, r4;
setp.eq.u32 p2, rank, 1;
@!p0 bra DONE;
NEXT:
and.b32 r5, r1, 1;
xor.b32 r6, r5, 1;
@p2 bra SEND;
{wait(8, "r5", "SECOND")}
mbarrier.test_wait.parity.shared::cta.b64 p3, [smem], r5;
not.pred p3, p3;
{count_wrong("p3")}
{wait(0, "r5", "FIRST")}
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r20+16];
bra AGAIN;
SEND:
{wait(16, "r6", "BACK")}
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r20];
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r20+8];
AGAIN:
add.u32 r1, r1, 1;
setp.lt.u32 p4, r1, arg0;
@p4 bra NEXT;
DONE:
{CLUSTER_SYNC}"""
    return Body(text, cluster=2)


def cluster_exit() -> Body:
    """Half of the warps arrive at the cluster barrier and end without waiting; the others wait, then send to each other.

    out[0]: words that did not come as sent.
    """
    text = f"""
{init(1, sync="bar.sync 0;" + chr(10))}
barrier.cluster.arrive.release;
setp.lt.u32 p2, warp, 2;
@p2 bra DONE;
barrier.cluster.wait.acquire;
setp.eq.u32 p5, tid, 64;
@p5 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 256;
sub.u32 r1, tid, 64;
mad.lo.u32 r3, r1, 4, smem;
add.u32 r3, r3, {SLOTS};
xor.b32 r4, rank, 1;
mapa.shared::cluster.u32 r20, r3, r4;
mapa.shared::cluster.u32 r21, smem, r4;
mad.lo.u32 r10, tid, 2, r4;
mad.lo.u32 r11, tid, 2, rank;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [r20], r11, [r21];
{wait(0, "0", "FULL")}
ld.shared.b32 r12, [r3];
setp.ne.u32 p3, r12, r10;
{count_wrong("p3")}
DONE:
"""
    return Body(text, cluster=2)


def dependent_launch(cluster: int) -> Body:
    """A launch of a chain: CTAs see what the launch before wrote, and let the next one start early.

    data: two rows of one word per CTA, initially 0. arg0: number of this launch. out[0]: words that were not the last launch's.
    """
    sync = CLUSTER_SYNC if cluster > 1 else ""
    text = f"""
{sync}
griddepcontrol.launch_dependents;
griddepcontrol.wait;
@!p0 bra DONE;
add.u32 r1, cta, 1;
setp.eq.u32 p2, r1, ctas;
selp.u32 r1, 0, r1, p2;
and.b32 r2, arg0, 1;
xor.b32 r3, r2, 1;
mad.lo.u32 r4, r2, ctas, r1;
mul.wide.u32 d1, r4, 4;
add.u64 d1, d1, data;
ld.global.b32 r5, [d1];
setp.ne.u32 p3, r5, arg0;
{count_wrong("p3")}
mad.lo.u32 r4, r3, ctas, cta;
mul.wide.u32 d1, r4, 4;
add.u64 d1, d1, data;
add.u32 r6, arg0, 1;
st.global.b32 [d1], r6;
DONE:
{sync}"""
    return Body(text, cluster=cluster, use_pdl=True)


def meet(cluster: int, smem_bytes: int, is_cooperative: bool = False) -> Body:
    """CTAs, each of which fills an SM, wait for each other on a counter, for a limited time.

    data[0]: the counter, initially 0. arg0: arrivals to wait for. arg1: how often to look. out[0]: CTAs that gave up.
    """
    text = f"""
{CLUSTER_SYNC if cluster > 1 else ""}
@!p0 bra DONE;
red.release.gpu.global.add.u32 [data], 1;
mov.u32 r1, 0;
LOOK:
ld.acquire.gpu.global.u32 r2, [data];
setp.ge.u32 p2, r2, arg0;
@p2 bra DONE;
nanosleep.u32 500;
add.u32 r1, r1, 1;
setp.lt.u32 p3, r1, arg1;
@p3 bra LOOK;
red.global.add.u32 [out], 1;
DONE:
"""
    return Body(text, threads=32, cluster=cluster, smem_bytes=smem_bytes, is_cooperative=is_cooperative)
