"""`nvfp4-cute demo`: which cases it runs, its table, and that it notices one wrong bit."""

import pytest

from nvfp4_cute import cli
from nvfp4_cute.cli import demo
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.problems.nvfp4_group_gemm import spec

# The two cheapest test shapes, with two and with four groups.
FEW = {name: demo.cases(all_benchmarks=False)[name] for name in ("test 0", "test 7")}


def test_cases():
    quick, everything = demo.cases(all_benchmarks=False), demo.cases(all_benchmarks=True)
    assert list(quick.values()) == [*spec.TESTS, spec.BENCHMARKS[3]]
    assert list(everything.values()) == [*spec.TESTS, *spec.BENCHMARKS]
    assert [everything[name] for name in quick] == list(quick.values())
    assert quick["benchmark 3"].sizes == ((128, 4096, 1536), (384, 4096, 1536))


@pytest.mark.parametrize("option", [[], ["--all"]])
def test_cli_chooses_the_cases(monkeypatch, option):
    seen = []
    monkeypatch.setattr(demo, "run_cases", lambda cases, target: seen.append(cases) or 0)
    assert cli.main(["demo", *option]) == 0
    assert seen == [demo.cases(all_benchmarks=bool(option))]


def test_demo_runs_the_kernel_and_reports(capsys):
    assert demo.run_cases(FEW) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert "sm_100a" in lines[0] and "float64 reference" in lines[1]
    assert "test 0: bit-equal" in text  # one line per case, because the output is not a terminal
    row = next(line for line in lines if line.startswith("test 0 ")).split()
    assert row[2:10] == ["2", "96,128", "x", "128,256", "x", "256,512", "6", row[9]]
    assert int(row[9].replace(",", "")) > 100 and row[-1] == "bit-equal"
    kernels = [line.split() for line in lines if "groups  " in line and "sm_100a" in line]
    assert [kernel[:3] for kernel in kernels] == [["2", "groups", "sm_100a"], ["4", "groups", "sm_100a"]]
    assert all(kernel[5] == "0" for kernel in kernels), "no spills"
    assert "Computed, not measured." in text
    assert lines[-1].startswith("2 of 2 cases bit-equal; ")


def test_demo_counts_tiles_up_to_the_total():
    done = []
    result = demo.run_case("test 0", FEW["test 0"], done.append)
    assert result.num_tiles == 6  # 2 x 1 of the first group, 2 x 2 of the second, 64 tokens x 128 weights
    assert done == sorted(done) and done[-1] == 6


def test_one_wrong_bit_fails_the_demo(monkeypatch, capsys):
    correct = demo.adapter.custom_kernel

    def wrong(data, *, backend):
        outputs = correct(data, backend=backend)
        outputs[1][5, 7, 0] += 1
        return outputs

    monkeypatch.setattr(demo.adapter, "custom_kernel", wrong)
    assert demo.run_cases({"test 0": FEW["test 0"]}) == 1
    text = capsys.readouterr().out
    assert "test 0: group 1 element (5, 7) is" in text
    assert "WRONG" in text and "0 of 1 cases bit-equal" in text


def test_a_stopped_emulation_fails_the_demo(monkeypatch, capsys):
    def hang(data, *, backend):
        raise EmulatorError("warp 4 waits for ever")

    monkeypatch.setattr(demo.adapter, "custom_kernel", hang)
    assert demo.run_cases({"test 0": FEW["test 0"]}) == 1
    text = capsys.readouterr().out
    assert "STOPPED" in text and "warp 4 waits for ever" in text
