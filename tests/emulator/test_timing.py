"""The timing model: conservation laws, single instructions compared with published figures, and contents of a timeline."""

import dataclasses
import functools
import gzip
import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import prefetch_walk
import pytest
import small_kernels as small

from nvfp4_cute.emulator.compiled import compiled
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.ptx import parse
from nvfp4_cute.emulator.record.costs import block_cost
from nvfp4_cute.emulator.record.events import ClusterTrace, LaunchTrace, Op
from nvfp4_cute.gpus.targets import TARGETS, lookup
from nvfp4_cute.gpus.timing_figures import constants_of
from nvfp4_cute.planning.arch import is_weight_only
from nvfp4_cute.timing import trace
from nvfp4_cute.timing.clock import time_ptx
from nvfp4_cute.timing.memory import Memory
from nvfp4_cute.timing.replay import Replay, replay
from nvfp4_cute.timing.state import Groups
from nvfp4_cute.timing.work import in_turns, worked

B200 = constants_of(lookup("B200"))
H200 = constants_of(lookup("H200"))
PIECE, PIECES, CTAS = 16384, 6, 40


def stream(loads: int, wrap: int = PIECES) -> str:
    """Thread 0 of each CTA copies `loads` pieces, which repeat after `wrap`, two at a time, and then stores one."""
    body = small.init(1, 1)
    body += "@!%p0 bra END;\nmov.u32 %r20, %ctaid.x;\n"
    body += f"mul.wide.u32 %rd20, %r20, {PIECE * PIECES};\nadd.u64 %rd21, %rd1, %rd20;\n"
    for i in range(loads):
        bar, phase = i % 2, i // 2
        if phase:
            body += small.wait(8 * bar, (phase - 1) % 2)
        body += f"mbarrier.arrive.expect_tx.shared.b64 _, [%r1+{8 * bar}], {PIECE};\n"
        body += f"add.u32 %r21, %r1, {1024 + PIECE * bar};\nadd.u64 %rd22, %rd21, {i % wrap * PIECE};\n"
        body += "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        body += f"[%r21], [%rd22], {PIECE}, [{'%r1' if not bar else '%r22'}];\n".replace("%r22", "%r1+8")
    for bar in range(2):
        body += small.wait(8 * bar, ((loads - 1 - bar) // 2) % 2)
    body += f"mul.wide.u32 %rd23, %r20, {PIECE};\nadd.u64 %rd24, %rd2, %rd23;\n"
    body += f"cp.async.bulk.global.shared::cta.bulk_group [%rd24], [%r21], {PIECE};\n"
    body += "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nEND:\n"
    return small.kernel(body)


@functools.cache
def operands() -> tuple[np.ndarray, np.ndarray]:
    """Returns the same arrays for every launch."""
    return np.zeros(PIECE * PIECES * CTAS, np.uint8), np.zeros(PIECE * CTAS, np.uint8)


def timed(constants=B200, loads: int = PIECES, grid: int = CTAS, wrap: int = PIECES, **kwargs):
    return time_ptx(constants, stream(loads, wrap), grid=grid, args=operands(), smem_bytes=40000, **kwargs)


def test_bytes_are_those_that_the_instructions_ask_for():
    timing = timed()
    plain = run_ptx(stream(PIECES), grid=CTAS, args=operands(), smem_bytes=40000)
    assert timing.requested_bytes == plain.tma_load_bytes == PIECE * PIECES * CTAS
    assert timing.stored_bytes == plain.tma_store_bytes == PIECE * CTAS
    assert timing.hbm_bytes == timing.requested_bytes


def test_what_l2_holds_is_not_read_again():
    timing = timed(loads=12, wrap=3)
    assert timing.requested_bytes == 12 * PIECE * CTAS
    assert timing.hbm_bytes == 3 * PIECE * CTAS


WITH_TMA = [target for target in TARGETS if not is_weight_only(target.arch)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", WITH_TMA, ids=lambda t: t.name)
def test_never_faster_than_memory_and_launch(target):
    constants = constants_of(target)
    ptx = stream(PIECES).replace("sm_100a", target.arch)
    timing = time_ptx(constants, ptx, grid=CTAS, args=operands(), smem_bytes=40000)
    assert timing.cycles >= constants.launch + timing.hbm_bytes / constants.hbm_bandwidth


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "field",
    ["hbm_bandwidth", "l2_bandwidth", "l2_look_ups", "l2_write_bandwidth", "sm_bandwidth", "smem_bandwidth"],
)
def test_more_bandwidth_is_never_slower(field):
    faster = dataclasses.replace(B200, **{field: 2 * getattr(B200, field)})
    assert timed(faster).cycles <= timed(B200).cycles


def test_more_memory_bandwidth_helps_a_kernel_that_streams():
    slower = dataclasses.replace(B200, hbm_bandwidth=B200.hbm_bandwidth / 32)
    assert timed(slower).cycles > 2 * timed(B200).cycles - B200.launch


def test_a_second_wave_costs_the_time_of_a_cta():
    few = dataclasses.replace(B200, num_sms=4, gpcs=(4,))
    one, two = timed(few, grid=20), timed(few, grid=40)  # 5 fit on an SM
    assert two.cycles > one.cycles + (PIECE * PIECES / B200.sm_bandwidth)


def test_skipping_data_does_not_change_the_time():
    assert timed().cycles == timed(with_data=True).cycles


def test_the_same_launch_takes_the_same_time():
    assert timed().cycles == timed().cycles


def test_a_machine_without_a_recorder_records_nothing():
    machine = Machine()
    run_ptx(stream(2), grid=1, args=operands(), smem_bytes=40000, machine=machine)
    assert machine.recorder is None


def test_critical_path_names_memory_and_adds_up():
    timing = timed()
    assert max(timing.critical, key=timing.critical.get) == "memory data"
    assert sum(timing.critical.values()) == pytest.approx(timing.cycles - B200.launch / 2, rel=0.05)
    assert "memory data" in timing.report() and "modelled" in timing.report()


def test_waiting_for_groups_leaves_the_newest_alone():
    groups = Groups()
    for done in (30.0, 10.0, 40.0):
        groups.add(done)
        groups.commit()
    assert groups.wait(pending=5) == 0.0 and groups.wait(pending=3) == 0.0
    assert groups.wait(pending=1) == 30.0  # of the first two
    assert groups.wait(pending=1) == 0.0  # only the newest group may be pending
    assert groups.wait(pending=0) == 40.0


# ---- the cluster barrier ---------------------------------------------------------------------------------------------
def test_a_warp_that_has_ended_is_not_waited_for_and_does_not_stand_for_others():
    """Some warps arrive and exit, another one arrives 4000 cycles later, and one waits for it."""
    arrive, wait = (Op.CLUSTER_ARRIVE,), (Op.CLUSTER_WAIT,)
    late = [(Op.SLEEP, 4000 / B200.clock_hz * 1e9), arrive, wait]
    cluster = ClusterTrace((0, 0, 0), [[[arrive], [arrive], [arrive, wait]], [[arrive], [arrive], late]])
    cycles = replay(B200, LaunchTrace("cluster", 1, [cluster])).cycles
    assert cycles == pytest.approx(B200.launch + 4000 + B200.cluster_barrier, abs=10)


# ---- prefetches ------------------------------------------------------------------------------------------------------
def copy_after(*before: tuple) -> float:
    """Cycles until a warp has a copy of one piece by tensor map 1, 4000 cycles after the events `before`."""
    barrier, pause = 0, (Op.SLEEP, 4000 / B200.clock_hz * 1e9)
    copy = (Op.LOAD, ((1 << 20, PIECE),), PIECE, (barrier,), (0,), 1, 0)
    events = [(Op.INIT, barrier, 1), *before, pause, (Op.TX, barrier, PIECE), (Op.ARRIVE, barrier, 1), copy]
    trace = LaunchTrace("copy", 1, [ClusterTrace((0, 0, 0), [[[*events, (Op.WAIT, barrier, 1)]]])])
    return replay(B200, trace).cycles


def test_a_tensor_map_that_was_prefetched_is_not_waited_for():
    saved = copy_after() - copy_after((Op.PREFETCH_MAP, (1,)))
    assert saved == pytest.approx(B200.descriptor_latency, abs=2)
    assert copy_after((Op.PREFETCH_MAP, (2,))) == pytest.approx(copy_after(), abs=2)


def test_a_prefetched_piece_comes_from_l2():
    saved = copy_after() - copy_after((Op.PREFETCH, ((1 << 20, PIECE),), PIECE, 1))
    from_memory = B200.hbm_latency - B200.l2_latency + B200.hbm_spread + B200.page_latency
    assert saved == pytest.approx(from_memory + B200.descriptor_latency, rel=0.01)


def test_prefetches_take_look_ups_and_not_what_l2_sends():
    memory, start, count = Memory(B200), 1e6, 50
    memory.read((0, PIECE), 0.0, 0)
    looked_up = [memory.prefetch((0, PIECE), start, 0) for _ in range(count)]
    assert looked_up[-1] == pytest.approx(start + count * PIECE / B200.l2_look_ups)
    reply = memory.read((0, PIECE), start, 0)
    assert reply.hit and reply.time == pytest.approx(start + PIECE / B200.l2_bandwidth + B200.l2_latency)
    assert memory.hbm_bytes == memory.l2_bytes // 2 == PIECE


def test_device_memory_sends_rows_of_overlapping_boxes_once():
    """Boxes of 8 rows at rows 0, 5, 20 and 15, one of another column, and one after all others were evicted."""
    pitch, row_bytes = 1 << 10, 128
    box = lambda row, place=0: (row * pitch + place, 8 * row_bytes, pitch, row_bytes)
    memory, rows = Memory(B200), []
    for piece in (box(0), box(5), box(20), box(15), box(2, row_bytes)):
        before = memory.hbm_bytes
        memory.read(piece, 1e6, 0)
        rows.append((memory.hbm_bytes - before) // row_bytes)
    assert rows == [8, 5, 8, 5, 8]
    assert Memory(B200).know((box(0), box(5), box(5))) == 13 * row_bytes
    memory.read((1 << 30, B200.l2_bytes), 2e6, 0)
    before = memory.hbm_bytes
    memory.read(box(4), 3e6, 0)
    assert memory.hbm_bytes - before == 8 * row_bytes


def test_an_engine_waits_for_its_prefetches_look_ups():
    """All SMs prefetch and load what is in L2, whose look-ups take longer than a copy engine."""
    box = ((0, PIECE),)
    copy = [(Op.TX, 0, PIECE), (Op.ARRIVE, 0, 1), (Op.LOAD, box, PIECE, (0,), (0,), 0, 0), (Op.WAIT, 0, 1)]
    times = []
    for count in (10, 20):
        events = [(Op.INIT, 0, 1), *[(Op.PREFETCH, box, PIECE, 0)] * count, *copy]
        clusters = [ClusterTrace((i, 0, 0), [[events]]) for i in range(H200.num_sms)]
        times.append(replay(H200, LaunchTrace("prefetches", 1, clusters)).cycles)
    look_up = H200.num_sms * PIECE / H200.l2_look_ups
    assert look_up > PIECE / H200.prefetch_bandwidth
    assert times[1] - times[0] == pytest.approx(10 * look_up, rel=0.05)


def test_memory_that_is_behind_drops_prefetches_that_come_too_fast():
    memory, one = Memory(B200), PIECE / B200.hbm_bandwidth
    many = 4 * int(B200.prefetch_backlog / one)
    for i in range(many):
        memory.prefetch((i * PIECE, PIECE), 0.0, 0)
    taken = memory.hbm_bytes // PIECE
    assert (
        B200.prefetch_backlog < taken * one <= B200.prefetch_backlog + 2 * one
    )  # all prefetches until the backlog was full
    for i in range(many):  # loads are never dropped, and hit L2 where the prefetch was not dropped
        assert memory.read((i * PIECE, PIECE), 1e5, 0).hit == (i < taken)
    assert memory.hbm_bytes == many * PIECE
    for _ in range(
        2
    ):  # loads are queued, but the backlog of prefetches has shrunk: it takes one more, not two
        memory.prefetch((many * PIECE, PIECE), 1e5, 0)
        many += 1
    assert memory.hbm_bytes == (many - 1) * PIECE


PREFETCHES = (
    (
        "8 prefetches of 16384 bytes,   1 CTAs, warm",
        0.05,
        (1, prefetch_walk.requests, 16384, False, "prefetches", 8),
    ),
    (
        "8 prefetches of 16384 bytes, 132 CTAs, warm",
        0.05,
        (132, prefetch_walk.requests, 16384, False, "prefetches", 8),
    ),
    (
        "48 loads of 16384 bytes and 96 prefetches of as many, 132 CTAs, warm",
        0.05,
        (132, prefetch_walk.mixed, False, 4),
    ),
    (
        "48 loads of 16384 bytes and 24 prefetches of as many, 132 CTAs, cold",
        0.1,
        (132, prefetch_walk.mixed, True, 1),
    ),
    (
        "48 loads of 16384 bytes and 96 prefetches of as many, 132 CTAs, cold",
        0.15,
        (132, prefetch_walk.mixed, True, 4),
    ),
    (
        " 4 boxes of 16384 bytes, 132 CTAs, 100000 cycles after their prefetch in a burst",
        0.25,
        (132, prefetch_walk.burst, 4, True),
    ),
)


@pytest.mark.parametrize("words,error,case", PREFETCHES, ids=[words for words, *_ in PREFETCHES])
def test_prefetches_take_what_an_h200_took(words, error, case):
    assert prefetch_walk.cycles(*case) == pytest.approx(prefetch_walk.measured()[words], rel=error)


# ---- single instructions ---------------------------------------------------------------------------------------------

# SemiAnalysisAI/microbench-blackwell, nvfp4, cycles between instructions: (M, N, CTAs, cycles).
TCGEN05 = (
    (128, 64, 1, 48.2), (128, 128, 1, 64.2), (128, 256, 1, 128.2), (256, 64, 2, 43.4), (256, 128, 2, 64.2),
    (256, 256, 2, 128.2), (128, 256, 2, 64.2), (128, 128, 2, 32.2),
)  # fmt: skip


@pytest.mark.parametrize("m,n,ctas,cycles", TCGEN05)
def test_tcgen05_intervals_are_the_published_ones(m, n, ctas, cycles):
    assert B200.mma_interval("mxf4nvf4", m, n, ctas, False) == pytest.approx(cycles, rel=0.1)


def test_an_mma_of_96_elements_takes_as_long_as_one_of_64_unless_it_reads_more():
    """The limit is that of a single CTA with 256 columns: 48 bytes of 384 rows at 128 bytes per cycle."""
    assert B200.mma_interval("mxf4nvf4", 256, 256, 2, False, 48) == 128
    assert B200.mma_interval("mxf4nvf4", 128, 256, 1, False, 48) == 144


@pytest.mark.parametrize("n,cycles", [(64, 32.0), (128, 64.0), (256, 128.0)])
def test_wgmma_intervals_are_the_measured_ones(n, cycles):
    assert H200.wgmma_interval("f16", n, False) == cycles


def test_warps_that_wake_one_another_take_the_measured_time():
    """The probe's ping-pong took 79 cycles per step on an H200."""
    steps = 64
    arrive = "mbarrier.arrive.shared.b64 _, [%r1+{at}];\n"
    first = "".join(arrive.format(at=0) + small.wait(8, i % 2) for i in range(steps))
    second = "".join(small.wait(0, i % 2) + arrive.format(at=8) for i in range(steps))
    body = (
        small.init(1, 1)
        + "@!%p1 bra END;\n@!%p0 bra SECOND;\n"
        + first
        + "bra END;\nSECOND:\n"
        + second
        + "END:\n"
    )
    empty = small.kernel(small.init(1, 1), "sm_90a")
    times = [
        time_ptx(H200, ptx, block=64, args=operands(), smem_bytes=4096).cycles
        for ptx in (small.kernel(body, "sm_90a"), empty)
    ]
    assert (times[0] - times[1]) / (2 * steps) == pytest.approx(79.2, rel=0.15)


# Results of bench/probes/h200_issue_probe.txt: cycles per instruction of a scheduler with four warps.
ISSUE = {
    "LOP3": ("lop3.b32 {x}, {x}, %r1, %r8, 0x6a;", 2.05),
    "PRMT": ("prmt.b32 {x}, {x}, %r1, 0x5140;", 2.06),
    "SHR": ("shr.u32 {x}, {x}, %r8;", 2.05),
    "MAD": ("mad.lo.u32 {x}, {x}, %r1, %r8;", 2.04),
    "HMUL2": ("mul.rn.f16x2 {x}, {x}, %r8;", 1.08),
    "FFMA": ("fma.rn.f32 {x}, {x}, %r8, %r8;", 1.07),
    "EX2": ("ex2.approx.ftz.f32 {x}, {x};", 8.04),
    "POPC": ("popc.b32 {x}, {x};", 8.03),
    "SHUFFLE": ("shfl.sync.up.b32 {x}, {x}, 0, 0, -1;", 4.03),
    "LOP3 and MAD": (
        "lop3.b32 {x}, {x}, %r1, %r8, 0x6a;\nmad.lo.u32 {y}, {y}, %r1, %r8;",
        2 * 1.06,
    ),
    "LOP3 and HMUL2": ("lop3.b32 {x}, {x}, %r1, %r8, 0x6a;\nmul.rn.f16x2 {y}, {y}, %r8;", 2 * 1.20),
}


@pytest.mark.parametrize("kind", ISSUE)
def test_instructions_issue_as_fast_as_measured(kind):
    """Eight independent chains in each of 16 warps, as in the probe. The time of a kernel without them is subtracted."""
    text, cycles = ISSUE[kind]
    chains = "".join(f"mov.u32 %v{i}, %r0;\n" for i in range(16))
    body = "".join(text.format(x=f"%v{i % 8}", y=f"%v{8 + i % 8}") + "\n" for i in range(256))
    times = [
        time_ptx(
            H200, small.kernel(chains + part, "sm_90a"), block=512, args=operands(), smem_bytes=4096
        ).cycles
        for part in (body, "")
    ]
    each = (times[0] - times[1]) / 256 / 4
    assert each == pytest.approx(cycles, rel=0.2)


def test_logic_of_three_inputs_is_one_instruction():
    logic = "and.b32 %v0, %r0, 15;\nand.b32 %v1, %r8, 240;\nor.b32 %v2, %v0, %v1;\n"
    used_twice = logic + "add.u32 %v3, %v0, %v1;\n"
    costs = []
    for text in (logic, used_twice):
        program = parse(small.kernel(text, "sm_90a"))
        code = compiled(program, program.entries["k"], timed=True)
        first = next(
            pc for pc, inst in enumerate(code.insts) if inst.opcode == "and" and "b32" in inst.mods and pc > 3
        )
        costs.append(block_cost(code, first, first + len(text.splitlines())))
    assert [cost.alu for cost in costs] == [4, 6], "one of the ands is part of the or, unless others use it"
    assert [cost.slots for cost in costs] == [2, 4]


PROBE = (Path(__file__).parents[2] / "bench/probes/h200_issue_probe.txt").read_text()
BESIDE = re.compile(
    r"A registers, (\d+) instructions between, (\d) warpgroups beside others: (\d+) cycles a step \(tensor cores (\d+)\)"
    r".*others issue ([\d.]+) "
)
ISSUED_ALONE, OTHER_INSTRUCTIONS = {3: 0.89, 2: 0.85, 1: 0.725}, 23
"""Of the probe: instructions a scheduler and cycle without wgmma by warps; those of a step that are not counted work."""


def test_the_share_of_issue_that_wgmma_takes_is_what_the_probe_leaves():
    """All warps always compute. The time that their own instructions do not explain is that of wgmma."""
    shares = []
    for work, groups, cycles, tensor, others in BESIDE.findall(PROBE):
        if int(work) and int(groups) == 2:
            issued = 2 * (int(work) + OTHER_INSTRUCTIONS) + float(others) * int(cycles)
            shares.append((int(cycles) - issued / ISSUED_ALONE[3]) / int(tensor))
    assert len(shares) == 5
    assert H200.wgmma_issue == pytest.approx(median(shares), abs=0.05)


def test_computing_beside_wgmma_takes_longer_by_its_share():
    simulation = Replay(H200, [LaunchTrace("k", 1, [])])
    sm = simulation.sms[0]
    sm.matrix[0] = 512.0
    left = 1 - H200.wgmma_issue
    assert worked(simulation, sm, 0, 0.0, 10) == pytest.approx(10 / left)
    assert worked(simulation, sm, 0, 0.0, 512 * left) == pytest.approx(512)
    assert worked(simulation, sm, 0, 0.0, 600) == pytest.approx(512 + 600 - 512 * left)
    assert worked(simulation, sm, 0, 512.0, 600) == 512 + 600


def test_few_instructions_do_not_wait_for_another_warps_many():
    """A scheduler takes turns; two equal blocks take twice as long, as one after the other."""
    sm = Replay(B200, [LaunchTrace("k", 1, [])]).sms[0]
    assert in_turns(sm, 0, 0.0, (900.0, 450.0), (900, 450)) == (900, 450)
    assert in_turns(sm, 0, 100.0, (930.0, 465.0), (30, 15)) == (160, 130)
    assert in_turns(sm, 0, 200.0, (1830.0, 915.0), (900, 450)) == (1830, 915)
    assert in_turns(sm, 1, 100.0, (130.0, 115.0), (30, 15)) == (130, 115), "another scheduler"


def test_what_mma_sync_takes_is_what_the_probe_says():
    """Time of 16 m16n8k16 in each of a scheduler's 8 warps, and the increase by 64 instructions in between."""
    probe = (Path(__file__).parents[2] / "bench/probes/h200_small_mma_probe.txt").read_text()
    took = {
        int(between): float(cycles)
        for between, cycles in re.findall(
            r"mma\.sync n32, (\d+) instr a slab, 8 warps a scheduler: ([\d.]+)", probe
        )
    }
    flops = 2 * 16 * 8 * 16
    assert 4 * 16 * flops / (H200.matrix_rate("f16") * H200.sync_share) == pytest.approx(took[0], rel=0.01)
    alone = 64 / ISSUED_ALONE[3]
    assert (took[64] - alone) / took[0] == pytest.approx(H200.sync_issue, abs=0.05)


def test_every_figure_has_a_source():
    for target in TARGETS:
        constants = constants_of(target)
        named = {f.name for f in dataclasses.fields(constants)} - {"name", "arch", "sources"}
        assert named == set(constants.sources)
        assert sum(constants.gpcs) == constants.num_sms


def test_an_h100s_groups_hold_as_many_clusters_as_were_resident():
    page = (Path(__file__).parents[2] / "bench/results/prove-h100_sxm.md").read_text()
    resident = {
        int(size): int(count) for size, count in re.findall(r"resident_(\d+) .*the driver says (\d+)", page)
    }
    gpcs = constants_of(lookup("H100")).gpcs
    assert {size: sum(sms // size for sms in gpcs) for size in resident} == resident and len(resident) == 5


def test_the_slowest_of_many_lines_comes_later_than_a_single_one_and_the_mean_is_that_of_a_chase():
    h100 = dataclasses.replace(
        constants_of(lookup("H100"), multiplies=False), hbm_bandwidth=1e9, page_latency=0
    )
    memory = Memory(h100)
    late = [memory.read((128 * i, 64), 0.0, 0).time for i in range(32 * 400)]
    assert np.mean(late) == pytest.approx(h100.hbm_latency, rel=0.02)
    for lines, cycles in ((4, 110), (16, 210), (32, 340)):  # bench/probes/h100_gather_probe.txt
        slowest = np.reshape(late, (-1, lines)).max(axis=1).mean()
        assert slowest - h100.hbm_latency == pytest.approx(cycles, abs=60)
    assert B200.line_spread == 0


# ---- work counters ---------------------------------------------------------------------------------------------------
WORK = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 counter, .param .u64 out)
{{
.reg .pred %p<4>;
.reg .b32 %r<16>;
.reg .b64 %rd<8>;
ld.param.u64 %rd1, [counter];
ld.param.u64 %rd2, [out];
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %nctaid.x;
mov.u32 %r3, %r1;
{first}
TILE:
setp.ge.u32 %p1, %r3, 240;
@%p1 bra DONE;
mov.u32 %r4, 0;
BUSY:
add.u32 %r4, %r4, 1;
setp.lt.u32 %p2, %r4, 400;
@%p2 bra BUSY;
mad.wide.u32 %rd3, %r3, 4, %rd2;
st.global.u32 [%rd3], %r1;
{next}
bra.uni TILE;
DONE:
ret;
}}
"""


def test_tiles_of_a_work_counter_are_spread():
    """Tiles that CTAs take from an atomic counter take as long as a fixed share: 30 for each of 8 CTAs."""
    few = dataclasses.replace(B200, num_sms=8, gpcs=(8,))
    take = "atom.global.add.u32 %r3, [%rd1], 1;"
    cycles = {}
    for way, first, then in (("static", "", "add.u32 %r3, %r3, %r2;"), ("dynamic", take, take)):
        counter, out = np.zeros(1, np.uint32), np.full(240, 99, np.uint32)
        ptx = WORK.format(first=first, next=then)
        cycles[way] = (
            time_ptx(few, ptx, grid=8, block=1, args=(counter, out), with_data=True).cycles - few.launch
        )
        assert np.bincount(out, minlength=8).tolist() == [30] * 8
    atomics = 31 * 2 * few.l2_latency
    assert cycles["static"] < cycles["dynamic"] < 1.1 * cycles["static"] + atomics


# ---- timelines -------------------------------------------------------------------------------------------------------
def test_timeline_has_a_process_for_each_sm_and_rows_that_do_not_overlap(tmp_path):
    timing = timed(grid=3, timeline=True)
    path = tmp_path / "t.json.gz"
    trace.write(path, timing)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len([n for n in names if n.startswith("SM ")]) == 3
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"]:
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 3 * 2  # a warp and the copy engine
    for spans in rows.values():
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(sorted(spans)))
    assert max(end for spans in rows.values() for _, end in spans) <= timing.us
    read = sum(e["args"]["TB/s"] * trace.BUCKET_US * 1e6 for e in events if e["ph"] == "C")
    assert read == pytest.approx(timing.hbm_bytes, rel=0.01)


def test_a_timeline_of_two_launches_puts_the_second_after_the_first():
    timings = timed(grid=1, timeline=True), timed(grid=2, timeline=True)
    events = list(trace.events(*timings))
    launches = [(e["ts"], e["dur"]) for e in events if e.get("cat") == "launch"]
    assert launches == [(0.0, round(timings[0].us, 4)), (round(timings[0].us, 4), round(timings[1].us, 4))]
    rows = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    assert len(rows) == len(set(rows)) == 1 + 2 * 2  # the launches, and a warp and the copy engine of two SMs
    last = max(pid for pid, _ in rows)  # an SM that only the second launch uses
    assert min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == last) >= round(timings[0].us, 4)


def test_a_timing_without_a_timeline_cannot_be_drawn():
    with pytest.raises(ValueError, match="timeline=True"):
        list(trace.events(timed(grid=1)))
