"""Our folders keep the rules of SOL-ExecBench's schema (NVIDIA/SOL-ExecBench 8d2237d, docs/ and core/data), written here anew: its
package is on no index."""

import ast
import json

import pytest
from trace_folders import SMALL

from nvfp4_cute.competition.trace import folder
from nvfp4_cute.problems import trace_schema as schema

PYTHON = {"pytorch", "triton", "cute_dsl", "cutile", "cudnn_frontend"}
HARDWARE = {"B200", "LOCAL"}
DTYPES = {
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1", "float4_e2m1fn_x2",
    "int64", "int32", "int16", "int8", "bool",
}  # fmt: skip
INPUTS = {"random": set(), "scalar": {"value"}, "safetensors": {"path", "tensor_key"}, "custom": set()}
TOLERANCE = {"max_atol", "max_rtol", "required_matched_ratio", "max_error_cap", "allow_negative_inf"}


FAST = ("nvfp4_moe", "nvfp4_quantize")  # whose kernels call the library: nothing is assembled


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize(
    "problem",
    [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SMALL) if name not in FAST)],
)
def test_a_folder_keeps_its_rules(problem, returns, tmp_path):
    schema.write_folder(tmp_path, *folder.load(problem, SMALL[problem], returns=returns))
    definition = json.loads((tmp_path / schema.DEFINITION_FILE).read_text())
    axes, inputs, outputs = (definition[name] for name in ("axes", "inputs", "outputs"))
    assert definition["name"] and not set(inputs) & set(outputs)
    for axis in axes.values():
        assert axis["type"] in ("const", "var", "expr")
        assert axis["type"] != "const" or (isinstance(axis["value"], int) and axis["value"] >= 0)
    for tensor in (*inputs.values(), *outputs.values()):
        assert tensor["dtype"] in DTYPES
        assert tensor["shape"] is None or all(name in axes or name.isdigit() for name in tensor["shape"])
    functions = {n.name: n for n in ast.parse(definition["reference"]).body if isinstance(n, ast.FunctionDef)}
    assert [a.arg for a in functions["run"].args.args] == list(inputs)
    if "custom_inputs_entrypoint" in definition:
        assert (
            len(functions[definition["custom_inputs_entrypoint"]].args.args) == 2
        )  # sizes of the axes, device

    variables = {name for name, axis in axes.items() if axis["type"] == "var"}
    for line in (tmp_path / schema.WORKLOAD_FILE).read_text().splitlines():
        workload = json.loads(line)
        assert (
            workload["uuid"] and set(workload["axes"]) == variables and set(workload["inputs"]) == set(inputs)
        )
        kinds = [source["type"] for source in workload["inputs"].values()]
        assert set(kinds) <= set(INPUTS) and ("custom" not in kinds or set(kinds) == {"custom"})
        for source in workload["inputs"].values():
            assert INPUTS[source["type"]] <= set(source)
        assert set(workload["tolerance"]) <= TOLERANCE

    solution = json.loads((tmp_path / schema.SOLUTION_FILE).read_text())
    spec, (source,) = solution["spec"], solution["sources"]
    assert solution["name"] and solution["author"] and solution["definition"] == definition["name"]
    assert spec["languages"] and set(spec["languages"]) <= PYTHON
    assert spec["target_hardware"] and set(spec["target_hardware"]) <= HARDWARE
    file, separator, function = spec["entry_point"].partition("::")
    assert separator and source["path"] == file and file.endswith(".py") and "binding" not in spec
    assert spec["destination_passing_style"] is not returns
    defined = {n.name: n for n in ast.parse(source["content"]).body if isinstance(n, ast.FunctionDef)}
    wanted = [*inputs, *(() if returns else outputs)]
    assert [a.arg for a in defined[function].args.args] == wanted
