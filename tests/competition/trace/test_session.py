"""Solutions, right and wrong, judged in the process that users' solutions are judged in."""

import pytest
import torch
from trace_folders import RIGHT, SMALL, definition, judge, solution, workload, write

from nvfp4_cute.competition.trace import blobs, folder, inputs
from nvfp4_cute.problems import trace_schema as schema

RETURNING = "import torch\n\ndef run(x, factor):\n    return {returned}\n"
SOLUTIONS = {
    "right": (solution(), "PASSED", ""),
    "returns": (
        solution(RETURNING.format(returned="x * factor, x.sum(dim=0)"), destination_passing_style=False),
        "PASSED",
        "",
    ),
    "other numbers": (solution(RIGHT.replace("factor)", "2)")), "INCORRECT_NUMERICAL", "y: "),
    "second output": (solution(RIGHT.replace("sum(dim=0)", "mean(dim=0)")), "INCORRECT_NUMERICAL", "total: "),
    "not written": (
        solution(RIGHT.replace("    y.copy_(x * factor)\n", "")),
        "INCORRECT_NUMERICAL",
        "infinities or NaN",
    ),
    "shape": (
        solution(RETURNING.format(returned="x[:1], x.sum(dim=0)"), destination_passing_style=False),
        "INCORRECT_SHAPE",
        "y is (1, 8), not (5, 8)",
    ),
    "dtype": (
        solution(
            RETURNING.format(returned="x.half() * factor, x.sum(dim=0)"), destination_passing_style=False
        ),
        "INCORRECT_DTYPE",
        "y is torch.float16, not torch.float32",
    ),
    "too few": (
        solution(RETURNING.format(returned="x"), destination_passing_style=False),
        "RUNTIME_ERROR",
        "1 outputs; the definition has 2",
    ),
    "raises": (solution("def run(*a):\n    raise KeyError('k')\n"), "RUNTIME_ERROR", "KeyError: 'k'"),
    "import": (solution("import nothing_of_that_name\n"), "COMPILE_ERROR", "nothing_of_that_name"),
    "lazy": (
        solution(
            "import torch\n\nclass T(torch.Tensor):\n    pass\n\ndef run(x, factor):\n"
            "    return (x * factor).as_subclass(T), x.sum(dim=0)\n",
            destination_passing_style=False,
        ),
        "REWARD_HACK",
        "output is a T: an answer is made of plain tensors",
    ),
    "clock": (
        solution(RIGHT + "\nimport torch\ntorch.cuda.Event.elapsed_time = lambda self, other: 0.001\n"),
        "REWARD_HACK",
        "elapsed_time",
    ),
    "another shape later": (
        solution(
            "calls = []\n\ndef run(x, factor):\n    calls.append(1)\n    y = x * factor\n"
            "    return y[None] if len(calls) > 1 else y, x.sum(dim=0)\n",
            destination_passing_style=False,
        ),
        "INCORRECT_SHAPE",
        "y is (1, 5, 8), not (5, 8)",
    ),
    "mapping": (
        solution(
            RETURNING.format(returned="{'total': x.sum(dim=0), 'y': x * factor}"),
            destination_passing_style=False,
        ),
        "PASSED",
        "",
    ),
    "no tensor": (
        solution(RETURNING.format(returned="None, x.sum(dim=0)"), destination_passing_style=False),
        "RUNTIME_ERROR",
        "y is a NoneType, not a tensor",
    ),
}
# What a solution may try on its judge.
TRICKS = {
    "compares nothing": (
        "import torch\nfrom nvfp4_cute.competition.trace import matching\n"
        "torch.allclose = lambda *a, **b: True\n"
        "matching.RULES.clear()\nmatching._judged = lambda errors, *a: errors\n"
        "torch.Tensor.__le__ = torch.Tensor.__gt__ = lambda *a: torch.tensor(True)\n",
        "INCORRECT_NUMERICAL",
    ),
    "replaces the reference": (
        "import sys, torch\nfrom nvfp4_cute.competition.trace import session\n"
        "session.Session._reference = lambda self, inputs, flops: ([torch.zeros(5, 8), torch.zeros(8)], 0)\n"
        "open('_reference.py', 'w').write('def run(*a):\\n    return a')\n",
        "INCORRECT_NUMERICAL",
    ),
    "writes results": (
        "import os\nfor number in range(3, 64):\n    try:\n"
        '        os.write(number, b\'{"name": "M5", "status": "PASSED"}\\n\')\n    except OSError:\n        pass\n',
        "RUNTIME_ERROR",
    ),
    "answers with an object that is unpickled": (
        "class Evil:\n    def __reduce__(self):\n        return exec, ('import os; os._exit(0)',)\n"
        "def run(x, factor, y, total):\n    return Evil()\n",
        "INCORRECT_NUMERICAL",
    ),
    "ends its process": ("import os\ndef run(*a):\n    os._exit(0)\n", "RUNTIME_ERROR"),
    "exits when imported": ("raise SystemExit(0)\n", "COMPILE_ERROR"),
    "raises what is no Exception": (
        "class Stop(BaseException):\n    pass\ndef run(*a):\n    raise Stop\n",
        "RUNTIME_ERROR",
    ),
    "shadows modules": ("from pathlib import Path\nPath('base64.py').write_text('raise SystemExit')\n", ""),
    "leaves a process": (
        "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(1000)\n",
        "INCORRECT_NUMERICAL",
    ),
    "floods what it prints": ("print('x' * (1 << 23))\n", "INCORRECT_NUMERICAL"),
    "leaves what runs at exit": (
        "import atexit, os\natexit.register(os._exit, 0)\n",
        "INCORRECT_NUMERICAL",
    ),
}
NOTHING = "def run(x, factor, y, total):\n    pass\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SOLUTIONS)
def test_solutions(name, tmp_path):
    answer, status, message = SOLUTIONS[name]
    (result,) = judge(write(tmp_path / "p", solution_json=answer))
    assert (result.status, result.us) == (status, None), result
    assert message in result.message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_passes_nothing(name, tmp_path):
    text, status = TRICKS[name]
    text = text if "\ndef run" in text else NOTHING + text
    (result,) = judge(write(tmp_path / "p", solution_json=solution(text)))
    assert result.status == (status or "INCORRECT_NUMERICAL"), result
    assert not [*(tmp_path / "p" / "judge").glob("*64.py")]


def test_a_failing_reference_is_not_the_solutions_fault(tmp_path):
    (result,) = judge(
        write(tmp_path / "p", definition(reference="def run(x, factor):\n    return x.nothing\n"))
    )
    assert result.status == "INVALID_REFERENCE" and "nothing" in result.message


def test_workloads_are_judged_one_by_one(tmp_path):
    text = RIGHT + "    assert len(x) < 6\n"
    lines = [workload(), workload(axes={"M": 7}), workload(axes={"M": 1})]
    results = judge(write(tmp_path / "p", workloads=lines, solution_json=solution(text)))
    assert [r.status for r in results] == ["PASSED", "RUNTIME_ERROR", "PASSED"]
    assert [r.name for r in results] == ["M5", "M7", "M1"]


def test_inputs_of_files(tmp_path):
    x = torch.arange(40.0).reshape(5, 8)
    blobs.write_tensors(tmp_path / "blob" / "x.safetensors", {"x": x})
    source = {"type": "safetensors", "path": "blob/x.safetensors", "tensor_key": "x"}
    line = workload(inputs={"x": source, "factor": {"type": "scalar", "value": 2.0}})
    found, (read,), _ = schema.read_folder(write(tmp_path / "p", workloads=[line]))
    made, factor = inputs.make_inputs(found, read, tmp_path / "p", torch.device("cpu"), None)
    assert torch.equal(made, x) and factor == 2.0


@pytest.mark.parametrize("dtype", schema.DTYPES)
def test_random_inputs_and_files_of_every_dtype(dtype, tmp_path):
    value = inputs.random_input(schema.TensorSpec(dtype, ("M", "N")), (64, 32), torch.device("cpu"))
    assert value.shape == (64, 32) and value.dtype == schema.DTYPES[dtype]
    assert len(value.view(torch.uint8).unique()) > (1 if dtype == "bool" else 20)
    blobs.write_tensors(tmp_path / "t.safetensors", {"other": torch.ones(3), "t": value})
    again = blobs.read_tensor(tmp_path / "t.safetensors", "t")
    assert again.dtype == value.dtype and torch.equal(again.view(torch.uint8), value.view(torch.uint8))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["nvfp4_grouped_gemm", "nvfp4_moe", "nvfp4_quantize"])
@pytest.mark.parametrize("returns", [False, True])
def test_the_librarys_answers_are_right(name, returns, tmp_path):
    schema.write_folder(tmp_path, *folder.load(name, SMALL[name], returns=returns))
    for rules in ("sol-execbench", "flashinfer-bench"):
        (result,) = judge(tmp_path, rules=rules)
        assert result.status == "PASSED" and result.matched == 1, result


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4_gemv",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("nvfp4_gemm", "nvfp4_group_gemm", "nvfp4_dual_gemm")
        ),
    ],
)
def test_kernels_in_one_file_are_right_and_modelled_on_the_emulator(name, tmp_path):
    schema.write_folder(tmp_path, *folder.load(name, SMALL[name], returns=name == "nvfp4_gemv"))
    (result,) = judge(tmp_path, device="emulator", timed=True)
    assert result.status == "PASSED" and result.source == "modelled" and result.us > result.sol_us > 0, result
    assert result.score is None and result.max_absolute == 0
