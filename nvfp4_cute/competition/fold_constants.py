"""Parameters, fields, attributes and locals that have one value wherever they get one."""

import ast
from collections.abc import Iterator

from nvfp4_cute.competition.fold_state import (
    CONSTANT,
    UNUSED,
    Group,
    State,
    argument_of,
    because,
    is_dataclass,
    is_text,
)
from nvfp4_cute.competition.fold_values import FUNCTIONS, UNKNOWN, calls, parameters, spreads

# What the compiler's decorators give functions beside their arguments.
INJECTED = {"loc", "ip"}


class Constants(State):
    """What is a constant of the file: its value where it is read, and nothing where it is given."""

    def constants(self) -> Iterator[Group]:
        """Parameters, fields, attributes and locals that have one value."""
        for function in self.world.functions.values():
            yield from self._constant_parameters(function, function.name, 0)
        for owner in self.world.classes.values():
            if is_dataclass(owner):
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
            given = [argument_of(call, argument.arg, position) for call in found]
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
            yield [because(edit, reason) for edit in group]

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
            given = [argument_of(call, name, place) for call in found]
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
            yield [because(edit, UNUSED if value is UNKNOWN else CONSTANT) for edit in group]

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
                elif isinstance(node, ast.Attribute) and not is_dataclass(owner):
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
            if is_dataclass(owner) or owner.bases:
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
        body = [n for n in node.body if not is_text(n)]
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
            yield [because(edit, UNUSED) for edit in gone]
