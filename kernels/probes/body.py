"""A probe's PTX text and how it is launched; and pieces that texts share.

Every text finds these registers: tid, warp, lane, cta (its number in the grid), ctas (in the grid), rank (in the cluster),
smem (shared address of ``Body.smem_bytes`` bytes, aligned to 1024), out and data (addresses of int32 or bytes in global memory),
arg0, arg1; predicates p0 (the first thread of the CTA) and p1 (the first lane of a warp). It may use p2 ... p15, h0 ... h7,
r0 ... r63, v0 ... v127, d0 ... d31.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Body:
    """What a probe executes.

    Attributes:
        text: PTX.
        threads: of a CTA.  cluster: CTAs of a cluster.  smem_bytes: of dynamic shared memory.
        use_pdl: launched with programmatic dependent launch.  is_cooperative: all CTAs guaranteed to be resident.
    """

    text: str
    threads: int = 128
    cluster: int = 1
    smem_bytes: int = 1024
    use_pdl: bool = False
    is_cooperative: bool = False


PRELUDE = """
.reg .pred p<16>;
.reg .b16 h<8>;
.reg .b32 tid, warp, lane, cta, ctas, rank, smem, arg0, arg1, r<64>, v<128>;
.reg .b64 out, data, d<32>;
mov.b64 out, $0;
mov.b64 data, $1;
mov.b32 arg0, $2;
mov.b32 arg1, $3;
mov.b32 smem, $4;
mov.u32 tid, %tid.x;
mov.u32 cta, %ctaid.x;
mov.u32 ctas, %nctaid.x;
mov.u32 rank, %cluster_ctarank;
shr.u32 warp, tid, 5;
and.b32 lane, tid, 31;
setp.eq.u32 p0, tid, 0;
setp.eq.u32 p1, lane, 0;
"""
CLUSTER_SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"


def whole(body: Body) -> str:
    """The text with its registers, as one block."""
    return "{" + PRELUDE + body.text + "\n}"


def init(*counts: int, sync: str = "bar.sync 0;\n") -> str:
    """The first thread initialises mbarriers at smem, smem + 8, ...; then everybody may use them."""
    lines = [f"@p0 mbarrier.init.shared.b64 [smem+{8 * i}], {count};\n" for i, count in enumerate(counts)]
    return "".join(lines) + "fence.mbarrier_init.release.cluster;\n" + sync


def wait(at: int, parity: str, label: str, qualifiers: str = "") -> str:
    """Until the phase of ``parity`` of the mbarrier at smem + ``at`` is over. Uses p15."""
    return (
        f"{label}:\nmbarrier.try_wait.parity{qualifiers}.shared::cta.b64 p15, [smem+{at}], {parity};\n"
        f"@!p15 bra {label};\n"
    )


def count_wrong(predicate: str) -> str:
    """Add one to the first word of ``out`` where the predicate holds."""
    return f"@{predicate} red.global.add.u32 [out], 1;\n"
