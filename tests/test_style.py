"""House rules for the whole tree: import direction, environment reads, pipeline state.

Also checks that they find planted faults.
"""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import style_lint

from nvfp4_cute.compile import disk_cache

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "nvfp4_cute"
# Folder -> import name, as pyproject.toml maps them.
FOLDERS = {
    "nvfp4_cute": PACKAGE,
    "kernels": "nvfp4_cute.kernels",
    "problems": "nvfp4_cute.problems",
    "bench": "nvfp4_cute.bench",
}

# Lowest first. A module imports from its own row and from rows above it in this list, never from below.
LAYERS = (
    (
        "activation",
        "errors",
        "custom_ops",
        "env",
        "launch_table",
        "private_api",
        "terminal",
        "child_process",
        "clone",
    ),
    ("emulator",),
    ("timing",),
    ("batch_invariance", "formats", "gpus"),
    ("problem",),
    ("reference", "operands"),
    ("planning",),
    ("compile",),
    ("launch",),
    ("backends",),
    ("ops",),
    ("experts",),
    ("nn",),
    ("roofline",),
    ("tuning",),
    ("models",),
    ("torch_api",),
    ("",),  # nvfp4_cute/__init__.py: the public names
    ("problems",),
    ("bench",),
    ("competition",),
    ("prove",),
    ("cli",),
    ("__main__",),
    ("examples",),
)
# Modules that kernels may import besides cutlass, each other, and their family in planning.arch.
LEAVES = (
    "activation",
    "errors",
    "formats.block_format",
    "formats.codecs",
    "formats.four_over_six",
    "formats.scale_layout",
    "formats.silu",
    "formats.softplus",
    "launch_table",
    "planning.config",
)
STDLIB_LEAVES = ("errors", "planning.config", "env", "launch_table")
HOST_THIRD_PARTY = {"torch", "numpy", "tqdm"}
# Importing these needs a compiler, a driver, or an extra, so host modules do it inside the function that needs them.
PYTEST_PLUGINS = {"cli.pytest_plugin"}
# Modules of packages with the same name.
INTEGRATIONS = {
    "models.transformers": {"transformers"},
    "bench.validation.triton_kernel": {"triton"},
    "bench.invariance.engine": {"vllm"},
    "bench.vllm.engine": {"vllm"},
    "bench.vllm.folders": {"tokenizers"},
    "bench.vllm.hybrid": {"vllm"},
    "bench.vllm.serve": {"openai"},
    "competition.trace.native": {"tvm_ffi"},
    "bench.foreign.cutlass_grouped": {"blackwell"},
    "bench.foreign.cutlass_moe": {"blackwell"},
    "bench.foreign.flashinfer_masked": {"flashinfer"},
    "bench.foreign.lightmoe_layer": {"lightmoe"},
    "bench.foreign.lightmoe": {"lightmoe"},
    "bench.foreign.quack_varlen": {"quack"},
    "models.sglang.methods": {"sglang"},
} | {f"models.vllm.{part}": {"vllm"} for part in ("config", "experts", "kernels", "linear", "parameters")}
DEFERRED_THIRD_PARTY = {"cutlass", "cuda", "matplotlib", "yaml", "transformers", "triton"}

# Layers around the machine, through which programs written for a GPU reach it, and their allowed imports.
EMULATOR_ROWS = (
    ("isa",),
    ("fused",),
    ("code",),
    ("check", "record"),
    ("compiled", "parallel", "lockstep", "machine"),
    ("fronts",),
)
"""Lowest first; all other modules of the emulator are below. Parts of one row do not import each other's folders."""

EMULATOR_FRONTS = {"launch_shim": {"cutlass"}, "dsl_shim": {"cutlass"}, "cuda_shim": {"cuda"}}

# Host code that may name an architecture: families, the machine and its clock, lists of GPUs and of their probes, and
# problems for one GPU. All other code asks ``planning.arch.family_of``.
NAMES_ARCHITECTURES = ("planning.arch", "emulator", "timing", "gpus", "prove", "bench", "problems")


def module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


SOURCES = {path: path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
MODULES = {module_name(path): path for path in SOURCES}
# Programs may import anything, and nothing imports them: examples, and calls of other people's packages.
PROGRAMS = ("nvfp4_cute.examples", "nvfp4_cute.bench.witnesses.run_")
HOST = [m for m in MODULES if not m.startswith(("nvfp4_cute.kernels", *PROGRAMS))]
KERNELS = [m for m in MODULES if m.startswith("nvfp4_cute.kernels")]


@cache
def imports(module: str) -> list[style_lint.Import]:
    return style_lint.imports(SOURCES[MODULES[module]], module, frozenset(MODULES))


def area(module: str) -> str:
    """`nvfp4_cute.emulator.isa.arith` -> `emulator`; the package itself -> the empty string."""
    return module.split(".", 2)[1] if "." in module else ""


def each(modules: Iterable[str]) -> Callable[[Callable[[str], Iterable[Any]]], Callable[[], None]]:
    """Turns a function that finds a module's violations into one test, which reports those of all ``modules``."""
    names = list(modules)

    def decorate(find: Callable[[str], Iterable[Any]]) -> Callable[[], None]:
        def test() -> None:
            assert names
            found = [f"{module}: {violation}" for module in names for violation in find(module) or ()]
            assert not found, "\n".join([*found, find.__doc__ or ""])

        test.__name__, test.__doc__ = find.__name__, find.__doc__
        return test

    return decorate


def place(module: str) -> str:
    """`nvfp4_cute.emulator.isa.arith` -> `emulator.isa.arith`."""
    return module.partition(".")[2]


def layer(module: str) -> int:
    for rank, names in enumerate(LAYERS):
        if area(module) in names:
            return rank
    pytest.fail(
        f"{module} has no place in LAYERS of tests/test_style.py: decide what may import it and add it"
    )


def internal(module: str) -> list[style_lint.Import]:
    return [i for i in imports(module) if i.name.split(".")[0] == PACKAGE]


def external(module: str) -> list[style_lint.Import]:
    return [
        i
        for i in imports(module)
        if (root := i.name.split(".")[0]) != PACKAGE and root not in sys.stdlib_module_names
    ]


@each(MODULES)
def test_tables_in_docstrings_are_those_of_markdown(module):
    """The API reference shows a table of reStructuredText as rows of "=", so tables are written as `| a | b |`."""
    for number, line in enumerate(SOURCES[MODULES[module]].splitlines(), 1):
        if re.match(r" *={4,} +={3,}", line):
            yield number


# ---- import direction ------------------------------------------------------------------------------------------


@each(HOST)
def test_host_imports_point_one_way(module):
    for found in internal(module):
        if area(found.name) == "kernels":
            if not found.deferred:
                yield found, "importing a kernel imports cutlass: do it inside a function"
            if layer(module) < layer("nvfp4_cute.compile.keys"):
                yield found, "only compile and above see kernels"
        elif layer(found.name) > layer(module):
            yield found, "is of a higher layer"


@each(m for m in HOST if place(m) in LEAVES)
def test_leaves_import_only_leaves(module):
    return [(found, "is no leaf") for found in internal(module) if place(found.name) not in LEAVES]


@each(HOST)
def test_host_third_party_imports(module):
    allowed = set() if place(module) in STDLIB_LEAVES else HOST_THIRD_PARTY
    allowed = allowed | ({"pytest"} if place(module) in PYTEST_PLUGINS else set())
    allowed = allowed | INTEGRATIONS.get(place(module), set())
    deferred = set() if place(module) in LEAVES else DEFERRED_THIRD_PARTY
    for found in external(module):
        if found.name.split(".")[0] not in (allowed | deferred if found.deferred else allowed):
            yield found, "host modules import it inside a function, if at all"


@each(m for m in HOST if area(m) == "emulator")
def test_emulator_stands_alone(module):
    """The machine runs any PTX and does not import torch, the DSL, or this project's kernels."""
    fronts, name = "nvfp4_cute.emulator.fronts.", module.rpartition(".")[2]
    is_front, allowed = module.startswith(fronts), {"numpy"}
    if is_front:
        allowed |= {"torch"} if name.startswith("torch_") else EMULATOR_FRONTS.get(name, set())
    for found in imports(module):
        if found in external(module) and found.name.split(".")[0] not in allowed:
            yield found, "is not the emulator's"
        if found in internal(module) and area(found.name) not in ("emulator", "errors"):
            yield found, "is above the emulator"
        if found.name.startswith(fronts) and not is_front:
            yield found, "the machine must not need its fronts"


def emulator_row(part: str) -> int:
    return next((rank for rank, parts in enumerate(EMULATOR_ROWS) if part in parts), -1)


@each(m for m in HOST if m.startswith("nvfp4_cute.emulator."))
def test_emulator_imports_point_one_way(module):
    """The order is state and numerics, instructions, observers, the machine, and its fronts."""
    own = module.split(".")[2]
    for found in internal(module):
        if found.name.startswith("nvfp4_cute.emulator."):
            other = found.name.split(".")[2]
            if emulator_row(other) > emulator_row(own) or {own, other} == {"check", "record"}:
                yield found, "is of a row that this module's does not see"


def test_no_circle_of_files():
    """Imports at load, inside functions, and in types: every module can be read and tested before the modules that need it."""
    graph = {m: {i.name for i in imports(m) if i.name in MODULES and i.name != m} for m in MODULES}
    circles = style_lint.circles(graph)
    assert not circles, "\n".join(" ".join(circle) for circle in circles)


@each(KERNELS)
def test_kernels_can_be_lifted_out(module):
    """A kernel imports cutlass, its siblings, leaf modules, and the integer-only plan of its own architecture."""
    own = module.split(".")[2] if module.count(".") >= 2 else "common"
    allowed_kernels = {f"nvfp4_cute.kernels.{name}" for name in ("common", own)} | {"nvfp4_cute.kernels"}
    family = f"nvfp4_cute.planning.arch.{own}"
    allowed_host = {f"nvfp4_cute.{leaf}" for leaf in LEAVES} | {
        family,
        f"{family}.limits",
        f"{family}_weight_only",
        f"{family}_fp8",
        f"{family}_int8",
    }
    for found in internal(module):
        is_kernel = area(found.name) == "kernels"
        name = ".".join(found.name.split(".")[:3]) if is_kernel else found.name
        if name not in (allowed_kernels if is_kernel else allowed_host):
            yield found, "cannot be lifted out with it"
    for found in external(module):
        if found.name.split(".")[0] != "cutlass":
            yield found, "kernels import cutlass alone"


def test_the_disk_cache_looks_at_every_source_that_kernels_may_import():
    assert {"kernels", "planning.arch", "compile.keys", "compile.compiler", *LEAVES} <= set(
        disk_cache.SOURCES
    )


def test_nothing_imports_the_tests():
    assert not [i for m in MODULES for i in imports(m) if i.name.split(".")[0] in ("tests", "conftest")]


def test_host_package_imports_without_cutlass_and_torch_stays_on_the_cpu():
    """Every host module imports in a new process that cannot import cutlass and cuda."""
    code = """
        import importlib, sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("cutlass", "cuda"):
                    raise ImportError(f"{name} was imported at import time")
        sys.meta_path.insert(0, Refuse())
        import nvfp4_cute
        assert "nvfp4_cute.emulator.machine" not in sys.modules, "the emulator takes as long to import as all the rest"
        for name in sys.argv[1:]:
            importlib.import_module(name)
        if "torch" in sys.modules:
            assert not sys.modules["torch"].cuda.is_initialized()
    """
    modules = [m for m in HOST if not m.endswith("__main__") and place(m) not in INTEGRATIONS]
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *modules],
        check=True,
        cwd="/",
        timeout=120,
    )


def test_every_folder_is_packaged():
    """A subpackage that pyproject.toml omits works in a checkout but is missing from the wheel."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("packages = [") : text.index("[tool.setuptools.package-dir]")]
    packages = [m for m, path in MODULES.items() if path.name == "__init__.py"]
    assert sorted(packages) == sorted(ast.literal_eval(block[block.index("[") :]))


# ---- single rules ----------------------------------------------------------------------------------------------


@each(m for m in MODULES if m != "nvfp4_cute.env")
def test_only_env_reads_the_environment(module):
    return style_lint.environment_findings(str(MODULES[module]), SOURCES[MODULES[module]])


ASKS_A_FAMILY = [
    m for m in HOST if not f"{place(m)}.".startswith(tuple(f"{name}." for name in NAMES_ARCHITECTURES))
]


@each(ASKS_A_FAMILY)
def test_host_code_asks_a_family_and_does_not_say_which(module):
    """Use ``planning.arch.family_of(arch)``, or add another function of an architecture to ``planning.arch``."""
    return style_lint.architecture_findings(str(MODULES[module]), SOURCES[MODULES[module]])


# The emulator knows only the formats of PTX.
KNOWS_ELEMENTS = ("formats", "emulator", "timing")


@each(m for m in HOST if area(m) not in KNOWS_ELEMENTS)
def test_host_code_asks_a_format_for_bytes_and_elements(module):
    """Use the format's record: row_bytes, elements, num_k_blocks, scale_shape, atom_row_bytes ..."""
    return style_lint.element_size_findings(str(MODULES[module]), SOURCES[MODULES[module]])


@each(KERNELS)
def test_kernels_do_not_postpone_annotations(module):
    """`cute.struct` reads annotations as types, and the future import turns them into strings."""
    return [(found, "") for found in imports(module) if found.name == "__future__"]


def test_kernels_keep_pipeline_state_in_rebound_local_names():
    sources = {str(MODULES[m].relative_to(ROOT)): SOURCES[MODULES[m]] for m in KERNELS}
    findings = style_lint.pipeline_state_findings(sources)
    assert not findings, "\n".join(map(str, findings))


# ---- the lint finds planted faults -----------------------------------------------------------------------------

GOOD = """
def run_load(args):
    producer = args.producer
    while args.more:
        for k_tile in range(8):
            stage = producer.acquire_and_advance()
            copy(stage.index, stage.barrier)
    producer.tail()

def mma_tile(consumer, acc):
    for k_tile in range(8):
        stage = consumer.wait_and_advance()
        stage.release()
    return consumer, acc

def forward(consumer, acc):
    return mma_tile(consumer, acc)

def run_mma(args):
    consumer, acc = args.consumer, 0
    while args.more:
        consumer, acc = mma_tile(consumer, acc)
        consumer = mma_tile(consumer, acc)[0]
        consumer, acc = forward(acc=acc, consumer=consumer)
"""

FAULTS = {
    "bundle": ("P1", "def run(args):\n    for _ in r:\n        args.consumer.wait_and_advance()\n"),
    "self": ("P1", "class A:\n    def run(self):\n        self.state.advance()\n"),
    "self itself": ("P1", "class A:\n    def run(self):\n        self.advance()\n"),
    "list": ("P1", "def run(states):\n    states[0].advance()\n"),
    "call result": ("P1", "def run(pipe):\n    pipe.make_producer().acquire_and_advance()\n"),
    "closure": (
        "P2",
        "def run(c):\n    def step():\n        c.wait_and_advance()\n    step()\n    return c\n",
    ),
    "global": ("P2", "def run():\n    state.advance()\n"),
    "helper": ("P3", "def step(consumer):\n    consumer.wait_and_advance()\n"),
    "one return of two": (
        "P3",
        "def step(consumer, n):\n    consumer.advance()\n    if n:\n        return consumer\n    return n\n",
    ),
    "helper of a helper": (
        "P3",
        "def a(c):\n    c.advance()\n    return c\ndef b(c):\n    c = a(c)\n",
    ),
    "dropped result": (
        "P4",
        "def a(c):\n    c.advance()\n    return c\ndef b(args):\n    c = args.c\n    a(c)\n",
    ),
    "wrong name": (
        "P4",
        "def a(c):\n    c.advance()\n    return c\ndef b(args):\n    c = args.c\n    d = a(c)\n",
    ),
    "method": (
        "P4",
        "class A:\n    def step(self, c):\n        c.advance()\n        return c\n"
        "    def run(self, args):\n        c = args.c\n        self.step(c)\n",
    ),
    "keyword": (
        "P4",
        "def a(x, *, c):\n    c.advance()\n    return c\ndef b(args):\n    c = args.c\n    a(1, c=c)\n",
    ),
    "bundle into a helper": (
        "P1",
        "def a(c):\n    c.advance()\n    return c\ndef b(args):\n    x = a(args.c)\n",
    ),
}


def test_lint_accepts_rebound_local_state():
    assert style_lint.pipeline_state_findings({"good.py": GOOD}) == []


@pytest.mark.parametrize("name", FAULTS)
def test_lint_catches(name):
    rule, source = FAULTS[name]
    assert rule in {f.rule for f in style_lint.pipeline_state_findings({"bad.py": source})}


def test_lint_follows_helpers_into_other_files():
    helper = "def step(c):\n    c.advance()\n    return c\n"
    caller = "def run(args):\n    c = args.c\n    step(c)\n"
    findings = style_lint.pipeline_state_findings({"helper.py": helper, "caller.py": caller})
    assert [(f.path, f.line, f.rule) for f in findings] == [("caller.py", 3, "P4")]


def test_lint_knows_every_advancing_method_of_the_dsl():
    """ADVANCERS lists all methods of the DSL's participants that assign to self or advance a member."""
    pipeline = pytest.importorskip("cutlass.pipeline")
    quiet = {
        "__init__",
        "tail",
    }  # tail() drains the pipeline at the end of a role: nothing reads the state afterwards
    for cls in (pipeline.PipelineState, pipeline.PipelineProducer, pipeline.PipelineConsumer):
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        for method in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
            stores = [
                n for n in ast.walk(method) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
            ]
            calls = [
                n for n in ast.walk(method) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
            ]
            advances = bool(stores) or any(n.func.attr in style_lint.ADVANCERS for n in calls)
            if advances and method.name not in quiet:
                assert method.name in style_lint.ADVANCERS, f"{cls.__name__}.{method.name} advances state"


def test_circle_lint_catches():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert style_lint.circles(graph) == [["b", "c"]]
    graph["d"] = {"e"}
    assert style_lint.circles(graph) == [["a", "b", "c", "d", "e"]]
    assert style_lint.circles({"a": {"b"}, "b": set()}) == []


def test_element_size_lint_catches():
    source = """from nvfp4_cute.formats.scale_layout import SF_VEC_SIZE, to_blocked, padded_shape
k = 2 * row_bytes
pitch = self.a.stride(1) * 2
blocks = -(-k // 64) * 512
data = torch.empty(m, k // 2)
both = x.shape[-1] // 16 + (m + n) * k // 32
half = n // 2 + len(b) // 2
"""
    found = style_lint.element_size_findings("x.py", source)
    assert sorted((f.line, f.rule) for f in found) == [
        *[(1, "B3")] * 2, (2, "B2"), (3, "B2"), (4, "B1"), (5, "B1"), (6, "B1"), (6, "B1"),
    ]  # fmt: skip


def test_environment_lint_catches():
    source = """import os
from os import getenv
os.environ["A"]
os.getenv("B")
os.environ.setdefault("C", "")
os.environ["D"] = os.environ["E"]
os.environ["F"] = "a setting for a library"
"""
    assert sorted(f.line for f in style_lint.environment_findings("x.py", source)) == [2, 3, 4, 5, 6]


def test_architecture_lint_catches():
    source = """from a.arch import base, sm90
import a.arch.sm120.limits
from b import GroupedGemmSm100
if arch == "sm_90a":
    y = 1
if arch in ("sm_120a", "sm_121a"):
    y = sm100.ARCHS
x = family.sm_90
def choose_sm100(arch="sm_100a"):
    return "sm_100a, for example"
for transform32 in prism90:
    pass
"""
    assert {f.line for f in style_lint.architecture_findings("x.py", source)} == {1, 2, 3, 4, 6, 7, 8, 9}


def test_import_lint_resolves_names():
    source = """
import os
from . import ptx
from ..errors import EmulatorError
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import torch
def f():
    import cutlass
"""
    known = frozenset({"p.errors", "p.emu", "p.emu.ptx", "p.emu.machine"})
    found = {(i.name, i.deferred) for i in style_lint.imports(source, "p.emu.machine", known)}
    assert found == {
        ("os", False),
        ("p.emu.ptx", False),
        ("p.errors", False),
        ("typing", False),
        ("torch", True),
        ("cutlass", True),
    }
