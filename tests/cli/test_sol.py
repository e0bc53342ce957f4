"""`nvfp4-cute sol`: tables, shapes, JSON, plots, and refusals."""

import json
import sys
from functools import partial

import flat_parts as parts
import pytest
import torch

import nvfp4_cute as nv
from nvfp4_cute import cli
from nvfp4_cute.cli import sol
from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.gpus import targets
from nvfp4_cute.roofline import speed_of_light as light
from nvfp4_cute.terminal import text_table


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(targets, "detect", lambda: None)


def run(capsys, line: str) -> str:
    assert cli.main(["sol", *line.split()]) == 0
    return capsys.readouterr().out


def refused(capsys, line: str) -> str:
    assert cli.main(["sol", *line.split()]) == (1 if "b2000" in line else 2)  # 1: no such GPU
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    return streams.err


# ---- the competition's table -----------------------------------------------------------------------------------


def test_table_has_every_published_row_and_says_what_it_is(capsys):
    out = run(capsys, "--target B200")
    assert "Computed floors, not measurements." in out.splitlines()[0]
    rows = [line.split() for line in out.splitlines() if line.startswith("nvfp4_")]
    published = [case.sol_us for cases in sol.PROBLEMS.values() for case in cases]
    assert [float(row[4]) for row in rows] == published and len(rows) == 14
    for problem, _, _, _, theirs, ours, difference, physical, bound in rows:
        limit = 0.4 if problem == "nvfp4_gemv" else 0.05
        assert abs(float(difference)) <= limit
        assert float(difference) == pytest.approx(100 * (float(ours) / float(theirs) - 1), abs=0.04)
        assert float(physical) > 0 and bound in ("memory", "math", "launch")
    assert "7.68 TB/s" in out and "6.90 PFLOP/s" in out
    assert max(map(len, out.splitlines())) <= 140


def test_one_problem(capsys):
    rows = [line for line in run(capsys, "--problem nvfp4_gemm").splitlines() if line.startswith("nvfp4_")]
    assert len(rows) == 3 and all(row.startswith("nvfp4_gemm ") for row in rows)


def test_another_target_changes_the_physical_column_alone(capsys):
    b200, h200 = (json.loads(run(capsys, f"--json --target {name}"))["rows"] for name in ("B200", "H200"))
    for one, other in zip(b200, h200, strict=True):
        assert one["competition_us"] == other["competition_us"]
        assert one["physical_us"] < other["physical_us"]


def test_target_of_the_machine_is_taken_unless_another_is_asked_for(capsys, monkeypatch):
    assert run(capsys, "").startswith("target B200 (default): sm_100a, 148 SMs at 1.965 GHz, 7.5 TB/s.")
    monkeypatch.setattr(targets, "detect", lambda: targets.H200)
    assert run(capsys, "").startswith("target H200 (the GPU in this machine): sm_90a")
    assert run(capsys, "--target gb10").startswith("target GB10 (as asked): sm_121a")


def test_json_carries_every_figure_with_its_source(capsys):
    data = json.loads(run(capsys, "--json --target rtx5090"))
    assert data["label"] == sol.LABEL and data["target"]["name"] == "RTX 5090"
    figures = data["target"]["figures"]
    assert figures["num_sms"]["value"] == 170
    assert figures["launch_s"] == {"value": None, "source": None}
    assert all((f["value"] is None) == (f["source"] is None) for f in figures.values())
    for row in data["rows"]:
        assert row["bytes"] == sum(operand["bytes"] for operand in row["operands"])
        assert row["flops"] == sum(product["flops"] for product in row["products"])
        assert row["physical_us"] == max(t["us"] for t in row["terms"] if t["us"] is not None)


# ---- shapes ----------------------------------------------------------------------------------------------------


def test_shape_shows_traffic_by_operand_and_what_binds(capsys):
    out = run(capsys, "--target B200 --m 16,32 --n 4096 --k 7168 --op dual --out nvfp4")
    work = light.grouped_gemm([(16, 4096, 7168), (32, 4096, 7168)], num_b=2, out="nvfp4")
    for operand in work.operands:
        line = next(line for line in out.splitlines() if line.split()[:1] == [operand.name])
        assert line.split()[1:3] == ["written" if operand.written else "read", f"{operand.bytes:,}"]
    assert f"total: {work.bytes:,} bytes, {work.flops:,} FLOP" in out
    assert "a @ b2^T: 2,818,572,288 FLOP" in out
    assert "physical speed of light: 8.849 us, bound by memory" in out
    assert "the competition's formula (a B200): 8.641 us" in out


def test_one_m_stands_for_all_groups(capsys):
    alike = [
        json.loads(run(capsys, f"--json --n 128 --k 256 {m}"))["rows"][0]["bytes"]
        for m in ("--m 8 --groups 3", "--m 8,8,8", "--m 8,8,8 --groups 3")
    ]
    assert len(set(alike)) == 1


def test_operands_of_other_formats(capsys):
    """Each format's elements and scales, and the rate of the wider elements."""
    assert cli.main([*"sol --m 16 --n 256 --k 512 --formats mxfp8_e4m3,mxfp4 --json".split()]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert {o["name"]: o["bytes"] for o in row["operands"]} == {
        "a": 16 * 512, "a_scale": 16 * 16, "b": 256 * 256, "b_scale": 256 * 16, "c": 2 * 16 * 256
    }  # fmt: skip
    assert row["math"] == "fp8"


def test_a_pair_counts_at_the_rate_of_what_multiplies_it_there(capsys):
    """Hopper decodes MXFP8 to bf16, but multiplies FP8 with fp32 scales directly. Power limits a long run of the latter."""
    line = "--m 4096 --n 4096 --k 7168 --target H100 --json --formats"
    decoded, plain = (
        json.loads(run(capsys, f"{line} {pair}"))["rows"][0]
        for pair in ("mxfp8_e4m3", "fp8_1x128,fp8_128x128")
    )
    assert decoded["terms"][1]["us"] == pytest.approx(2 * plain["terms"][1]["us"])
    assert "dequantized to bf16" in decoded["terms"][1]["basis"] and "fp8 at" in plain["terms"][1]["basis"]
    cycles = 2 * 4096 * 4096 * 7168 / targets.H100_SXM.rates["fp8"]
    assert plain["sustained_us"] == pytest.approx(1e6 * cycles * 3.7e-9 / 600)
    text = run(capsys, f"{line.replace(' --json', '')} fp8_1x128,fp8_128x128")
    assert f"repeated for seconds on random data: {plain['sustained_us']:.3f} us, by the power limit" in text


def test_integers_are_called_so(capsys):
    """At the rate of integers, if the GPU has one."""
    line = "--m 4096 --n 4096 --k 4096 --formats int8,int8 --json --target"
    for target in (targets.B200, targets.H100_SXM, targets.RTX_5090, targets.THOR):
        row = json.loads(run(capsys, f"{line} {target.name.replace(' ', '-')}"))["rows"][0]
        assert row["math"] == "int8" and "TFLOP/s (int8 at" in row["terms"][1]["basis"]
        seconds = 2 * 4096**3 / (target.rates["int8"] * target.num_sms * target.clock_hz)
        assert row["terms"][1]["us"] == pytest.approx(1e6 * seconds)
    assert "sm_103a: no kernel for int8 x int8" in refused(capsys, f"{line.replace(' --json', '')} B300")
    assert "int8" not in targets.B300.rates


def test_a_pair_without_a_kernel_is_refused_with_what_there_is(capsys):
    message = refused(capsys, "--m 8 --n 128 --k 256 --formats nvfp4,mxfp4 --target H100")
    assert "sm_90a: no kernel for nvfp4 x mxfp4" in message and "quantize a to MXFP4" in message


def test_refusals_are_those_of_the_call(capsys):
    """The refusal depends on formats of operands and results, GPU and operation, but not on sizes."""
    x16, int8, fp8 = torch.randn(8, 512).bfloat16(), (nv.INT8, nv.INT8), (nv.FP8_1x128, nv.FP8_128x128)
    some = lambda rows, format=nv.NVFP4: nv.quantize(torch.randn(rows, 512), format=format)
    pair = lambda formats: [some(128, format) for format in formats]
    listed = lambda sides: [[side] for side in sides]
    for line, gpu, call in (
        ("--formats nvfp4,mxfp4", "H200", partial(parts.gemm, *pair((nv.NVFP4, nv.MXFP4)))),
        ("--op dual --formats int8", "B300", partial(parts.dual_gemm, *pair(int8), some(128, nv.INT8))),
        ("--out fp8_1x128", "B200", partial(parts.gemm, *pair((nv.NVFP4,) * 2), out_dtype="fp8_1x128")),
        (
            "--formats fp8_1x128,fp8_128x128 --out nvfp4",
            "H200",
            partial(parts.gemm, *pair(fp8), out_dtype="nvfp4"),
        ),
        (
            "--formats fp8_1x128,fp8_128x128 --out fp8_1x128 --groups 2",
            "RTX 5090",
            partial(parts.grouped_gemm, *listed(pair(fp8)), out_dtype="fp8_1x128"),
        ),
        ("--op w4a16 --out nvfp4", "B200", partial(parts.gemm, x16, some(128), out_dtype="nvfp4")),
        ("--op w4a16 --formats fp8_1x128", "B200", partial(parts.gemm, x16, some(128, nv.FP8_1x128))),
    ):
        with pytest.raises((UnsupportedProblem, UnsupportedTarget)) as error:
            call(backend=f"emulator:{gpu}")
        message = refused(capsys, f"--m 16 --n 4096 --k 7168 {line} --target {gpu.replace(' ', '-')}")
        assert message == f"nvfp4-cute sol: {error.value}\n"


@pytest.mark.parametrize(
    "options, target",
    [
        ("--out fp8_1x128", "B200"),
        ("--formats int8 --out nvfp4", "H200"),
        ("--formats fp8_1x128,fp8_128x128 --out fp8_1x128", "RTX-5090"),
        ("--formats int8 --op dual", "B300"),
        ("--formats nvfp4,mxfp4", "B200"),
    ],
)
def test_commands_refuse_the_same_in_the_same_words(capsys, options, target):
    """`sol`, `bench` and `tune` refuse the same combinations with the same message."""
    shape = f"--m 16 --n 4096 --k 7168 {options} --target {target}"
    said = []
    for verb in ("sol", "bench", "tune"):
        assert cli.main([verb, *shape.split()]) == 2
        said.append(capsys.readouterr().err.removeprefix(f"nvfp4-cute {verb}: "))
    assert said[0] == said[1] == said[2] and "; " in said[0]


@pytest.mark.parametrize(
    "line, weight_bytes, scale_bytes",
    [
        ("--formats int4_32_float16 --target B200", 4096 * 1024 // 2, 4096 * 1024 // 32 * 2),
        ("--formats mxfp4 --groups 2 --target H200", 4096 * 1024, 2 * 4096 * 1024 // 32),
    ],
)
def test_weights_of_other_formats_beside_16_bits(capsys, line, weight_bytes, scale_bytes):
    (row,) = json.loads(run(capsys, f"--m 16 --n 4096 --k 1024 --op w4a16 --json {line}"))["rows"]
    found = {o["name"]: o["bytes"] for o in row["operands"]}
    assert (found["b"], found["b_scale"]) == (weight_bytes, scale_bytes) and row["math"] == "fp16"


def test_w4a16_has_no_competition_time(capsys):
    out = run(capsys, "--op w4a16 --m 1 --n 4096 --k 4096 --target H200")
    assert "a_scale" not in out and "b_scale" in out and "competition" not in out
    (row,) = json.loads(run(capsys, "--json --op w4a16 --m 1 --n 4096 --k 4096"))["rows"]
    assert (row["math"], row["competition_us"], row["published_us"]) == ("fp16", None, None)


@pytest.mark.parametrize(
    "line, message",
    [
        ("--m 1 --n 128 --k 100", "K=100 is not a positive multiple of 16 (NVFP4 block size); pad K to 112"),
        (
            "--m 1 --n 128 --k 64 --op w4a16 --formats nvfp4,mxfp4",
            "name the format of b alone, --formats mxfp4",
        ),
        ("--m 1,2 --n 128 --k 64 --groups 3", "m has 2 entries for 3 groups"),
        ("--n 128 --k 64", "--m, --n, and --k together"),
        ("--m 1 --n 128", "--m, --n, and --k together"),
        ("--op dual", "--m, --n, and --k together"),
        ("--problem nvfp4_gemm --m 1 --n 128 --k 64", "no --problem"),
        ("--target b2000", "did you mean B200?"),
        ("--memory --m 4", "--memory is about weights"),
        ("--memory --n 4", "--n and --k together"),
        ("--memory --n 4 --k 17", "K=17 is not a positive multiple of 16"),
    ],
)
def test_refusals(capsys, line, message):
    assert message in refused(capsys, line)


def test_a_shape_without_rows_has_nothing_to_compute():
    with pytest.raises(ValueError, match=r"m=\(0,\), n=128: nothing to compute"):
        sol.Shape((0,), 128, 64, 1)


# ---- memory ----------------------------------------------------------------------------------------------------


def test_memory_table(capsys):
    out = run(capsys, "--memory --target B200")
    line = next(line for line in out.splitlines() if line.startswith("linear 4096 x 4096"))
    assert line.split()[4:] == ["16.8", "M", "33.6", "16.8", "9.4", "3.56", "4.5", "1.3"]
    assert "DeepSeek-V3 experts, 58 layers in fp16, fp8, nvfp4" in out.splitlines()[-1]
    assert "Computed" in out


def test_memory_of_given_matrices(capsys):
    (row,) = json.loads(run(capsys, "--memory --n 4096 --k 7168 --groups 8 --json"))["rows"]
    assert row["name"] == "8 x linear 4096 x 7168"
    assert row["bytes"]["fp16"] == 8 * 4096 * 7168 * 2


# ---- pictures --------------------------------------------------------------------------------------------------


def test_without_matplotlib_the_way_to_get_it_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert 'run `pip install "nvfp4-cute[plot]"`' in refused(capsys, f"--plot {tmp_path}/roofline.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["B200", "GB10", "H200"])
def test_picture(capsys, tmp_path, target):
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    path = tmp_path / "roofline.png"
    run(capsys, f"--target {target} --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


# ---- text ------------------------------------------------------------------------------------------------------


def test_text_table_aligns_numbers_to_the_right():
    assert text_table(("name", "us"), [("a", "1.5"), ("bcdef", "10.25")]) == (
        "name      us\na        1.5\nbcdef  10.25"
    )
    assert text_table(("name",), []) == ""
