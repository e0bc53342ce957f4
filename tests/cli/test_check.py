"""`nvfp4-cute check`: the problems that it draws, the faults that it finds, and its output."""

import shlex
from dataclasses import replace

import pytest
import torch

from nvfp4_cute import cli
from nvfp4_cute.cli import argument_types as types
from nvfp4_cute.cli import check
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import MXFP4, MXFP8_E4M3
from nvfp4_cute.formats.scale_layout import from_blocked
from nvfp4_cute.operands import draws
from nvfp4_cute.problem import RESULT_FORMATS
from nvfp4_cute.prove import exact
from nvfp4_cute.reference import expand_operand

LIMITS = exact.Limits(groups=4, max_m=20, max_n=40, max_k=128)
MANY = [exact.draw(seed, LIMITS) for seed in range(200)]


def test_draw_depends_on_the_seed_alone():
    first, again, other = exact.draw(7, LIMITS), exact.draw(7, LIMITS), exact.draw(8, LIMITS)
    assert first.problem == again.problem
    assert all(
        torch.equal(x, y)
        for x, y in zip(first.a.data + first.b.data, again.a.data + again.b.data, strict=True)
    )
    assert first.problem != other.problem


def test_draw_stays_within_limits_and_reaches_the_edges():
    sizes = [size for case in MANY for size in case.problem.sizes]
    m, n, k = ({size[axis] for size in sizes} for axis in range(3))
    assert m == set(range(21))
    assert n == set(range(1, 41))
    assert k == {32, 64, 96, 128}
    assert {case.problem.num_groups for case in MANY} == {1, 2, 3, 4}
    assert {case.problem.out_dtype for case in MANY} == {torch.float16, torch.bfloat16, torch.float32}
    assert {case.alpha is None for case in MANY} == {False, True}


def test_longest_k_is_exact_in_fp32():
    """The largest sum, in units of the smallest product, is below 2**24. One more step of K would exceed it."""
    unit, largest = (0.5 * 0.5) ** 2, (6 * 2.0) ** 2
    assert draws.MAX_EXACT_K * largest / unit <= 2**24 < (draws.MAX_EXACT_K + draws.K_STEP) * largest / unit
    assert min(draws.SCALES) == 0.5 and max(draws.SCALES) == 2.0
    assert all(s % 0.5 == 0 for s in draws.SCALES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 0}, "groups=0 is not positive; use at least 1"),
        ({"max_m": -3}, "max_m=-3 is not positive"),
        ({"max_k": 16}, r"max_k=16 is outside 32\.\.7264 .*; use 32"),
        ({"max_k": 8000}, r"max_k=8000 is outside 32\.\.7264 .*; use 7264"),
    ],
)
def test_limits_that_leave_nothing_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        exact.Limits(**{"groups": 1, "max_m": 1, "max_n": 1, "max_k": 32} | change)


def test_difference_finds_the_first_wrong_bit():
    want = [torch.zeros(2, 3), torch.arange(6.0, dtype=torch.float32).reshape(2, 3).to(torch.float16)]
    out = [t.clone() for t in want]
    assert exact.difference(out, want) is None
    out[1][1, 0] += 1
    out[1][1, 2] += 1
    assert exact.difference(out, want) == (
        "group 1 element (1, 0) is 4.0, the reference says 3.0; 2 of 6 elements of the group differ"
    )


def test_difference_is_about_bits():
    """-0 differs from 0, and a NaN left from the poisoned output is not a result."""
    zero = [torch.zeros(1, 1)]
    assert "is -0.0" in exact.difference([-torch.zeros(1, 1)], zero)
    assert "is nan" in exact.difference([torch.full((1, 1), float("nan"))], zero)
    assert exact.difference([torch.empty(0, 4)], [torch.empty(0, 4)]) is None


def test_run_reports_each_problem(capsys):
    assert check.run_problems("reference", LIMITS, seed=3, count=2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["seed 3", "seed 4", "reference"]
    assert "bit-equal" in lines[0]
    assert lines[-1] == "reference: 2 of 2 problems bit-equal to the reference"


@pytest.mark.parametrize("fault", ["wrong bit", "emulator error"])
def test_a_failure_prints_the_command_that_repeats_it(monkeypatch, capsys, fault):
    correct = exact.Case.run
    failing = next(
        seed
        for seed in range(100)
        if any(t.numel() for t in exact.draw(seed, LIMITS).run("reference", "cpu"))
    )

    def run(case, backend, device, weight_only=False):
        outputs = correct(case, "reference", device)
        if backend == "emulator" and case.seed == failing:
            if fault == "emulator error":
                raise EmulatorError("warp 3 waits for ever")
            next(t for t in outputs if t.numel())[0, 0] += 1000
        return outputs

    monkeypatch.setattr(exact.Case, "run", run)
    arguments = ["check", "--backend", "emulator", "--seed", str(failing), "--count", "2", "--groups", "4"]
    arguments += ["--max-m", "20", "--max-n", "40", "--max-k", "128"]
    assert cli.main(arguments) == 1
    text = capsys.readouterr().out
    assert ("warp 3 waits for ever" if fault == "emulator error" else "the reference says") in text
    assert "emulator: 1 of 2 problems bit-equal to the reference" in text
    repeat = next(line for line in text.splitlines() if "repeat:" in line).split("repeat: ")[1]
    program, *again = shlex.split(repeat)
    assert program == "nvfp4-cute"
    assert cli.main(again) == 1
    assert "emulator: 0 of 1 problems bit-equal to the reference" in capsys.readouterr().out


@pytest.mark.parametrize(
    "names", ["mxfp4", "mxfp8_e4m3,mxfp8_e5m2", "mxfp8_e4m3,mxfp4", "fp8_1x128,fp8_128x128"]
)
def test_operands_of_other_formats(names, capsys):
    """Operands have exact sums: the reference in float32 equals the sum in float64."""
    formats = types.formats(names)
    limits = exact.Limits(groups=2, max_m=20, max_n=40, max_k=256, formats=formats)
    case = exact.draw(3, limits)
    assert (case.problem.a_format, case.problem.b_format) == formats
    assert all(k % limits.k_step == 0 for _, _, k in case.problem.sizes)
    a, b = (
        [expand_operand(x, s, "blocked", f) for x, s in zip(data, scales, strict=True)]
        for data, scales, f in (
            (case.a.data, case.a.scale, formats[0]),
            (case.b.data, case.b.scale, formats[1]),
        )
    )
    sums = [x @ y.T for x, y in zip(a, b, strict=True)]
    assert all(torch.equal(total.float().double(), total) for total in sums)
    outs = case.run("reference", "cpu")
    factors = [1.0] * len(sums) if case.alpha is None else case.alpha.tolist()
    for out, total, factor in zip(outs, sums, factors, strict=True):
        assert torch.equal(out, (total.float() * factor).to(case.problem.out_dtype))
    assert f"--formats {formats[0]},{formats[1]}" in check.repeat_command("emulator:sm_100a", limits, 3)


@pytest.mark.parametrize("out", ["nvfp4", "mxfp8_e4m3", "mxfp4"])
def test_quantized_results(out, monkeypatch):
    """Data and scales of valid rows equal quantized float32 results. A wrong scale is found."""
    limits = exact.Limits(groups=3, max_m=20, max_n=96, max_k=128, out=out)
    case = next(c for c in (exact.draw(seed, limits) for seed in range(50)) if 0 < c.problem.sizes[0][0])
    format = RESULT_FORMATS[out]
    assert all(n % format.block_k == 0 for _, n, _ in case.problem.sizes)
    outs, count = case.run("reference", "cpu"), case.problem.num_groups
    plain = replace(case, problem=replace(case.problem, out_dtype=torch.float32)).run("reference", "cpu")
    for g, x in enumerate(plain):
        if len(x):
            want = block_scaled.quantize(x, format=format)
            assert torch.equal(outs[g].view(torch.uint8), want.data.view(torch.uint8))
            columns = format.padded_scale_shape(*x.shape)[1]
            blocked = from_blocked(want.scale.view(torch.uint8), len(x), columns)
            assert torch.equal(outs[count + g], blocked)
    wrong = [t.clone() for t in outs]
    wrong[count].view(torch.uint8)[0, 0] += 1
    assert exact.difference(wrong, outs, case.names).startswith("scales of group 0 element (0, 0) is")
    assert check.repeat_command("emulator", limits, 3).endswith(f"--out {out}")
    with pytest.raises(ValueError, match=f"has no block of {out}; use at least {format.block_k}"):
        replace(limits, max_n=format.block_k - 1)


def test_formats_that_there_are_not(capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", "--formats", "mxfp5"])
    assert "format='mxfp5' is unknown; use one of nvfp4, mxfp4" in capsys.readouterr().err


def test_on_a_gpu_whose_products_are_weight_only(capsys):
    """One product per group covers all rows. The printed command line is the same."""
    limits = exact.Limits(2, 9, 40, 128, (MXFP8_E4M3, MXFP4))
    assert check.run_problems("emulator:sm_80", limits, seed=1, count=1) == 0
    assert "emulator:sm_80: 1 of 1 problems bit-equal to the reference" in capsys.readouterr().out
