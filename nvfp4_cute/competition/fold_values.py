"""What is known of a file's expressions: values that are literals, and who calls, mentions, and defines what."""

import ast
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

UNKNOWN = object()
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONST_EXPR = "const_expr"
COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# Bits of what the compiler's number types are named after.
WIDTH = re.compile(r"cutlass\.\w*?(\d+)(?:E\w+)?")
# Kinds of expressions that are never None, whatever is in them.
NEVER_NONE = (ast.Tuple, ast.List, ast.Dict, ast.JoinedStr, ast.Lambda, ast.BinOp, ast.Compare)


@dataclass(frozen=True)
class Symbol:
    """A class of an imported module, by its whole name, or an object that a top-level name stands for: two names, two values."""

    name: str


class World:
    """One state of a file.

    Args:
        tree: its syntax.
        entry_points: top-level names that are used from outside.
    """

    def __init__(self, tree: ast.Module, entry_points: frozenset[str]):
        self.tree, self.entry_points = tree, entry_points
        self.parents: dict[ast.AST, ast.AST] = {}
        self.loads: dict[str, list[ast.Name]] = defaultdict(list)
        self.stores: dict[str, list[ast.AST]] = defaultdict(list)
        self.attributes: dict[str, list[ast.Attribute]] = defaultdict(list)
        self.texts: set[str] = set()
        self.planned: Callable[[ast.expr], Any] = lambda node: UNKNOWN  # ``fold_plans.Plans.one``
        self._types: dict[ast.expr, str | None] = {}
        self._bindings: dict[ast.AST, dict[str, list[ast.AST]]] = {}
        self.nodes: list[ast.AST] = [tree]
        for node in self.nodes:  # grows meanwhile: breadth first, as ast.walk
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                self.nodes.append(child)
            if isinstance(node, ast.Name):
                (self.loads if isinstance(node.ctx, ast.Load) else self.stores)[node.id].append(node)
            elif isinstance(node, ast.Attribute):
                self.attributes[node.attr].append(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.texts.add(node.value)
        self.functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self.classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}

    @cached_property
    def imported(self) -> set[str]:
        """Names that imports bind."""
        return {
            (alias.asname or alias.name).split(".")[0]
            for node in self.nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }

    @cached_property
    def sources(self) -> dict[str, str]:
        """Imported name -> what it is, in full."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            elif isinstance(node, ast.Import):
                found |= {
                    a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                    for a in node.names
                }
        return found

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Values of top-level names that are bound once, to a literal or to arithmetic of such."""
        found: dict[str, Any] = {}
        for node in self.tree.body:
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                name = node.targets[0].id
                value = self.value(node.value, found)
                is_record = isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
                if value is UNKNOWN and is_record and node.value.func.id in self.frozen:  # type: ignore[attr-defined]
                    value = Symbol(name)
                if value is not UNKNOWN and len(self.stores[name]) == 1:
                    found[name] = value
        return found

    @cached_property
    def records(self) -> dict[str, ast.Call]:
        """Top-level names that stand for an object of a frozen dataclass, and the call that makes it."""
        return {
            node.targets[0].id: node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id in self.frozen
        }

    def _of_record(self, name: str, field: str, known: dict[str, Any]) -> Any:
        """A field of such an object."""
        call = self.records[name]
        owner = self.classes[call.func.id]  # type: ignore[attr-defined]
        fields = [n for n in owner.body if isinstance(n, ast.AnnAssign)]
        for place, node in enumerate(fields):
            if isinstance(node.target, ast.Name) and node.target.id == field:
                given = next((k.value for k in call.keywords if k.arg == field), None)
                given = given or (call.args[place] if place < len(call.args) else node.value)
                return UNKNOWN if given is None else self.value(given, known)
        return UNKNOWN

    @cached_property
    def frozen(self) -> set[str]:
        """Dataclasses whose objects do not change."""
        return {
            name
            for name, node in self.classes.items()
            if any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
        }

    @cached_property
    def members(self) -> dict[str, list[tuple[ast.ClassDef, ast.AST]]]:
        """Name of a field, method, property or attribute -> the classes that define it, and where."""
        found: dict[str, list[tuple[ast.ClassDef, ast.AST]]] = defaultdict(list)
        for owner in self.nodes:
            if not isinstance(owner, ast.ClassDef):
                continue
            for node in owner.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found[node.target.id].append((owner, node))
                elif isinstance(node, FUNCTIONS):
                    found[node.name].append((owner, node))
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            found[target.id].append((owner, node))
        for name, nodes in self.attributes.items():
            for attribute in nodes:
                if not isinstance(attribute.ctx, ast.Load):
                    around = self.enclosing(attribute, (ast.ClassDef,))
                    if isinstance(around, ast.ClassDef):
                        found[name].append((around, attribute))
        return found

    @cached_property
    def replaced(self) -> set[str]:
        """Fields that ``dataclasses.replace`` gives values."""
        return {
            keyword.arg
            for name in self.loads["replace"]
            if isinstance(call := self.parents[name], ast.Call) and call.func is name
            for keyword in call.keywords
            if keyword.arg
        }

    def enclosing(self, node: ast.AST, kinds: tuple[type, ...]) -> ast.AST | None:
        """The innermost node of these kinds around ``node``."""
        current = self.parents.get(node)
        while current is not None and not isinstance(current, kinds):
            current = self.parents.get(current)
        return current

    def is_foreign(self, node: ast.Attribute) -> bool:
        """Whether an attribute is one of an imported module: ``cute.arch.x``."""
        root: ast.expr = node.value
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        return isinstance(root, ast.Name) and root.id in self.imported

    def reads(self, name: str) -> list[ast.Attribute]:
        """Loads of an attribute of our own objects."""
        return [n for n in self.attributes[name] if isinstance(n.ctx, ast.Load) and not self.is_foreign(n)]

    def reads_of(self, name: str, owner: ast.ClassDef) -> list[ast.Attribute] | None:
        """Loads of a member of a class of ours; None where some may be those of another class with a member of that name."""
        is_alone = len({id(other) for other, _ in self.members[name]}) == 1
        found = []
        for read in self.reads(name):
            kind = self.type_of(read.value)
            if kind is None and not is_alone:
                return None
            if kind in (None, owner.name):
                found.append(read)
        return found

    # ---- types -----------------------------------------------------------------------------------
    def type_of(self, node: ast.expr) -> str | None:
        """The class of ours that an expression's value is of, by annotations and constructors; None where nothing says it."""
        if node not in self._types:
            self._types[node] = None  # of an expression that leads to itself
            self._types[node] = self._type_of(node)
        return self._types[node]

    def _type_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._type_of_name(node) or self._type_by_members(node)
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value)
            return self._type_of_member(owner, node.attr) if owner else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "replace" and node.args:
                return self.type_of(node.args[0])
            if node.func.id in self.classes:
                return node.func.id
            function = self.functions.get(node.func.id)
            return self._annotated(function.returns) if function else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "get" and len(node.args) == 2:
                return self.type_of(node.args[1])
            owner = self.type_of(node.func.value)
            if owner is None and isinstance(node.func.value, ast.Name) and node.func.value.id in self.classes:
                owner = node.func.value.id
            for other, member in self.members[node.func.attr]:
                if other.name == owner and isinstance(member, ast.FunctionDef):
                    return self._annotated(member.returns)
        if isinstance(node, ast.IfExp):
            one, other_type = self.type_of(node.body), self.type_of(node.orelse)
            return one if one == other_type else None
        return None

    def _type_of_name(self, node: ast.Name) -> str | None:
        function = self.enclosing(node, (*FUNCTIONS, ast.Lambda))
        while function is not None:
            found = [b for b in self.bound_in(function, node.id) if self._scope(b) is function]
            if found:
                types = {self._type_of_binding(b, function) for b in found}
                return types.pop() if len(types) == 1 else None
            function = self.enclosing(function, (*FUNCTIONS, ast.Lambda))
        for top in self.stores[node.id]:
            statement = self.parents[top]
            if self.parents.get(statement) is self.tree and isinstance(statement, ast.Assign):
                return self.type_of(statement.value)
        return None

    def _type_by_members(self, node: ast.Name) -> str | None:
        """The one class that has all the members that a local name is asked for."""
        function = self.enclosing(node, FUNCTIONS)
        if function is None or node.id in self.sources or node.id in self.classes:
            return None
        asked = {
            parent.attr
            for load in self.loads[node.id]
            if isinstance(parent := self.parents[load], ast.Attribute) and self.is_inside(load, function)
        }
        having = [{owner.name for owner, _ in self.members.get(name, [])} for name in asked]
        common = set.intersection(*having) if having else set()
        return common.pop() if len(common) == 1 and len(asked) > 1 else None

    def _scope(self, binding: ast.AST) -> ast.AST | None:
        return self.enclosing(binding, (*FUNCTIONS, ast.Lambda))

    def _type_of_binding(self, binding: ast.AST, function: ast.AST) -> str | None:
        if isinstance(binding, ast.arg):
            if binding.arg == "self":
                owner = self.parents.get(function)
                return owner.name if isinstance(owner, ast.ClassDef) else None
            return self._annotated(binding.annotation)
        parent = self.parents[binding]
        if isinstance(parent, ast.Assign):
            return self.type_of(parent.value)
        if isinstance(parent, ast.AnnAssign):
            return self._annotated(parent.annotation)
        if isinstance(parent, ast.Tuple) and isinstance(statement := self.parents[parent], ast.Assign):
            if isinstance(statement.value, ast.Tuple) and len(statement.value.elts) == len(parent.elts):
                return self.type_of(statement.value.elts[parent.elts.index(binding)])  # type: ignore[arg-type]
        return None

    def _annotated(self, node: ast.expr | None) -> str | None:
        """The class of ours in an annotation, alone or with None."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value if node.value in self.classes else None
        if isinstance(node, ast.Name):
            return node.id if node.id in self.classes else None
        if isinstance(node, ast.BinOp):
            sides = [self._annotated(part) for part in (node.left, node.right)]
            nothing = [isinstance(p, ast.Constant) and p.value is None for p in (node.left, node.right)]
            return sides[0] if nothing[1] else sides[1] if nothing[0] else None
        return None

    def _type_of_member(self, owner: str, name: str) -> str | None:
        types = set()
        for other, node in self.members[name]:
            if other.name != owner:
                continue
            if isinstance(node, ast.AnnAssign):
                types.add(self._annotated(node.annotation))
            elif isinstance(node, ast.FunctionDef):
                types.add(self._annotated(node.returns))
            elif isinstance(node, ast.Attribute) and isinstance(statement := self.parents[node], ast.Assign):
                types.add(self.type_of(statement.value) if statement.targets == [node] else None)
            else:
                types.add(None)
        return types.pop() if len(types) == 1 else None

    def bound_in(self, function: ast.AST, name: str) -> list[ast.AST]:
        """Nodes that bind ``name`` in a function, parameters and imports among them; of functions inside of it, too."""
        if function not in self._bindings:
            found: dict[str, list[ast.AST]] = defaultdict(list)
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                    found[node.id].append(node)
                elif isinstance(node, ast.arg):
                    found[node.arg].append(node)
                elif isinstance(node, FUNCTIONS) and node is not function:
                    found[node.name].append(node)
                elif isinstance(node, ast.alias):
                    found[(node.asname or node.name).split(".")[0]].append(node)
            self._bindings[function] = found
        return self._bindings[function].get(name, [])

    def is_inside(self, node: ast.AST, ancestor: ast.AST) -> bool:
        """Whether a node is an ancestor, or below it."""
        current: ast.AST | None = node
        while current is not None and current is not ancestor:
            current = self.parents.get(current)
        return current is ancestor

    # ---- values ----------------------------------------------------------------------------------
    def value(self, node: ast.expr, constants: dict[str, Any] | None = None) -> Any:
        """The value of an expression, or UNKNOWN."""
        found = self._value(node, self.constants if constants is None else constants)
        is_ready = "constants" in self.__dict__  # plans are asked once the file's constants are known
        return self.planned(node) if found is UNKNOWN and is_ready else found

    def _value(self, node: ast.expr, known: dict[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in known:
                function = self.enclosing(node, FUNCTIONS)
                if function is None or not self.bound_in(function, node.id):
                    return known[node.id]
            full = self.sources.get(node.id, "")
            return (
                Symbol(full) if full.rpartition(".")[2][:1].isupper() and not self.is_local(node) else UNKNOWN
            )
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node, known)
        if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
            keys = [self.value(key, known) for key in node.keys if key is not None]
            values = [self.value(part, known) for part in node.values]
            if not any(v is UNKNOWN for v in (*keys, *values)):
                return dict(zip(keys, values, strict=True))
            return UNKNOWN
        if isinstance(node, ast.Tuple):
            values = [self.value(part, known) for part in node.elts]
            return UNKNOWN if any(v is UNKNOWN for v in values) else tuple(values)
        if isinstance(node, ast.IfExp):
            test = self.value(node.test, known)
            return UNKNOWN if test is UNKNOWN else self.value(node.body if test else node.orelse, known)
        if isinstance(node, ast.BoolOp):
            return self._bool_op(node, known)
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand, known)
            if value is UNKNOWN:
                return UNKNOWN
            return (
                not value
                if isinstance(node.op, ast.Not)
                else -value
                if isinstance(node.op, ast.USub)
                else UNKNOWN
            )
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            return self._applied(
                ARITHMETIC[type(node.op)], self.value(node.left, known), self.value(node.right, known)
            )
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node, known)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            table, *arguments = [self.value(part, known) for part in (node.func.value, *node.args)]
            return self._applied(table.get, *arguments) if isinstance(table, dict) else UNKNOWN
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in (CONST_EXPR, "len", "bool"):
                value = self.value(node.args[0], known)
                return (
                    value
                    if value is UNKNOWN or name == CONST_EXPR
                    else self._applied(len if name == "len" else bool, value)
                )
        return UNKNOWN

    def is_local(self, node: ast.Name) -> bool:
        """Whether a function around a name binds it, other than by an import."""
        function = self.enclosing(node, FUNCTIONS)
        while function is not None:
            if any(not isinstance(b, ast.alias) for b in self.bound_in(function, node.id)):
                return True
            function = self.enclosing(function, FUNCTIONS)
        return False

    def _of_attribute(self, node: ast.Attribute, known: dict[str, Any]) -> Any:
        """A class of an imported module, the width of a number type."""
        parts, root = [node.attr], node.value
        while isinstance(root, ast.Attribute):
            parts, root = [root.attr, *parts], root.value
        if isinstance(root, ast.Name) and root.id in self.sources and not self.is_local(root):
            name = ".".join([self.sources[root.id], *parts])
            if node.attr[:1].isupper():
                return Symbol(name)
        value = self.value(node.value, known)
        if isinstance(value, Symbol) and value.name in self.records:
            return self._of_record(value.name, node.attr, known)
        if node.attr == "width":
            match = WIDTH.fullmatch(value.name) if isinstance(value, Symbol) else None
            return int(match[1]) if match else UNKNOWN
        return UNKNOWN

    def _bool_op(self, node: ast.BoolOp, known: dict[str, Any]) -> Any:
        decides = isinstance(node.op, ast.Or)  # a true operand decides an `or`, a false one an `and`
        values = [self.value(part, known) for part in node.values]
        for value in values:
            if value is not UNKNOWN and bool(value) == decides:
                return value if values[0] is not UNKNOWN else decides
        return UNKNOWN if any(v is UNKNOWN for v in values) else values[-1]

    def _compared(self, node: ast.Compare, known: dict[str, Any]) -> Any:
        left, right = (self.value(part, known) for part in (node.left, node.comparators[0]))
        kind = type(node.ops[0])
        if kind in (ast.Is, ast.IsNot):
            if isinstance(left, Symbol) and isinstance(right, Symbol):
                return (left == right) == (kind is ast.Is)
            if right is None and (left is not UNKNOWN or isinstance(node.left, NEVER_NONE)):
                return (left is None) == (kind is ast.Is)
            return UNKNOWN
        return self._applied(COMPARE[kind], left, right)

    @staticmethod
    def _applied(function: Any, *values: Any) -> Any:
        if any(value is UNKNOWN for value in values):
            return UNKNOWN
        try:
            return function(*values)
        except (TypeError, ValueError, ZeroDivisionError):
            return UNKNOWN


def is_same(one: Any, other: Any) -> bool:
    """Equal and of one type: True is not 1."""
    return type(one) is type(other) and bool(one == other)


def is_pure(node: ast.AST) -> bool:
    """Whether an expression can be left out where nobody needs its value."""
    allowed = (ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.BinOp, ast.UnaryOp)
    syntax = (ast.operator, ast.unaryop, ast.expr_context)
    return all(isinstance(part, allowed + syntax) for part in ast.walk(node))


def calls(world: World, name: str) -> list[ast.Call] | None:
    """Every call of a top-level function or class; None where it is used in another way, or arguments are spread."""
    found = []
    for load in world.loads[name]:
        parent = world.parents[load]
        if isinstance(parent, ast.Call) and parent.func is load:
            found.append(parent)
        elif not is_annotation(world, load) and not isinstance(parent, ast.Attribute):
            return None
    return None if any(spreads(call) for call in found) else found


def spreads(call: ast.Call) -> bool:
    """Whether a call has arguments behind a star."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def is_annotation(world: World, node: ast.AST) -> bool:
    """Whether a name stands in the annotation of a parameter, a result, or a variable."""
    current: ast.AST = node
    while (parent := world.parents.get(current)) is not None and not isinstance(parent, ast.stmt | ast.arg):
        current = parent
    if isinstance(parent, ast.arg):
        return parent.annotation is current
    if isinstance(parent, ast.AnnAssign):
        return parent.annotation is current
    return isinstance(parent, FUNCTIONS) and parent.returns is current


def parameters(function: ast.FunctionDef) -> Iterator[tuple[ast.arg, ast.expr | None, int | None]]:
    """Parameters with their defaults, and positions; None for keyword-only ones."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for place, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        yield argument, default, place
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument, default, None
