"""FlashInfer-Bench's own classes read and run what we write: make test-trace."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trace_folders import SMALL

from nvfp4_cute import examples
from nvfp4_cute.competition.trace import folder
from nvfp4_cute.problems import trace_schema as schema

bench = pytest.importorskip("flashinfer_bench", reason="needs flashinfer-bench: make test-trace")
data = pytest.importorskip("flashinfer_bench.data")


@pytest.fixture(scope="module", params=sorted(SMALL))
def trace_set(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("set")
    folder.write_trace_set(root, *folder.load(request.param, SMALL[request.param]))
    returning = folder.load(request.param, SMALL[request.param], returns=True)
    folder.write_trace_set(root, *returning)
    return data.TraceSet.from_path(str(root))


def test_it_reads_the_set_and_makes_the_inputs(trace_set):
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors

    ((name, definition),) = trace_set.definitions.items()
    solutions, (trace,) = trace_set.solutions[name], trace_set.workloads[name]
    assert [s.spec.destination_passing_style for s in solutions] == [True, False]
    stored = load_safetensors(definition, trace.workload, trace_set.root)
    inputs = gen_inputs(definition, trace.workload, "cpu", stored)
    assert definition.get_axes_values_from_inputs(inputs) == trace.workload.axes
    assert [i.dtype for i in inputs] == [
        schema.DTYPES[spec.dtype.value] for spec in definition.inputs.values()
    ]


def test_it_reads_the_folder(tmp_path):
    found, _, solution = folder.load("nvfp4_moe", SMALL["nvfp4_moe"])
    definition = data.Definition(**schema.definition_json(found))
    read = data.Solution(**schema.solution_json(solution))
    assert definition.name == found.name and read.get_entry_symbol() == "run"


def test_its_evaluator_accepts_the_librarys_answers(trace_set, monkeypatch, tmp_path):
    """With its builder and its judgement; on the CPU, where there is nothing to wait for."""
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.evaluators.default import DefaultEvaluator
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.compile import BuilderRegistry

    ((name, definition),) = trace_set.definitions.items()
    (trace,) = trace_set.workloads[name]
    registry = BuilderRegistry.get_instance()
    needs_gpu = "nvfp4-cute" not in trace_set.solutions[name][0].spec.dependencies
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    stored = load_safetensors(definition, trace.workload, trace_set.root)
    # Views of a file begin anywhere; to a GPU they are copied.
    inputs = [value.clone() for value in gen_inputs(definition, trace.workload, "cpu", stored)]
    reference = registry.build_reference(definition)(*inputs)
    right = list(reference) if isinstance(reference, tuple) else [reference]
    for solution in trace_set.solutions[name]:
        runnable = registry.build(definition, solution)
        if needs_gpu:
            continue
        correctness, failure = DefaultEvaluator.check_correctness(
            definition, runnable, [inputs], [right], BenchmarkConfig(), str(tmp_path / "log"), "cpu"
        )
        assert failure is None, failure
        assert correctness.max_absolute_error <= 0.05


@pytest.mark.parametrize("name", ["nvfp4_gemm", "nvfp4_grouped_gemm"])
def test_its_evaluator_runs_on_the_virtual_gpu(name, tmp_path):
    """The example judges our exports, one a file of CuTe DSL, one a call of the library; the evaluator is unmodified."""
    folder.write_trace_set(tmp_path, *folder.load(name, SMALL[name]))
    script = Path(examples.__file__).parent / "flashinfer_judge.py"
    command = [sys.executable, "-m", "nvfp4_cute", "emulate", "--arch", "sm_100a", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "max_absolute_error=0.0" in done.stdout
