"""Scheduling, hangs, runaways, launch geometry, divergence, and the form of error messages."""

import numpy as np
import pytest

from nvfp4_cute.emulator.code import Code
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.isa import Builder, Mods, handler
from nvfp4_cute.emulator.isa.families import find_handler
from nvfp4_cute.emulator.isa.requirements import architecture
from nvfp4_cute.emulator.lanes import bits_mask, mask_bits
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.ptx import Inst, Reg, parse
from nvfp4_cute.errors import EmulatorError

MODULE = ".shared .align 8 .b64 bars[4]; .shared .align 4 .b32 flag;"
WAIT = """{{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r52], {parity}, 10000000;
@P1 bra.uni DONE; bra.uni LAB_WAIT; DONE: }}"""
PROLOGUE = "mov.u32 %r50, %tid.x; shr.u32 %r51, %r50, 5; mov.b32 %r52, bars; mov.b32 %r53, flag;"


def test_hang_report_says_what_every_warp_waits_for(ptx_kernel) -> None:
    body = f"""{PROLOGUE}
    setp.eq.u32 %p1, %r50, 0; @%p1 mbarrier.init.shared.b64 [%r52], 3;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r52], 64;
    bar.sync 0;
    setp.eq.u32 %p2, %r51, 1; @%p2 bra OTHER;
    {WAIT.format(parity=0)}
    bra END;
    OTHER: bar.sync 5, 96;
    END:"""
    with pytest.raises(EmulatorError) as caught:
        run_ptx(ptx_kernel(body, 0, module=MODULE), None, 1, 64)
    lines = str(caught.value).split("\n")
    assert lines[0] == "kernel k hangs: every live warp is blocked"
    assert len(lines) == 3
    assert lines[1].startswith("  cta (0, 0, 0) rank 0 warp 0: PTX line ")
    assert "`mbarrier.try_wait.parity.shared.b64 P1, [%r52], 0, 10000000`" in lines[1]
    assert (
        "mbarrier smem+0x400 parity 0 (phase 0, pending 2 of 3 arrivals, 64 tx bytes outstanding)" in lines[1]
    )
    assert "barrier 5: 1 of 3 warps arrived (warps [1])" in lines[2]


def test_hang_report_names_phases_and_bytes_and_puts_equal_warps_together(ptx_kernel) -> None:
    body = f"""{PROLOGUE}
    setp.eq.u32 %p1, %r50, 0; @%p1 mbarrier.init.shared.b64 [%r52], 1;
    @%p1 mbarrier.arrive.shared.b64 _, [%r52];
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r52], 16;
    bar.sync 0;
    {WAIT.format(parity=1)}"""
    with pytest.raises(EmulatorError) as caught:
        run_ptx(ptx_kernel(body, 0, module=MODULE), None, 1, 96)
    _, line = str(caught.value).split("\n")
    assert line.startswith("  cta (0, 0, 0) rank 0 warps 0, 1, 2: PTX line ")
    assert line.endswith(
        "; phase 0 is complete, this waits for the end of phase 1; more bytes are expected than copied"
    )


PHASES = f"""{PROLOGUE}
setp.eq.u32 %p1, %r50, 0; @%p1 mbarrier.init.shared.b64 [%r52], 1; bar.sync 0; mov.b32 %r3, 0; mov.b32 %r4, 0;
TURN: @%p1 mbarrier.arrive.shared.b64 _, [%r52];
{WAIT.format(parity="%r3")}
xor.b32 %r3, %r3, 1; add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, TURNS; @%p2 bra TURN;
bar.sync 0; mul.wide.u32 %rd1, %r50, 4; add.s64 %rd2, %rd0, %rd1; st.global.b32 [%rd2], %r4;"""


@pytest.mark.parametrize("turns", [2, 5, 6])
def test_warps_that_wait_for_each_phase_see_each_phase(ptx_kernel, turns: int) -> None:
    """One warp completes phases without waiting for the others, which see every phase, as they mostly do on a GPU."""
    out = np.zeros(128, np.uint32)
    run_ptx(ptx_kernel(PHASES.replace("TURNS", str(turns)), module=MODULE), None, 1, 128, [out])
    assert out.tolist() == [turns] * 128


def test_a_missed_phase_is_told(ptx_kernel) -> None:
    body = f"""{PROLOGUE}
    setp.eq.u32 %p1, %r50, 0; @%p1 mbarrier.init.shared.b64 [%r52], 1;
    @%p1 mbarrier.arrive.shared.b64 _, [%r52]; @%p1 mbarrier.arrive.shared.b64 _, [%r52];
    bar.sync 0;
    {WAIT.format(parity=0)}"""
    with pytest.raises(EmulatorError) as caught:
        run_ptx(ptx_kernel(body, 0, module=MODULE), None, 1, 64)
    _, line = str(caught.value).split("\n")
    assert "warps 0, 1: PTX line" in line
    assert line.endswith(
        "; phase 1 is complete, this waits for the end of phase 2; the warp has found 0 of the 2 complete phases: "
        "the barrier passed on twice before it looked, and nothing makes the others wait"
    )


@pytest.mark.parametrize(
    "loop",
    [
        "L: ld.volatile.shared.b32 %r1, [%r53]; setp.eq.u32 %p1, %r1, 1; @!%p1 bra L;",
        "L: ld.acquire.cta.shared.b32 %r1, [%r53]; nanosleep.u32 100; setp.eq.u32 %p1, %r1, 1; @!%p1 bra L;",
        "L: ld.shared.b32 %r1, [%r53]; setp.eq.u32 %p1, %r1, 1; @!%p1 bra L;",
        "mbarrier.init.shared.b64 [%r52], 1; L: mbarrier.try_wait.parity.shared.b64 %p1, [%r52], 0; @!%p1 bra L;",
        "L: bra L;",
    ],
    ids=["volatile", "acquire", "weak", "peek", "empty"],
)
def test_a_loop_that_nobody_ends_is_a_hang(ptx_kernel, loop: str) -> None:
    with pytest.raises(EmulatorError, match="hangs") as caught:
        run_ptx(ptx_kernel(f"{PROLOGUE} st.shared.b32 [%r53], 0; {loop}", 0, module=MODULE), None, 1, 1)
    assert "spinning" in str(caught.value)  # and not only the instruction limit


@pytest.mark.parametrize("kind", ["ld.volatile.shared", "ld.shared"])
def test_a_polled_flag_ends_the_loop(ptx_kernel, kind: str) -> None:
    """Warp 1 sets the flag long after warp 0 has started to poll it."""
    out = np.zeros(64, np.uint32)
    body = f"""{PROLOGUE}
    setp.eq.u32 %p2, %r50, 0; @%p2 st.shared.b32 [%r53], 0; bar.sync 0;
    setp.eq.u32 %p1, %r51, 1; mov.b32 %r3, 0; @%p1 bra SETTER;
    POLL: {kind}.b32 %r1, [%r53]; setp.eq.u32 %p3, %r1, 0; @%p3 bra POLL; bra END;
    SETTER: add.u32 %r3, %r3, 1; setp.lt.u32 %p4, %r3, 20000; @%p4 bra SETTER; st.shared.b32 [%r53], 17; mov.b32 %r1, 3;
    END: mul.wide.u32 %rd1, %r50, 4; add.s64 %rd2, %rd0, %rd1; st.global.b32 [%rd2], %r1;"""
    run_ptx(ptx_kernel(body, module=MODULE), None, 1, 64, [out])
    assert out.tolist() == [17] * 32 + [3] * 32


@pytest.mark.parametrize("pause", ["", "nanosleep.u32 20;"])
def test_a_cta_that_another_one_waits_for_gets_its_turn(ptx_kernel, pause: str) -> None:
    """CTA 0 polls a word, with or without pauses. CTA 1, which writes it, starts only after CTA 0 is seen to poll."""
    words = np.zeros(2, np.uint32)
    body = f"""mov.u32 %r50, %ctaid.x; setp.ne.u32 %p1, %r50, 0; @%p1 bra WRITE;
    POLL: ld.relaxed.gpu.global.b32 %r1, [%rd0]; setp.ne.u32 %p2, %r1, 0; @%p2 bra SEEN; {pause} bra POLL;
    SEEN: st.global.b32 [%rd0+4], %r1; bra END;
    WRITE: red.relaxed.gpu.global.add.u32 [%rd0], 7;
    END:"""
    machine = Machine(instruction_limit=100_000)
    run_ptx(ptx_kernel(body), None, 2, 1, [words], machine=machine)
    assert words.tolist() == [7, 7]


def test_a_long_computation_is_not_a_hang(ptx_kernel) -> None:
    out = np.zeros(1, np.uint32)
    body = "mov.b32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 50000; @%p1 bra L; st.global.b32 [%rd0], %r1;"
    run_ptx(ptx_kernel(body), None, 1, 1, [out])
    assert out[0] == 50000


def test_runaway_is_stopped(ptx_kernel) -> None:
    machine = Machine(instruction_limit=30_000)
    body = "mov.b32 %r1, 0; L: add.u32 %r1, %r1, 1; st.global.b32 [%rd0], %r1; bra L;"
    with pytest.raises(EmulatorError, match=r"runaway"):
        run_ptx(ptx_kernel(body), None, 1, 1, [np.zeros(1, np.uint32)], machine=machine)


def test_one_group_waits_while_the_other_lets_it_go(ptx_kernel) -> None:
    """Lane 0 waits for a barrier on which the other lanes of its warp arrive later."""
    out = np.zeros(32, np.uint32)
    body = f"""{PROLOGUE}
    setp.ne.u32 %p1, %r50, 0; @!%p1 mbarrier.init.shared.b64 [%r52], 31;
    @%p1 bra ARRIVE;
    {WAIT.format(parity=0)}
    mov.b32 %r0, 1; bra END;
    ARRIVE: mbarrier.arrive.shared.b64 _, [%r52]; mov.b32 %r0, 2;
    END: mul.wide.u32 %rd1, %r50, 4; add.s64 %rd2, %rd0, %rd1; st.global.b32 [%rd2], %r0;"""
    run_ptx(ptx_kernel(body, module=MODULE), None, 1, 32, [out])
    assert out.tolist() == [1] + [2] * 31


def test_diverged_hang_lists_the_groups(ptx_kernel) -> None:
    body = f"""{PROLOGUE}
    setp.lt.u32 %p1, %r50, 4; mbarrier.init.shared.b64 [%r52], 1; @%p1 bra B;
    {WAIT.format(parity=0)}
    bra END;
    B: bar.warp.sync -1;
    END:"""
    with pytest.raises(EmulatorError, match="hangs") as caught:
        run_ptx(ptx_kernel(body, 0, module=MODULE), None, 1, 32)
    text = str(caught.value)
    assert "diverged: lanes 0xfffffff0 at PTX line" in text and "mbarrier smem+0x400" in text
    assert "lanes 0x0000000f" in text and "have not arrived" in text


def test_values_of_one_lane_stay_scalars(ptx_kernel) -> None:
    """An elected lane overwrites registers that no waiting lane reads, so they remain scalars."""
    program = parse(
        ptx_kernel(
            """
    elect.sync %r1|%p1, -1; @!%p1 bra END;
    mov.b32 %r2, 5; L: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 9; @%p2 bra L;
    END: mov.b32 %r3, %r1;""",
            0,
        )
    )
    code = Code(program, program.entries["k"])
    end = program.entries["k"].labels["END"]
    names = {code.builder.names[slot] for slot in code.live_at(end)}
    assert names == {"%r1"}
    assert "%r2" in {code.builder.names[s] for s in code.live_at(program.entries["k"].labels["L"])}


def test_launch_geometry_and_statistics(ptx_kernel) -> None:
    seen = []
    machine = Machine(progress=lambda done, total: seen.append((done, total)))
    out = np.zeros(6, np.uint32)
    body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mad.lo.u32 %r3, %r2, 2, %r1; mul.wide.u32 %rd1, %r3, 4; add.s64 %rd2, %rd0, %rd1; st.global.b32 [%rd2], 1;"
    stats = run_ptx(ptx_kernel(body), None, (2, 3), 1, [out], cluster=(2, 1), machine=machine)
    assert out.tolist() == [1] * 6
    assert seen == [(2, 6), (4, 6), (6, 6)]
    assert (stats.launches, stats.ctas, stats.instructions, stats.store_bytes) == (1, 6, 6 * 8, 24)


def test_grid_must_be_a_multiple_of_the_cluster(ptx_kernel) -> None:
    with pytest.raises(EmulatorError, match=r"grid \(3, 1, 1\) is not a multiple of cluster \(2, 1, 1\)"):
        run_ptx(ptx_kernel("", 0), None, 3, 1, cluster=2)


def test_cancelled_clusters_do_not_run(ptx_kernel) -> None:
    machine = Machine()
    cancelled = []
    machine.progress = lambda done, total: cancelled.append(machine.cancel_cluster())
    out = np.zeros(4, np.uint32)
    body = (
        "mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd0, %rd1; st.global.b32 [%rd2], 1;"
    )
    run_ptx(ptx_kernel(body), None, 4, 1, [out], machine=machine)
    assert out.tolist() == [1, 0, 1, 0]
    assert cancelled == [(1, 0, 0), (3, 0, 0)]


GRID_FLAG = """.version 8.8
.target sm_100a
.visible .entry k(.param .u64 out) {
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>;
ld.param.b64 %rd1, [out];
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %nctaid.x;
sub.u32 %r2, %r2, 1;
mul.wide.u32 %rd2, %r1, 4;
add.u64 %rd2, %rd1, %rd2;
setp.eq.u32 %p1, %r1, %r2;
@%p1 bra LAST;
POLL: ld.acquire.gpu.global.b32 %r3, [%rd2+4];
setp.eq.u32 %p2, %r3, 0;
@%p2 bra POLL;
LAST: st.release.gpu.global.b32 [%rd2], 1;
ret;
}"""


def test_clusters_that_wait_for_later_ones_run_beside_them() -> None:
    """Every CTA waits for its right neighbour, which gets a place on an SM although the waiting ones still run."""
    out = np.zeros(5, np.uint32)
    run_ptx(GRID_FLAG, None, 5, 1, [out], sm_count=2)
    assert out.tolist() == [1] * 5
    with pytest.raises(EmulatorError, match="hangs") as caught:
        run_ptx(GRID_FLAG, None, 65, 1, [np.zeros(65, np.uint32)], sm_count=2)
    assert str(caught.value).count("spinning") == 64, "two SMs hold 64 CTAs"


def test_lanes_that_poll_let_the_rest_of_their_warp_go_on(ptx_kernel) -> None:
    """Lane 0 polls a flag that lane 1 sets after the loop, which comes first in the code."""
    body = f"""{PROLOGUE} st.shared.b32 [%r53], 0;
    setp.ne.u32 %p1, %r50, 0; @%p1 bra REST;
    POLL: ld.volatile.shared.b32 %r1, [%r53]; setp.eq.u32 %p2, %r1, 0; @%p2 bra POLL;
    REST: setp.eq.u32 %p3, %r50, 1; @%p3 st.volatile.shared.b32 [%r53], {{flag}};"""
    run_ptx(ptx_kernel(body.format(flag=5), 0, module=MODULE), None, 1, 32)
    with pytest.raises(EmulatorError, match="hangs") as caught:
        run_ptx(ptx_kernel(body.format(flag=0), 0, module=MODULE), None, 1, 32)
    assert "diverged" in str(caught.value) or "spinning" in str(caught.value)


def test_errors_name_kernel_cta_warp_line_and_source(ptx_kernel) -> None:
    text = ptx_kernel(
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 exit;\n.loc 1 7 3\ntrap;", 0, name="mine"
    )
    text = text.replace(".address_size 64\n", '.address_size 64\n.file 1 "mine.py"\n')
    line = next(i for i, t in enumerate(text.split("\n"), 1) if t == "trap;")
    with pytest.raises(EmulatorError) as caught:
        run_ptx(text, None, (1, 2), 64)
    assert str(caught.value).startswith(
        f"kernel mine cta (0, 0, 0) warp 1: PTX line {line} `trap` (mine.py:7): "
    )


def test_registry_takes_the_longest_prefix_and_refuses_doubles() -> None:
    assert find_handler(Inst("bar", ("warp", "sync"), (), "", 1))[0] == "bar.warp.sync"
    assert find_handler(Inst("bar", ("sync",), (), "", 1))[0] == "bar.sync"
    with pytest.raises(EmulatorError, match=r"unknown opcode `bar.odd`"):
        find_handler(Inst("bar", ("odd",), (), "bar.odd", 1))
    with pytest.raises(ValueError, match="two handlers"):
        handler("bra")(lambda inst, b: lambda warp: None)


def test_mods_must_all_be_consumed() -> None:
    mods = Mods(Inst("mbarrier.arrive", ("arrive", "expect_tx", "shared", "b64"), (), "text", 3))
    assert mods.flag("expect_tx") and mods.type() == "b64"
    with pytest.raises(EmulatorError, match=r"PTX line 3: `text`: not modelled: unknown modifier \.shared"):
        mods.done()


def test_builder_refuses_a_register_that_is_too_narrow() -> None:
    builder = Builder({}, {}, {}, architecture("sm_100a"))
    with pytest.raises(EmulatorError, match="narrower than .b64"):
        builder.read(Reg("%r1", "b32"), "b64")


def test_masks_round_trip() -> None:
    for bits in (0, 1, 0x80000001, 0xFFFFFFFF, 0x12345678):
        assert mask_bits(bits_mask(bits)) == bits
