"""The timing model: conservation laws, single instructions against published figures, and what a timeline says."""

import dataclasses
import gzip
import itertools
import json
from collections import defaultdict

import numpy as np
import pytest
import small_kernels as small

from nvfp4_cute.emulator import trace
from nvfp4_cute.emulator.driver import run_ptx, time_ptx
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.targets import TARGETS, lookup
from nvfp4_cute.timing_constants import constants_of

B200 = constants_of(lookup("B200"))
H200 = constants_of(lookup("H200"))
PIECE, PIECES, CTAS = 16384, 6, 40


def stream(loads: int, wrap: int = PIECES) -> str:
    """Thread 0 of each CTA copies `loads` pieces of its own `wrap` pieces, two in flight, then stores one."""
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


def operands() -> tuple[np.ndarray, np.ndarray]:
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


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_never_faster_than_memory_and_launch(target):
    constants = constants_of(target)
    ptx = stream(PIECES).replace("sm_100a", target.arch)
    timing = time_ptx(constants, ptx, grid=CTAS, args=operands(), smem_bytes=40000)
    assert timing.cycles >= constants.launch + timing.hbm_bytes / constants.hbm_bandwidth


@pytest.mark.parametrize(
    "field", ["hbm_bandwidth", "l2_bandwidth", "l2_write_bandwidth", "sm_bandwidth", "smem_bandwidth"]
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


# ---- single instructions ---------------------------------------------------------------------------------------------

# SemiAnalysisAI/microbench-blackwell, nvfp4, cycles between instructions: (M, N, CTAs, cycles).
TCGEN05 = (
    (128, 64, 1, 48.2), (128, 128, 1, 64.2), (128, 256, 1, 128.2), (256, 64, 2, 43.4), (256, 128, 2, 64.2),
    (256, 256, 2, 128.2), (128, 256, 2, 64.2), (128, 128, 2, 32.2),
)  # fmt: skip


@pytest.mark.parametrize("m,n,ctas,cycles", TCGEN05)
def test_tcgen05_intervals_are_the_published_ones(m, n, ctas, cycles):
    assert B200.mma_interval("mxf4nvf4", m, n, ctas, False) == pytest.approx(cycles, rel=0.1)


@pytest.mark.parametrize("n,cycles", [(64, 32.0), (128, 64.0), (256, 128.0)])
def test_wgmma_intervals_are_the_measured_ones(n, cycles):
    assert H200.wgmma_interval("f16", n, False) == cycles


def test_warps_that_wake_one_another_take_the_measured_time():
    """The probe's ping-pong on an H200: 79 cycles a step."""
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


def test_every_figure_has_a_source():
    for target in TARGETS:
        constants = constants_of(target)
        named = {f.name for f in dataclasses.fields(constants)} - {"name", "arch", "sources"}
        assert named == set(constants.sources)
        assert sum(constants.gpcs) == constants.num_sms


# ---- timelines -------------------------------------------------------------------------------------------------------
def test_timeline_has_a_process_for_each_sm_and_rows_that_do_not_overlap(tmp_path):
    timing = timed(grid=3, timeline=True)
    path = tmp_path / "t.json.gz"
    trace.write(timing, path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len([n for n in names if n.startswith("SM ")]) == 3
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 3 * 2  # a warp and the copy engine
    for spans in rows.values():
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(sorted(spans)))
    assert max(end for spans in rows.values() for _, end in spans) <= timing.us
    read = sum(e["args"]["TB/s"] * trace.BUCKET_US * 1e6 for e in events if e["ph"] == "C")
    assert read == pytest.approx(timing.hbm_bytes, rel=0.01)


def test_a_timing_without_a_timeline_cannot_be_drawn():
    with pytest.raises(ValueError, match="timeline=True"):
        list(trace.events(timed(grid=1)))
