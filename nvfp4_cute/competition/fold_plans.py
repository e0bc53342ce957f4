"""What host code computes from a frozen config, computed here: a kernel's plans, as numbers.

A file that names every config that it may ever compile needs no code that plans for others. Its planning functions, which use
nothing but Python's own library, are executed here for each of its configs. An expression with the same value for all of them
is that value; a function that differs becomes a table by the config's name.
"""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import FunctionType
from typing import Any

from nvfp4_cute.competition.fold_values import FUNCTIONS, UNKNOWN, Symbol, World, calls, is_same, parameters
from nvfp4_cute.competition.sources import is_stdlib

CONFIG = "KernelConfig"
# Of a config as it is launched, and not as it is compiled.
LAUNCH_FIELD = "num_cta"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SIMPLE = (bool, int, float, str, type(None))
BUILTINS = {
    function.__name__: function
    for function in (
        abs,
        all,
        any,
        bool,
        int,
        isinstance,
        len,
        max,
        min,
        range,
        round,
        sum,
        sorted,
        tuple,
        zip,
    )
}


class External:
    """Something of an imported module that is no part of Python: it is passed on, and says its name."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, External) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)


class ExternalModule(External):
    """A module of which nothing is there but names."""

    def __getattr__(self, name: str) -> External:
        if name.startswith("__"):  # no AttributeError: nobody may take the lack of it for an answer
            raise TypeError(name)
        return external(f"{self._name}.{name}")


def external(name: str) -> External:
    """A class, or a module, by its whole name."""
    return (External if name.rpartition(".")[2][:1].isupper() else ExternalModule)(name)


class Plans:
    """Values of expressions in one state of a file, one a config.

    Attributes:
        configs: as they are compiled, in the order of the file.
        pure: names of the file's functions and classes that need nothing but Python, with what they are.
    """

    def __init__(self, world: World):
        self.world = world
        self.pure = _executed(world)
        self.configs = self._configs()
        self._of_type: dict[str, list[Any]] = {CONFIG: self.configs} if self.configs else {}
        self._known: dict[ast.expr, Any] = {}
        self._open: set[ast.AST] = set()

    def _configs(self) -> list[Any]:
        found: dict[Any, None] = {}
        for load in self.world.loads[CONFIG]:
            call = self.world.parents[load]
            if not (isinstance(call, ast.Call) and call.func is load):
                continue
            around = self.world.enclosing(call, FUNCTIONS)
            if isinstance(around, ast.FunctionDef) and _is_table(around):
                continue
            if around is not None or CONFIG not in self.pure:
                return []
            config = eval(compile(ast.Expression(call), "configs", "eval"), dict(self.pure))
            found[replace(config, **{LAUNCH_FIELD: None} if hasattr(config, LAUNCH_FIELD) else {})] = None
        return list(found)

    # ---- values ------------------------------------------------------------------------------------
    def values(self, node: ast.expr) -> list[Any] | None:
        """The expression's value for each config, or None where something in it is not known."""
        if not self.configs or isinstance(node, ast.Constant | ast.Starred):
            return None
        if node not in self._known:
            self._known[node] = None  # of what leads to itself
            self._known[node] = self._values(node)
        return self._known[node]

    def one(self, node: ast.expr) -> Any:
        """The value that is the same for all configs: a number, a text, a bool, None, or a tuple of such; else UNKNOWN."""
        found = self.values(node)
        if found is None or any(not is_same(v, found[0]) for v in found):
            return UNKNOWN
        if type(found[0]) is External:
            return Symbol(repr(found[0]))
        return found[0] if _is_simple(found[0]) else UNKNOWN

    def _values(self, node: ast.expr) -> list[Any] | None:
        if isinstance(node, ast.Name):
            known = self._of_atom(node)
            if known is None and node.id in self.pure and not self.world.is_local(node):
                return [self.pure[node.id]] * len(self.configs)
            return known
        if isinstance(node, ast.Attribute):
            if node.attr == LAUNCH_FIELD or (known := self._of_atom(node)) is not None:
                return None if node.attr == LAUNCH_FIELD else known
            owners = self.values(node.value)
            try:
                return None if owners is None else [getattr(owner, node.attr) for owner in owners]
            except Exception:
                return None
        return self._evaluated(node)

    def _evaluated(self, node: ast.expr) -> list[Any] | None:
        """As :meth:`values`, executed."""
        rows: dict[str, list[Any]] = {}
        try:
            expression = self._substituted(node, rows, frozenset())
        except _UnknownNameError:
            return None
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "plan", "eval")
        found = []
        for index in range(len(self.configs)):
            names = {**BUILTINS, **self.pure, **{name: row[index] for name, row in rows.items()}}
            try:
                found.append(eval(code, {"__builtins__": {}, **names}))
            except Exception:
                return None
        return found

    def _substituted(self, node: Any, rows: dict[str, list[Any]], bound: frozenset[str]) -> Any:
        """The expression with names of ``rows`` in the place of what is known by config.

        Args:
            bound: names that comprehensions around the node bind.
        """
        if isinstance(node, list):
            return [self._substituted(part, rows, bound) for part in node]
        if not isinstance(node, ast.AST):
            return node
        if isinstance(node, COMPREHENSIONS):
            bound |= {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Lambda | ast.NamedExpr) or (
            isinstance(node, ast.Attribute) and node.attr == LAUNCH_FIELD
        ):
            raise _UnknownNameError
        elif isinstance(node, ast.Name) and node.id in bound:
            return node
        elif isinstance(node, ast.Name | ast.Attribute):
            known = self._of_atom(node)
            if known is not None:
                name = f"_row{len(rows)}"
                rows[name] = known
                return ast.Name(name, ast.Load())
            if isinstance(node, ast.Name):
                if self.world.is_local(node) or not (node.id in self.pure or node.id in BUILTINS):
                    raise _UnknownNameError
                return node
        elif isinstance(node, ast.Subscript) and (rows_of := self.values(node.value)) is not None:
            if all(isinstance(row, tuple) and row and all(part == row[0] for part in row) for row in rows_of):
                name = f"_row{len(rows)}"
                rows[name] = [row[0] for row in rows_of]
                return ast.Name(name, ast.Load())
        parts = {name: self._substituted(value, rows, bound) for name, value in ast.iter_fields(node)}
        return type(node)(**parts)

    def _of_atom(self, node: ast.expr) -> list[Any] | None:
        """Values of a name or an attribute that stands for a config, a plan, or a part of an assignment."""
        kind = self.world.type_of(node)
        around = self.world.enclosing(node, FUNCTIONS)
        if isinstance(around, ast.FunctionDef) and kind is not None and _returned(around) == kind:
            kind = None  # a plan in the making
        if kind == CONFIG:
            return self.configs
        if kind is not None and (rows := self.of_type(kind)) is not None:
            return rows
        if isinstance(node, ast.Name):
            return self._of_local(node)
        return None

    def of_type(self, kind: str) -> list[Any] | None:
        """The plans of a class that exactly one function makes, from a config alone."""
        if kind not in self._of_type:
            self._of_type[kind] = None  # type: ignore[assignment]
            makers = [f for f in self.world.functions.values() if self.is_plan(f) and _returned(f) == kind]
            calls = [call for maker in makers for call in self.calls_from_outside(maker)]
            found = [self.values(call) for call in calls]
            if found and len(makers) == 1 and all(f is not None and f == found[0] for f in found):
                self._of_type[kind] = found[0]  # type: ignore[assignment]
        return self._of_type[kind]

    def _of_local(self, node: ast.Name) -> list[Any] | None:
        """Of a local name that is bound once, by an assignment, perhaps among others, or of a parameter that has one value."""
        function = self.world.enclosing(node, FUNCTIONS)
        if function is None:
            return None
        binding = self._binding(function, node)
        if binding is None or binding in self._open:
            return None
        self._open.add(binding)
        try:
            found = (
                self._of_parameter(function, binding)
                if isinstance(binding, ast.arg)
                else self._of_target(binding)
            )
        finally:
            self._open.discard(binding)
        return found if found is not None and all(map(_is_frozen, found)) else None

    def _binding(self, function: ast.AST, node: ast.Name) -> ast.AST | None:
        """What gives a name its value: the only binding, or of a parameter that one statement assigns anew the nearer one."""
        bound = self.world.bound_in(function, node.id)
        if len(bound) == 1:
            return bound[0]
        if len(bound) != 2 or not isinstance(bound[0], ast.arg):
            return None
        statement = self.world.parents[bound[1]]
        if not isinstance(statement, ast.Assign) or self.world.parents[statement] is not function:
            return None
        if self.world.is_inside(node, statement.value):
            return bound[0]
        return bound[1] if node.lineno > (statement.end_lineno or 0) else None

    def _of_parameter(self, function: ast.AST, argument: ast.arg) -> list[Any] | None:
        """Of a parameter of a function that is only called."""
        if (
            not isinstance(function, ast.FunctionDef)
            or self.world.functions.get(function.name) is not function
        ):
            return None
        found = calls(self.world, function.name) if function.name not in self.world.entry_points else None
        place = next((p for a, _, p in parameters(function) if a is argument), None)
        default = next((d for a, d, _ in parameters(function) if a is argument), None)
        values: list[Any] = []
        for call in found or []:
            given = next((k.value for k in call.keywords if k.arg == argument.arg), default)
            if place is not None and place < len(call.args):
                given = call.args[place]
            values.append(None if given is None else self._row(given))
        return values[0] if values and values[0] is not None and all(v == values[0] for v in values) else None

    def _of_target(self, name: ast.AST) -> list[Any] | None:
        """Of what an assignment gives a name."""
        path: list[int] = []
        target = name
        while isinstance(parent := self.world.parents[target], ast.Tuple):
            if any(isinstance(e, ast.Starred) for e in parent.elts):
                return None
            path.insert(0, parent.elts.index(target))  # type: ignore[arg-type]
            target = parent
        if not isinstance(parent, ast.Assign) or len(parent.targets) != 1:
            return None
        value = parent.value
        while (
            path and isinstance(value, ast.Tuple) and not any(isinstance(e, ast.Starred) for e in value.elts)
        ):
            value = value.elts[path.pop(0)]
        found = self._row(value)
        for index in path:
            try:
                found = None if found is None else [row[index] for row in found]
            except (TypeError, IndexError):
                return None
        return found

    def _row(self, node: ast.expr) -> list[Any] | None:
        """An expression's values, of a constant, too."""
        value = self.world.value(node)
        return [value] * len(self.configs) if _is_simple(value) else self.values(node)

    # ---- functions ---------------------------------------------------------------------------------
    def is_plan(self, function: ast.FunctionDef) -> bool:
        """Whether a function is pure and takes a config."""
        return function.name in self.pure and any(
            isinstance(a.annotation, ast.Name) and a.annotation.id == CONFIG for a in function.args.args
        )

    def calls_from_outside(self, function: ast.FunctionDef) -> list[ast.Call]:
        """Calls that are not made by pure functions: those are executed as they are."""
        found = []
        for load in self.world.loads[function.name]:
            call = self.world.parents[load]
            around = self.world.enclosing(load, (ast.FunctionDef, ast.ClassDef))
            if (
                isinstance(call, ast.Call)
                and call.func is load
                and getattr(around, "name", "") not in self.pure
            ):
                found.append(call)
        return found

    def is_identity(self, call: ast.Call) -> bool:
        """Whether a call of a plan gives the config that it gets."""
        function = self.world.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if function is None or not self.is_plan(function) or not self.configs or not call.args:
            return False
        return self.world.type_of(call.args[0]) == CONFIG and self.values(call) == self.configs

    def is_planned(self, node: ast.expr) -> bool:
        """Whether there is more in an expression than Python's operators on named numbers."""
        return any(
            isinstance(part, ast.Attribute)
            or (
                isinstance(part, ast.Call)
                and isinstance(part.func, ast.Name)
                and part.func.id in self.world.functions
            )
            for part in ast.walk(node)
        )

    def is_host_code(self, node: ast.AST) -> bool:
        """Whether the function around a node uses nothing but Python's own library and what is pure of ours."""
        around = self.world.enclosing(node, FUNCTIONS)
        return around is not None and not any(
            isinstance(part, ast.Name) and isinstance(self.pure.get(part.id), External)
            for part in ast.walk(around)
        )

    def is_python(self, name: str) -> bool:
        """Whether a name stands for a pure function of Python, a class of ours, or a function that uses nothing else."""
        function = self.world.functions.get(name)
        if function is not None:
            called = {
                c.func.id
                for c in ast.walk(function)
                if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)
            }
            plain = all(isinstance(c.func, ast.Name) for c in ast.walk(function) if isinstance(c, ast.Call))
            return (
                plain
                and self.is_host_code(function.body[0])
                and name not in called
                and all(map(self.is_python, called))
            )
        return name in BUILTINS or (name in self.world.classes and name in self.pure)

    def tables(self) -> Iterator[tuple[ast.FunctionDef, list[str]]]:
        """Functions whose values differ by config, with the lines that their bodies become."""
        for function in self.world.functions.values():
            if not self.is_plan(function) or not self.configs:
                continue
            found = [self.values(call) for call in self.calls_from_outside(function)]
            if not found or any(f is None or f != found[0] for f in found) or found[0] == self.configs:
                continue
            argument = next(
                a.arg
                for a in function.args.args
                if isinstance(a.annotation, ast.Name) and a.annotation.id == CONFIG
            )
            texts = [self.source(row) for row in found[0]]  # type: ignore[union-attr]
            if all(text is not None for text in texts) and not _is_table(function):
                keys = [f'"{config.to_name()}"' for config in self.configs]
                rows = [f"        {key}: {text}," for key, text in zip(keys, texts, strict=True)]
                yield function, ["    return {", *dict.fromkeys(rows), f"    }}[{argument}.to_name()]"]

    def source(self, value: Any) -> str | None:
        """An expression that makes a value; None where there is none."""
        if type(value) in SIMPLE or isinstance(value, External):
            return repr(value)
        if isinstance(value, tuple) and type(value) is tuple:
            parts = [self.source(part) for part in value]
            if any(part is None for part in parts):
                return None
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"  # type: ignore[arg-type]
        for name, known in self.pure.items():
            if known is value and name in self.world.stores:
                return name
        if is_dataclass(value):
            parts = [self.source(getattr(value, field.name)) for field in fields(value)]
            if any(part is None for part in parts):
                return None
            given = ", ".join(f"{f.name}={part}" for f, part in zip(fields(value), parts, strict=True))
            return f"{type(value).__name__}({given})"
        return None


class _UnknownNameError(Exception):
    """An expression depends on what is not known."""


def _executed(world: World) -> dict[str, Any]:
    """Functions, classes and constants of the file whose definitions need nothing but Python's own library, by name."""
    found: dict[str, Any] = {"__name__": "plans", "__builtins__": builtins}
    for node in world.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                if is_stdlib(node.module or "" if isinstance(node, ast.ImportFrom) else alias.name):
                    exec(compile(ast.Module([node], []), "plans", "exec"), found)
                else:
                    found[name] = external(world.sources[name])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign):
            try:
                exec(compile(ast.Module([node], []), "plans", "exec"), found)
            except Exception:  # of what an imported module would have to do
                continue
    return {name: value for name, value in found.items() if not name.startswith("__")}


def _returned(function: ast.FunctionDef) -> str:
    return function.returns.id if isinstance(function.returns, ast.Name) else ""


def _is_table(function: ast.FunctionDef) -> bool:
    last = function.body[-1]
    return (
        isinstance(last, ast.Return)
        and isinstance(last.value, ast.Subscript)
        and isinstance(last.value.value, ast.Dict)
    )


def _is_simple(value: Any) -> bool:
    if type(value) is str:
        return value.isidentifier() or not value  # what may stand in any quotes
    return type(value) in SIMPLE or (type(value) is tuple and all(map(_is_simple, value)))


def _is_frozen(value: Any) -> bool:
    """Whether nothing can change a value between here and where it is used."""
    if isinstance(value, tuple):
        return all(map(_is_frozen, value))
    if is_dataclass(value) and not isinstance(value, type):
        return value.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return isinstance(value, (*SIMPLE, External, type, range, Enum, FunctionType))
