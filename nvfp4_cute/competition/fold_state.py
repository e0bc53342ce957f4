"""One state of a file that is folded: what is known of it, and the edits that its passes are made of."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from nvfp4_cute.competition.fold_plans import Plans
from nvfp4_cute.competition.fold_text import Cut, Edit, Put, Text
from nvfp4_cute.competition.fold_values import UNKNOWN, Symbol, World, is_pure, is_same, parameters

BRANCH, CONSTANT = "a branch that is always taken", "a constant of this file"
UNUSED, SHORTER = "nothing uses it", "a condition that is known"
PLANNED, ONCE = "what its frozen configs come to", "a loop that runs once"
INLINED = "the only use of what it says"
# Numbers that say less than their names.
LARGE = 1 << 16
PLAIN = (type(None), bool, int, str, float, Symbol)
Group = list[Edit]
# Touches a line twice: no group with these edits is made.
IMPOSSIBLE: Group = [Cut(1, 1), Cut(1, 1)]


class State:
    """A file between two passes. Passes are classes of their own, which find groups of edits that belong together."""

    def __init__(self, world: World, text: Text):
        self.world, self.plans = world, Plans(world)
        self.world.planned = self.plans.one
        self.lines = [line.text for line in text.lines]

    def _without(self, node: ast.stmt) -> Group:
        """A statement and the comment above it go; the only one of a block becomes ``pass``."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        parent = self.world.parents[node]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and node in block:
                others = [n for n in block if n is not node and not is_text(n)]
                if not others and not isinstance(parent, ast.Module):
                    indent = " " * node.col_offset
                    last = self._end([node])
                    return [Put(first, 0, last, len(self._line(last).encode()), f"{indent}pass", UNUSED)]
        while first > 1 and self._line(first - 1).strip().startswith("#") and not self._is_heading(first - 1):
            first -= 1
        return [Cut(first, self._end([node]))]

    def _is_heading(self, number: int) -> bool:
        return "# ----" in self._line(number)

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

    def _length_with(self, node: ast.expr, text: str) -> int:
        """Of a line with another text in the place of an expression."""
        tail = self._line(node.end_lineno or node.lineno).encode()[node.end_col_offset :]
        return node.col_offset + len(text) + len(tail)

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
        if not is_text(text):
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


def because(edit: Edit, reason: str) -> Edit:
    """The edit with another reason."""
    if isinstance(edit, Put):
        return Put(edit.first, edit.start, edit.last, edit.stop, edit.text, reason)
    return edit


def argument_of(call: ast.Call, name: str, position: int | None) -> ast.expr | None:
    """What a call gives a parameter; None where it is left to the default."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position is not None and position < len(call.args) else None


def is_dataclass(owner: ast.ClassDef) -> bool:
    """Whether a class is made one by a decorator."""
    return any("dataclass" in ast.unparse(decorator) for decorator in owner.decorator_list)


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a text by itself, such as a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
