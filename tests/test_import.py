"""What ``import nvfp4_cute`` imports in a new process, and what it defers."""

import ast
import json
import pickle
import pydoc
import subprocess
import sys
import textwrap
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import nvfp4_cute


def in_new_process(code: str, *arguments: str) -> str:
    """Returns the output of a script."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_takes_little_and_imports_little():
    """The package's imports are listed exactly; torch needs some of its own to register ops.

    Compares processor time with torch's.
    """
    code = """
        import json, sys, time
        start = time.process_time()
        import torch
        before, middle = set(sys.modules), time.process_time()
        import nvfp4_cute
        end = time.process_time()
        print(json.dumps([sorted(set(sys.modules) - before), middle - start, end - middle]))
    """
    times = []
    for _ in range(2):  # the first one may have to compile
        new, torch_s, ours_s = json.loads(in_new_process(code))
        times.append(ours_s / torch_s)
        names = (
            "clone",
            "custom_ops",
            "errors",
            "experts",
            "experts.library",
            "formats",
            "formats.block_format",
            "formats.pickling",
            "nn",
            "nn.library",
            "ops",
            "ops.library",
        )
        ours = [name for name in new if name.split(".")[0] == "nvfp4_cute"]
        assert ours == ["nvfp4_cute", *(f"nvfp4_cute.{name}" for name in names)]
        assert not {"cutlass", "cuda", "tqdm", "fractions", "statistics"} & set(new)
        if times[-1] < 1 / 20:
            break
    assert min(times) < 1 / 20


@pytest.mark.parametrize("first", ["private_api", "ops.library"])
def test_ops_are_registered_whichever_import_brings_torch(first):
    """The package is imported before torch, and a module of the package that is not yet loaded imports torch."""
    code = """
        import sys, nvfp4_cute
        from importlib import import_module
        assert "torch" not in sys.modules
        import_module(f"nvfp4_cute.{sys.argv[1]}")
        import torch
        print(*(hasattr(torch.ops.nvfp4_cute, op) for op in ("grouped_gemm_out", "linear", "route")))
    """
    assert in_new_process(code, first).split() == ["True"] * 3


def test_a_clone_has_all_of_the_package():
    """Python that starts in a clone imports the package from there, even if another copy is installed."""
    code = """
        import sys
        sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
        sys.modules.pop("nvfp4_cute", None)
        sys.path.insert(0, sys.argv[1])
        from nvfp4_cute import bench, kernels, problems
        from nvfp4_cute.kernels import common
        print(*(module.__path__[0] for module in (kernels, common, problems, bench)))
    """
    root = Path(__file__).parents[1]
    found = [Path(one) for one in in_new_process(code, str(root)).split()]
    assert found == [root / one for one in ("kernels", "kernels/common", "problems", "bench")]


def test_version_is_that_of_the_distribution():
    assert nvfp4_cute.__version__ == version("nvfp4-cute")


def test_names_are_the_same_for_type_checkers():
    tree = ast.parse(Path(nvfp4_cute.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module.removeprefix("nvfp4_cute.") for node in block.body for alias in node.names
    }
    # Records, which have their own text here, are next to their class.
    records = [
        n for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.annotation, ast.Constant)
    ]
    typed |= {node.target.id: typed[node.annotation.value] for node in records}
    assert typed == nvfp4_cute._MODULES


OTHER_NAMES = {"LinearNVFP4": "QuantizedLinear"}


@pytest.mark.parametrize("name", nvfp4_cute.__all__)
def test_a_public_name_is_what_its_module_has(name):
    value = getattr(nvfp4_cute, name)
    assert value.__module__ == f"nvfp4_cute.{nvfp4_cute._MODULES[name]}"
    is_format, own = isinstance(value, nvfp4_cute.BlockFormat), OTHER_NAMES.get(name, name)
    assert (value.name == name.lower() if is_format else value.__name__ == own) and name in dir(nvfp4_cute)
    assert getattr(nvfp4_cute, name) is value and pickle.loads(pickle.dumps(value)) == value


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="module 'nvfp4_cute' has no attribute 'grouped_gem'"):
        nvfp4_cute.grouped_gem  # noqa: B018


LOADED = """
    data, scale = torch.export.load(sys.argv[1]).module()(torch.linspace(-4, 4, 32 * 64).view(32, 64))
    expected = nvfp4_cute.quantize(torch.linspace(-4, 4, 32 * 64).view(32, 64))
    assert torch.equal(data, expected.data) and torch.equal(scale.view(torch.uint8), expected.scale.view(torch.uint8))
"""
TRACED = """
    x = torch.linspace(-4, 4, 32 * 64).view(32, 64)
    traced = torch.compile(lambda: nvfp4_cute.quantize(x).data, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(), nvfp4_cute.quantize(x).data)
"""


def test_graphs_run_after_the_import_alone(tmp_path):
    """Loaded and traced graphs use custom ops before anything else of the package has been imported."""
    path = str(tmp_path / "program.pt2")

    class Quantize(torch.nn.Module):
        def forward(self, x):
            return torch.ops.nvfp4_cute.quantize(x, None, None, "blocked", "nvfp4", "up", "auto")

    x = torch.linspace(-4, 4, 32 * 64).view(32, 64)
    torch.export.save(torch.export.export(Quantize(), (x,)), path)
    # Slow parts of torch are imported once for both.
    code = """
        import os, sys, textwrap, torch, torch._dynamo, torch.export
        import nvfp4_cute
        for program in sys.argv[2:]:
            child = os.fork()
            if child == 0:
                exec(textwrap.dedent(program))
                sys.exit()
            assert os.waitpid(child, 0)[1] == 0, program
    """
    in_new_process(code, path, LOADED, TRACED)


def test_load_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "nvfp4_cute.models.transformers", raising=False)
    monkeypatch.delitem(vars(nvfp4_cute), "load", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install .nvfp4-cute.models"):
        nvfp4_cute.load  # noqa: B018 (the look-up imports)
    assert "load" not in dir(nvfp4_cute)
    assert "Multiply matrices" in pydoc.plain(pydoc.render_doc(nvfp4_cute)), (
        "help() imports all names of dir()"
    )


def test_names_that_the_readme_shows():
    from nvfp4_cute.nn import QuantizedLinear, fuse, replace_linears

    assert (nvfp4_cute.fuse, nvfp4_cute.replace_linears) == (fuse, replace_linears)
    assert nvfp4_cute.QuantizedLinear is QuantizedLinear
    assert callable(fuse) and callable(nvfp4_cute.debug)
    assert ("load" in dir(nvfp4_cute)) == (find_spec("transformers") is not None)
    assert not {"Any", "TYPE_CHECKING", "import_module", "private_api"} & set(dir(nvfp4_cute))
