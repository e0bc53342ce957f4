"""What nothing mentions any more."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from nvfp4_cute.competition.fold_plans import CONFIG
from nvfp4_cute.competition.fold_state import UNUSED, Group, State, because, is_text
from nvfp4_cute.competition.fold_text import Cut
from nvfp4_cute.competition.fold_values import FUNCTIONS, is_annotation, is_pure


class Unused(State):
    """Definitions, members, imports, locals and stores that nothing reads."""

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
                yield [because(edit, UNUSED) for edit in self._without(node)]

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
        is_empty = all(is_text(node) or isinstance(node, ast.Pass) for node in owner.body)
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
            if is_constant and after is not None and is_text(after)
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


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return set()
