"""Probes of operations between threads: mbarriers, CTA and cluster barriers, warp instructions, atomics, matrix moves."""

import numpy as np

from probes.backends import HEADER, Backend, Probe, Results, aligned
from probes.copies import FLOAT_CORNERS, float_pairs

CODES = {"u32": np.uint32, "s32": np.uint32, "b32": np.uint32, "f32": np.uint32, "u64": np.uint64, "s64": np.uint64, "b64": np.uint64, "f64": np.uint64, "f16": np.uint16, "bf16": np.uint16}  # fmt: skip


def entry(params: str, body: str, shared: int = 4096) -> str:
    """A module with one kernel: pointer parameters by name; %rd0 the first one, %r0 the thread, %r1 shared memory."""
    names = params.split()
    text = ", ".join(f".param .u64 {n}" for n in names)
    pointers = "".join(f"ld.param.u64 %rd{i}, [{n}];\n" for i, n in enumerate(names))
    return f"""{HEADER}.visible .entry k({text})
{{
.shared .align 1024 .b8 smem[{shared}];
.reg .pred %p<32>;
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .b64 %rd<64>;
{pointers}mov.u32 %r0, %tid.x; mov.u32 %r1, smem;
{body}
ret;
}}
"""


class Steps:
    """PTX of one thread that stores a word of output for each state that it queries."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.labels: list[str] = []

    def do(self, text: str) -> "Steps":
        self.lines.append(text)
        return self

    def ask(self, label: str, text: str) -> "Steps":
        """Appends `text`, which sets %r40, and stores its result."""
        self.labels.append(label)
        self.lines.append(f"{text} st.global.b32 [%rd0+{4 * (len(self.labels) - 1)}], %r40;")
        return self

    def phases(self, label: str, barrier: str = "%r1") -> "Steps":
        """Stores as bits which parities are complete."""
        test = f"mbarrier.test_wait.parity.shared.b64 %p0, [{barrier}], 0; mbarrier.test_wait.parity.shared.b64 %p1, [{barrier}], 1;"
        return self.ask(f"{label}: phases", f"{test} selp.b32 %r40, 1, 0, %p0; @%p1 or.b32 %r40, %r40, 2;")

    def state(self, label: str, token: str) -> "Steps":
        """Stores whether the phase of a state token is complete, and the pending count in the token."""
        self.ask(
            f"{label}: over", f"mbarrier.test_wait.shared.b64 %p0, [%r1], {token}; selp.b32 %r40, 1, 0, %p0;"
        )
        return self.ask(f"{label}: pending", f"mbarrier.pending_count.b64 %r40, {token};")


def mbarrier_steps() -> Steps:
    """Every query that one thread can make about an mbarrier."""
    s = Steps()
    s.do("mbarrier.init.shared.b64 [%r1], 3;").phases("fresh")
    s.ask("try_wait", "mbarrier.try_wait.parity.shared.b64 %p0, [%r1], 1, 20; selp.b32 %r40, 1, 0, %p0;")
    s.do("mbarrier.arrive.shared.b64 %rd1, [%r1];").state("one of three", "%rd1").phases("one of three")
    s.do("mbarrier.arrive.shared.b64 %rd2, [%r1], 2;").state("first token", "%rd1").state(
        "last token", "%rd2"
    ).phases("second phase")
    s.do("mbarrier.arrive.noComplete.shared.b64 %rd3, [%r1], 2;").state("noComplete", "%rd3").phases(
        "two of three"
    )
    s.do("mbarrier.arrive.shared.b64 %rd4, [%r1];").state("third", "%rd4").state(
        "noComplete later", "%rd3"
    ).phases("third phase")
    s.do("mbarrier.arrive_drop.shared.b64 %rd5, [%r1];").state("dropped", "%rd5").do(
        "mbarrier.arrive.shared.b64 %rd6, [%r1], 2;"
    ).phases("after a drop")
    s.do("mbarrier.arrive.shared.b64 %rd7, [%r1];").state("one of two", "%rd7").do(
        "mbarrier.arrive.shared.b64 %rd8, [%r1];"
    ).state("two of two", "%rd8").phases("two arrivals suffice")
    s.do("mbarrier.arrive_drop.noComplete.shared.b64 %rd9, [%r1], 1;").state(
        "drop noComplete", "%rd9"
    ).phases("drop noComplete")
    s.do("mbarrier.arrive.shared.b64 %rd10, [%r1];").phases("after it").do(
        "mbarrier.arrive.shared.b64 %rd10, [%r1];"
    ).phases("one arrival suffices")
    s.do("mbarrier.inval.shared.b64 [%r1]; mbarrier.init.shared.b64 [%r1], 1;").phases("again")
    s.do("mbarrier.arrive.expect_tx.shared.b64 %rd11, [%r1], 48;").phases("bytes awaited")
    complete = "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r1], {};"
    expect = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], {};"
    s.do(complete.format(16)).phases("16 of 48").do(complete.format(32)).phases("48 of 48").state(
        "expect_tx", "%rd11"
    )
    s.do(complete.format(64)).phases("bytes before arrival").do(expect.format(64)).phases(
        "expected afterwards"
    )
    s.do("mbarrier.arrive.shared.b64 %rd12, [%r1];").phases("then arrival")
    s.do(expect.format(32)).do("mbarrier.arrive.shared.b64 %rd14, [%r1];").phases("awaiting").do(
        complete.format(32)
    ).phases("arrived")
    s.do("mbarrier.arrive.expect_tx.shared.b64 %rd15, [%r1], 0;").phases("no bytes")
    s.do(expect.format(1048575)).do("mbarrier.arrive.shared.b64 %rd15, [%r1];").phases("most bytes").do(
        complete.format(1048575)
    ).phases("most bytes done")
    s.do("mbarrier.init.shared.b64 [%r1+8], 1048575; add.u32 %r2, %r1, 8;").do(
        "mbarrier.arrive.shared.b64 %rd16, [%r1+8], 1048575;"
    ).phases("most arrivals", "%r2")
    s.do("mbarrier.inval.shared.b64 [%r1]; mbarrier.init.shared.b64 [%r1], 1;")
    s.do(complete.format(64)).do("mbarrier.arrive.shared.b64 %rd13, [%r1];").phases("bytes too early").do(
        expect.format(64)
    ).phases("expect completes")
    return s


def mbarriers(backend: Backend) -> Results:
    """One thread's view of an mbarrier."""
    steps = mbarrier_steps()
    out = aligned(len(steps.labels), np.uint32, 0xDEAD)
    backend.launch(entry("out", "\n".join(steps.lines)), [out], block=1)
    return {label: out[i : i + 1] for i, label in enumerate(steps.labels)}


CLUSTER = """
mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p0, %r0, 0; mul.lo.u32 %r3, %r2, 256; cvt.u64.u32 %rd1, %r3; add.u64 %rd0, %rd0, %rd1;
@%p0 mbarrier.init.shared.b64 [%r1], 40; @%p0 mbarrier.init.shared.b64 [%r1+8], 2; @%p0 fence.mbarrier_init.release.cluster;
st.shared.b32 [%r1+64], %r0;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
xor.b32 %r4, %r2, 1; mapa.shared::cluster.u32 %r5, %r1, %r4; mapa.shared::cluster.u32 %r6, %r1, %r2;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5], 7;
@%p0 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r5+8], 32;
@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6+8];
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0; mbarrier.test_wait.parity.shared.b64 %p2, [%r1+8], 0;
selp.b32 %r7, 1, 0, %p1; @%p2 or.b32 %r7, %r7, 2;
barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
@%p0 mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r5+8], 32;
@%p0 mbarrier.arrive.shared.b64 _, [%r1];
barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0; mbarrier.test_wait.parity.shared.b64 %p2, [%r1+8], 0;
selp.b32 %r8, 4, 0, %p1; @%p2 or.b32 %r8, %r8, 8; or.b32 %r7, %r7, %r8;
add.u32 %r9, %r0, 100; shl.b32 %r10, %r0, 2; add.u32 %r11, %r5, %r10; st.shared::cluster.b32 [%r11+128], %r9;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
add.u32 %r12, %r1, %r10; ld.shared.b32 %r13, [%r12+128];
cvt.u64.u32 %rd2, %r10; add.u64 %rd0, %rd0, %rd2; st.global.b32 [%rd0], %r13;
shr.u32 %r14, %r5, 24; shr.u32 %r15, %r6, 24; shl.b32 %r14, %r14, 8; or.b32 %r14, %r14, %r15; getctarank.shared::cluster.u32 %r16, %r5; shl.b32 %r16, %r16, 16;
or.b32 %r14, %r14, %r16; cvta.shared.u64 %rd3, smem; mapa.u64 %rd4, %rd3, %r4; getctarank.u64 %r17, %rd4; shl.b32 %r17, %r17, 24; or.b32 %r14, %r14, %r17;
isspacep.shared::cta %p5, %rd4; isspacep.shared::cluster %p6, %rd4; isspacep.shared::cluster %p7, %rd3; isspacep.global %p8, %rd0;
@%p5 or.b32 %r7, %r7, 16; @%p6 or.b32 %r7, %r7, 32; @%p7 or.b32 %r7, %r7, 64; @%p8 or.b32 %r7, %r7, 128;
@%p0 st.global.b32 [%rd0+128], %r7; @%p0 st.global.b32 [%rd0+132], %r14;
ld.b32 %r18, [%rd4+128]; @%p0 st.global.b32 [%rd0+136], %r18;
sub.u32 %r19, %r5, %r6; and.b32 %r19, %r19, 0xFFFFFF; @%p0 st.global.b32 [%rd0+140], %r19;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""


def cluster_barriers(backend: Backend) -> Results:
    """Two CTAs: arrivals, transactions and stores in each other's shared memory, address mapping, the cluster barrier."""
    out = aligned(128, np.uint32, 0xDEAD)
    backend.launch(entry("out", CLUSTER), [out], grid=2, cluster=2)
    return {"rank 0": out[:64], "rank 1": out[64:]}


# ---- asynchronous stores --------------------------------------------------------------------------------------------
ASYNC = {
    "st.async": ("b32", "b64", "v2.b32", "v4.b32", "v2.b64"),
    **{f"red.async {op}": ("u32", "s32") for op in ("min", "max")},
    **{f"red.async {op}": ("b32",) for op in ("and", "or", "xor")},
    **{f"red.async {op}": ("u32",) for op in ("inc", "dec")},
    "red.async add": ("u32", "s32", "u64"),
}


def async_text() -> tuple[str, int]:
    """Two CTAs store to each other's shared memory and combine with it, 16 bytes per lane and form.

    Returns text and byte count.
    """
    operand = {
        "b32": "%r20",
        "b64": "%rd6",
        "v2.b32": "{%r20, %r21}",
        "v4.b32": "{%r20, %r21, %r22, %r23}",
        "v2.b64": "{%rd6, %rd7}",
    }
    forms = [(name, type_) for name, types in ASYNC.items() for type_ in types]
    expected = sum(32 * touched_bytes(type_) for _, type_ in forms)
    body = "mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p0, %r0, 0; shl.b32 %r3, %r0, 4; cvt.u64.u32 %rd2, %r3; add.u64 %rd1, %rd1, %rd2;"
    body += f"mad.lo.u32 %r4, %r2, {512 * len(forms) + 512}, %r3; cvt.u64.u32 %rd3, %r4; add.u64 %rd0, %rd0, %rd3; add.u32 %r3, %r3, %r1;"
    body += "ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd1]; mov.b64 %rd6, {%r20, %r21}; mov.b64 %rd7, {%r22, %r23};\n"
    for i in range(len(forms)):
        body += f"st.shared.v4.b32 [%r3+{512 * i}], {{%r{20 + i % 4}, %r{20 + (i + 1) % 4}, %r23, %r20}};\n"
    body += f"mov.b32 %r10, {512 * len(forms)}; add.u32 %r10, %r10, %r1;"
    body += f"@%p0 mbarrier.init.shared.b64 [%r10], 1; @%p0 fence.mbarrier_init.release.cluster; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {expected};"
    body += "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; xor.b32 %r5, %r2, 1; mapa.shared::cluster.u32 %r6, %r3, %r5; mapa.shared::cluster.u32 %r7, %r10, %r5;\n"
    for i, (name, type_) in enumerate(forms):
        opcode, _, operation = name.partition(" ")
        if operation:
            opcode, value = (
                f"{opcode}.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}",
                "%rd6" if type_ == "u64" else "%r22",
            )
        else:
            opcode, value = f"{opcode}.weak.shared::cluster.mbarrier::complete_tx::bytes", operand[type_]
        body += f"{opcode}.{type_} [%r6+{512 * i}], {value}, [%r7];\n"
    body += "WAIT:\nmbarrier.try_wait.parity.shared.b64 %p1, [%r10], 0; @!%p1 bra WAIT;\n"
    for i in range(len(forms)):
        body += f"ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r3+{512 * i}]; st.global.v4.b32 [%rd0+{512 * i}], {{%r20, %r21, %r22, %r23}};\n"
    body += "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    return entry("out data", body, 512 * len(forms) + 512), 512 * len(forms)


def async_stores(backend: Backend) -> Results:
    """st.async and red.async: the shared memory of both CTAs once their barriers have completed."""
    text, nbytes = async_text()
    out, data = aligned((2, nbytes + 512), np.uint8), aligned(512, np.uint8)
    data[:] = np.random.default_rng(8).integers(0, 256, 512, np.uint8)
    backend.launch(text, [out, data], grid=2, cluster=2)
    return {f"rank {i}": out[i, :nbytes].copy() for i in range(2)}


ARRIVALS = """
shl.b32 %r2, %r0, 2; cvt.u64.u32 %rd2, %r2; add.u64 %rd0, %rd0, %rd2; add.u64 %rd1, %rd1, %rd2; add.u32 %r3, %r1, %r2; setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r1+512], 1; @%p0 mbarrier.init.shared.b64 [%r1+520], 33; bar.sync 0;
cp.async.ca.shared.global [%r3], [%rd1], 4; cp.async.mbarrier.arrive.shared.b64 [%r1+512]; bar.sync 0;
mbarrier.test_wait.parity.shared.b64 %p1, [%r1+512], 0; selp.b32 %r4, 1, 0, %p1; bar.sync 0;
@%p0 mbarrier.arrive.shared.b64 _, [%r1+512];
ONE:
mbarrier.try_wait.parity.shared.b64 %p1, [%r1+512], 0; @!%p1 bra ONE;
ld.shared.b32 %r5, [%r3];
cp.async.ca.shared.global [%r3+128], [%rd1+128], 4; cp.async.mbarrier.arrive.noinc.shared.b64 [%r1+520]; bar.sync 0;
mbarrier.test_wait.parity.shared.b64 %p1, [%r1+520], 0; @%p1 or.b32 %r4, %r4, 2; bar.sync 0;
@%p0 mbarrier.arrive.shared.b64 _, [%r1+520];
TWO:
mbarrier.try_wait.parity.shared.b64 %p1, [%r1+520], 0; @!%p1 bra TWO;
ld.shared.b32 %r6, [%r3+128]; st.global.b32 [%rd0], %r4; st.global.b32 [%rd0+128], %r5; st.global.b32 [%rd0+256], %r6;
"""


def copy_arrivals(backend: Backend) -> Results:
    """cp.async.mbarrier.arrive with and without .noinc: which operation completes a phase, and the data at that time."""
    out, data = aligned(96, np.uint32), aligned(64, np.uint32)
    data[:] = np.arange(64) * 0x01010101
    backend.launch(entry("out data", ARRIVALS), [out, data])
    return {"early": out[:32], "copies": out[32:]}


# ---- named barriers ------------------------------------------------------------------------------------------------------
NAMED = """
shr.u32 %r2, %r0, 5; setp.eq.u32 %p0, %r2, 0; setp.lt.u32 %p1, %r0, 64; and.b32 %r3, %r0, 3; setp.eq.u32 %p2, %r3, 1; shl.b32 %r4, %r0, 2; add.u32 %r5, %r1, %r4;
mul.wide.u32 %rd1, %r0, 32; add.u64 %rd0, %rd0, %rd1;
setp.lt.u32 %p6, %r0, 1000; bar.red.popc.u32 %r10, 0, %p2; bar.red.and.pred %p3, 0, %p2; bar.red.or.pred %p4, 0, %p2; bar.red.popc.u32 %r11, 0, !%p2; barrier.red.and.pred %p5, 0, %p6;
selp.b32 %r12, 1, 0, %p3; @%p5 or.b32 %r12, %r12, 2; selp.b32 %r13, 1, 0, %p4;
mul.lo.u32 %r6, %r0, 3; st.shared.b32 [%r5], %r6;
@!%p1 bra OTHERS;
bar.sync 1, 64; xor.b32 %r7, %r4, 128; add.u32 %r8, %r1, %r7; ld.shared.b32 %r14, [%r8];
bar.red.popc.u32 %r15, 2, 64, %p2;
bra JOIN;
OTHERS:
mov.b32 %r14, 0; bar.red.popc.u32 %r15, 3, 64, !%p2;
JOIN:
@!%p0 bra CONSUMER;
st.shared.b32 [%r5+1024], %r6; bar.arrive 4, 64; mov.b32 %r16, 0;
bra END;
CONSUMER:
setp.ne.u32 %p7, %r2, 3; mov.b32 %r16, 1;
@%p7 bra END;
bar.sync 4, 64; and.b32 %r17, %r4, 127; add.u32 %r17, %r17, %r1; ld.shared.b32 %r16, [%r17+1024];
END:
st.global.v4.b32 [%rd0], {%r10, %r11, %r12, %r13}; st.global.v4.b32 [%rd0+16], {%r14, %r15, %r16, 0};
"""


def named_barriers(backend: Backend) -> Results:
    """bar.sync, bar.arrive and bar.red with and without thread counts, four warps."""
    out = aligned((128, 8), np.uint32, 0xDEAD)
    backend.launch(entry("out", NAMED), [out], block=128)
    return {"threads": out}


# ---- warps ---------------------------------------------------------------------------------------------------------------
MASKS = (0xFFFFFFFF, 0x80000000, 0x0000FF00, 0xFFFFFFFE, 0x12345678, 0xAAAAAAAA, 0x00010000)
SHUFFLES = [
    *(f"shfl.sync.{mode}.b32 %r40|%p1, %r3, {n}, {c}, -1;" for mode in ("idx", "up", "down", "bfly") for n in (0, 1, 5, 16, 31, 33) for c in (31, 0, 0x1C1F, 0x1003, 0x0807)),
    *(f"shfl.sync.{mode}.b32 %r40|%p1, %r3, %r4, {c}, -1;" for mode in ("idx", "up", "down", "bfly") for c in (31, 0, 0x1C1F)),
    "shfl.sync.idx.b32 %r40|%p1, %r3, %r4, %r5, -1;",
]  # fmt: skip
MASKED = [
    "elect.sync %r40|%p1, {m};", "vote.sync.all.pred %p1, %p2, {m}; mov.b32 %r40, 0;", "vote.sync.any.pred %p1, %p2, {m}; mov.b32 %r40, 0;", "vote.sync.uni.pred %p1, %p2, {m}; mov.b32 %r40, 0;",
    "vote.sync.uni.pred %p1, %p3, {m}; mov.b32 %r40, 0;", "vote.sync.all.pred %p1, %p3, {m}; mov.b32 %r40, 1;", "vote.sync.any.pred %p1, !%p3, {m}; mov.b32 %r40, 1;",
    "vote.sync.ballot.b32 %r40, %p2, {m}; setp.ne.u32 %p1, %r40, 0;", "match.any.sync.b32 %r40, %r6, {m}; setp.ne.u32 %p1, %r40, 0;", "match.all.sync.b32 %r40|%p1, %r6, {m};", "match.all.sync.b32 %r40|%p1, %r7, {m};",
    "match.any.sync.b64 %r40, %rd3, {m}; setp.ne.u32 %p1, %r40, 0;", "match.all.sync.b64 %r40|%p1, %rd3, {m};", "activemask.b32 %r40; setp.ne.u32 %p1, %r40, 0;",
    *(f"redux.sync.{op}.{t} %r40, %r3, {{m}}; setp.ne.u32 %p1, %r40, 0;" for t in ("u32", "s32") for op in ("add", "min", "max")), *(f"redux.sync.{op}.b32 %r40, %r3, {{m}}; setp.ne.u32 %p1, %r40, 0;" for op in ("and", "or", "xor")),
]  # fmt: skip


def warp_text() -> tuple[str, list[str]]:
    """The kernel, and a label for each stored row of 32 words: the result, with bit 31 flipped where the predicate holds."""
    body = [
        "mul.wide.u32 %rd2, %r0, 4; add.u64 %rd0, %rd0, %rd2; add.u64 %rd1, %rd1, %rd2; ld.global.b32 %r3, [%rd1]; and.b32 %r4, %r3, 63; shr.u32 %r5, %r3, 8; and.b32 %r5, %r5, 0x1F1F;"
    ]
    body.append(
        "and.b32 %r6, %r0, 12; mov.b32 %r7, 5; mov.b64 %rd3, {%r7, %r6}; and.b32 %r8, %r3, 1; setp.eq.u32 %p2, %r8, 1; setp.lt.u32 %p3, %r0, 32;"
    )
    put = "selp.b32 %r41, 0x80000000, 0, %p1; xor.b32 %r40, %r40, %r41; st.global.b32 [%rd0], %r40;"
    labels = []
    for text in SHUFFLES:
        body.append(f"{text} {put} add.u64 %rd0, %rd0, 128;")
        labels.append(text)
    number = 0
    for mask in MASKS:
        for text in MASKED:
            label = text.format(m=hex(mask))
            body.append(
                f"mov.b32 %r9, {mask:#x}; shr.u32 %r10, %r9, %r0; and.b32 %r10, %r10, 1; setp.eq.u32 %p4, %r10, 0; @%p4 bra SKIP{number};"
            )
            body.append(
                f"{text.format(m='%r9')} {put}\nSKIP{number}:\nbar.warp.sync -1; add.u64 %rd0, %rd0, 128;"
            )
            labels.append(label)
            number += 1
    return entry("out data", "\n".join(body)), labels


def warps(backend: Backend) -> Results:
    """Shuffles, elections, votes, matches and reductions; under partial masks only the named lanes take part."""
    text, labels = warp_text()
    out, data = aligned((len(labels), 32), np.uint32, 0xDEAD), aligned(32, np.uint32)
    data[:] = np.random.default_rng(3).integers(0, 1 << 32, 32, np.uint32)
    backend.launch(text, [out, data])
    return dict(zip(labels, out, strict=True))


# ---- atomics -------------------------------------------------------------------------------------------------------------
_SPACES = ("global", "shared")
ATOMICS = [
    *((space, f"{op}.{t}") for space in _SPACES for t in ("u32", "s32", "u64") for op in ("add",)), *((space, f"{op}.{t}") for space in _SPACES for t in ("u32", "s32", "u64", "s64") for op in ("min", "max")),
    *((space, f"{op}.b{w}") for space in _SPACES for w in (32, 64) for op in ("and", "or", "xor", "exch")), *((space, f"{op}.u32") for space in _SPACES for op in ("inc", "dec")),
    *((space, f"cas.b{w}") for space in _SPACES for w in (16, 32, 64)), *((space, f"add{x}") for space in _SPACES for x in (".f32", ".f64", ".noftz.f16", ".noftz.bf16", ".noftz.f16x2", ".noftz.bf16x2")),
    *(("global", f"{op}.noftz.v2.{t}") for t in ("f16", "bf16", "f16x2", "bf16x2") for op in ("add", "min", "max")), ("global", "add.v2.f32"), ("global", "add.v4.f32"), ("global", "add.noftz.v4.f16x2"), ("global", "add.noftz.v8.bf16"),
]  # fmt: skip
_ATOM_WIDTH = {
    "f16": 2,
    "bf16": 2,
    "b16": 2,
    "u32": 4,
    "s32": 4,
    "b32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "u64": 8,
    "s64": 8,
    "b64": 8,
    "f64": 8,
}


def touched_bytes(operation: str) -> int:
    """Bytes of memory that one thread's atomic changes."""
    *mods, type_ = operation.split(".")
    return _ATOM_WIDTH[type_] * next((int(m[1:]) for m in mods if m[0] == "v"), 1)


def atomic_text(kind: str, space: str, operation: str) -> str:
    """Each thread combines its operand with its own 16 bytes of memory. Stores the memory's contents before and after."""
    width = _ATOM_WIDTH[operation.rpartition(".")[2]]
    count = touched_bytes(operation) // width
    register = {2: "h", 4: "r", 8: "rd"}[width]
    first = 8
    names = [f"%{register}{first + i}" for i in range(count)]
    results = [f"%{register}{(32 if width > 2 else 0) + i}" for i in range(count)]
    load = "".join(f"ld.global.b{8 * width} {n}, [%rd2+{width * i}];" for i, n in enumerate(names))
    operand = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    result = "{" + ", ".join(results) + "}" if count > 1 else results[0]
    if operation.startswith("cas"):
        load += f"ld.global.b{8 * width} %{register}7, [%rd2+8];"
        operand = f"{operand}, %{register}7"
    place = "%rd1" if space == "global" else "%r3"
    move_in = (
        "ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd1]; st.shared.v4.b32 [%r3], {%r20, %r21, %r22, %r23};"
    )
    move_out = (
        "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r3]; st.global.v4.b32 [%rd1], {%r20, %r21, %r22, %r23};"
    )
    body = "mul.wide.u32 %rd3, %r0, 16; add.u64 %rd0, %rd0, %rd3; add.u64 %rd1, %rd1, %rd3; add.u64 %rd2, %rd2, %rd3; shl.b32 %r3, %r0, 4; add.u32 %r3, %r3, %r1;\n"
    body += load + (move_in if space == "shared" else "") + "\n"
    if kind == "atom":
        body += f"atom.{space}.{operation} {result}, [{place}], {operand};\n"
        body += "".join(f"st.global.b{8 * width} [%rd0+{width * i}], {r};" for i, r in enumerate(results))
    else:
        body += f"red.{space}.{operation} [{place}], {operand};\n"
    return entry("out memory data", body + (move_out if space == "shared" else ""), 16 * 256)


def atomics(backend: Backend) -> Results:
    """Every atomic operation on separate memory per thread: its return value and the memory afterwards."""
    results: Results = {}
    for space, operation in ATOMICS:
        type_ = operation.rpartition(".")[2]
        rng = np.random.default_rng(len(operation))
        element = type_.removesuffix("x2")
        threads = 256 if element in FLOAT_CORNERS else 32
        memory, data, out = (aligned((threads, 16), np.uint8) for _ in range(3))
        memory[:], data[:] = rng.integers(0, 256, (2, threads, 16), np.uint8)
        memory[:8], data[16:24] = data[:8], 0
        if element in FLOAT_CORNERS:
            dtype = FLOAT_CORNERS[element][0]
            old, new = float_pairs(element, 256 * 16 // dtype().itemsize)
            old, new = (np.resize(x[: 16 * 16 if element == "f32" else x.size], x.size) for x in (old, new))
            memory.reshape(-1)[:], data.reshape(-1)[:] = old.view(np.uint8), new.view(np.uint8)
            if dtype is np.uint32 and ".v" not in operation:  # one element a thread: spread the pairs
                memory.view(np.uint32)[:, 0], data.view(np.uint32)[:, 0] = old[:256], new[:256]
            elif dtype is np.uint16 and ".v" not in operation:
                step = 2 if type_.endswith("x2") else 1
                memory.view(np.uint16)[:, :step], data.view(np.uint16)[:, :step] = (
                    old[: 256 * step].reshape(256, step),
                    new[: 256 * step].reshape(256, step),
                )
        elif type_ == "f64":
            memory.view(np.float64)[:], data.view(np.float64)[:] = rng.normal(0, 1, (2, threads, 2))
        kinds = ("atom",) if operation.startswith(("cas", "exch")) else ("atom", "red")
        before = memory.copy()
        for kind in kinds:
            memory[:] = before
            out[:] = 0
            backend.launch(atomic_text(kind, space, operation), [out, memory, data], block=threads)
            used = touched_bytes(operation)
            results[f"{kind} {space} {operation}"] = memory[:, :used].copy()
            if kind == "atom":
                results[f"{kind} {space} {operation} result"] = out[:, :used].copy()
    return results


# ---- matrix moves and loads ------------------------------------------------------------------------------------------------
def _quad(count: int, base: int) -> str:
    return "{" + ", ".join(f"%r{base + i}" for i in range(count)) + "}"


def matrices(backend: Backend) -> Results:
    """ldmatrix and stmatrix of 16-bit elements, with permuted row addresses."""
    body = "mul.wide.u32 %rd3, %r0, 16; add.u64 %rd4, %rd1, %rd3; ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd4];\n"
    body += "mul.lo.u32 %r3, %r0, 5; and.b32 %r3, %r3, 31; shl.b32 %r3, %r3, 4; add.u32 %r3, %r3, %r1; shl.b32 %r4, %r0, 4; add.u32 %r4, %r4, %r1;\n"
    body += "add.u64 %rd0, %rd0, %rd3;\n"
    labels = []
    restore = "st.shared.v4.b32 [%r4], {%r20, %r21, %r22, %r23}; bar.sync 0;"
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            label = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            labels.append(label)
            body += f"{restore} mov.b32 %r31, 0; mov.b32 %r32, 0; mov.b32 %r33, 0; {label} {_quad(count, 30)}, [%r3]; st.global.v4.b32 [%rd0], {{%r30, %r31, %r32, %r33}}; add.u64 %rd0, %rd0, 512; bar.sync 0;\n"
            label = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            labels.append(label)
            body += f"{restore} {label} [%r3], {_quad(count, 20)}; bar.sync 0; ld.shared.v4.b32 {{%r30, %r31, %r32, %r33}}, [%r4]; st.global.v4.b32 [%rd0], {{%r30, %r31, %r32, %r33}}; add.u64 %rd0, %rd0, 512; bar.sync 0;\n"
    out, data = aligned((len(labels), 512), np.uint8), aligned(512, np.uint8)
    data.view(np.uint16)[:] = np.arange(256)
    backend.launch(entry("out data", body), [out, data])
    return dict(zip(labels, out, strict=True))


def narrow_accesses(backend: Backend) -> Results:
    """Loads and stores narrower than their registers, vectors, and generic addresses of shared memory."""
    loads = [
        "ld.global.s8 %r10, [%rd1+3];",
        "ld.global.u8 %r10, [%rd1+3];",
        "ld.global.s16 %r10, [%rd1+6];",
        "ld.global.u16 %r10, [%rd1+6];",
        "ld.global.nc.s8 %r10, [%rd1+1];",
    ]
    loads += [
        "ld.global.v2.s8 {%r10, %r11}, [%rd1+4]; xor.b32 %r10, %r10, %r11;",
        "ld.global.v4.u8 {%r10, %r11, %r12, %r13}, [%rd1+4]; mad.lo.u32 %r10, %r11, 3, %r10; mad.lo.u32 %r10, %r12, 5, %r10; mad.lo.u32 %r10, %r13, 7, %r10;",
    ]
    loads += [
        "ld.global.v2.s16 {%r10, %r11}, [%rd1+8]; xor.b32 %r10, %r10, %r11;",
        "ld.global.s32 %rd5, [%rd1+8]; mov.b64 {_, %r10}, %rd5;",
        "ld.global.u32 %rd5, [%rd1+8]; mov.b64 {_, %r10}, %rd5;",
    ]
    loads += [
        "st.shared.b64 [%r3], %rd6; ld.shared.s8 %r10, [%r3+7];",
        "st.shared.u8 [%r3+1], %r20; ld.shared.b32 %r10, [%r3];",
        "st.shared.v2.u16 [%r3+4], {%r20, %r21}; ld.shared.b32 %r10, [%r3+4];",
        "st.shared.v4.u8 [%r3], {%r20, %r21, %r20, %r21}; ld.shared.b32 %r10, [%r3];",
    ]
    loads += [
        "cvt.u64.u32 %rd7, %r3; cvta.shared.u64 %rd7, %rd7; st.u32 [%rd7], %r20; ld.shared.b32 %r10, [%r3];",
        "st.shared.b32 [%r3], %r21; ld.s16 %r10, [%rd7+2];",
        "atom.add.u32 %r10, [%rd7], %r20; ld.shared.b32 %r11, [%r3]; xor.b32 %r10, %r10, %r11;",
    ]
    body = "mul.wide.u32 %rd3, %r0, 16; add.u64 %rd1, %rd1, %rd3; ld.global.v2.b32 {%r20, %r21}, [%rd1]; ld.global.b64 %rd6, [%rd1+8]; shl.b32 %r3, %r0, 4; add.u32 %r3, %r3, %r1; mul.wide.u32 %rd3, %r0, 4; add.u64 %rd0, %rd0, %rd3;\n"
    body += "".join(f"{text} st.global.b32 [%rd0], %r10; add.u64 %rd0, %rd0, 128;\n" for text in loads)
    out, data = aligned((len(loads), 32), np.uint32), aligned(512, np.uint8)
    data[:] = np.random.default_rng(1).integers(0, 256, 512, np.uint8)
    backend.launch(entry("out data", body), [out, data])
    return dict(zip(loads, out, strict=True))


PROBES: dict[str, Probe] = {
    "mbarrier": mbarriers,
    "cluster barriers": cluster_barriers,
    "asynchronous stores": async_stores,
    "copy arrivals": copy_arrivals,
    "named barriers": named_barriers,
    "warps": warps,
    "atomics": atomics,
    "matrices": matrices,
    "narrow accesses": narrow_accesses,
}
