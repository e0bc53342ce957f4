"""Launches that are divided among processes have the same stores, statistics, progress and errors as in one process."""

import numpy as np
import pytest

from nvfp4_cute.emulator import machine as machines
from nvfp4_cute.emulator import parallel
from nvfp4_cute.emulator.check.ledger import HazardError
from nvfp4_cute.emulator.code import Code
from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.machine import Machine
from nvfp4_cute.emulator.ptx import parse
from nvfp4_cute.errors import EmulatorError

GRID = 40
# Element 32 * cta + lane of the output becomes cta * 1000 + lane.
INDEX = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r3, %r1, 32, %r2;
mul.wide.u32 %rd10, %r3, 4; add.u64 %rd11, %rd0, %rd10; mad.lo.u32 %r4, %r1, 1000, %r2;"""


def run(text, jobs, out, **options):
    seen = []
    machine = Machine(jobs=jobs, progress=lambda done, total: seen.append((done, total)))
    stats = run_ptx(text, grid=GRID, args=[out], machine=machine, **options)
    return stats, seen


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch):
    """Disables lockstep, in which many CTAs are one piece of work, so that launches of this size are divided."""
    monkeypatch.setattr(machines, "runs_together", lambda launch: False)


@pytest.fixture
def divided(monkeypatch):
    """Counts the launches that were divided."""
    calls = []
    real = parallel.run
    monkeypatch.setattr(parallel, "run", lambda *args: (calls.append(1), real(*args)))
    return calls


def test_two_processes_do_what_one_does(ptx_kernel, divided):
    text = ptx_kernel(f"{INDEX} st.global.b32 [%rd11], %r4;", 1)
    results = []
    for jobs in (1, 2, 3):
        out = np.full(32 * GRID, -1, np.int32)
        results.append((out, *run(text, jobs, out)))
    assert len(divided) == 2
    want = (1000 * np.arange(GRID)[:, None] + np.arange(32)).reshape(-1)
    for out, stats, seen in results:
        np.testing.assert_array_equal(out, want)
        assert (stats.ctas, stats.launches) == (GRID, 1)
        assert (stats.instructions, stats.store_bytes) == (results[0][1].instructions, 128 * GRID)
        assert seen == [(done, GRID) for done in range(1, GRID + 1)]


def test_outputs_that_interleave_keep_each_others_bytes(ptx_kernel, divided):
    """Two registered ranges overlap one buffer: bytes of one between the other's rows are kept."""
    buffer = np.full(32 * GRID + 8, 7, np.int32)
    machine = Machine(jobs=2)
    machine.memory.add_range("neighbour", buffer[8:].ctypes.data, buffer[8:].nbytes)
    text = ptx_kernel(
        f"{INDEX} and.b32 %r5, %r2, 1; setp.eq.u32 %p1, %r5, 0; @%p1 st.global.b32 [%rd11], %r4;", 1
    )
    run_ptx(text, grid=GRID, args=[buffer[: 32 * GRID]], machine=machine)
    assert divided
    got = buffer[: 32 * GRID].reshape(GRID, 32)
    assert (got[:, 1::2] == 7).all() and (buffer[32 * GRID :] == 7).all()
    np.testing.assert_array_equal(got[:, ::2], 1000 * np.arange(GRID)[:, None] + np.arange(0, 32, 2))


def test_an_error_in_a_process_reaches_the_caller(ptx_kernel, divided):
    text = ptx_kernel(f"{INDEX} st.global.b32 [%rd11+4], %r4;", 1)
    out = np.zeros(32 * GRID, np.int32)
    with pytest.raises(EmulatorError, match=r"cta \(39, 0, 0\) warp 0.*outside every live range"):
        run(text, 2, out)
    assert divided


@pytest.mark.parametrize(
    "instruction",
    [
        "atom.global.add.u32 %r9, [%rd0], 1;",
        "red.relaxed.gpu.global.add.u32 [%rd0], 1;",
        "atom.add.u32 %r9, [%rd0], 1;",
        "ld.acquire.gpu.global.b32 %r9, [%rd0];",
        "ld.volatile.global.b32 %r9, [%rd0];",
        "fence.acq_rel.gpu;",
        "membar.gl;",
    ],
)
def test_code_that_communicates_stays_in_one_process(ptx_kernel, divided, instruction):
    out = np.zeros(32 * GRID, np.int32)
    run(ptx_kernel(f"{INDEX} {instruction}", 1), 2, out)
    assert not divided


def test_communication_inside_a_cluster_does_not_count(ptx_kernel):
    body = f"{INDEX} mov.b32 %r8, flag; st.shared.b32 [%r8], 0; atom.shared.add.u32 %r9, [%r8], 1; ld.volatile.shared.b32 %r9, [%r8];"
    program = parse(ptx_kernel(body, 1, module=".shared .align 4 .b32 flag;"))
    assert not parallel.communicates(Code(program, program.entries["k"]))


def test_small_or_unchecked_launches_stay_in_one_process(ptx_kernel, divided):
    text = ptx_kernel(f"{INDEX} st.global.b32 [%rd11], %r4;", 1)
    out = np.zeros(32 * GRID, np.int32)
    run(text, 2, out, checked=False)
    run_ptx(text, grid=parallel.MIN_CLUSTERS - 1, args=[out], machine=Machine(jobs=2))
    assert not divided


def test_a_process_that_dies_is_reported(ptx_kernel, monkeypatch):
    monkeypatch.setattr(parallel, "_work", lambda *args: None)
    with pytest.raises(EmulatorError, match="a process of the emulator died"):
        run(ptx_kernel(f"{INDEX} st.global.b32 [%rd11], %r4;", 1), 2, np.zeros(32 * GRID, np.int32))


# ---- under the hazard checker ------------------------------------------------------------------------------------
@pytest.fixture
def checked_apart(monkeypatch):
    """For each divided launch under the checker, whether it was found clean."""
    calls = []
    real = parallel.run_checked
    monkeypatch.setattr(parallel, "run_checked", lambda *args: calls.append(real(*args)) or calls[-1])
    return calls


def run_under_checker(text, out, jobs=2):
    machine = Machine(jobs=jobs, check=True)
    return run_ptx(text, grid=GRID, args=[out], machine=machine)


def test_clean_clusters_are_checked_in_two_processes(ptx_kernel, checked_apart):
    text = ptx_kernel(
        f"{INDEX} ld.global.b32 %r5, [%rd11]; add.u32 %r4, %r4, %r5; st.global.b32 [%rd11], %r4;", 1
    )
    out, alone = np.ones(32 * GRID, np.int32), np.ones(32 * GRID, np.int32)
    stats = run_under_checker(text, out)
    one = run_under_checker(text, alone, jobs=1)
    assert checked_apart == [True]
    np.testing.assert_array_equal(out, alone)
    assert (stats.ctas, stats.launches, stats.instructions) == (one.ctas, one.launches, one.instructions)


@pytest.mark.parametrize(
    "harm, kind",
    [
        # the last lane writes a word that the next cluster, in the other process, also writes
        ("st.global.b32 [%rd11], %r4; setp.eq.u32 %p1, %r2, 31; setp.lt.and.u32 %p1, %r1, 39, %p1; @%p1 st.global.b32 [%rd11+4], %r4;", "double-store"),
        # every cluster reads the output of the previous one
        ("st.global.b32 [%rd11], %r4; setp.gt.u32 %p1, %r1, 0; @%p1 ld.global.b32 %r5, [%rd11+-128];", "race"),
        # a hazard that one process sees
        ("st.global.b32 [%rd11], %r4; mov.b32 %r8, word; setp.eq.u32 %p1, %r2, 0; @%p1 st.shared.v4.b32 [%r8], {%r4, %r4, %r4, %r4}; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd11], [%r8], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", "proxy-fence"),
        # an error
        ("st.global.b32 [%rd11+4], %r4;", "out-of-bounds"),
    ],
)  # fmt: skip
def test_hazards_have_the_same_report_as_in_one_process(ptx_kernel, checked_apart, harm, kind):
    """Memory is restored before the launch runs again, because each cluster adds to its contents."""
    text = ptx_kernel(
        f"{INDEX} ld.global.b32 %r10, [%rd11]; add.u32 %r4, %r4, %r10; {harm}",
        1,
        module=".shared .align 16 .b32 word[4];",
    )
    reports, outputs = [], []
    for jobs in (1, 2):
        out = np.ones(32 * GRID, np.int32)
        with pytest.raises(HazardError) as error:
            run_under_checker(text, out, jobs)
        assert kind in {hazard.kind for hazard in error.value.hazards}
        reports.append(
            [(hazard.kind, hazard.text.replace(hex(out.ctypes.data), "")) for hazard in error.value.hazards]
        )
        outputs.append(out)
    assert checked_apart == [False]
    assert [kind for kind, _ in reports[0]] == [kind for kind, _ in reports[1]]
    np.testing.assert_array_equal(*outputs)


def test_a_warning_of_one_process_is_kept_and_fails_nothing(ptx_kernel, checked_apart):
    text = ptx_kernel(
        f"{INDEX} ld.global.b32 %r10, [%rd11]; add.u32 %r4, %r4, %r10; st.global.b32 [%rd11], %r4; "
        "mov.b32 %r8, word; ld.shared.b32 %r9, [%r8];",
        1,
        module=".shared .align 4 .b32 word;",
    )
    found, outputs = [], []
    for jobs in (1, 2):
        machine, out = Machine(jobs=jobs, check=True), np.ones(32 * GRID, np.int32)
        run_ptx(text, grid=GRID, args=[out], machine=machine)
        found.append({(hazard.kind, hazard.severity) for hazard in machine.checker.hazards})
        outputs.append(out)
    assert checked_apart == [True]
    assert found[0] == found[1] == {("uninitialised", "warning")}
    np.testing.assert_array_equal(*outputs)
