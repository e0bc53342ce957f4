"""The timing model of CTAs that wait for each other through global memory: the replay decides when a wait ends."""

import dataclasses
import itertools
import re
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import small_kernels as small

from nvfp4_cute.emulator.faults import HangFault
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.gpus.timing_figures import MEASURED_AT, constants_of
from nvfp4_cute.timing.clock import time_ptx

B200, H200 = constants_of(lookup("B200")), constants_of(lookup("H200"))
PROBE = (Path(__file__).parents[2] / "bench/probes/h200_probe.txt").read_text()
ROUNDS = 20
FIRST, SECOND = 0, 128
LABELS = itertools.count()
"""Words that CTAs poll, in bytes from the first."""


def work(loops: int) -> str:
    """Keeps the warp busy for `loops` iterations."""
    label = f"W{next(LABELS)}"
    return f"mov.u32 %r31, {loops};\n{label}:\nmul.lo.u32 %r30, %r30, %r31;\nsub.u32 %r31, %r31, 1;\nsetp.ne.u32 %p4, %r31, 0;\n@%p4 bra {label};\n"


def poll(at: int, least: int, name: str, *, scope: str = "acquire.gpu", pause: str = "") -> str:
    """Waits until the word at %rd2+`at` is `least` or more."""
    return f"{name}:\nld.{scope}.global.u32 %r20, [%rd2+{at}];\n{pause}setp.lt.u32 %p2, %r20, {least};\n@%p2 bra {name};\n"


def raise_word(at: int, how: str = "red.release.gpu.global.add.u32") -> str:
    """Adds 1 to the word at %rd2+`at`."""
    return f"{how} [%rd2+{at}], 1;\n"


def of_ctas(*bodies: str) -> str:
    """A kernel in which each CTA executes its own text."""
    text = "mov.u32 %r10, %ctaid.x;\nmov.u32 %r30, %r10;\n"
    for i, body in enumerate(bodies):
        text += f"setp.ne.u32 %p3, %r10, {i};\n@%p3 bra NOT{i};\n{body}bra END;\nNOT{i}:\n"
    return small.kernel(text + "END:\n")


def cycles(*bodies: str, constants=B200) -> float:
    words = np.zeros(64, np.uint32)
    timing = time_ptx(
        constants, of_ctas(*bodies), grid=len(bodies), block=1, args=(words, words), smem_bytes=1024
    )
    return timing.cycles


def ping_pong(rounds: int, message: str = raise_word(SECOND), constants=B200, **how: str) -> float:
    """Cycles of two CTAs that alternately send each other messages."""
    first = "".join(
        message.replace(f"+{SECOND}", f"+{FIRST}") + poll(SECOND, i + 1, f"A{i}", **how)
        for i in range(rounds)
    )
    second = "".join(poll(FIRST, i + 1, f"B{i}", **how) + message for i in range(rounds))
    return cycles(first, second, constants=constants)


RELAXED = raise_word(SECOND, "red.relaxed.gpu.global.add.u32")
STORE = "st.global.u32 [%rd2+64], %r10;\n"


@pytest.mark.parametrize("kind,message", [(0, RELAXED), (2, STORE + raise_word(SECOND))])
def test_messages_take_as_long_as_measured(kind, message):
    """Compares with the probe's median over pairs of SMs of an H200."""
    hops = [float(hop) for hop in re.findall(rf"flag_hop_cycles kind {kind} peer \d+: ([\d.]+)", PROBE)]
    assert len(hops) == 5
    each = (ping_pong(ROUNDS, message, H200) - ping_pong(0, message, H200)) / (2 * ROUNDS)
    assert each * MEASURED_AT / H200.clock_hz == pytest.approx(median(hops), rel=0.15)


def test_each_message_takes_its_way_there_and_a_look():
    """A fence confirms a message, which travels to L2, and a poll finds it: at most two and a half times L2's latency."""
    each = (ping_pong(ROUNDS) - ping_pong(0)) / (2 * ROUNDS)
    assert 1.5 * B200.l2_latency < each < 3 * B200.l2_latency


@pytest.mark.parametrize(
    "how", [{"scope": "relaxed.gpu"}, {"scope": "volatile"}, {"pause": "nanosleep.u32 1;\n"}]
)
def test_the_machine_s_order_of_turns_does_not_matter(how):
    """The loop counts as one wait, however often the emulator lets the warp poll."""
    assert ping_pong(ROUNDS, **how) == pytest.approx(ping_pong(ROUNDS), rel=0.05)


def test_a_wait_ends_when_the_writer_comes_to_it():
    """A delay of the writer delays the waiting CTA by the same cycles, up to the time of a poll."""
    times = [
        cycles(poll(FIRST, 1, "A") + work(50), work(trips) + raise_word(FIRST)) for trips in (1, 200, 800)
    ]
    chain = cycles(work(800)) - cycles(work(200))
    assert times[2] - times[1] == pytest.approx(chain, abs=B200.l2_latency)
    assert times[1] - times[0] > chain / 4


def test_who_needs_not_wait_looks_once():
    """The word was written long before, so there is one memory access, whichever CTA the emulator ran first."""
    late = work(400)
    times = [cycles(late + text, raise_word(FIRST)) for text in (poll(FIRST, 1, "A"), "")]
    assert times[0] - times[1] < 1.2 * B200.l2_latency


def test_all_writes_that_a_look_needs_are_waited_for():
    """Three CTAs increment a counter; the wait ends with the last of them."""
    writers = [work(trips) + raise_word(FIRST) for trips in (600, 1, 300)]
    one, two, three = (cycles(poll(FIRST, count, "A") + work(600), *writers) for count in (1, 2, 3))
    slowest = cycles(poll(FIRST, 1, "A") + work(600), writers[0])
    assert three == pytest.approx(slowest, abs=2 * B200.l2_latency)
    assert one < two - 1000 < three - 3000


def test_a_release_waits_for_what_was_written_before():
    messages = (STORE + RELAXED, STORE + "fence.acq_rel.gpu;\n" + RELAXED, STORE + raise_word(SECOND))
    times = [ping_pong(ROUNDS, message) / (2 * ROUNDS) for message in messages]
    assert times[1] - times[0] == pytest.approx(B200.l2_latency, abs=B200.l2_latency / 2)
    assert times[2] == pytest.approx(times[1], rel=0.05)


def test_ctas_that_do_not_fit_at_once_cannot_wait_for_each_other():
    one = dataclasses.replace(B200, num_sms=1, gpcs=(1,))
    text, words = of_ctas(poll(FIRST, 1, "A"), raise_word(FIRST)), np.zeros(64, np.uint32)
    with pytest.raises(HangFault, match="polls memory that no other warp changes"):
        time_ptx(one, text, grid=2, args=(words, words), smem_bytes=150_000)


def test_what_was_written_here_is_read_from_l2():
    """A bulk copy reads lines that threads wrote as one piece, of which nobody wrote the second half."""
    write = "".join(f"st.global.u32 [%rd2+{1024 + 128 * line}], %r0;\n" for line in range(4))
    read = small.init(1) + "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;\nadd.u32 %r21, %r1, 1024;\n"
    for at in (1024, 2048):
        read += f"add.u64 %rd21, %rd2, {at};\nadd.u32 %r22, %r21, {at - 1024};\n"
        read += (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r22], [%rd21], 512, [%r1];\n"
        )
    memory = np.zeros(1024 + 128, np.uint32)
    memory = memory[-memory.ctypes.data % 128 // 4 :][:1024]
    text = small.kernel(write + read + small.wait(0))
    assert time_ptx(B200, text, block=1, args=(memory, memory), smem_bytes=4096).hbm_bytes == 512
