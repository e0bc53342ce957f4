"""Branches, loops and expressions that constants decide."""

import ast
from collections.abc import Iterator

from nvfp4_cute.competition.fold_state import BRANCH, ONCE, PLANNED, SHORTER, Group, State, is_text
from nvfp4_cute.competition.fold_text import Cut, Dedent, Edit, Put
from nvfp4_cute.competition.fold_values import FUNCTIONS, UNKNOWN, is_pure, is_same

# Expressions that plans may decide as a whole.
KNOWN = (ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.IfExp, ast.Subscript, ast.UnaryOp)


class Branches(State):
    """What is never executed, or comes to what is known."""

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
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BoolOp):
                # As a condition: without an operand that is known, comparisons still give a truth value.
                unknown = [part for part in node.value.values if self.world.value(part) is UNKNOWN]
                if unknown and all(isinstance(part, ast.Compare) for part in unknown):
                    yield from self._shorter(node.value)
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

    def planned(self) -> Iterator[Group]:
        """What host code computes from the configs."""
        for function, texts in self.plans.tables():
            first = function.body[0]
            begin = self._end([first]) + 1 if is_text(first) else first.lineno
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
