"""What is written is what is read; what breaks a rule of the schema is refused by name."""

import json

import pytest
import trace_folders
from trace_folders import SMALL, definition, solution, workload, write

from nvfp4_cute.competition.trace import folder
from nvfp4_cute.problems import trace_schema as schema


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "nvfp4_gemm" else ())
        for name in sorted(set(SMALL) - {"nvfp4_group_gemm", "nvfp4_dual_gemm"})
    ],
)
def test_what_is_written_is_read(name, tmp_path):
    written = folder.load(name, SMALL[name])
    schema.write_folder(tmp_path, *written)
    assert schema.read_folder(tmp_path) == written


def test_every_problem_has_small_axes():
    assert set(SMALL) == set(folder.names())


def test_flashinfers_lines_and_expressions_are_read(tmp_path):
    axes = {"M": {"type": "var"}, "N": {"type": "expr", "expression": "4 * M // 2 - 2"}}
    trace = {"definition": "scale_n8", "workload": workload()}
    write(tmp_path, definition(axes=axes), [trace])
    found, (read,), _ = schema.read_folder(tmp_path)
    assert found.sizes(read.axes) == {"M": 5, "N": 8} and read.tolerance == schema.Tolerance()
    assert found.shape(found.inputs["x"], {"M": 5, "N": 8}) == (5, 8)


REFUSED = {
    "no dtype": (
        definition(outputs={"y": {"shape": ["M"], "dtype": "float7"}}),
        None,
        None,
        "dtype 'float7' is unknown; use",
    ),
    "no axis": (
        definition(outputs={"y": {"shape": ["Q"], "dtype": "int8"}}),
        None,
        None,
        "the shape names Q; the axes",
    ),
    "no run": (definition(reference="def go(x):\n    pass\n"), None, None, "no function run; it defines go"),
    "no generator": (
        definition(custom_inputs_entrypoint="make"),
        None,
        None,
        "no function make; it defines run",
    ),
    "no Python": (definition(reference="def run(:"), None, None, "definition.json: invalid syntax"),
    "no name": (
        {k: v for k, v in definition().items() if k != "name"},
        None,
        None,
        "the field 'name' is missing",
    ),
    "two of a name": (
        definition(outputs={"x": {"shape": ["M"], "dtype": "int8"}}),
        None,
        None,
        "name an input and an output; give",
    ),
    "constraint": (
        definition(constraints=["M % 4 == 0"]),
        None,
        None,
        "M % 4 == 0 does not hold of {'N': 8, 'M': 5}",
    ),
    "missing size": (None, [workload(axes={})], None, "the workload says no M; add it"),
    "no such input": (None, [workload(inputs={"z": {"type": "random"}})], None, "gives z, which"),
    "other definition": (
        None,
        None,
        solution() | {"definition": "d"},
        "solves 'd'; the folder defines 'scale_n8'",
    ),
    "entry": (None, None, solution(entry_point="main.py"), "entry_point 'main.py' is not FILE::FUNCTION"),
    "outside": (
        None,
        None,
        solution() | {"sources": [{"path": "../main.py", "content": "x"}]},
        "source '../main.py' leaves the folder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    *files, message = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        schema.read_folder(write(tmp_path, *files))
    assert message in str(caught.value), caught.value


def test_a_constraint_on_values_is_not_one_of_axes(tmp_path):
    write(tmp_path, definition(constraints=["M == x[0].item()", "M >= 1 and N == 8"]))
    schema.read_folder(tmp_path)


@pytest.mark.parametrize("expression", ["__import__('os')", "M.bit_length()", "Q + 1", "M / 2"])
def test_axis_expressions_are_arithmetic(expression):
    with pytest.raises(ValueError, match="axis expression"):
        schema.evaluate(expression, {"M": 5})


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "workload.jsonl").unlink()
    with pytest.raises(ValueError, match=r"there is no file .*workload.jsonl"):
        schema.read_folder(tmp_path)


def test_one_solution_says_both_projects_words(tmp_path):
    content = schema.solution_json(folder.load("nvfp4_quantize", SMALL["nvfp4_quantize"])[2])
    spec = content["spec"]
    assert (spec["language"], spec["languages"], spec["target_hardware"]) == (
        "python",
        ["cute_dsl"],
        ["B200", "LOCAL"],
    )
    assert (
        json.loads(json.dumps(content)) == content and trace_folders.solution()["spec"].keys() <= spec.keys()
    )
