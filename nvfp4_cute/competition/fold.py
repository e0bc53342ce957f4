"""What an assembled file decides once and for all is written out: constants put in, branches that are never taken left out.

Works on the file alone, a closed world: its entry points are called from outside, everything else from inside. A parameter, a
field of a dataclass, or an attribute that gets one constant at every place that gives it a value is that constant. An ``if``
whose condition is then known is one of its branches. What nothing mentions any more goes, too: definitions, parameters, fields,
and the lines of docstrings about them. Passes repeat until none finds anything.

Only text is edited, at positions that the syntax tree names: comments stay with their lines, and every line keeps the place that
it came from.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from nvfp4_cute.competition.fold_inline import inlined
from nvfp4_cute.competition.fold_plans import CONFIG, Plans
from nvfp4_cute.competition.fold_text import Cut, Dedent, Edit, Put, Text
from nvfp4_cute.competition.fold_tidy import WIDTH, tidy
from nvfp4_cute.competition.fold_values import (
    FUNCTIONS,
    UNKNOWN,
    Symbol,
    World,
    calls,
    is_annotation,
    is_pure,
    is_same,
    parameters,
    spreads,
)

MAX_PASSES = 400
HEADING = "# ---- "
# What the compiler's decorators give functions beside their arguments.
INJECTED = {"loc", "ip"}
BRANCH, CONSTANT = "a branch that is always taken", "a constant of this file"
UNUSED, SHORTER = "nothing uses it", "a condition that is known"
PLANNED, ONCE = "what its frozen configs come to", "a loop that runs once"
INLINED = "the only use of what it says"
# Numbers that say less than their names.
LARGE = 1 << 16
# Expressions that plans may decide as a whole.
KNOWN = (ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.IfExp, ast.Subscript, ast.UnaryOp)
PLAIN = (type(None), bool, int, str, float, Symbol)
Group = list[Edit]
# Touches a line twice: no group with these edits is made.
IMPOSSIBLE: Group = [Cut(1, 1), Cut(1, 1)]


def fold(lines: Sequence[Any], entry_points: Iterable[str]) -> list[Any]:
    """The lines of a file without what its constants decide.

    Args:
        lines: ``bundle.Line``.
        entry_points: top-level names that are used from outside.
    """
    text = Text(list(lines))
    names = frozenset(entry_points)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of comparisons of what were names a pass ago
        for _ in range(MAX_PASSES):
            state = _Pass(World(text.tree(), names), text)
            if not text.apply(state.found()):
                break
    tidy(text, HEADING)
    return text.lines


class _Pass:
    """What is found in one state of the file."""

    def __init__(self, world: World, text: Text):
        self.world, self.plans = world, Plans(world)
        self.world.planned = self.plans.one
        self.lines = [line.text for line in text.lines]

    def found(self) -> Iterator[Group]:
        """Everything."""
        for find in (self.branches, self.planned, self.constants, self.inlined, self.unused):
            yield from find()

    # ---- branches --------------------------------------------------------------------------------
    def branches(self) -> Iterator[Group]:
        """Statements and expressions whose condition is known, the outermost first; statements behind a return."""
        for node in self.world.nodes:
            for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
                yield from self._unreachable(block) if isinstance(block, list) else ()
            if isinstance(node, ast.For):
                yield from self._once(node)
            elif isinstance(node, ast.BinOp):
                yield from self._neutral(node)
            elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and len(node.values) == 2:
                first = node.values[0]
                if isinstance(first, ast.ListComp) and self.world.value(first.generators[0].iter) == ():
                    yield [self._put(node, self._source(node.values[1]), SHORTER)]
            elif isinstance(node, ast.If):
                test = self.world.value(node.test)
                if test is not UNKNOWN:
                    yield self._taken(node, bool(test))
                else:
                    yield from self._shorter(node.test)
            elif isinstance(node, ast.IfExp):
                test = self.world.value(node.test)
                if test is not UNKNOWN:
                    yield [self._put(node, self._source(node.body if test else node.orelse), SHORTER)]
                else:
                    yield from self._shorter(node.test)

    def _once(self, loop: ast.For) -> Iterator[Group]:
        """A loop over one number."""
        call, function = loop.iter, self.world.enclosing(loop, FUNCTIONS)
        if (
            not isinstance(call, ast.Call)
            or ast.unparse(call.func).rpartition(".")[2] not in ("range", "range_constexpr")
            or not isinstance(loop.target, ast.Name)
            or function is None
            or len(call.args) != 1
            or not is_same(self.world.value(call.args[0]), 1)
            or not self._is_loops_own(loop, loop.target.id, function)
            or any(isinstance(n, ast.Break | ast.Continue) for n in ast.walk(loop))
        ):
            return
        uses = [n for n in self.world.loads[loop.target.id] if self.world.is_inside(n, loop)]
        if uses:
            yield [self._use(use, "0") for use in uses]
        else:
            indent = loop.body[0].col_offset - loop.col_offset
            head = loop.body[0].lineno - 1
            while self._line(head).strip().startswith("#"):
                head -= 1
            yield [Cut(loop.lineno, head), Dedent(head + 1, self._end([loop]), indent, ONCE)]

    def _is_loops_own(self, loop: ast.For, name: str, function: ast.AST) -> bool:
        """Whether only loops bind a name, this one's body does not, and nothing outside of them reads it."""
        world = self.world
        bound = world.bound_in(function, name)
        loops = [world.parents[node] for node in bound]
        return (
            all(isinstance(other, ast.For | ast.comprehension) and other.target in bound for other in loops)
            and not any(world.is_inside(node, loop) for node in bound if node is not loop.target)
            and all(
                any(
                    world.is_inside(load, world.parents[o] if isinstance(o, ast.comprehension) else o)
                    for o in loops
                )
                for load in world.loads[name]
                if world.is_inside(load, function)
            )
        )

    def _neutral(self, node: ast.BinOp) -> Iterator[Group]:
        """A term 0 and a factor or divisor 1."""
        kind = type(node.op)
        for one, other, is_left in ((node.left, node.right, True), (node.right, node.left, False)):
            value = one.value if isinstance(one, ast.Constant) else None
            is_term = is_same(value, 0) and (kind is ast.Add or (kind is ast.Sub and not is_left))
            is_factor = is_same(value, 1) and (kind is ast.Mult or (kind is ast.FloorDiv and not is_left))
            if is_term or is_factor:
                inner = isinstance(other, ast.BinOp | ast.UnaryOp | ast.IfExp | ast.BoolOp | ast.Compare)
                outer = isinstance(
                    self.world.parents[node], ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Subscript
                )
                source = self._source(other)
                yield [self._put(node, f"({source})" if inner and outer else source, SHORTER)]
                return
            if kind is ast.Mult and is_same(value, 0) and is_pure(other):
                yield [self._put(node, "0", SHORTER)]
                return

    # ---- plans -----------------------------------------------------------------------------------
    def planned(self) -> Iterator[Group]:
        """What host code computes from the configs."""
        for function, texts in self.plans.tables():
            first = function.body[0]
            begin = self._end([first]) + 1 if _is_text(first) else first.lineno
            last = self._end([function])
            yield [Put(begin, 0, last, len(self._line(last).encode()), "\n".join(texts), PLANNED)]
        known: set[ast.AST] = set()
        for node in self.world.nodes:
            if node in known or self.world.parents.get(node) in known:
                known.add(node)
            elif isinstance(node, ast.Call) and self.plans.is_identity(node):
                yield [self._put(node, self._source(node.args[0]), PLANNED)]
            elif isinstance(node, ast.JoinedStr):
                known.add(node)
            elif (
                isinstance(node, KNOWN)
                and not (
                    isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
                )
                and self.plans.is_planned(node)
                and (value := self.plans.one(node)) is not UNKNOWN
            ):
                known.add(node)
                if not (isinstance(node, ast.Attribute) and self.world.is_foreign(node)):
                    yield [self._use(node, self._named(value), PLANNED)]

    def _unreachable(self, block: list[ast.stmt]) -> Iterator[Group]:
        for statement in block[:-1]:
            if isinstance(statement, ast.Return | ast.Raise):
                yield [Cut(self._end([statement]) + 1, self._end(block))]
                return

    def _shorter(self, test: ast.expr) -> Iterator[Group]:
        """Operands of a condition that change nothing."""
        for node in ast.walk(test):
            if not isinstance(node, ast.BoolOp):
                continue
            values = [self.world.value(part) for part in node.values]
            left = [part for part, value in zip(node.values, values, strict=True) if value is UNKNOWN]
            decides = isinstance(node.op, ast.Or)
            if any(value is not UNKNOWN and bool(value) == decides for value in values):
                continue  # that is all of it
            if left and len(left) < len(values):
                word = " and " if isinstance(node.op, ast.And) else " or "
                yield [self._put(node, word.join(map(self._source, left)), SHORTER)]

    def _taken(self, node: ast.If, truth: bool) -> Group:
        is_elif = self._line(node.lineno).lstrip().startswith("elif")
        indent = node.body[0].col_offset - node.col_offset
        head = self._head_end(node)
        body_end = self._end(node.body)
        orelse_is_elif = len(node.orelse) == 1 and self._line(node.orelse[0].lineno).lstrip().startswith(
            "elif"
        )
        end = self._end([node])
        if truth:
            rest = [Cut(body_end + 1, end)] if end > body_end else []
            if is_elif:
                return [self._word(node.lineno, head, "else:"), *rest]
            return [Cut(node.lineno, head), Dedent(head + 1, body_end, indent, BRANCH), *rest]
        if not node.orelse:
            return self._without(node)
        if orelse_is_elif:
            cut = Cut(node.lineno, node.orelse[0].lineno - 1)
            if is_elif:
                return [cut]
            line = node.orelse[0].lineno
            column = self._line(line).index("elif")
            return [cut, Put(line, column, line, column + 4, "if", BRANCH)]
        else_line = next(
            n for n in range(body_end + 1, node.orelse[0].lineno) if self._line(n).strip() == "else:"
        )
        if is_elif:
            return [Cut(node.lineno, else_line - 1)]
        return [Cut(node.lineno, else_line), Dedent(else_line + 1, end, indent, BRANCH)]

    def _head_end(self, node: ast.If) -> int:
        number = node.test.end_lineno or node.lineno
        while not self._line(number).split("#")[0].rstrip().endswith(":"):
            number += 1
        return number

    def _word(self, first: int, last: int, word: str) -> Edit:
        line = self._line(first)
        return Put(first, len(line) - len(line.lstrip()), last, len(self._line(last).encode()), word, BRANCH)

    def _without(self, node: ast.stmt) -> Group:
        """A statement and the comment above it go; the only one of a block becomes ``pass``."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        parent = self.world.parents[node]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and node in block:
                others = [n for n in block if n is not node and not _is_text(n)]
                if not others and not isinstance(parent, ast.Module):
                    indent = " " * node.col_offset
                    last = self._end([node])
                    return [Put(first, 0, last, len(self._line(last).encode()), f"{indent}pass", UNUSED)]
        while first > 1 and self._line(first - 1).strip().startswith("#") and not self._is_heading(first - 1):
            first -= 1
        return [Cut(first, self._end([node]))]

    def _is_heading(self, number: int) -> bool:
        return "# ----" in self._line(number)

    # ---- constants -------------------------------------------------------------------------------
    def constants(self) -> Iterator[Group]:
        """Parameters, fields, attributes and locals that have one value."""
        for function in self.world.functions.values():
            yield from self._constant_parameters(function, function.name, 0)
        for owner in self.world.classes.values():
            if _is_dataclass(owner):
                yield from self._constant_fields(owner)
                continue
            for member in owner.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    yield from self._constant_parameters(member, owner.name, 1)
                elif isinstance(member, ast.FunctionDef):
                    yield from self._constant_parameters(member, None, 1)
        yield from self._second_names()
        yield from self._constant_attributes()
        yield from self._class_constants()
        yield from self._constant_locals()

    def _second_names(self) -> Iterator[Group]:
        """Top-level names for what has another name of the file."""
        world = self.world
        for node in world.tree.body:
            if not (
                isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and len(node.targets) == 1
            ):
                continue
            target, name = node.targets[0], node.value.id
            if isinstance(target, ast.Name) and name in world.constants and len(world.stores[target.id]) == 1:
                loads = world.loads[target.id]
                if not any(world.is_local(load) for load in loads) and target.id not in world.entry_points:
                    yield [*(self._use(load, name) for load in loads), *self._without(node)]

    def _calls(self, function: ast.FunctionDef, name: str | None) -> list[ast.Call] | None:
        """Calls of a function, of a class, or (no name) of a method; None where not all are known."""
        if name is not None:
            return None if name in self.world.entry_points else calls(self.world, name)
        if len(self.world.members[function.name]) != 1 or function.name.startswith("__"):
            return None
        found = []
        for read in self.world.reads(function.name):
            call = self.world.parents[read]
            if not (isinstance(call, ast.Call) and call.func is read):
                return None
            if spreads(call):
                return None
            found.append(call)
        return found

    def _constant_parameters(
        self, function: ast.FunctionDef, name: str | None, skipped: int
    ) -> Iterator[Group]:
        found = self._calls(function, name)
        if not found or function.args.vararg or function.args.kwarg:
            return
        decorators = " ".join(map(ast.unparse, function.decorator_list))
        if any(word in decorators for word in ("property", "classmethod", "staticmethod")):
            return
        listed = list(parameters(function))
        for argument, default, place in listed:
            if argument.arg in INJECTED or argument.arg in ("self", "cls"):
                continue
            position = None if place is None else place - skipped
            given = [_argument(call, argument.arg, position) for call in found]
            texts = [default if value is None else value for value in given]
            value = self._one_value(texts)
            uses = [n for n in self.world.loads[argument.arg] if self.world.is_inside(n, function)]
            if len(self.world.bound_in(function, argument.arg)) != 1:
                continue
            if value is UNKNOWN:
                if uses or not all(v is None or self._is_harmless(v) for v in given):
                    continue
                reason = UNUSED
            else:
                reason = CONSTANT
            group: Group = [self._use(use, value) for use in uses] if value is not UNKNOWN else []
            group += self._without_parameter(function, argument, default)
            for call in found:
                group += self._without_argument(call, argument.arg, position)
            group += self._undescribed(function, argument.arg)
            yield [_because(edit, reason) for edit in group]

    def _constant_fields(self, owner: ast.ClassDef) -> Iterator[Group]:
        if owner.bases or owner.name in self.world.entry_points:
            return
        found = self._constructions(owner)
        if found is None or not found:
            return
        fields = [n for n in owner.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        for place, node in enumerate(fields):
            name = node.target.id  # type: ignore[union-attr]
            if name in self.world.replaced or name in self.world.texts:
                continue
            given = [_argument(call, name, place) for call in found]
            value = self._one_value([node.value if v is None else v for v in given])
            reads = self.world.reads_of(name, owner)
            if reads is None or (
                value is UNKNOWN and (reads or not all(v is None or self._is_harmless(v) for v in given))
            ):
                continue
            group: Group = [] if value is UNKNOWN else [self._use(read, value) for read in reads]
            group += self._without(node)
            for call in found:
                group += self._without_argument(call, name, place)
            group += self._undescribed(owner, name)
            yield [_because(edit, UNUSED if value is UNKNOWN else CONSTANT) for edit in group]

    def _constructions(self, owner: ast.ClassDef) -> list[ast.Call] | None:
        found = calls(self.world, owner.name)
        if found is None:
            return None
        for load in self.world.loads["cls"]:
            call = self.world.parents[load]
            if self.world.is_inside(load, owner):
                if not (isinstance(call, ast.Call) and call.func is load) or spreads(call):
                    return None
                found.append(call)
        return found

    def _constant_attributes(self) -> Iterator[Group]:
        for name, places in self.world.members.items():
            for owner, node in places:
                if sum(other is owner for other, _ in places) != 1:
                    continue
                if isinstance(node, ast.FunctionDef):
                    yield from self._constant_property(name, owner, node)
                elif isinstance(node, ast.Attribute) and not _is_dataclass(owner):
                    yield from self._constant_attribute(name, owner, node)

    def _constant_attribute(self, name: str, owner: ast.ClassDef, node: ast.Attribute) -> Iterator[Group]:
        statement = self.world.parents[node]
        reads = self.world.reads_of(name, owner)
        if (
            not isinstance(statement, ast.Assign)
            or statement.targets != [node]
            or name in self.world.texts
            or reads is None
        ):
            return
        value = self._one_value([statement.value])
        if value is not UNKNOWN:
            yield [*(self._use(read, value) for read in reads), *self._without(statement)]
        elif not reads and self._is_harmless(statement.value):
            yield self._without(statement)

    def _class_constants(self) -> Iterator[Group]:
        """What a class has for all of its objects: constants where methods read it, nothing where none does."""
        for owner in self.world.classes.values():
            if _is_dataclass(owner) or owner.bases:
                continue
            for node in owner.body:
                if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                    continue
                name = node.targets[0].id
                reads = self.world.attributes[name]
                own = [n for n in reads if ast.unparse(n.value) == "self" and self.world.is_inside(n, owner)]
                if len(own) < len(reads) or self.world.loads[name] or name in self.world.texts:
                    continue
                value = self._one_value([node.value])
                if value is not UNKNOWN or (not reads and self._is_harmless(node.value)):
                    yield [*(self._use(read, value) for read in reads), *self._without(node)]

    def _constant_property(self, name: str, owner: ast.ClassDef, node: ast.FunctionDef) -> Iterator[Group]:
        body = [n for n in node.body if not _is_text(n)]
        is_property = any(ast.unparse(d) == "property" for d in node.decorator_list)
        if not is_property or len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None:
            return
        value = self._one_value([body[0].value])
        reads = self.world.reads_of(name, owner)
        if value is not UNKNOWN and reads is not None and name not in self.world.texts:
            yield [*(self._use(read, value) for read in reads), *self._without(node)]

    def _constant_locals(self) -> Iterator[Group]:
        for node in self.world.nodes:
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            function = self.world.enclosing(node, FUNCTIONS)
            if function is None:
                continue
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Name):
                yield from self._constant_local(function, target, value, self._without(node))
            elif (
                isinstance(target, ast.Tuple)
                and isinstance(value, ast.Tuple)
                and len(target.elts) == len(value.elts) > 2
            ):
                places: list[list[tuple[ast.AST, ast.AST]]] = [
                    [(e, e) for e in t.elts] for t in (target, value)
                ]
                for index, (name, one) in enumerate(zip(target.elts, value.elts, strict=True)):
                    if isinstance(name, ast.Name):
                        gone = [self._item(listed, index) for listed in places]
                        yield from self._constant_local(function, name, one, gone)
            elif (
                isinstance(target, ast.Tuple)
                and isinstance(value, ast.Tuple)
                and len(target.elts) == len(value.elts) == 2
            ):
                for index, other in ((0, 1), (1, 0)):
                    name, one = target.elts[index], value.elts[index]
                    if isinstance(name, ast.Name):
                        rest = f"{self._source(target.elts[other])} = {self._source(value.elts[other])}"
                        yield from self._constant_local(
                            function, name, one, [self._put(node, rest, CONSTANT)]
                        )

    def _constant_local(
        self, function: ast.AST, name: ast.Name, value: ast.expr, gone: Group
    ) -> Iterator[Group]:
        world = self.world
        if len(world.bound_in(function, name.id)) != 1:
            return
        outer = world.enclosing(function, FUNCTIONS)
        if outer is not None and len(world.bound_in(outer, name.id)) != 1:
            return
        uses = [n for n in world.loads[name.id] if world.is_inside(n, function)]
        constant = self._one_value([value])
        if constant is not UNKNOWN and not any(world.is_inside(use, world.parents[name]) for use in uses):
            yield [*(self._use(use, constant) for use in uses), *gone]
        elif not uses and self._is_harmless(value):
            yield [_because(edit, UNUSED) for edit in gone]

    def _length_with(self, node: ast.expr, text: str) -> int:
        """Of a line with another text in the place of an expression."""
        tail = self._line(node.end_lineno or node.lineno).encode()[node.end_col_offset :]
        return node.col_offset + len(text) + len(tail)

    def _is_harmless(self, node: ast.expr) -> bool:
        """Whether an expression can be left out: a pure one, an object of ours, or, in host code, what Python computes."""
        if is_pure(node) or self.plans.values(node) is not None:
            return True
        if isinstance(node, ast.Tuple):
            return all(map(self._is_harmless, node.elts))
        is_host = self.plans.is_host_code(node)
        return all(
            isinstance(part.func, ast.Name) and self.plans.is_python(part.func.id)
            if isinstance(part, ast.Call)
            else is_host or not isinstance(part, ast.Subscript | ast.ListComp | ast.GeneratorExp)
            for part in ast.walk(node)
            if isinstance(part, ast.expr)
        )

    def _unused_locals(self) -> Iterator[Group]:
        """Assignments of several names that nothing reads."""
        for node in self.world.nodes:
            function = self.world.enclosing(node, FUNCTIONS) if isinstance(node, ast.Assign) else None
            if (
                function is None
                or not isinstance(node, ast.Assign)
                or not isinstance(node.targets[0], ast.Tuple)
            ):
                continue
            names = [n for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            plain = all(
                isinstance(n, ast.Name | ast.Tuple | ast.Store) for t in node.targets for n in ast.walk(t)
            )
            read = any(self.world.is_inside(load, function) for n in names for load in self.world.loads[n.id])
            if plain and not read and self._is_harmless(node.value):
                yield [_because(edit, UNUSED) for edit in self._without(node)]

    def _named(self, value: Any) -> str:
        """A value as code: of large numbers that have a name, that."""
        if isinstance(value, Symbol):
            return value.name
        if type(value) is int and abs(value) >= LARGE:
            names = [name for name, known in self.world.constants.items() if is_same(known, value)]
            return names[0] if names else repr(value)
        if isinstance(value, tuple):
            return f"({', '.join(map(self._named, value))}{',' * (len(value) == 1)})"
        return repr(value)

    def _dead_stores(self) -> Iterator[Group]:
        """Registers that are only filled, and names that the next statement binds anew."""
        for node in self.world.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                if ast.unparse(node.targets[0]) == node.value.id:
                    yield self._without(node)
            block = getattr(node, "body", None)
            for one, other in pairwise(block) if isinstance(block, list) else ():
                if isinstance(one, ast.Assign) and isinstance(other, ast.Assign) and is_pure(one.value):
                    names = {n.id for n in ast.walk(one.targets[0]) if isinstance(n, ast.Name)}
                    read = {n.id for n in ast.walk(other.value) if isinstance(n, ast.Name)}
                    same = ast.unparse(one.targets[0]) == ast.unparse(other.targets[0])
                    if same and len(one.targets) == len(other.targets) == 1 and names.isdisjoint(read):
                        yield self._without(one)
            function = self.world.enclosing(node, FUNCTIONS) if isinstance(node, ast.Assign) else None
            if (
                isinstance(node, ast.Assign)
                and function is not None
                and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Call)
                and ast.unparse(node.value.func) == "cute.make_rmem_tensor"
            ):
                name = node.targets[0].id
                loads = [n for n in self.world.loads[name] if self.world.is_inside(n, function)]
                fills = [self._filling(load) for load in loads]
                if len(self.world.bound_in(function, name)) == 1 and all(fill is not None for fill in fills):
                    yield [edit for gone in (node, *fills) for edit in self._without(gone)]  # type: ignore[arg-type]

    def _filling(self, load: ast.Name) -> ast.stmt | None:
        """The statement ``load.fill(number)``."""
        member = self.world.parents[load]
        call = self.world.parents[member]
        statement = self.world.parents.get(call)
        if isinstance(member, ast.Attribute) and member.attr == "fill" and isinstance(statement, ast.Expr):
            return statement
        return None

    def _one_value(self, nodes: Sequence[ast.expr | None]) -> Any:
        """Source of the constant that all expressions are, or UNKNOWN."""
        if any(node is None for node in nodes):
            return UNKNOWN
        values = [self.world.value(node) for node in nodes if node is not None]
        first = values[0]
        is_pair = isinstance(first, tuple) and all(isinstance(part, PLAIN) for part in first)
        if not (isinstance(first, PLAIN) or is_pair) or not all(
            v is not UNKNOWN and is_same(v, first) for v in values
        ):
            return UNKNOWN
        sources = {self._source(node) for node in nodes if node is not None}
        one = sources.pop() if len(sources) == 1 else ""
        if isinstance(first, Symbol):
            is_global = one.split(".")[0] in self.world.imported or one in self.world.constants
            return one if is_global else first.name
        if is_pair:
            if one in self.world.constants:
                return one
            return f"({', '.join(p.name if isinstance(p, Symbol) else repr(p) for p in first)})"
        return one if one in self.world.constants else self._named(first)

    def inlined(self) -> Iterator[Group]:
        """Functions of one expression that stand in the place of their calls; results that are returned as they come."""
        for found in inlined(self.world):
            if any(self._length_with(use, text) > WIDTH for use, text in found.uses):
                continue
            yield [
                *(self._put(use, text, INLINED) for use, text in found.uses),
                *self._without(found.definition),
            ]
        for node in self.world.nodes:
            if isinstance(node, ast.keyword) and node.arg is None and isinstance(node.value, ast.Dict):
                pairs = list(zip(node.value.keys, node.value.values, strict=True))
                if all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key, _ in pairs):
                    given = ", ".join(f"{key.value}={self._source(value)}" for key, value in pairs)  # type: ignore[union-attr]
                    yield [self._put(node, given, INLINED)]
            elif isinstance(node, ast.Starred):
                yield from self._spread(node)
            body = getattr(node, "body", None)
            if not isinstance(node, ast.FunctionDef) or len(body or []) < 2:
                continue
            before, last = node.body[-2:]
            yield from self._returned_at_once(node, before, last)
            if (
                isinstance(before, ast.Assign)
                and isinstance(last, ast.Return)
                and last.value is not None
                and len(before.targets) == 1
                and ast.unparse(before.targets[0]) == ast.unparse(last.value)
                and all(isinstance(n, ast.Name | ast.Tuple | ast.expr_context) for n in ast.walk(last.value))
            ):
                yield [
                    *self._without(last),
                    self._put(before, f"return {self._source(before.value)}", INLINED),
                ]

    def _spread(self, node: ast.Starred) -> Iterator[Group]:
        """Arguments behind a star: the parts of a tuple that the statement before makes."""
        name, function = node.value, self.world.enclosing(node, (*FUNCTIONS, ast.Lambda))
        if (
            not isinstance(self.world.parents[node], ast.Call)
            or not isinstance(name, ast.Name)
            or not isinstance(function, ast.FunctionDef)
        ):
            return
        bound = self.world.bound_in(function, name.id)
        for before, statement in pairwise(function.body):
            if (
                isinstance(before, ast.Assign)
                and before.targets == bound
                and isinstance(before.value, ast.Tuple)
                and before.value.elts
                and is_pure(before.value)
                and self.world.is_inside(node, statement)
            ):
                yield [self._put(node, ", ".join(map(self._source, before.value.elts)), INLINED)]

    def _returned_at_once(
        self, function: ast.FunctionDef, before: ast.stmt, last: ast.stmt
    ) -> Iterator[Group]:
        """A name that only the next statement uses, first of all, to return what it makes of it."""
        if not (
            isinstance(before, ast.Assign)
            and isinstance(last, ast.Return)
            and isinstance(last.value, ast.Call)
            and last.value.args
            and isinstance(name := last.value.args[0], ast.Name)
            and ast.unparse(before.targets[0]) == name.id
            and is_pure(last.value.func)
            and len(self.world.bound_in(function, name.id)) == 1
            and sum(self.world.is_inside(load, function) for load in self.world.loads[name.id]) == 1
        ):
            return
        text = self._source(before.value)
        if "#" not in text and self._length_with(name, text) <= WIDTH:
            yield [*self._without(before), self._put(name, text, INLINED)]

    # ---- what nothing uses -------------------------------------------------------------------------
    def unused(self) -> Iterator[Group]:
        """Definitions, methods and imports that nothing mentions."""
        world = self.world
        for node in world.tree.body:
            names = _bound(node)
            if (
                names
                and not names & world.entry_points
                and not any(self._is_used(name, node) for name in names)
            ):
                yield [*self._without(node), *self._documentation(node)]
            for part in [*getattr(node, "body", []), node, *getattr(node, "handlers", [])]:
                for statement in part.body if isinstance(part, ast.ExceptHandler) else [part]:
                    if isinstance(statement, ast.Import | ast.ImportFrom):
                        yield from self._unused_import(statement)
        yield from self._unused_locals()
        yield from self._dead_stores()
        for owner in world.classes.values():
            yield from self._only_annotated(owner)
            yield from self._unnamed_members(owner)
            yield from self._same_as_base(owner)
            for member in owner.body:
                if not isinstance(member, ast.FunctionDef) or re.fullmatch(r"__\w+__", member.name):
                    continue
                if self.plans.configs and (owner.name, member.name) == (CONFIG, "to_name"):
                    continue  # tables ask for it
                inside = [
                    n
                    for n in world.attributes[member.name]
                    if not world.is_inside(n, member) and not self._is_of_another(n, owner)
                ]
                if (
                    all(isinstance(base, ast.Name) and base.id in world.classes for base in owner.bases)
                    and not [n for n in inside if not world.is_foreign(n)]
                    and member.name not in world.texts
                ):
                    yield self._without(member)

    def _only_annotated(self, owner: ast.ClassDef) -> Iterator[Group]:
        """A class that only annotations mention, beside another one: nothing makes an object of it."""
        loads = [load for load in self.world.loads[owner.name] if not self.world.is_inside(load, owner)]
        if not loads or owner.name in self.world.entry_points:
            return
        group: Group = []
        for load in loads:
            union = self.world.parents[load]
            if not (
                isinstance(union, ast.BinOp)
                and isinstance(union.op, ast.BitOr)
                and is_annotation(self.world, load)
            ):
                return
            group.append(
                self._put(union, self._source(union.left if union.right is load else union.right), UNUSED)
            )
        yield [*group, *self._without(owner)]

    def _is_of_another(self, node: ast.Attribute, owner: ast.ClassDef) -> bool:
        """Whether an attribute is known to be one of another class, of one without relatives."""
        name = (
            node.value.id
            if isinstance(node.value, ast.Name) and node.value.id in self.world.classes
            else None
        )
        kind = self.world.classes.get(name or self.world.type_of(node.value) or "")
        return kind is not None and kind is not owner and not kind.bases and not owner.bases

    def _unnamed_members(self, owner: ast.ClassDef) -> Iterator[Group]:
        """Members of an enumeration that is only asked for members by name."""
        uses = [self.world.parents[load] for load in self.world.loads[owner.name]]
        if [ast.unparse(base) for base in owner.bases] != ["IntEnum"] or not uses:
            return
        names = {use.attr for use in uses if isinstance(use, ast.Attribute)}
        if all(isinstance(use, ast.Attribute) or is_annotation(self.world, use) for use in uses):
            for node in owner.body:
                if isinstance(node, ast.Assign) and not names & _bound(node):
                    yield self._without(node)

    def _same_as_base(self, owner: ast.ClassDef) -> Iterator[Group]:
        """A class that adds nothing to one of ours is that one."""
        base = owner.bases[0] if len(owner.bases) == 1 else None
        is_empty = all(_is_text(node) or isinstance(node, ast.Pass) for node in owner.body)
        if isinstance(base, ast.Name) and base.id in self.world.classes and is_empty:
            if owner.name not in self.world.entry_points and owner.name not in self.world.texts:
                loads = self.world.loads[owner.name]
                yield [*(self._put(load, base.id, UNUSED) for load in loads), *self._without(owner)]

    def _is_used(self, name: str, definition: ast.stmt) -> bool:
        return any(not self.world.is_inside(load, definition) for load in self.world.loads[name])

    def _documentation(self, node: ast.stmt) -> Group:
        """The string below a constant that says what it is."""
        body = self.world.tree.body
        after = body[body.index(node) + 1] if node is not body[-1] else None
        is_constant = isinstance(node, ast.Assign | ast.AnnAssign)
        return (
            [Cut(after.lineno, self._end([after]))]
            if is_constant and after is not None and _is_text(after)
            else []
        )

    def _unused_import(self, node: ast.Import | ast.ImportFrom) -> Iterator[Group]:
        kept = [a for a in node.names if self.world.loads[(a.asname or a.name).split(".")[0]]]
        if len(kept) == len(node.names):
            return
        if not kept:
            yield self._without(node)
            return
        listed = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in kept)
        head = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
        yield [self._put(node, head + listed, UNUSED)]

    # ---- places ------------------------------------------------------------------------------------
    def _without_parameter(
        self, function: ast.FunctionDef, argument: ast.arg, default: ast.expr | None
    ) -> Group:
        items: list[tuple[ast.AST, ast.AST]] = []
        for other, value, _ in parameters(function):
            items.append((other, value or other))
        index = [first for first, _ in items].index(argument)
        keyword_only = function.args.kwonlyargs
        if keyword_only == [argument]:  # the star before it goes as well: leave such a parameter to people
            return IMPOSSIBLE
        return [self._item(items, index)]

    def _without_argument(self, call: ast.Call, name: str, position: int | None) -> Group:
        items: list[tuple[ast.AST, ast.AST]] = [(a, a) for a in call.args] + [
            (k, k.value) for k in call.keywords
        ]
        for index, (item, _) in enumerate(items):
            if isinstance(item, ast.keyword) and item.arg == name:
                return [self._item(items, index)]
        if position is not None and position < len(call.args):
            return [self._item(items, position)]
        return []

    def _item(self, items: list[tuple[ast.AST, ast.AST]], index: int) -> Edit:
        """The edit that takes one of several things with commas between them away."""
        first, last = items[index]
        begin, start = first.lineno, first.col_offset  # type: ignore[attr-defined]
        end, stop = last.end_lineno, last.end_col_offset  # type: ignore[attr-defined]
        before = self.lines[begin - 1].encode()[:start].decode()
        after = self.lines[end - 1].encode()[stop:].decode()
        if not before.strip() and after.strip() in ("", ","):
            return Cut(begin, end)
        if index + 1 < len(items):
            following = items[index + 1][0]
            if following.lineno == end:  # type: ignore[attr-defined]
                return Put(begin, start, end, following.col_offset, "", CONSTANT)  # type: ignore[attr-defined]
        if index:
            previous = items[index - 1][1]
            if previous.end_lineno == begin:  # type: ignore[attr-defined]
                return Put(begin, previous.end_col_offset, end, stop, "", CONSTANT)  # type: ignore[attr-defined]
        comma = re.match(r"\s*,\s*", after)
        return Put(begin, start, end, stop + len(comma[0] if comma else ""), "", CONSTANT)

    def _undescribed(self, owner: ast.AST, name: str) -> Group:
        """The lines of a docstring about a parameter or field, where they are about nothing else."""
        body = owner.body  # type: ignore[attr-defined]
        text = body[0]
        if isinstance(owner, ast.FunctionDef) and owner.name == "__init__":
            text = self.world.parents[owner].body[0]  # type: ignore[attr-defined]
        if not _is_text(text):
            return []
        for number in range(text.lineno, self._end([text])):
            match = re.match(rf"(\s+){name}: ", self._line(number))
            if match:
                last = number
                while last + 1 < self._end([text]) and re.match(match[1] + r"\s+\S", self._line(last + 1)):
                    last += 1
                return [Cut(number, last)]
        return []

    def _line(self, number: int) -> str:
        return self.lines[number - 1]

    @staticmethod
    def _end(nodes: Sequence[ast.stmt]) -> int:
        return nodes[-1].end_lineno or nodes[-1].lineno

    def _source(self, node: ast.expr) -> str:
        data = [line.encode() for line in self.lines[node.lineno - 1 : node.end_lineno]]
        data[-1] = data[-1][: node.end_col_offset]
        data[0] = data[0][node.col_offset :]
        return re.sub(r"\s*\n\s*", " ", b"\n".join(data).decode())

    def _use(self, node: ast.expr, text: str, reason: str = CONSTANT) -> Put:
        """A constant in the place of a name; in parentheses where a number would run into what is around it."""
        parent = self.world.parents[node]
        is_number = text[:1].isdigit() or text.startswith("-")
        if is_number and (
            isinstance(parent, ast.Attribute) or (text.startswith("-") and not isinstance(parent, ast.Call))
        ):
            text = f"({text})"
        return self._put(node, text, reason)

    def _put(self, node: ast.AST, text: str, reason: str) -> Put:
        place = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return Put(*place, text, reason)


def _because(edit: Edit, reason: str) -> Edit:
    if isinstance(edit, Put):
        return Put(edit.first, edit.start, edit.last, edit.stop, edit.text, reason)
    return edit


def _argument(call: ast.Call, name: str, position: int | None) -> ast.expr | None:
    """What a call gives a parameter; None where it is left to the default."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position is not None and position < len(call.args) else None


def _is_dataclass(owner: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in owner.decorator_list)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return set()
