"""tune: requests, candidates, stored results and their reuse; times from a fake stopwatch, or from the timing model."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cases
import device_groups_check
import grouped_gemm_check
import pytest
import torch
from flat_parts import gemm, grouped_gemm
from oracle import assert_bitwise_equal

from nvfp4_cute import Options, backends, cli, tune
from nvfp4_cute.backends import calls
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.bench.cases import select
from nvfp4_cute.cli import tune as tune_verb
from nvfp4_cute.cli.options import choices
from nvfp4_cute.cli.options import tune as tune_options
from nvfp4_cute.formats.block_format import FP8_1x128, FP8_128x128
from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import B200
from nvfp4_cute.launch import prepared, tuned
from nvfp4_cute.launch.tuned import Request, Tuning
from nvfp4_cute.planning.arch import sm90, sm100
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.tuning import autotune
from nvfp4_cute.tuning.stopwatch import EMPTY, Sample

H200 = targets.lookup("H200")
SIZES = ((40, 72, 256), (70, 128, 512))
PROBLEM = GroupedProblem(SIZES)
# A config that no rule chooses for these problems.
ODD = KernelConfig.from_name("t128x192x256_s2a2_swap_p1")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A separate cache for tuning results; kernels stay in the session's cache."""
    monkeypatch.setattr(tuned, "env", SimpleNamespace(cache_dir=lambda: tmp_path))
    tuned.forget()
    yield tmp_path
    tuned.forget()


def entry(folder) -> Path:
    (path,) = folder.glob("tuned/*.json")
    return path


def operands(sizes=SIZES):
    return cases.make_operands(cases.Case("tune", sizes))


# ---- what is the same problem ----------------------------------------------------------------------------------


def request(problem=PROBLEM, gpu=B200.gpu, **changed):
    return Request.of(replace(problem, **changed), gpu)


@pytest.mark.parametrize("changed", [{"has_alpha": True}, {"out_dtype": torch.float16}, {"limit": 7.0}])
def test_what_takes_the_same_time_is_the_same_problem(changed):
    assert request(**changed) == request()


@pytest.mark.parametrize(
    "changed",
    [
        {"sizes": SIZES[::-1]},
        {"out_dtype": torch.float32},
        {"out_dtype": "nvfp4"},
        {"out_m_major": True},
        {"activation": "silu"},
        {"form": "ragged"},
        {"gpu": targets.lookup("B300").gpu},
        {"gpu": B200.gpu._replace(num_sms=74)},
    ],
)
def test_another_problem_has_another_entry(changed, tmp_path):
    gpu = changed.pop("gpu", B200.gpu)
    assert request(gpu=gpu, **changed).path(tmp_path) != request().path(tmp_path)


def test_sizes_on_the_device_are_told_apart_by_powers_of_two():
    mean = lambda m, form="ragged": request(sizes=((m, 64, 256),) * 3, form=form)
    assert mean(33) == mean(64) != mean(65)
    assert mean(1) == mean(0) != mean(2)
    assert "of 33 to 64 rows on average" in str(mean(40)) and "65 to 128 rows at most" in str(
        mean(100, "masked")
    )
    assert request(sizes=SIZES[:1], form="batched") == request(sizes=SIZES[:1])


# ---- entries ---------------------------------------------------------------------------------------------------


def found(times=None, kind="measured", problem=PROBLEM, gpu=B200.gpu):
    return Tuning(Request.of(problem, gpu), kind, times or {ODD: 1.0, KernelConfig(): 2.5})


def test_what_was_stored_is_found():
    assert tuned.find(PROBLEM, B200.gpu) is None
    assert tuned.store(found()) is None
    assert tuned.find(replace(PROBLEM, has_alpha=True), B200.gpu) == ODD
    assert tuned.find(PROBLEM, targets.lookup("B300").gpu) is None
    assert tuned.load(request()) == found()


def damage_digit(data: bytes) -> bytes:
    return data.replace(b"2.5", b"3.5")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: b"",
        lambda data: b"[]",
        lambda data: b"7",
        lambda data: b"{}",
        lambda data: b"\xff" + data[1:],
        lambda data: b"[" * 100_000,
        damage_digit,
    ],
)
def test_a_damaged_entry_does_not_count(folder, damage):
    tuned.store(found())
    path = entry(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert tuned.load(request()) is None
    tuned.forget()
    assert tuned.find(PROBLEM, B200.gpu) is None
    tuned.store(found())
    assert tuned.find(PROBLEM, B200.gpu) == ODD


def test_entries_of_other_kernels_and_versions_do_not_count(folder, monkeypatch):
    tuned.store(found())
    kept = entry(folder)
    for name, value in (("source_digest", "other"), ("dsl_versions", {"nvidia_cutlass_dsl": "1.0"})):
        with monkeypatch.context() as patch:
            patch.setattr(tuned.disk_cache, name, lambda value=value: value)
            assert tuned.load(request()) is None
            request().path(folder).write_bytes(kept.read_bytes())  # intact, but of another request
            assert tuned.load(request()) is None
    assert tuned.load(request()) is not None


def test_measured_times_outlive_modelled_ones():
    assert tuned.store(found(kind="modelled")) is None
    assert tuned.store(found()) is None
    assert "measured" in tuned.store(found({KernelConfig(): 1.0}, kind="modelled"))
    assert tuned.load(request()) == found()


def test_what_cannot_be_kept_says_why(tmp_path, monkeypatch):
    (tmp_path / "tuned").write_text("in the way")
    assert "cannot be written" in tuned.store(found())
    monkeypatch.setattr(tuned, "env", SimpleNamespace(cache_dir=lambda: None))
    assert "off" in tuned.store(found())
    assert tuned.load(request()) is None


# ---- calls take what was found ---------------------------------------------------------------------------------


def test_a_later_call_takes_it():
    tuned.store(found())
    case = cases.Case("tune", SIZES)
    listed = cases.make_operands(case)
    expected = grouped_gemm_check.run(case, listed, "reference")
    with observe() as observer:
        actual = grouped_gemm_check.run(case, listed, "emulator")
        grouped_gemm_check.run(case, listed, "emulator", config=sm100.CANDIDATES[0])
    for got, want in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, want)
    used = [plan.kernel.key.config for plan in observer.plans]
    assert used == [replace(ODD, num_cta=None), sm100.resolve(sm100.CANDIDATES[0])]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["ragged", "masked"])
def test_a_later_call_takes_it_where_the_device_has_the_sizes(form):
    arguments = device_groups_check.operands(form, [5, 60], n=64, k=256, has_alpha=False)
    mean = (-(-65 // 2) if form == "ragged" else 60, 64, 256)
    tuned.store(found(problem=GroupedProblem((mean,) * 2, form)))
    with observe() as observer:
        actual = device_groups_check.run(arguments, "emulator")
    assert_bitwise_equal(actual, device_groups_check.run(arguments, "reference"))
    assert [stats.ctas for stats in observer.stats] == [ODD.num_cta]


@pytest.fixture
def on_cuda(monkeypatch):
    """Fakes an H200 and records launches."""
    from nvfp4_cute.backends import cuda

    launched = []
    monkeypatch.setattr(targets, "gpu_of", lambda device: H200.gpu)
    monkeypatch.setattr(cuda, "gpu_of", lambda device: H200.gpu)
    monkeypatch.setattr(cuda, "run", lambda task: launched.append(task.config_on(H200.gpu)))
    return launched


def fake_stopwatch(monkeypatch, times_us):
    """Runs calls once, as in a capture, and returns given times."""

    def measure(calls, num_sets, *, rounds=40):
        for call in calls.values():
            call(0)
        times = {name: times_us(KernelConfig.from_name(name)) for name in calls}
        return {name: Sample(us, us, us, rounds) for name, us in (times | {EMPTY: 1.0}).items()}

    monkeypatch.setattr(autotune.stopwatch, "measure", measure)


def test_measured_on_a_gpu(on_cuda, monkeypatch):
    """All of sm_90a's configs are launched, the chosen one first; then a call without a config uses the fastest."""
    a, b, a_scale, b_scale, _ = operands()
    monkeypatch.setattr(calls, "prepared", NeverPrepared)
    fake_stopwatch(monkeypatch, lambda config: 50.0 - config.cta_tile_shape_mnk[1] / 8 + config.cluster_size)
    tuning = tune(grouped_gemm, a, b, a_scale, b_scale, backend="cuda")
    tried = sm90.CANDIDATES
    assert tuning.kind == "measured" and set(tuning.times_us) == set(tried)
    assert on_cuda[0] == sm90.choose(GroupedProblem(SIZES), H200.num_sms)
    assert sorted(map(str, on_cuda)) == sorted(map(str, 2 * tried))
    assert tuning.config == KernelConfig.from_name("t128x256x128_s0a1_swap")
    times = list(tuning.times_us.values())
    assert times == sorted(times)
    text = str(tuning)
    assert text.count("measured") == 1 + len(times) and "modelled" not in text and "H200 (sm_90a)" in text
    grouped_gemm(a, b, a_scale, b_scale, backend="cuda")
    assert on_cuda[-1] == tuning.config


class NeverPrepared:
    """Replaces ``prepared`` and stores nothing, because there is no GPU to launch on."""

    lookup = staticmethod(lambda *args: (None, None))


def test_a_call_that_is_repeated_does_not_look(monkeypatch):
    """A prepared call does not look up a config; tuning drops this thread's prepared calls."""

    class Prepared:
        def try_launch(self, inputs, outs):
            return [torch.zeros(m, n) for m, n, _ in SIZES]

    a, b, a_scale, b_scale, _ = operands()
    monkeypatch.setattr(tuned, "find", None)
    monkeypatch.setattr(prepared, "lookup", lambda *args: (None, Prepared()))
    assert len(grouped_gemm(a, b, a_scale, b_scale, backend="cuda")) == 2
    prepared._local.calls["a signature"] = prepared._local.recent["a kind"] = Prepared()
    prepared.forget()
    assert not prepared._local.calls and not prepared._local.recent


# ---- modelled --------------------------------------------------------------------------------------------------


def test_modelled_without_a_gpu(monkeypatch):
    """Every candidate has a modelled time, and the next call uses the stored config."""
    tried = (sm100.CANDIDATES[0], ODD)
    monkeypatch.setattr(autotune, "candidates", lambda *given: list(tried))
    a, b, a_scale, b_scale, _ = operands()
    tuning = tune(grouped_gemm, a, b, a_scale, b_scale)
    assert tuning.request == request() and tuning.kind == "modelled"
    assert set(tuning.times_us) == set(tried) and all(us > 1 for us in tuning.times_us.values())
    assert str(tuning).count("modelled") == 1 + len(tried)
    assert tuned.find(PROBLEM, B200.gpu) == tuning.config
    tune(grouped_gemm, a[:1], b[:1], a_scale[:1], b_scale[:1], keep=False)
    assert tuned.find(GroupedProblem(SIZES[:1]), B200.gpu) is None


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("form", ["list", "batched", "ragged", "masked"])
def test_candidates_are_those_that_may_be_chosen(arch, form):
    gpu = targets.lookup(arch).gpu
    sizes = ((40, 256, 512),) * 3
    tried = autotune.candidates(Request.of(GroupedProblem(sizes, form), gpu))
    stripped = [replace(config, num_cta=None) for config in tried]
    assert len(set(tried)) == len(tried) > 5
    offered = set(autotune.choose.candidates(arch, form))
    assert offered <= set(stripped) and set(stripped[1:]) <= offered
    # The untuned choice is the first one. It may have fewer stages than the candidate with its tile.
    assert stripped[0].cta_tile_shape_mnk in {config.cta_tile_shape_mnk for config in offered}
    if form in ("list", "batched"):
        assert tried[0] == autotune.choose.choose_config(GroupedProblem(sizes), arch, gpu.num_sms)


def test_problems_without_a_kernel_are_refused():
    with pytest.raises(ValueError, match="sm_90a: out has contiguous columns"):
        autotune.candidates(request(gpu=H200.gpu, out_m_major=True))


def test_configs_are_judged_by_what_is_launched():
    """A product in bands is a launch with one group per band, and stream-K cannot count all work of a large one."""
    m, n, k = 1 << 17, 1 << 15, 1 << 20
    huge = GroupedProblem(((m, n, k),), has_alpha=False)
    tried = autotune.candidates(Request.of(huge, H200.gpu))
    offered = autotune.choose.candidates("sm_90a", "list")
    assert tried and not any(config.stream_k for config in tried) and any(c.stream_k for c in offered)
    empty = lambda rows: torch.empty(rows, 8192, dtype=torch.uint8)
    scales = lambda rows: torch.empty(rows * 1024, dtype=torch.uint8)
    call = lambda gpu: tuned.asked_by(
        lambda: gemm(empty(16384), empty(512), scales(16384), scales(512), backend=f"emulator:{gpu}")
    )
    asked = call("GB10")
    config = autotune.candidates(asked.request, asked.check)[0]
    assert asked.request.problem.num_groups == 1 and asked.check(config).num_groups > 1
    assert call("H200").check(sm90.DEFAULT_CONFIG).num_groups == 1


def test_calls_with_nothing_to_tune_are_refused():
    a, b, a_scale, b_scale, _ = operands()
    with pytest.raises(ValueError, match="leave it out"):
        tune(grouped_gemm, a, b, a_scale, b_scale, options=Options(ODD))
    with pytest.raises(ValueError, match="chooses no config"):
        tune(gemm, torch.zeros(4, 512, dtype=torch.bfloat16), b[1], None, b_scale[1])
    with pytest.raises(ValueError, match="entries"):
        tune(grouped_gemm, a, b[:1], a_scale, b_scale)


def test_not_keeping_warns(monkeypatch):
    monkeypatch.setattr(autotune, "candidates", lambda *given: [ODD])
    monkeypatch.setattr(autotune.tuned, "store", lambda tuning: "the disk is full")
    a, b, a_scale, b_scale, _ = operands()
    with pytest.warns(RuntimeWarning, match="the disk is full"):
        tune(grouped_gemm, a, b, a_scale, b_scale)


def test_bench_explains_it(capsys):
    (case,) = select(("competition",), "nvfp4_group_gemm case 3")
    tuned.store(found(problem=GroupedProblem(case.sizes)))
    assert cli.main([*"bench --explain --target B200 --containing".split(), str(case)]) == 0
    first, then = capsys.readouterr().out.splitlines()[3:5]
    assert (
        first.strip() == f"{ODD.to_name()}: tuned, 1.00 us measured; chosen without that:"
        and "cycles" in then
    )


# ---- the verb --------------------------------------------------------------------------------------------------


def test_verb(monkeypatch, capsys):
    monkeypatch.setattr(targets, "detect", lambda: None)
    monkeypatch.setattr(
        autotune, "candidates", lambda *given: [KernelConfig.from_name("t128x16x256_s0a2_swap")]
    )
    command = "tune --m 3,0,20 --n 72 --k 256 --form ragged --target".split()
    assert cli.main([*command, "RTX 5090"]) == 0
    text = capsys.readouterr().out
    assert "RTX 5090 (sm_120a): times are modelled" in text and "Kept in" in text
    assert "t128x16x256_s0a2_swap" in text
    problem = GroupedProblem(((8, 72, 256),) * 3, "ragged")
    assert tuned.find(problem, targets.lookup("RTX 5090").gpu) is not None
    assert cli.main([*command, "RTX PRO 6000", "--dry-run"]) == 0
    assert "Kept in" not in capsys.readouterr().out
    assert tuned.find(problem, targets.lookup("RTX PRO 6000").gpu) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name a suite"),
        ("--m 4 --n 64", "--m, --n, and --k together"),
        ("competition --m 4 --n 64 --k 64", "name a suite"),
        ("--m 1,2 --n 64 --k 64 --groups 3", "2 entries for 3 groups"),
        ("--m 1,2 --n 64 --k 64 --form batched", "one size"),
        ("competition --containing gemv", "nothing to configure"),
        ("--m 4 --n 64 --k 64 --target 8086", "not in the table"),
        ("--m 4 --n 64 --k 64 --formats nvfp4,mxfp4", "no kernel for nvfp4 x mxfp4"),
        (
            "--m 4 --n 64 --k 64 --formats int4_32_bfloat16",
            "no kernel for int4_32_bfloat16 x int4_32_bfloat16",
        ),
    ],
)
def test_the_verb_refuses(arguments, message, capsys):
    assert cli.main(["tune", *arguments.split()]) == (1 if "8086" in arguments else 2)  # 1: no such GPU
    assert message in capsys.readouterr().err


def test_the_verb_is_described():
    for line in tune_options.EXAMPLES.split("\n\n")[0].splitlines()[1:]:
        cli.build_parser().parse_args(line.strip().split("  ")[0].split()[1:])


@pytest.mark.parametrize("form", choices.FORMS)
@pytest.mark.parametrize("op", choices.OPERATIONS)
def test_the_verb_makes_operands_of_every_form(form, op):
    work = tune_verb.of_shape((40,), 64, 256, 2, op, form, "nvfp4")
    operation, args, options = tune_verb.arguments(work, torch.device("cpu"))
    asked = tuned.request_of(lambda: operation(*args, backend="emulator", **options))
    # A batch of two dual GEMMs is a list.
    assert asked.problem.form == ("list" if (form, op) == ("batched", "dual") else form)
    assert asked.problem.num_groups == 2 and asked.problem.out_dtype == "nvfp4"
    assert asked.problem.sizes[0] == (40 if form in ("list", "batched") else 64, 64, 256)
    assert (asked.problem.activation is None) == (op != "dual")


@pytest.mark.parametrize("form", choices.FORMS)
def test_the_verb_makes_operands_of_other_formats(form):
    args = cli.build_parser().parse_args("tune --m 40 --n 64 --k 256 --formats fp8_1x128,fp8_128x128".split())
    work = tune_verb.of_shape(args.m, args.n, args.k, 2, args.op, form, args.out, args.formats)
    operation, operands, options = tune_verb.arguments(work, torch.device("cpu"))
    asked = tuned.request_of(lambda: operation(*operands, backend="emulator", **options)).problem
    assert (asked.a_format, asked.b_format) == (FP8_1x128, FP8_128x128) and asked.form == form


@pytest.mark.gpu("sm_90a")
@pytest.mark.slow
def test_measured_on_an_h200():
    a, b, a_scale, b_scale, _ = ([x.cuda() for x in xs] if xs else None for xs in operands())
    tuning = tune(grouped_gemm, a, b, a_scale, b_scale)
    assert tuning.kind == "measured"
    assert set(tuning.times_us) == set(sm90.CANDIDATES)
    assert tuned.find(PROBLEM, backends.gpu_of("auto", a[0].device)) == tuning.config
    grouped_gemm(a, b, a_scale, b_scale)
