"""`nvfp4-cute bench`: cases, operands, peers, figures of a report, and the command line. Times need a GPU."""

import importlib.util
import json
import re
import shlex

import pytest
import torch

from nvfp4_cute import cli
from nvfp4_cute.bench import cases, choices, command, measured, modelled, ours, report
from nvfp4_cute.bench.operands import empty_operands, make_operands
from nvfp4_cute.bench.peers import PEERS
from nvfp4_cute.cli.verbs import VERBS
from nvfp4_cute.formats.block_format import (
    INT8,
    MXFP4,
    MXFP8_E4M3,
    NVFP4_PAIR,
    FP8_1x128,
    FP8_128x128,
)
from nvfp4_cute.gpus import targets
from nvfp4_cute.planning import choose
from nvfp4_cute.planning.arch import sm100
from nvfp4_cute.planning.arch.sm100.choosing import config_for_rows
from nvfp4_cute.problem import RESULT_FORMATS, GroupedProblem
from nvfp4_cute.reference import grouped_gemm_reference
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.tuning import autotune, stopwatch

CPU = torch.device("cpu")
SMALL = cases.Case(
    "dense", "gemm", "two groups", "grouped_gemm", ((48, 64, 128), (0, 64, 128), (16, 64, 128))
)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(targets, "detect", lambda: None)


# ---- cases -----------------------------------------------------------------------------------------------------
def test_names_are_unique_and_every_competition_case_has_its_published_times():
    everything = cases.select()
    assert len({str(case) for case in everything}) == len(everything)
    assert [case for case in everything if case.sol_us] == cases.competition()
    assert len(cases.competition()) == 14
    assert all(case.best_us > case.sol_us for case in cases.competition())


def test_work_agrees_with_the_published_floor():
    for case in cases.competition():
        tolerance = 4e-3 if case.operation == "gemv" else 5e-4
        assert light.competition_us(case.work) == pytest.approx(case.sol_us, rel=tolerance), str(case)


@pytest.mark.parametrize("tokens, experts, top_k", [(1, 8, 2), (64, 128, 8), (4096, 8, 2)])
def test_routing_gives_every_token_its_experts(tokens, experts, top_k):
    rows = cases.routed_rows(tokens, experts, top_k)
    assert len(rows) == experts and sum(rows) == tokens * top_k and max(rows) <= tokens
    assert rows == cases.routed_rows(tokens, experts, top_k)


def test_expert_layers_are_those_of_one_gpu():
    groups = {case.problem: len(case.sizes) for case in cases.experts()}
    assert groups == {"256 experts": 256, "DeepSeek-V3": 32, "Qwen3-30B-A3B": 128, "Mixtral-8x7B": 8}
    decode = {case.name: case for case in cases.experts() if case.problem == "Mixtral-8x7B"}["down decode"]
    assert sum(m for m, _, _ in decode.sizes) == 2 * cases.DECODE_TOKENS
    assert {(n, k) for _, n, k in decode.sizes} == {(4096, 14336)}


def test_published_times_are_peers_on_their_gpu_only():
    (case,) = cases.select(("dense",), "8192^3")
    for target, who, us in (
        (targets.RTX_5090, "QuACK nvfp4-out (its blockscaled_api.md)", 735.46),
        (targets.RTX_PRO_6000, "CUTLASS CuTe DSL (cutlass#3272)", 674.96),
    ):
        (row,) = report.make_rows([case], target, lambda _: (None, {}, {}))
        name, time = row.best_peer
        assert (name, time.kind) == (who, report.PUBLISHED) and time.us == pytest.approx(us, abs=0.01)
    assert not report.make_rows([case], targets.B300, lambda _: (None, {}, {}))[0].peers


def test_selecting():
    assert {case.suite for case in cases.select(("dense", "linear"))} == {"dense", "linear"}
    assert [case.name for case in cases.select(("dense",), "^3")] == [f"{x}^3" for x in cases.DENSE_EXTENTS]
    with pytest.raises(ValueError, match="suite 'square' is unknown; use competition, dense"):
        cases.select(("square",))
    with pytest.raises(ValueError, match="no case of dense contains 'case 0'"):
        cases.select(("dense",), "case 0")


# ---- operands, peers, the check --------------------------------------------------------------------------------
def filled():
    operands = make_operands(SMALL, CPU, seed=3)
    results = grouped_gemm_reference(
        operands.a, operands.b, operands.a_scale, operands.b_scale, out_dtype=torch.float16
    )
    for out, result in zip(operands.out, results, strict=True):
        out.copy_(result)
    return operands


def test_bf16_operands_hold_the_same_values():
    operands = make_operands(SMALL, CPU, seed=1)
    expected = grouped_gemm_reference(
        operands.a, operands.b, operands.a_scale, operands.b_scale, out_dtype=torch.float32
    )
    for a, b, result in zip(*operands.bf16, expected, strict=True):
        assert torch.equal((a.double() @ b.double().T).float(), result)
    assert all(out.isnan().all() for out in operands.out)
    assert not torch.equal(operands.a[0], make_operands(SMALL, CPU, seed=2).a[0])


def test_a_wrong_result_is_not_timed():
    operands = filled()
    measured.check(SMALL, operands, operands.out)
    operands.out[2][3, 5] = torch.nan
    with pytest.raises(ValueError, match="two groups, group 2: our result differs"):
        measured.check(SMALL, operands, operands.out)
    with pytest.raises(ValueError, match="group 0"):
        unwritten = make_operands(SMALL, CPU, seed=0)
        measured.check(SMALL, unwritten, unwritten.out)


def test_a_timed_call_may_return_tensors():
    """gemv returns its result. A timed call counts what it enqueues."""
    ran = []
    measured.in_turn([lambda: ran.append(0), lambda: torch.ones(2)])(1)
    measured.in_turn([lambda: ran.append(0), lambda: torch.ones(2)])(0)
    assert ran == [0]


def test_peers_say_what_they_cannot():
    reasons = {peer.name: peer.unsupported_reason for peer in PEERS}
    hopper, blackwell = (9, 0), (10, 0)
    mixed = cases.Case("dense", "gemm", "mixed", "grouped_gemm", ((8, 64, 128), (8, 32, 128)))
    dual = next(case for case in cases.competition() if case.operation == "dual_gemm")
    odd = cases.Case("dense", "gemm", "odd", "gemm", ((8, 40, 128),))
    assert reasons["torch bf16 loop"](mixed, hopper) is None
    assert reasons["torch bf16 grouped_mm"](SMALL, hopper) is None
    assert "differ" in reasons["torch bf16 grouped_mm"](mixed, hopper)
    assert "one group" in reasons["torch bf16 grouped_mm"](odd, hopper)
    assert "no NVFP4 tensor cores" in reasons["torch NVFP4 loop"](SMALL, hopper)
    assert reasons["torch NVFP4 loop"](SMALL, blackwell) is None
    assert "not multiples of 16" in reasons["torch fp8 loop"](odd, hopper)
    assert all(
        "more than a product" in reason(dual, blackwell) or "one group" in reason(dual, blackwell)
        for reason in reasons.values()
    )


def test_the_bf16_loop_computes_on_a_cpu_too():
    next(peer for peer in PEERS if peer.name == "torch bf16 loop").prepare(SMALL, filled())()


# ---- ours ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "operation, sizes, form",
    [
        ("grouped_gemm", SMALL.sizes, "list"),
        ("grouped_gemm", SMALL.sizes, "ragged"),
        ("gemv", ((48, 1, 128),) * 2, "list"),
        ("dual_gemm", ((48, 128, 256),), "list"),
    ],
)
def test_our_operations_take_the_operands_of_a_case(operation, sizes, form):
    case = cases.Case("dense", "gemm", "small", operation, sizes, form=form)
    operands = make_operands(case, CPU, seed=5)
    prepared = ours.prepare(case, operands, "reference")
    prepared.run()
    measured.check(case, operands, prepared.out)


@pytest.mark.parametrize("operation", ["grouped_gemm", "gemm"])
@pytest.mark.parametrize("pair", [(MXFP8_E4M3, MXFP4), (FP8_1x128, FP8_128x128), (INT8, INT8)], ids=str)
def test_operands_of_other_formats(pair, operation):
    """Random operands have the values that the reference states; empty ones have their shapes and types."""
    sizes = ((40, 136, 256), (0, 136, 256)) if operation == "grouped_gemm" else ((40, 136, 256),)
    for form in ("list", "ragged"):
        case = cases.Case("shape", "gemm", "small", operation, sizes, form=form, formats=pair)
        operands = make_operands(case, CPU, seed=5)
        prepared = ours.prepare(case, operands, "reference")
        prepared.run()
        measured.check(case, operands, prepared.out)
        ours.prepare(case, empty_operands(case), "reference").run()
    assert "NVFP4 loop" not in {p.name for p in PEERS if p.unsupported_reason(case, (10, 0)) is None}


@pytest.mark.parametrize("operation", ["gemm", "dual"])
@pytest.mark.parametrize("out", ["nvfp4", "mxfp8_e4m3"])
def test_a_shape_with_quantized_results(operation, out):
    """Results are the reference's in the quantized format, and floors count their bytes."""
    case = cases.shape_case((40,), 128, 256, operation=operation, formats=(MXFP8_E4M3, MXFP4), out=out)
    operands = make_operands(case, CPU, seed=5)
    prepared = ours.prepare(case, operands, "reference")
    prepared.run()
    measured.check(case, operands, prepared.out)
    prepared.out[0].scale.view(torch.uint8).fill_(0)
    with pytest.raises(ValueError, match=f"to {out}, group 0: our result differs"):
        measured.check(case, operands, prepared.out)
    ours.prepare(case, empty_operands(case), "reference").run()
    plain = cases.shape_case((40,), 128, 256, operation=operation, formats=(MXFP8_E4M3, MXFP4))
    assert plain.work.bytes - case.work.bytes == 40 * 128 * 2 - RESULT_FORMATS[out].nbytes(40, 128)
    with pytest.raises(ValueError, match="N=136 is not a positive multiple of 32"):
        cases.shape_case((8,), 136, 256, out="mxfp4")


def test_suites_of_other_formats():
    dense, plain = (cases.select(("dense",), "128^3", formats) for formats in ((MXFP4, MXFP4), NVFP4_PAIR))
    assert [str(case) for case in (*dense, *plain)] == ["gemm 128^3 mxfp4 x mxfp4", "gemm 128^3"]
    assert not any(c.published or c.sol_us for c in cases.select(formats=(MXFP4, MXFP4)))
    with pytest.raises(ValueError, match="K=192 is not a positive multiple of 128"):
        cases.shape_case((8,), 16, 192, formats=(FP8_1x128, FP8_128x128))


def test_a_modelled_time_is_above_the_floor_and_says_what_it_is():
    time, peers, remarks = modelled.time_case(SMALL, targets.B200)
    assert time.kind == report.MODELLED and not peers and not remarks
    assert time.us > light.physical_floor(SMALL.work, targets.B200).us


def test_what_is_not_modelled_says_why():
    huge = cases.Case("dense", "gemm", "32768^3", "gemm", ((32768,) * 3,))
    assert "not modelled: more than" in modelled.time_case(huge, targets.B200)[2]["ours"]
    many = cases.Case("experts", "many", "lists", "grouped_gemm", ((8, 16, 64),) * 600)
    assert "split the lists" in modelled.time_case(many, targets.RTX_5090)[2]["ours"]


# ---- reports ---------------------------------------------------------------------------------------------------
def rows():
    case = cases.competition()[-1]
    timer = lambda case: (
        report.Time(4.0, report.MEASURED, 3.5, 5.0),
        {"torch": report.Time(10.0, report.MEASURED)},
        {"fp8": "no"},
    )
    return report.make_rows([case], targets.B200, timer)


def test_a_row_computes_rates_and_takes_the_fastest_peer():
    (row,) = rows()
    record = row.record()
    assert record["tb_per_s"] == pytest.approx(row.case.work.bytes / 4e-6 / 1e12)
    assert record["tflop_per_s"] == pytest.approx(row.case.work.flops / 4e-6 / 1e12)
    assert record["percent_of_speed_of_light"] == pytest.approx(100 * row.floor.us / 4.0)
    assert row.best_peer == ("best entry", report.Time(6.43, report.PUBLISHED))


def test_text_page_and_json_say_the_same(tmp_path):
    result = report.Report(targets.B200, rows(), "how", ["a note"])
    line = next(line for line in result.text().splitlines() if line.startswith("nvfp4_group_gemm"))
    assert line.split()[-4:] == ["1.61", "best", "entry", "(published)"] and " measured " in line
    assert "fp8: no (nvfp4_group_gemm case 3)" in result.text()
    page = report.save(result, tmp_path)
    assert page.name == "b200.md" and line in page.read_text() and "- a note" in page.read_text()
    assert json.loads(result.json())["rows"][0]["time"]["us"] == 4.0


def test_samples_are_medians_and_deciles():
    sample = stopwatch.Sample.of([float(x) for x in range(11)])
    assert sample == stopwatch.Sample(5.0, 1.0, 9.0, 11)


# ---- the command -----------------------------------------------------------------------------------------------
def test_without_the_gpu_times_are_modelled(no_gpu, capsys):
    assert cli.main(["bench", "dense", "--containing", "gemm 128^3", "--target", "B200", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (row,) = shown["rows"]
    assert shown["target"] == "B200" and "modelled" in shown["heading"]
    assert re.search(r"median error is \d", shown["heading"])
    assert row["time"]["kind"] == "modelled" and 0 < row["percent_of_speed_of_light"] < 100


def test_modelled_times_are_kept_and_not_modelled_again(no_gpu, capsys, tmp_path, monkeypatch):
    made, path = [], tmp_path / "r.json"
    time = report.Time(4.0, "modelled", sustained_us=5.0)
    monkeypatch.setattr(modelled, "time_case", lambda case, _: (made.append(case.name), (time, {}, {}))[1])
    line = ["bench", "dense", "--containing", "gemm 1", "--target", "B200", "--results", str(path), "--json"]
    rows = []
    for _ in range(2):
        assert cli.main(line) == 0
        rows.append(json.loads(capsys.readouterr().out)["rows"])
    assert made == ["16384^3", "1024^3", "128^3"] and set(json.loads(path.read_text())) == {
        f"B200/gemm {name}" for name in made
    }
    assert [row["case"] for row in rows[1]] == made[::-1] and rows[0] == rows[1]
    assert rows[0][0]["time"]["sustained_us"] == 5.0


def test_a_gpu_that_is_measured_takes_no_processes(monkeypatch, capsys):
    monkeypatch.setattr(targets, "detect", lambda: targets.B200)
    for option in ("--jobs=2", "--results=r.json"):
        assert cli.main(["bench", "dense", option]) == 2
        assert "leave out --jobs and --results" in capsys.readouterr().err


def test_explain_names_what_is_chosen(no_gpu, capsys):
    assert cli.main(["bench", "competition", "experts", "--explain"]) == 0
    note, *parts = capsys.readouterr().out.strip().split("\n\n")
    assert "not measured" in note
    blocks = dict(part.split("\n", 1) for part in parts)
    grouped = [case for case in cases.select(("competition", "experts")) if case.operation == "grouped_gemm"]
    assert list(blocks) == [f"{case} on B200 (sm_100a)" for case in grouped]
    for case, block in zip(grouped, blocks.values(), strict=True):
        if case.form == "list":
            chosen = choose.choose_config(GroupedProblem(case.sizes), "sm_100a", targets.B200.num_sms)
            assert len(block.splitlines()) == len(sm100.CANDIDATES) and "bound by" in block
        else:
            rows = sum(m for m, _, _ in case.sizes)
            chosen = config_for_rows(-(-rows // len(case.sizes)), case.sizes[0][1])
        assert block.strip().startswith(chosen.to_name())


def test_explain_takes_a_shape_of_other_formats(no_gpu, capsys):
    line = (
        "bench --m 512 --n 4096 --k 7168 --groups 8 --formats fp8_1x128,fp8_128x128 --target H100 --explain"
    )
    assert cli.main(line.split()) == 0
    problem = GroupedProblem(((512, 4096, 7168),) * 8, a_format=FP8_1x128, b_format=FP8_128x128)
    assert choose.choose_config(problem, "sm_90a", 132).to_name() in capsys.readouterr().out


def test_explain_on_another_family(no_gpu, capsys):
    assert cli.main(["bench", "competition", "--explain", "--target", "RTX 5090"]) == 0
    assert "a rule of sm_120a" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, message",
    [
        ("dense --explain", "no chosen case is a grouped GEMM"),
        ("--explain --save", "--explain prints no times: leave out --save"),
        ("square", "suite 'square' is unknown"),
        ("dense --like-harness", "this machine has no B200"),
        ("dense --recordings kept", "--recordings keeps what --predict records: also pass --predict FILE"),
        ("--html t.html --jobs 2", "--html shows committed results: leave out jobs"),
        ("--compare a.json b.json --results r.json", "--compare reads two results: leave out results"),
        ("dense --target gtx", "target 'gtx' is not in the table"),
        ("dense --formats nvfp4,mxfp4", "sm_100a: no kernel for nvfp4 x mxfp4"),
        ("dense --formats mxfp4 --save", "leave out --formats"),
        ("dense --m 4", "a shape takes --m, --n, and --k together, and no suite"),
        ("layers --formats mxfp4", "layers are modelled: leave out formats"),
        ("ep --n 4", "leave out --n"),
    ],
)
def test_refusals(no_gpu, capsys, line, message):
    assert cli.main(["bench", *line.split()]) == (1 if "gtx" in line else 2)  # 1: no such GPU
    streams = capsys.readouterr()
    assert message in streams.err and not streams.out


@pytest.mark.gpu("sm_90a")
def test_peers_are_timed_on_a_gpu(capsys):
    assert cli.main(["bench", "dense", "--containing", "1024^3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    peers = row["peers"]
    assert {"torch bf16 loop", "torch fp8 loop"} <= set(peers)
    assert all(time["low"] <= time["us"] <= time["high"] for time in peers.values())
    assert all(time["us"] > row["speed_of_light_us"] / 4 for time in peers.values())


# ---- choices ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spread", choices.SPREADS)
def test_rows_are_spread_over_groups(spread):
    rows = choices.group_rows(spread, 32, 24)
    assert len(rows) == 32 and sum(rows) == 32 * 24 and rows == choices.group_rows(spread, 32, 24)
    largest = {"equal": (24, 24), "by chance": (25, 48), "exponential": (49, 200), "zipf": (49, 200)}[spread]
    assert largest[0] <= max(rows) <= largest[1]


def test_chosen_configs_are_measured_beside_all_others(monkeypatch, tmp_path, capsys):
    """The chosen config takes a quarter longer than the fastest in one problem, and is the fastest in the others."""
    gpu = targets.Gpu("sm_90a", 132, "H200")
    monkeypatch.setattr(choices, "gpu_of", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choices, "WEIGHTS", ((1024, 4096), (4096, 4096)))
    monkeypatch.setattr(choices, "EXPERTS", ((8, 4096, 7168),))

    def measured_us(case, tried):
        assert len(set(tried)) == len(tried) and set(tried) >= set(choose.candidates("sm_90a", case.form))
        return {
            config: 5.0 if config == tried[0] else 4.0 if " 1024 " in case.name else 6.0 for config in tried
        }

    monkeypatch.setattr(choices, "measured_us", measured_us)
    kept = tmp_path / "times.json"
    monkeypatch.setattr("sys.argv", ["choices", "--mean", "24", "--json", str(kept)])
    choices.main()
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"one group +2 +12.5 +25$", lines[1]) and len(lines) == 2 + len(choices.SPREADS)
    assert all(re.search(r"ragged, .* 1 +0.0 +0$", line) for line in lines[2:])
    assert [len(case["sizes"]) for case in json.loads(kept.read_text())] == [1, 1, 8, 8, 8, 8]


def test_chosen_configs_are_those_of_grouped_gemm():
    gpu = targets.Gpu("sm_90a", 132, "H200")
    one, *_, ragged = choices.problems((24,))
    first = lambda case: autotune.candidates(choices.request_of(case, gpu))[0]
    assert first(one) == choose.choose_config(GroupedProblem(one.sizes), "sm_90a", 132)
    groups, n, k = choices.EXPERTS[-1]
    mean = choose.problem_of_mean(groups, (24, n, k))
    assert first(ragged) == choose.choose_config(mean, "sm_90a", 132)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["list", "ragged"])
def test_prepared_grouped_gemms_take_a_config(form):
    case = cases.Case("dense", "gemm", form, "grouped_gemm", ((5, 128, 256), (9, 128, 256)), form=form)
    prepared = ours.prepare(case, make_operands(case, CPU, 0), "emulator:sm_90a")
    results = []
    for config in choose.candidates("sm_90a", form)[:2]:
        prepared.run(config)
        results.append([out.clone() for out in prepared.out])
    assert all(torch.equal(*outs) for outs in zip(*results, strict=True))
    assert not any(out.isnan().any() for out in results[0])


# ---- pages ---------------------------------------------------------------------------------------------------------
RESULTS = sorted(command.RESULTS.glob("*.md"))


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_every_page_says_which_command_makes_it(page):
    modules = re.findall(r"`python -m nvfp4_cute\.bench\.(\w+)", page.read_text())
    verbs = re.findall(r"`nvfp4-cute (\w+)", page.read_text())
    assert modules or verbs
    assert all(importlib.util.find_spec(f"nvfp4_cute.bench.{name}") for name in modules)
    assert set(verbs) <= set(VERBS)


def test_a_saved_page_names_the_options_that_made_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "_modelled", lambda *_: (lambda case: (None, {}, {}), []))
    line = "bench competition --containing 'gemv' --target 'RTX 5090' --save"
    assert cli.main(shlex.split(line)) == 0
    text = (tmp_path / "rtx_5090.md").read_text()
    assert "Made by `nvfp4-cute bench competition --containing gemv --target 'RTX 5090' --save`." in text


def test_a_weight_only_shape_is_timed_on_gpus_that_have_no_other(capsys):
    """Bytes count 16-bit activations, and quantized results are refused."""
    shape = "--op w4a16 --m 2 --n 64 --k 256 --target a100".split()
    assert cli.main(["bench", *shape, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["bytes"] == 2 * 256 * 2 + 64 * 128 + 64 * 16 + 2 * 64 * 2 and row["time"]["us"] > 0
    assert cli.main(["bench", *shape, "--out", "nvfp4"]) != 0
    assert "--op w4a16 has results of 16 or 32 bits" in capsys.readouterr().err
