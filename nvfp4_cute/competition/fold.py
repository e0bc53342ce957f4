"""What an assembled file decides once and for all is written out: constants put in, branches that are never taken left out.

Works on the file alone, a closed world: its entry points are called from outside, everything else from inside. A parameter, a
field of a dataclass, or an attribute that gets one constant at every place that gives it a value is that constant. An ``if``
whose condition is then known is one of its branches. What nothing mentions any more goes, too: definitions, parameters, fields,
and the lines of docstrings about them. Passes repeat until none finds anything.

Only text is edited, at positions that the syntax tree names: comments stay with their lines, and every line keeps the place that
it came from.
"""

import ast
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from nvfp4_cute.competition.fold_branches import Branches
from nvfp4_cute.competition.fold_constants import Constants
from nvfp4_cute.competition.fold_inline import inlined
from nvfp4_cute.competition.fold_state import INLINED, Group
from nvfp4_cute.competition.fold_text import Text
from nvfp4_cute.competition.fold_tidy import WIDTH, tidy
from nvfp4_cute.competition.fold_unused import Unused
from nvfp4_cute.competition.fold_values import FUNCTIONS, World, is_pure

MAX_PASSES = 400
HEADING = "# ---- "


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


class _Pass(Branches, Constants, Unused):
    """What is found in one state of the file."""

    def found(self) -> Iterator[Group]:
        """Everything."""
        for find in (self.branches, self.planned, self.constants, self.inlined, self.unused):
            yield from find()

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
