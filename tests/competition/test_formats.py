"""Exports for other harnesses, called as these call them; and torch's product, which ours is compared with."""

import ast

import pytest
from new_process import run_python

from nvfp4_cute import cli
from nvfp4_cute.competition import export, formats, rules
from nvfp4_cute.problems import registry

OTHERS = [formats.PYGPUBENCH, formats.KERNELBENCH]


def smallest(name):
    return min(registry.load(name).tests, key=lambda case: case.work.flops)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", registry.names())
def test_torchs_product_passes(verdict, name):
    text = export.make_submission(name, kind=export.TORCHS).text
    assert rules.check_server_rules(text.encode()) == [] and "cutlass" not in text
    results = verdict(text, strict=True, problem=name, cases=[smallest(name)])
    assert results.passed, results


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.name)
@pytest.mark.parametrize("name", ["nvfp4_gemv", "nvfp4_group_gemm"])
def test_the_same_kernel_with_another_entry(form, name):
    """Only what the harness calls differs, at the two ends of the file."""
    plain = export.make_submission(name).text
    other = export.make_submission(name, form=form).text
    definitions = {
        node.name: ast.dump(node)
        for node in ast.parse(other).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    ours = [node for node in ast.parse(plain).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert all(definitions[node.name] == ast.dump(node) for node in ours)
    assert {*definitions} - {node.name for node in ours} == {
        "from_flat",
        form.footer.split()[1].split("(")[0],
    }
    assert "POPCORN" not in other and rules.check_export_rules(other) == []


START = """
import importlib, sys, types
from contextlib import ExitStack
from dataclasses import replace
from nvfp4_cute.competition.worker import emulated_process
sys.path.insert(0, ".")
stack = ExitStack()
emulated_process("sm_100a", stack)
import torch
"""
# Plays pygpubench: hands over flat tensors, C of which holds NaN, and counts what is wrong.
PYGPUBENCH = """
def out(tensor, expected):
    tensor.fill_(float("nan"))
    return types.SimpleNamespace(tensor=tensor, expected=expected)

def do_bench_isolated(qualname, generate, arguments, repeats, seed):
    module, name = qualname.split(".")
    tensors = generate(**arguments, seed=seed)
    outs = [one for one in tensors if isinstance(one, types.SimpleNamespace)]
    function = getattr(importlib.import_module(module), name)
    function(*(getattr(one, "tensor", one) for one in tensors))
    torch.cuda.synchronize()
    errors = 0
    for one in outs:
        want, rtol, atol = one.expected
        errors += not torch.allclose(one.tensor.cpu().float(), want.cpu().float(), rtol=rtol, atol=atol)
    assert outs
    return types.SimpleNamespace(errors=errors, time_us=[1.0])

sys.modules["pygpubench"] = types.SimpleNamespace(
    out=out, do_bench_isolated=do_bench_isolated, basic_stats=lambda times: "no times"
)
bench = importlib.import_module("bench")
cases = [min(bench.PROBLEM.tests, key=lambda case: case.work.flops)]
bench.PROBLEM = replace(bench.PROBLEM, benchmarks=cases)
result = do_bench_isolated("submission.kernel", bench.generate_test_case, {"case": 0}, 2, 5)
print("WRONG" if result.errors else "right")
"""
KERNELBENCH = """
problem, submission = importlib.import_module("problem"), importlib.import_module("submission")
problem.CASE = min(problem.PROBLEM.tests, key=lambda case: case.work.flops)
inputs = [tensor.cuda() for tensor in problem.get_inputs()]
right = problem.Model(*problem.get_init_inputs())(*inputs)
ours = submission.ModelNew(*problem.get_init_inputs())(*inputs)
torch.cuda.synchronize()
same = right.shape == ours.shape and torch.allclose(right.cpu().float(), ours.cpu().float(), rtol=1e-3, atol=1e-3)
print("right" if same else "WRONG")
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["nvfp4_gemv", *(
    pytest.param(slow, marks=pytest.mark.slow) for slow in ("nvfp4_group_gemm", "nvfp4_gemm", "nvfp4_dual_gemm")
)])  # fmt: skip
@pytest.mark.parametrize(
    "form, program", [(formats.PYGPUBENCH, PYGPUBENCH), (formats.KERNELBENCH, KERNELBENCH)]
)
def test_called_as_the_harness_calls(form, program, name, tmp_path):
    output = tmp_path / "submission.py"
    assert cli.main(["export", name, "--format", form.name, "-o", str(output)]) == 0
    done = run_python("-c", START + program, cwd=tmp_path)
    assert done.stdout.strip() == "right", done.stderr[-3000:]


def test_options_that_do_not_go_together(capsys):
    assert cli.main(["export", "nvfp4_gemm", "--torch", "--format", "kernelbench"]) == 2
    assert "--torch goes without" in capsys.readouterr().err
