"""Folders of sources (``spec.py``, ``reference.py``, ``kernel.py``), and the JSON files made of them."""

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nvfp4_cute.competition.bundle import Recipe, assemble
from nvfp4_cute.competition.export import MOVED, NOT_EVERYWHERE
from nvfp4_cute.competition.rules import check_export_rules
from nvfp4_cute.competition.trace.blobs import write_tensors
from nvfp4_cute.problems import trace_schema as schema
from nvfp4_cute.problems import traces
from nvfp4_cute.problems.trace_schema import GENERATOR, Definition, Solution, Spec, Workload

LIBRARY = "nvfp4-cute"
"""A dependency of kernels that call this library, which must be installed for them."""
KERNEL_FILE = "kernel.py"
Triple = tuple[Definition, list[Workload], Solution]


def names() -> tuple[str, ...]:
    """Returns the problems that this project has in the schema."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(traces.__path__) if module.ispkg))


def is_source(folder: Path) -> bool:
    """Whether a folder contains sources instead of JSON."""
    return (folder / "spec.py").is_file()


def load(
    problem: str,
    axes: Mapping[str, Any] | None = None,
    *,
    returns: bool = False,
    reads: Callable[[], object] = lambda: None,
) -> Triple:
    """Returns definition, workloads, and solution of a problem.

    Args:
        problem: a name of :func:`names`, or the path of a folder of sources.
        axes: other values of the arguments of its ``spec`` function: sizes of constant axes, and for a variable axis
            one entry per workload.
        returns: whether the solution returns its outputs, instead of writing to given ones.
        reads: called after each read of a source file.

    Raises:
        ValueError: there is no such problem or axis, or the kernel breaks a rule of exports.
    """
    is_ours = problem in names()
    if not is_ours and not is_source(Path(problem)):
        raise ValueError(
            f"problem {problem!r}: neither a folder with spec.py, reference.py and kernel.py, nor one of {', '.join(names())}"
        )
    spec = _spec(_module(problem, "spec", is_ours), dict(axes or {}))
    definition = spec.definition(_reference(problem, is_ours, reads))
    workloads = spec.all_workloads(definition.generator is not None)
    sizes = [definition.sizes(workload.axes) for workload in workloads]
    text = _kernel_text(problem, spec, is_ours, sizes, reads)
    summary = (ast.get_docstring(ast.parse(text)) or spec.description).partition("\n")[0]
    entry = "run"
    if returns:
        entry, text = "returned", f"{text}\n\n{returning(definition)}"
    findings = check_export_rules(
        text, allowed=(LIBRARY.replace("-", "_"),) if LIBRARY in spec.dependencies else ()
    )
    if findings and is_ours:
        raise ValueError(f"the kernel of {problem} breaks rules: " + "; ".join(map(str, findings)))
    solution = Solution(
        f"{spec.name}_nvfp4_cute" + ("_returning" if returns else ""),
        spec.name,
        f"{KERNEL_FILE}::{entry}",
        {KERNEL_FILE: text},
        spec.languages,
        spec.target_hardware,
        spec.dependencies,
        not returns,
        description=summary,
    )
    return definition, list(workloads), solution


def returning(definition: Definition) -> str:
    """Returns the source of a function that allocates the outputs of ``run``, calls it, and returns them."""
    inputs, outputs = ", ".join(definition.inputs), ", ".join(definition.outputs)
    device = next(name for name, spec in definition.inputs.items() if spec.shape)
    lines = [
        f"def returned({inputs}):",
        '    """What ``run`` writes, in new tensors."""',
        "    import torch",
        "",
    ]
    for name, spec in definition.outputs.items():
        shape = ", ".join(_extent(definition, axis) for axis in spec.shape or ())
        dtype = schema.DTYPES[spec.dtype]
        lines.append(f"    {name} = torch.empty(({shape},), dtype={dtype}, device={device}.device)")
    lines += [f"    run({inputs}, {outputs})", f"    return {outputs}"]
    return "\n".join(lines) + "\n"


def _extent(definition: Definition, axis: str) -> str:
    """Returns an axis as code: its constant, or the extent of the first input that has it."""
    value = definition.axes[axis].value
    if value is not None:
        return str(value)
    for name, spec in definition.inputs.items():
        if axis in (spec.shape or ()):
            return f"{name}.shape[{(spec.shape or ()).index(axis)}]"
    raise ValueError(
        f"{definition.name}: no input has the axis {axis} of an output; --returning cannot allocate it"
    )


def definition_path(root: Path, definition: Definition) -> Path:
    """Returns the path of a definition in a trace set."""
    return root / "definitions" / definition.op_type / f"{definition.name}.json"


def write_trace_set(
    root: Path, definition: Definition, workloads: Sequence[Workload], solution: Solution
) -> None:
    """Writes the folders that FlashInfer-Bench reads as a trace set. Generated inputs go into safetensors files."""
    kind = definition.op_type
    plain = replace(definition, generator=None)
    paths = {
        definition_path(root, definition): schema.definition_json(plain),
        root / "solutions" / kind / definition.name / f"{solution.name}.json": schema.solution_json(solution),
    }
    for path, content in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
    lines = []
    for workload in workloads:
        stored = (
            Path("blob")
            / "workloads"
            / kind
            / definition.name
            / f"{definition.name}_{workload.uuid}.safetensors"
        )
        inputs: Mapping[str, Any] = workload.inputs
        if definition.generator:
            write_tensors(root / stored, _generated(definition, workload))
            inputs = {
                name: {"type": "safetensors", "path": str(stored), "tensor_key": name}
                for name in definition.inputs
            }
        content = schema.workload_json(replace(workload, inputs=inputs))
        lines.append(json.dumps({"definition": definition.name, "workload": content}) + "\n")
    path = root / "workloads" / kind / f"{definition.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def _generated(definition: Definition, workload: Workload) -> dict[str, torch.Tensor]:
    namespace: dict[str, Any] = {}
    exec(compile(definition.reference, definition.name, "exec"), namespace)
    return namespace[GENERATOR](definition.sizes(workload.axes), torch.device("cpu"))


def _module(problem: str, part: str, is_ours: bool) -> ModuleType:
    if is_ours:
        return importlib.import_module(f"{traces.__name__}.{problem}.{part}")
    path = Path(problem) / f"{part}.py"
    found = importlib.util.spec_from_file_location(f"{Path(problem).name}_{part}", path)
    if found is None or found.loader is None or not path.is_file():
        raise ValueError(f"there is no file {path}; a problem's folder holds it")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _spec(module: ModuleType, axes: dict[str, Any]) -> Spec:
    known = inspect.signature(module.spec).parameters
    for name, value in axes.items():
        if name not in known:
            raise ValueError(f"axis {name} is unknown; the problem has {', '.join(known)}")
        is_variable = isinstance(known[name].default, tuple)
        axes[name] = tuple(value) if is_variable else _one(name, value)
    return module.spec(**axes)


def _one(name: str, value: Sequence[int]) -> int:
    if len(value) != 1:
        raise ValueError(f"axis {name} is a constant: one size, not {len(value)}")
    return value[0]


def _reference(problem: str, is_ours: bool, reads: Callable[[], object]) -> str:
    if not is_ours:
        return _text(problem, "reference.py")
    module = _module(problem, "reference", is_ours)
    entry_points = tuple(name for name in ("run", GENERATOR) if hasattr(module, name))
    return assemble(Recipe(module.__name__, entry_points), reads).text


def _kernel_text(
    problem: str, spec: Spec, is_ours: bool, sizes: list[dict[str, int]], reads: Callable[[], object]
) -> str:
    if not is_ours:
        return _text(problem, KERNEL_FILE)
    kernel = _module(problem, "kernel", is_ours)
    if LIBRARY in spec.dependencies:
        return inspect.getsource(kernel)
    frozen = kernel.frozen_constants(sizes)
    return assemble(Recipe(kernel.__name__, ("run",), NOT_EVERYWHERE, MOVED, frozen), reads).text


def _text(problem: str, name: str) -> str:
    path = Path(problem) / name
    if not path.is_file():
        raise ValueError(f"there is no file {path}; a problem's folder holds it")
    return path.read_text(encoding="utf-8")
