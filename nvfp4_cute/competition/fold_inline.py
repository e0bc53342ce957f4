"""Functions of one expression in the place of their calls: those that are called once, and those that only pass on."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nvfp4_cute.competition.fold_values import FUNCTIONS, World, calls, is_pure, parameters

ATOMS = (ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.Subscript, ast.Tuple, ast.List)
# Longer expressions read better with a name.
LONGEST = 90
OPERATORS = (
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Attribute,
    ast.Subscript,
    ast.Starred,
)
COMPUTING = (
    ast.Call,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Subscript,
    ast.comprehension,
)
# What the compiler reads otherwise in its own functions than Python does in others.
TRACED = (ast.IfExp, ast.BoolOp, ast.Compare, ast.ListComp, ast.GeneratorExp)
NEVER = (ast.Lambda, ast.JoinedStr, ast.NamedExpr, ast.Starred)


@dataclass(frozen=True)
class Inlined:
    """A definition that goes, and what stands in the place of its uses."""

    definition: ast.FunctionDef
    uses: tuple[tuple[ast.expr, str], ...]


def inlined(world: World) -> Iterator[Inlined]:
    """Functions, properties, and methods of constants."""
    for function in world.functions.values():
        expression = _expression(function)
        found = calls(world, function.name) if function.name not in world.entry_points else None
        if expression is None or not found or not (len(found) == 1 or _passes_on(expression)):
            continue
        uses = [_use(world, function, expression, call, {}) for call in found]
        if all(use is not None for use in uses):
            yield Inlined(function, tuple(zip(found, uses, strict=True)))  # type: ignore[arg-type]
    for owner in world.classes.values():
        for member in owner.body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("__"):
                yield from _member(world, owner, member)


def _member(world: World, owner: ast.ClassDef, member: ast.FunctionDef) -> Iterator[Inlined]:
    expression, reads = _expression(member), world.reads_of(member.name, owner)
    if expression is None or not reads or member.name in world.texts:
        return
    is_property = any(ast.unparse(d) == "property" for d in member.decorator_list)
    found: list[Any] = [*reads] if is_property else [world.parents[read] for read in reads]
    if not (len(found) == 1 or _passes_on(expression)):
        return
    uses = []
    for read, use in zip(reads, found, strict=True):
        is_call = isinstance(use, ast.Call) and use.func is read
        if not is_pure(read.value) or not (is_property or is_call):
            return
        uses.append(_use(world, member, expression, use, {"self": ast.unparse(read.value)}))
    if all(use is not None for use in uses):
        yield Inlined(member, tuple(zip(found, uses, strict=True)))  # type: ignore[arg-type]


def _expression(function: ast.FunctionDef) -> ast.expr | None:
    """What a function returns that does nothing else."""
    body = [n for n in function.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    allowed = {"property", "cute.jit"}  # of methods, those of an object
    if (
        len(body) != 1
        or not isinstance(body[0], ast.Return)
        or body[0].value is None
        or not {ast.unparse(d) for d in function.decorator_list} <= allowed
        or function.args.vararg
        or function.args.kwarg
        or any(isinstance(part, NEVER) for part in ast.walk(body[0]))
    ):
        return None
    found = body[0].value
    is_table = isinstance(found, ast.Subscript) and isinstance(found.value, ast.Dict)
    return None if is_table else found


def _passes_on(expression: ast.expr) -> bool:
    parts = expression.elts if isinstance(expression, ast.Tuple) else [expression]
    return all(
        isinstance(p, ast.Name | ast.Constant)
        or (isinstance(p, ast.Attribute) and is_pure(p))
        or (
            isinstance(p, ast.Call)
            and not p.keywords
            and all(isinstance(a, ast.Name | ast.Constant) for a in (p.func, *p.args))
        )
        for p in parts
    )


def _use(
    world: World, function: ast.FunctionDef, expression: ast.expr, use: ast.expr, known: dict[str, str]
) -> str | None:
    """The expression for one use; None where it cannot stand there."""
    around = world.enclosing(use, FUNCTIONS)
    if around is function or world.is_inside(use, function):
        return None
    is_traced = {_is_traced(f) for f in (function, around)}
    if any(isinstance(part, TRACED) for part in ast.walk(expression)) and len(is_traced) != 1:
        return None
    given, computed = dict(known), 0
    if isinstance(use, ast.Call):
        skipped = 1 if "self" in known else 0
        for argument, default, place in parameters(function):
            if argument.arg == "self":
                continue
            position = None if place is None else place - skipped
            value = next((k.value for k in use.keywords if k.arg == argument.arg), None)
            if value is None:
                value = use.args[position] if position is not None and position < len(use.args) else default
            is_computed = not isinstance(value, ast.Name | ast.Attribute | ast.Constant)
            computed += is_computed
            # Computed here and there alike: once, and before all else that the expression computes.
            if value is None or (
                is_computed and (computed > 1 or not _begins_with(expression, argument.arg))
            ):
                return None
            if any(isinstance(n, NEVER) for n in ast.walk(value)):
                return None
            text = ast.unparse(value)
            given[argument.arg] = (
                text if isinstance(value, ATOMS) and not isinstance(value, ast.Tuple) else f"({text})"
            )
    for part in ast.walk(expression):
        if isinstance(part, ast.Name) and part.id not in given:
            if around is not None and world.bound_in(around, part.id):
                return None
    text = ast.unparse(_Put(given).visit(ast.parse(ast.unparse(expression), mode="eval").body))
    inner = ast.parse(text, mode="eval").body
    needs = isinstance(world.parents[use], OPERATORS) and not isinstance(inner, ATOMS)
    if len(text) > LONGEST:
        return None
    return f"({text})" if needs or isinstance(inner, ast.Tuple) and not text.startswith("(") else text


def _begins_with(expression: ast.expr, name: str) -> bool:
    """Whether an expression reads a name once, and before it computes anything."""
    order = list(_in_order(expression))
    reads = [place for place, node in enumerate(order) if isinstance(node, ast.Name) and node.id == name]
    return len(reads) == 1 and not any(isinstance(node, COMPUTING) for node in order[: reads[0]])


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Parts of an expression as Python evaluates them."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


def _is_traced(function: ast.AST | None) -> bool:
    decorators = getattr(function, "decorator_list", [])
    return any(ast.unparse(d) in ("cute.jit", "cute.kernel") for d in decorators)


class _Put(ast.NodeTransformer):
    def __init__(self, given: dict[str, str]):
        self.given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.given:
            return node
        return ast.parse(self.given[node.id], mode="eval").body
