"""Problems in the JSON files of FlashInfer-Bench and SOL-ExecBench: definition, workloads, solution.

The fields follow docs/flashinfer-trace of flashinfer-ai/flashinfer-bench and docs/ of NVIDIA/SOL-ExecBench. Where the two
differ, files written here are valid in both: an axis is a constant or a variable, and the ``spec`` of a solution has both
``language`` (FlashInfer-Bench) and ``languages`` (SOL-ExecBench). Files of either project can be read.
"""

import ast
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

DEFINITION_FILE, WORKLOAD_FILE, SOLUTION_FILE = "definition.json", "workload.jsonl", "solution.json"
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float4_e2m1": torch.float4_e2m1fn_x2,
    "float4_e2m1fn_x2": torch.float4_e2m1fn_x2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "bool": torch.bool,
}
"""Dtype of a tensor by its name in the schema. Shapes count elements of the torch dtype: bytes for packed fp4."""
GENERATOR = "generate_inputs"
OPERATORS = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.Name,
    ast.Constant,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
)
"""Syntax of an axis expression: numbers, names, + - * / // % ** and parentheses."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a definition. ``shape`` has names of axes, () for a tensor without dimensions, None for a Python number."""

    dtype: str
    shape: tuple[str, ...] | None
    description: str = ""


@dataclass(frozen=True)
class Axis:
    """A dimension: a constant ``value``, an ``expression`` of other axes, or, if both are None, a variable of the workload."""

    value: int | None = None
    expression: str | None = None
    description: str = ""

    @property
    def kind(self) -> str:
        """Kind of the axis in the schema."""
        return "const" if self.value is not None else "expr" if self.expression is not None else "var"


@dataclass(frozen=True)
class Tolerance:
    """Rule for a right answer. The defaults are those of both projects.

    A fraction ``matched_ratio`` of its elements has ``|x - y| <= atol + rtol * |y|``, and none exceeds ``error_cap``.
    """

    atol: float = 1e-2
    rtol: float = 1e-2
    matched_ratio: float = 0.99
    error_cap: float | None = None
    allow_negative_inf: bool = False


@dataclass(frozen=True)
class Workload:
    """Sizes of the variable axes, and the source of each input: {"type": "random"}, "scalar", "safetensors" or "custom"."""

    uuid: str
    axes: Mapping[str, int]
    inputs: Mapping[str, Mapping[str, Any]]
    tolerance: Tolerance = Tolerance()

    @property
    def name(self) -> str:
        """Its axes as readable text."""
        return "_".join(f"{axis}{size}" for axis, size in self.axes.items()) or self.uuid[:8]


@dataclass(frozen=True)
class Definition:
    """A problem to compute.

    Attributes:
        name: unique name.
        op_type: category.
        axes, inputs, outputs: in the order of the calling convention.
        reference: Python with ``run(inputs)``, which returns the outputs.
        constraints: expressions of the axes that hold.
        generator: function of ``reference`` that makes inputs of the kind "custom".
    """

    name: str
    op_type: str
    axes: Mapping[str, Axis]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    reference: str
    description: str = ""
    constraints: tuple[str, ...] = ()
    generator: str | None = None
    tags: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """Axes whose sizes a workload gives."""
        return tuple(name for name, axis in self.axes.items() if axis.kind == "var")

    def sizes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Returns the size of every axis of a workload.

        Raises:
            ValueError: a variable axis has no size, or a constraint does not hold.
        """
        found = {name: axis.value for name, axis in self.axes.items() if axis.value is not None}
        for name in self.variables:
            if name not in axes:
                raise ValueError(f"{self.name}: the workload says no {name}; add it to its axes")
            found[name] = axes[name]
        for name, axis in self.axes.items():
            if axis.expression is not None:
                found[name] = evaluate(axis.expression, found)
        for constraint in self.constraints:
            if not holds(constraint, found):
                raise ValueError(f"{self.name}: {constraint} does not hold of {found}")
        return found

    def shape(self, spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns a tensor's shape. ``sizes``: of every axis."""
        return tuple(int(name) if name.isdigit() else sizes[name] for name in spec.shape or ())


@dataclass(frozen=True)
class Solution:
    """Sources that compute a definition.

    Attributes:
        entry_point: "FILE::FUNCTION", called with the inputs one after the other.
        writes_outputs: whether the outputs follow the inputs as arguments (destination-passing style) instead of being
            returned.
        languages: names of SOL-ExecBench, such as "cute_dsl".
        binding: how Python calls C++ and CUDA: "torch" or "tvm-ffi"; None for the language's default.
        sources: path -> text.
    """

    name: str
    definition: str
    entry_point: str
    sources: Mapping[str, str]
    languages: tuple[str, ...] = ("pytorch",)
    target_hardware: tuple[str, ...] = ("LOCAL",)
    dependencies: tuple[str, ...] = ()
    writes_outputs: bool = True
    author: str = "nvfp4_cute"
    description: str = ""
    binding: str | None = None

    @property
    def entry_file(self) -> str:
        """File of the entry point."""
        return self.entry_point.partition("::")[0]

    @property
    def entry_name(self) -> str:
        """Function of the entry point."""
        return self.entry_point.partition("::")[2]


@dataclass(frozen=True)
class Spec:
    """A problem as a folder's ``spec.py`` states it. ``reference.py`` and ``kernel.py`` are in the same folder.

    Attributes:
        axes: name -> size of a constant axis, or the description of a variable axis.
        workloads: sizes of the variable axes.
        languages, target_hardware, dependencies: of the kernel.
    """

    name: str
    op_type: str
    axes: Mapping[str, int | str]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    workloads: tuple[Mapping[str, int], ...]
    description: str = ""
    constraints: tuple[str, ...] = ()
    tolerance: Tolerance = field(default=Tolerance())
    tags: tuple[str, ...] = ()
    languages: tuple[str, ...] = ("cute_dsl",)
    target_hardware: tuple[str, ...] = ("B200", "LOCAL")
    dependencies: tuple[str, ...] = ()

    def definition(self, reference: str) -> Definition:
        """Makes the definition with the text of ``reference.py``, which may have ``generate_inputs``."""
        axes = {
            name: Axis(value=axis) if isinstance(axis, int) else Axis(description=axis)
            for name, axis in self.axes.items()
        }
        functions = {node.name for node in ast.parse(reference).body if isinstance(node, ast.FunctionDef)}
        generator = GENERATOR if GENERATOR in functions else None
        return Definition(
            self.name,
            self.op_type,
            axes,
            self.inputs,
            self.outputs,
            reference,
            self.description,
            self.constraints,
            generator,
            self.tags,
        )

    def all_workloads(self, has_generator: bool) -> tuple[Workload, ...]:
        """Returns the workloads. Inputs come from the reference's generator if it has one, and are random otherwise."""
        source = {"type": "custom" if has_generator else "random"}
        return tuple(
            Workload(
                str(uuid.uuid5(uuid.NAMESPACE_URL, f"{self.name} {sorted(axes.items())}")),
                axes,
                dict.fromkeys(self.inputs, source),
                self.tolerance,
            )
            for axes in self.workloads
        )


def evaluate(expression: str, sizes: Mapping[str, int]) -> int:
    """Evaluates an axis expression.

    Raises:
        ValueError: it is not arithmetic of known axes, or not a whole number.
    """
    tree = ast.parse(expression, mode="eval")
    if not all(isinstance(node, OPERATORS) for node in ast.walk(tree)):
        raise ValueError(
            f"axis expression {expression!r} is more than arithmetic; write + - * / // % ** of axes"
        )
    try:
        value = eval(compile(tree, "axis", "eval"), {"__builtins__": {}}, dict(sizes))
    except NameError as error:
        raise ValueError(f"axis expression {expression!r}: {error}") from None
    if value != int(value):
        raise ValueError(f"axis expression {expression!r} gives {value}, no whole number")
    return int(value)


def holds(constraint: str, sizes: Mapping[str, int]) -> bool:
    """Returns whether a comparison of axes is true. Comparisons of anything else, such as values of an input, count as true."""
    tree = ast.parse(constraint, mode="eval")
    known = (*OPERATORS, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop)
    for node in ast.walk(tree):
        if not isinstance(node, known) or (isinstance(node, ast.Name) and node.id not in sizes):
            return True
    return bool(eval(compile(tree, "constraint", "eval"), {"__builtins__": {}}, dict(sizes)))


# ---- JSON ------------------------------------------------------------------------------------------------------


def definition_json(definition: Definition) -> dict[str, Any]:
    """Returns the definition in a form that both projects read."""
    axes = {
        name: _given(
            type=axis.kind, value=axis.value, expression=axis.expression, description=axis.description
        )
        for name, axis in definition.axes.items()
    }
    return _given(
        name=definition.name,
        op_type=definition.op_type,
        description=definition.description,
        tags=list(definition.tags),
        axes=axes,
        constraints=list(definition.constraints),
        custom_inputs_entrypoint=definition.generator,
        inputs={name: _tensor_json(spec) for name, spec in definition.inputs.items()},
        outputs={name: _tensor_json(spec) for name, spec in definition.outputs.items()},
        reference=definition.reference,
    )


def workload_json(workload: Workload) -> dict[str, Any]:
    """Returns a line of workload.jsonl."""
    tolerance = workload.tolerance
    return {
        "uuid": workload.uuid,
        "axes": dict(workload.axes),
        "inputs": {name: dict(source) for name, source in workload.inputs.items()},
        "tolerance": {
            "max_atol": tolerance.atol,
            "max_rtol": tolerance.rtol,
            "required_matched_ratio": tolerance.matched_ratio,
            "max_error_cap": tolerance.error_cap,
            "allow_negative_inf": tolerance.allow_negative_inf,
        },
    }


def solution_json(solution: Solution) -> dict[str, Any]:
    """Returns the solution in a form that both projects read:

    ``language`` for FlashInfer-Bench, ``languages`` for SOL-ExecBench.
    """
    return {
        "name": solution.name,
        "definition": solution.definition,
        "author": solution.author,
        "description": solution.description,
        "spec": {
            "language": "python",
            "languages": list(solution.languages),
            "target_hardware": list(solution.target_hardware),
            "entry_point": solution.entry_point,
            "destination_passing_style": solution.writes_outputs,
            "dependencies": list(solution.dependencies),
            **({"binding": solution.binding} if solution.binding else {}),
        },
        "sources": [{"path": path, "content": text} for path, text in solution.sources.items()],
    }


def write_folder(
    folder: Path, definition: Definition, workloads: Iterable[Workload], solution: Solution
) -> None:
    """Writes the three files into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DEFINITION_FILE).write_text(json.dumps(definition_json(definition), indent=2) + "\n")
    lines = (json.dumps(workload_json(workload)) + "\n" for workload in workloads)
    (folder / WORKLOAD_FILE).write_text("".join(lines))
    (folder / SOLUTION_FILE).write_text(json.dumps(solution_json(solution), indent=2) + "\n")


def read_folder(folder: Path, solution: Path | None = None) -> tuple[Definition, list[Workload], Solution]:
    """Reads a folder of the three files from either project.

    Args:
        solution: another solution than the folder's ``solution.json``.

    Raises:
        ValueError: a file is missing or breaks a rule of the schema; the message names file, rule, and value.
    """
    for path in (folder / DEFINITION_FILE, folder / WORKLOAD_FILE, solution or folder / SOLUTION_FILE):
        if not path.is_file():
            raise ValueError(f"there is no file {path}; a problem's folder holds it")
    definition = _read(folder / DEFINITION_FILE, lambda text: _definition(json.loads(text)))
    workloads = _read(
        folder / WORKLOAD_FILE,
        lambda text: [_workload(json.loads(line), definition) for line in text.splitlines() if line.strip()],
    )
    answer = _read(solution or folder / SOLUTION_FILE, lambda text: _solution(json.loads(text)))
    if answer.definition != definition.name:
        raise ValueError(
            f"{answer.name} solves {answer.definition!r}; the folder defines {definition.name!r}"
        )
    return definition, workloads, answer


def _read(path: Path, parse: Any) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except KeyError as error:
        raise ValueError(f"{path}: the field {error} is missing") from None
    except (ValueError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{path}: {error}") from None


def _definition(content: Mapping[str, Any]) -> Definition:
    axes = {
        name: Axis(axis.get("value"), axis.get("expression"), axis.get("description") or "")
        for name, axis in content["axes"].items()
    }
    found = Definition(
        content["name"],
        content.get("op_type") or "",
        axes,
        {name: _tensor(name, spec, axes) for name, spec in content["inputs"].items()},
        {name: _tensor(name, spec, axes) for name, spec in content["outputs"].items()},
        content["reference"],
        content.get("description") or "",
        tuple(content.get("constraints") or ()),
        content.get("custom_inputs_entrypoint"),
        tuple(content.get("tags") or ()),
    )
    both = set(found.inputs) & set(found.outputs)
    if both:
        raise ValueError(f"{sorted(both)} name an input and an output; give one another name")
    functions = [node.name for node in ast.parse(found.reference).body if isinstance(node, ast.FunctionDef)]
    for needed in filter(None, ["run", found.generator]):
        if needed not in functions:
            raise ValueError(
                f"the reference has no function {needed}; it defines {', '.join(functions) or 'none'}"
            )
    return found


def _tensor(name: str, content: Mapping[str, Any], axes: Mapping[str, Axis]) -> TensorSpec:
    if content["dtype"] not in DTYPES:
        raise ValueError(f"{name}: dtype {content['dtype']!r} is unknown; use one of {', '.join(DTYPES)}")
    shape = content["shape"]
    unknown = [axis for axis in shape or () if axis not in axes and not axis.isdigit()]
    if unknown:
        raise ValueError(f"{name}: the shape names {', '.join(unknown)}; the axes are {', '.join(axes)}")
    return TensorSpec(
        content["dtype"], None if shape is None else tuple(shape), content.get("description") or ""
    )


def _workload(content: Mapping[str, Any], definition: Definition) -> Workload:
    content = content.get("workload") or content  # lines of FlashInfer-Bench are traces without a result
    tolerance = {key: value for key, value in (content.get("tolerance") or {}).items() if value is not None}
    inputs = content["inputs"]
    unknown = sorted(set(inputs) - set(definition.inputs))
    if unknown:
        raise ValueError(f"a workload gives {', '.join(unknown)}, which {definition.name} has no input of")
    default = Tolerance()
    found = Workload(
        content["uuid"],
        content["axes"],
        inputs,
        Tolerance(
            tolerance.get("max_atol", default.atol),
            tolerance.get("max_rtol", default.rtol),
            tolerance.get("required_matched_ratio", default.matched_ratio),
            tolerance.get("max_error_cap"),
            tolerance.get("allow_negative_inf", False),
        ),
    )
    definition.sizes(found.axes)
    return found


def _solution(content: Mapping[str, Any]) -> Solution:
    spec = content["spec"]
    sources = [(source["path"], source["content"]) for source in content["sources"]]
    for path, _ in sources:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"source {path!r} leaves the folder; name it relative to the folder")
    if len(dict(sources)) != len(sources):
        raise ValueError("two sources have one path; name each once")
    found = Solution(
        content["name"],
        content["definition"],
        spec["entry_point"],
        dict(sources),
        tuple(spec.get("languages") or [spec["language"]]),
        tuple(spec["target_hardware"]),
        tuple(spec.get("dependencies") or ()),
        spec.get("destination_passing_style", True),
        content["author"],
        content.get("description") or "",
        spec.get("binding"),
    )
    if found.entry_point.count("::") != 1 or found.entry_file not in found.sources:
        raise ValueError(
            f"entry_point {found.entry_point!r} is not FILE::FUNCTION with FILE among the sources"
        )
    return found


def _tensor_json(spec: TensorSpec) -> dict[str, Any]:
    shape = None if spec.shape is None else list(spec.shape)
    return {"shape": shape, **_given(dtype=spec.dtype, description=spec.description)}


def _given(**fields: Any) -> dict[str, Any]:
    """Returns the fields that are neither None nor an empty text or list."""
    return {name: value for name, value in fields.items() if value not in (None, "", [])}
