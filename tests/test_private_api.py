"""Undocumented parts of torch and CuTe DSL that the package uses exist, with the parameters that it passes."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from nvfp4_cute import private_api
from nvfp4_cute.custom_ops import custom_op

STUBS = Path(torch.__file__).parent / "_C" / "__init__.pyi"
ROOT = Path(private_api.__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "parameters", "result"),
    [
        ("_cuda_getCurrentRawStream", ["device"], "_int"),
        ("_cuda_getDevice", [], "_int"),
        ("_cuda_sleep", ["cycles"], "None"),
    ],
)
def test_what_builds_with_cuda_have(name, parameters, result):
    """Reads torch's stubs, which are the same in every build."""
    tree = ast.parse(STUBS.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert [argument.arg for argument in found.args.args] == parameters
    assert ast.unparse(found.returns) == result


def test_symmetric_memory_has_what_is_used():
    """Buffers of GPUs, from torch's stubs and its module, which imports without a GPU."""
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    assert {"empty", "rendezvous", "set_backend", "enable_symm_mem_for_group"} <= set(dir(symmetric))
    tree = ast.parse((STUBS.parent / "_distributed_c10d.pyi").read_text())
    (handle,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "_SymmetricMemory")
    methods = {n.name: n for n in handle.body if isinstance(n, ast.FunctionDef)}
    assert [a.arg for a in methods["get_buffer"].args.args][:4] == ["self", "rank", "sizes", "dtype"]
    assert "world_size" in methods


@pytest.mark.gpu("sm_90a")
def test_queues_are_those_of_the_documented_way():
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert private_api.current_stream(0) == torch.cuda.current_stream(0).cuda_stream
    assert private_api.current_device() == torch.cuda.current_device()
    private_api.spin(1000)
    torch.cuda.synchronize()


def test_guards_tell_tensors_apart_as_they_are_asked_to():
    x = torch.zeros(4, 8)
    guards = private_api.TensorGuards(
        x, dynamic_dims_sizes=[list(x.shape)], dynamic_dims_strides=[list(x.stride())]
    )
    assert guards.check(torch.ones(4, 8))
    for other in (x[:3], x.t(), x.double(), torch.zeros(4, 8, requires_grad=True)):
        assert not guards.check(other)


def test_what_the_dsl_read_of_its_environment_can_be_changed():
    settings = private_api.dsl_settings()
    assert private_api.dsl_settings() is settings
    before = settings.arch
    settings.arch = "sm_120a"
    assert private_api.dsl_settings().arch == "sm_120a"
    settings.arch = before


def test_the_runtime_libraries_exist():
    libraries = private_api.dsl_runtime_libraries()
    assert libraries and all(Path(library).is_file() for library in libraries)


def test_kept_files_can_lie_in_a_folder():
    from cutlass.base_dsl.compiler import DumpDir

    assert isinstance(private_api.dump_folder("somewhere"), DumpDir)
    assert "somewhere" in vars(private_api.dump_folder("somewhere")).values()
    assert list(inspect.signature(DumpDir).parameters)[0] not in ("args", "kwargs")


def test_the_dsl_names_its_architectures():
    assert {"sm_90a", "sm_100a", "sm_120a"} <= private_api.dsl_archs()


def test_torch_says_which_operators_have_kernels():
    assert private_api.has_torch_kernel("mm", "CPU")
    assert not private_api.has_torch_kernel("_cudnn_init_dropout_state", "CPU")


def test_nothing_else_names_what_stands_in_this_module():
    """The fronts of the emulator are an exception, and ``custom_ops``, which may not import torch before it is whole."""
    names = re.compile(r"torch\._C\b|torch\.cuda\._|_get_dsl|cutlass\.base_dsl")
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "nvfp4_cute").rglob("*.py"))
        if "fronts" not in path.parts and names.search(path.read_text())
    ]
    assert found == ["nvfp4_cute/custom_ops.py", "nvfp4_cute/private_api.py"]


def test_torch_compile_does_not_trace_into_an_op():
    """A function with a graph break inside ``try`` runs as it is, and torch then compiles what it calls."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def inner(x):
        return x + 1

    @custom_op("nvfp4_cute::probe_of_tracing", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    def user(x, call):
        try:
            torch._dynamo.graph_break()
            return call(x)
        finally:
            pass

    x = torch.ones(2)
    for call, count in ((inner, 1), (op._opoverload, 0)):
        graphs.clear()
        assert torch.equal(torch.compile(user, backend=backend)(x, call), x + 1)
        assert len(graphs) == count
