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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nvfp4_cute.competition.fold_text import Cut, Dedent, Edit, Put, Text
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
)

MAX_PASSES = 400
HEADING = "# ---- "
# What the compiler's decorators give functions beside their arguments.
INJECTED = {"loc", "ip"}
BRANCH, CONSTANT = "a branch that is always taken", "a constant of this file"
UNUSED, SHORTER = "nothing uses it", "a condition that is known"
PLAIN = (type(None), bool, int, str, float, Symbol)
Group = list[Edit]


def fold(lines: Sequence[Any], entry_points: Iterable[str]) -> list[Any]:
    """The lines of a file without what its constants decide.

    Args:
        lines: ``bundle.Line``.
        entry_points: top-level names that are used from outside.
    """
    text = Text(list(lines))
    names = frozenset(entry_points)
    for _ in range(MAX_PASSES):
        state = _Pass(World(text.tree(), names), text)
        if not any(text.apply(find()) for find in (state.branches, state.constants, state.unused)):
            break
    text.drop_empty_sections(HEADING)
    text.tidy()
    return text.lines


class _Pass:
    """What is found in one state of the file."""

    def __init__(self, world: World, text: Text):
        self.world = world
        self.lines = [line.text for line in text.lines]

    # ---- branches --------------------------------------------------------------------------------
    def branches(self) -> Iterator[Group]:
        """Statements and expressions whose condition is known, the outermost first; statements behind a return."""
        for node in self.world.nodes:
            for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
                yield from self._unreachable(block) if isinstance(block, list) else ()
            if isinstance(node, ast.If):
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
        yield from self._constant_attributes()
        yield from self._constant_locals()

    def _calls(self, function: ast.FunctionDef, name: str | None) -> list[ast.Call] | None:
        """Calls of a function, of a class, or (no name) of a method by ``self``; None where not all are known."""
        if name is not None:
            return None if name in self.world.entry_points else calls(self.world, name)
        if len(self.world.members[function.name]) != 1 or function.name.startswith("__"):
            return None
        found = []
        for read in self.world.reads(function.name):
            call = self.world.parents[read]
            is_self = isinstance(read.value, ast.Name) and read.value.id == "self"
            if not (is_self and isinstance(call, ast.Call) and call.func is read):
                return None
            if any(isinstance(a, ast.Starred) for a in call.args) or any(
                k.arg is None for k in call.keywords
            ):
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
                if uses or not all(v is None or is_pure(v) for v in given):
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
                value is UNKNOWN and (reads or not all(v is None or is_pure(v) for v in given))
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
                if (
                    not (isinstance(call, ast.Call) and call.func is load)
                    or any(isinstance(a, ast.Starred) for a in call.args)
                    or any(k.arg is None for k in call.keywords)
                ):
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
        elif not reads and is_pure(statement.value):
            yield self._without(statement)

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
        elif not uses and is_pure(value):
            yield [_because(edit, UNUSED) for edit in gone]

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
            return one or first.name
        if is_pair:
            return one if one in self.world.constants else UNKNOWN
        return one if one in self.world.constants else repr(first)

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
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._unused_import(node)
        for owner in world.classes.values():
            yield from self._only_annotated(owner)
            for member in owner.body:
                if not isinstance(member, ast.FunctionDef) or re.fullmatch(r"__\w+__", member.name):
                    continue
                inside = [n for n in world.attributes[member.name] if not world.is_inside(n, member)]
                if (
                    not owner.bases
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
            yield [Cut(node.lineno, self._end([node]))]
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
            return [Cut(1, 1), Cut(1, 1)]
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

    def _use(self, node: ast.expr, text: str) -> Put:
        """A constant in the place of a name; in parentheses where a number would run into what is around it."""
        parent = self.world.parents[node]
        is_number = text[:1].isdigit() or text.startswith("-")
        if is_number and (
            isinstance(parent, ast.Attribute) or (text.startswith("-") and not isinstance(parent, ast.Call))
        ):
            text = f"({text})"
        return self._put(node, text, CONSTANT)

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
