"""The example of problems/README.md works: the test creates its folder from the page and runs it."""

import re
import sys
from pathlib import Path

import pytest
from new_process import run_python

import nvfp4_cute.problems
from nvfp4_cute.competition import protocol, report
from nvfp4_cute.problems import registry

ROOT = Path(__file__).resolve().parents[2]
NAME = "nvfp4_gemm_relu2"
PART = re.compile(r"^\*\*`([a-z_.]+)`\*\*.*?^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Torch's product needs a GPU or the emulator's replacement.
ON_THE_EMULATOR = """
import importlib, sys
from contextlib import ExitStack
import nvfp4_cute.problems
from nvfp4_cute.competition.worker import emulated_process
from nvfp4_cute.problems import registry

nvfp4_cute.problems.__path__.append(sys.argv[1])
problem = registry.load(sys.argv[2])
kernel = importlib.import_module(f"nvfp4_cute.problems.{problem.name}.torch_submission").custom_kernel
with ExitStack() as stack:
    emulated_process("sm_100a", stack)
    data = problem.make_inputs(problem.tests[0])
    right = problem.reference(data)
    print(problem.check(kernel(tuple(tensor.cuda() for tensor in data)).cpu(), right))
"""


@pytest.fixture
def problem(tmp_path, monkeypatch):
    folder = tmp_path / NAME
    folder.mkdir()
    parts = dict(PART.findall((ROOT / "problems" / "README.md").read_text()))
    assert {"task.yml", "spec.py", "inputs.py", "reference.py", "adapter.py"} < set(parts)
    for name, text in {**parts, "__init__.py": ""}.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(nvfp4_cute.problems, "__path__", [*nvfp4_cute.problems.__path__, str(tmp_path)])
    yield registry.load(NAME)
    for name in [name for name in sys.modules if NAME in name]:
        del sys.modules[name]


def test_cases_are_those_of_the_task_yml(problem):
    assert NAME in registry.names() and problem.deadline is None
    assert [case.name for case in problem.tests] == ["m128_n256_k256", "m72_n128_k512"]
    for case in problem.tests + problem.benchmarks:
        line = protocol.format_case(case.arguments)
        assert problem.case_type.from_arguments(**protocol.parse_case(line)) == case
    stats = protocol.Stats.of([20e3])
    result = protocol.CaseResult(
        protocol.format_case(problem.benchmarks[0].arguments), True, "", stats, "modelled"
    )
    (row,) = report.rows(problem, protocol.Results((result,), True))
    assert row.sol_us == pytest.approx(1.333, abs=1e-3) and row.percent_of_sol == pytest.approx(
        6.67, abs=0.01
    )


def test_the_adapter_is_accepted_and_a_wrong_answer_is_not(problem):
    from importlib import import_module

    custom_kernel = import_module(f"nvfp4_cute.problems.{NAME}.adapter").custom_kernel
    for case in problem.tests:
        data = problem.make_inputs(case)
        right = problem.reference(data)
        answer = custom_kernel(data)
        assert problem.check(answer, right) == (True, "") and problem.output(data) == [answer]
        answer[3, 5, 0] += 1 + answer[3, 5, 0] / 100
        assert not problem.check(answer, right)[0]


def test_torchs_product_is_accepted(problem, tmp_path):
    done = run_python("-c", ON_THE_EMULATOR, tmp_path, NAME)
    assert done.stdout.strip() == "(True, '')", done.stderr[-2000:]
