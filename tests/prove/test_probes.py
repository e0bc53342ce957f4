"""Probes: each compiles for every architecture that it is meant for, the emulator's answers, and detection of wrong answers."""

import pytest
import torch

from nvfp4_cute.compile.compiler import compile_kernel
from nvfp4_cute.kernels.probes import table
from nvfp4_cute.kernels.probes.body import Body
from nvfp4_cute.kernels.probes.clocks import WARM_UP
from nvfp4_cute.prove import constants, jobs, probes
from nvfp4_cute.prove.outcome import FAULT, NOT_HERE, PASSED, WRONG, Job
from nvfp4_cute.prove.probe_keys import ProbeKey, ProbeTask

NEEDS_A_GPU = {"pdl_graph", "spin_cooperative", "spin_two_streams"} | {
    f"resident_{size}" for size in (1, 2, 4, 8, 16)
}
CASES = [
    pytest.param(arch, name, marks=[] if arch in ("sm_90a", "sm_100a") else pytest.mark.slow)
    for arch in ("sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
    for name, probe in probes.PROBES.items()
    if arch in probe.archs
]
KERNELS = {
    "sm_100a": ("wgmma_run", "wgmma_wait", "scaled_sync_run"),
    "sm_90a": ("pair_alloc", "scaled", "mma_n"),
    "sm_120a": ("wgmma_run", "wgmma_wait", "pair_alloc", "scaled_run", "mma_n"),
}
"""What cannot be built for an architecture."""


def ask(arch, name):
    return jobs.perform(Job("probe", name, f"emulator:{arch}", {"probe": name}))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("arch", "name"), CASES)
def test_what_the_emulator_answers(arch, name):
    outcome = ask(arch, name)
    expected = {NOT_HERE} if name in NEEDS_A_GPU else {PASSED}
    if name.endswith("column1"):  # real chips fault or compute nonsense; the emulator may refuse it
        expected = {PASSED, FAULT}
    assert outcome.verdict in expected, outcome


@pytest.mark.slow
@pytest.mark.parametrize("arch", KERNELS)
def test_every_kernel_is_built(arch):
    for name in (*table.BODIES, *table.FILLING):
        if not name.startswith(KERNELS[arch]):
            kernel = compile_kernel(ProbeKey(arch, name))
            assert kernel.resources.stack_bytes == 0, name


def test_other_architectures_are_not_asked():
    assert ask("sm_120a", "pair_alloc").verdict == NOT_HERE


@pytest.mark.parametrize(
    ("name", "old", "new", "verdict"),
    [
        ("st_async", "mad.lo.u32 r13, r1, 4099, r2", "mad.lo.u32 r13, r1, 4098, r2", WRONG),
        ("cluster_exit", "mad.lo.u32 r11, tid, 2, rank", "mad.lo.u32 r11, tid, 2, 7", WRONG),
        ("pdl", "add.u32 r6, arg0, 1;", "add.u32 r6, arg0, 2;", WRONG),
        ("early_release", "mul.lo.u32 r10, r1, 4096;", "mul.lo.u32 r10, r1, 4095;", WRONG),
        ("wgmma_wait", "0x41800000", "0x41900000", WRONG),
        ("register_counts", "mul.lo.u32 r2, tid, 96;", "mul.lo.u32 r2, tid, 95;", WRONG),
        ("pdl", "st.global.b32 [d1], r6;", "st.global.b32 [d1+100000000], r6;", FAULT),
        ("arrives_in_order", "mov.u32 r1, 0;", "mbarrier.inval.shared.b64 [smem+3];\nmov.u32 r1, 0;", FAULT),
    ],
)
def test_a_kernel_that_does_something_else_is_noticed(monkeypatch, name, old, new, verdict):
    """Changes the kernel's text, with a different name so that no cache contains it."""
    body = table.body_of(name, "sm_90a")
    assert old in body.text
    planted = Body(
        **{
            **vars(body),
            "text": body.text.replace(old, new, 1) if name != "st_async" else _only_sent(body.text),
        }
    )
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", "off")
    monkeypatch.setattr(ProbeKey, "to_name", lambda key: f"planted_{name}_{verdict}_{abs(hash(new))}")
    monkeypatch.setattr(ProbeKey, "__eq__", lambda one, other: one is other)
    monkeypatch.setattr(table, "body_of", lambda *_: planted)
    outcome = ask("sm_90a", name)
    assert outcome.verdict == verdict, outcome


def _only_sent(text):
    """Changes the values that the sender computes, but not those that the receiver expects."""
    return text.replace("SEND:\n", "SEND:\nadd.u32 r10, r10, 1;\n", 1)


def test_scales_of_another_column_are_named(monkeypatch):
    """Runs the kernel for column 2 with the answers for column 0."""
    monkeypatch.setattr(ProbeTask, "key", lambda task, gpu: ProbeKey(gpu.arch, "mma_n32_column2"))
    verdict, detail, _ = probes._scaled(32, 0)(probes.Machine.of("emulator:sm_100a"))
    assert verdict == WRONG and "scales 2 columns from the first one" in detail


# ---- microbenchmarks -------------------------------------------------------------------------------------------
def launch(arch, name, arg0, data=None, ctas=1, arg1=0):
    out = torch.zeros(2, dtype=torch.int32)
    ProbeTask(name, out, out if data is None else data, ctas, arg0, arg1).run(f"emulator:{arch}")
    return out.tolist()


def test_a_chase_ends_where_it_leads():
    ring = torch.zeros((8, 16), dtype=torch.int32)
    ring[:, 0] = torch.tensor([64 * ((i + 3) % 8) for i in range(8)], dtype=torch.int32)
    assert launch("sm_90a", "chase", 5, ring)[1] == 64 * (5 * 3 % 8)
    assert launch("sm_90a", "remote_chase", 5, ctas=2)[1] == 0


def test_microbenchmarks_do_what_they_say():
    chunks = torch.zeros(3 * constants.CHUNK, dtype=torch.uint8)
    assert launch("sm_90a", "bulk_reads", 9, chunks, 2, 3)[0] > 0
    assert launch("sm_90a", "bulk_reads", 2, chunks, 1, 3)[0] > 0  # fewer than stages
    assert (
        launch("sm_90a", "barriers_256", 3)[0] > 0 and launch("sm_90a", "cluster_barriers", 3, ctas=2)[0] > 0
    )
    for count in (3, 5):  # the clock follows from the difference of two launches with different counts
        total = torch.tensor(launch("sm_90a", "wgmma_run", count)[1], dtype=torch.int32).view(torch.float32)
        assert total == (WARM_UP + count) * 16  # products of ones
    assert launch("sm_100a", "scaled_run_4", 0)[0] > 0 and launch("sm_120a", "scaled_sync_run", 2)[0] > 0


def test_every_figure_has_a_meaning_and_the_models_are_found():
    from nvfp4_cute.gpus import targets

    has = constants.model_has(targets.H200)
    assert has["l2_latency"][0] == pytest.approx(289 * 1.70 / 1.98) and has["launch_us"][0] == pytest.approx(
        2.75
    )
    assert set(has) <= set(constants.UNITS)


def test_an_emulator_measures_nothing():
    outcome = jobs.perform(Job("constant", "launch", "emulator:sm_90a", {"constant": "launch"}))
    assert outcome.verdict == NOT_HERE and not outcome.numbers
