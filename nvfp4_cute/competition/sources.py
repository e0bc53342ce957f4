"""Our modules as text and syntax: their top-level definitions and imports, and the names that a part of them uses."""

import ast
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from nvfp4_cute import clone

PACKAGE = "nvfp4_cute"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class BundleError(ValueError):
    """A module that cannot be put into one file; the message names file, line, and what to change."""


@dataclass(frozen=True)
class Target:
    """Meaning of a name: ``name`` of ``module``; the module itself if ``name`` is None."""

    module: str
    name: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the module belongs to this project."""
        return self.module.split(".")[0] == PACKAGE


@dataclass
class Definition:
    """A top-level statement that binds names.

    Attributes:
        nodes: the statement, and the string below it that documents it.
        names: names that it binds.
        first_line, last_line: source lines, from 1, including decorators and comments directly above.
    """

    nodes: list[ast.stmt]
    names: tuple[str, ...]
    first_line: int
    last_line: int

    @cached_property
    def local_imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Import statements inside functions."""
        return local_imports(self.nodes)


@dataclass
class Module:
    """One of our source files.

    Attributes:
        name: dotted import name.
        path: the file.
        definitions: in source order.
        imports: names that the top-level imports bind.
    """

    name: str
    path: Path
    text: str
    tree: ast.Module
    definitions: list[Definition] = field(default_factory=list)
    imports: dict[str, Target] = field(default_factory=dict)

    @cached_property
    def lines(self) -> list[str]:
        """Source lines without their line ends."""
        return self.text.splitlines()

    @property
    def label(self) -> str:
        """Path in the repository, for example ``kernels/sm100/load.py``."""
        parts = self.name.split(".")
        folder = "/".join(parts[1:] if parts[1:2] and parts[1] in clone.FOLDERS else parts)
        return folder + ("/__init__.py" if self.path.name == "__init__.py" else ".py")

    def definition_of(self, name: str) -> Definition | None:
        """Returns the statement that binds ``name``."""
        return next((found for found in self.definitions if name in found.names), None)

    def targets(self, node: ast.Import | ast.ImportFrom) -> dict[str, Target]:
        """Returns the names that an import statement of this module binds."""
        if isinstance(node, ast.Import):
            return {
                alias.asname or alias.name.split(".")[0]: Target(
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                for alias in node.names
            }
        module = node.module or ""
        if node.level:
            package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
            base = package[: len(package) - node.level + 1]
            module = ".".join([*base, *filter(None, [node.module])])
        return {alias.asname or alias.name: _member(module, alias.name) for alias in node.names}


def _member(module: str, name: str) -> Target:
    """Resolves ``from module import name``: a submodule of ours, or a member."""
    if module.split(".")[0] == PACKAGE and _is_module(f"{module}.{name}"):
        return Target(f"{module}.{name}")
    return Target(module, name)


def _is_module(name: str) -> bool:
    return _find(name) is not None


def _find(name: str) -> ModuleSpec | None:
    """Finds a module of ours. Parent packages are not executed, because kernels need a compiler that may be another version."""
    package, *rest = name.split(".")
    path = ".".join([package, *rest[:1]])
    spec = importlib.util.find_spec(path)
    for part in rest[1:]:
        if spec is None or spec.submodule_search_locations is None:
            return None
        path += f".{part}"
        spec = PathFinder.find_spec(path, spec.submodule_search_locations)
    return spec


def load(name: str) -> Module:
    """Reads and analyses the module ``name``.

    Raises:
        BundleError: it does not exist, or has a top-level statement that is neither definition nor import.
    """
    spec = _find(name)
    if spec is None or spec.origin is None:
        raise BundleError(f"there is no module {name}")
    path = Path(spec.origin)
    text = path.read_text(encoding="utf-8")
    module = Module(name, path, text, ast.parse(text))
    end = 0
    for index, node in enumerate(module.tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module.imports.update(module.targets(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if index and module.definitions and isinstance(node.value.value, str):
                documented = module.definitions[-1]
                documented.nodes.append(node)
                documented.last_line = _last_line(node)
        else:
            names = tuple(name for name in bound_names([node]) if name != "__all__")
            if not names and bound_names([node]):
                continue
            if not names:
                raise BundleError(
                    f"{module.label}:{node.lineno}: neither definition nor import; move it into a function"
                )
            first = _first_line(module.lines, node, end)
            module.definitions.append(Definition([node], names, first, _last_line(node)))
        end = _last_line(node)
    return module


def _last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _first_line(lines: list[str], node: ast.stmt, end: int) -> int:
    """Returns the first line including decorators and the comment that ends directly above."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    while first - 1 > end and lines[first - 2].startswith("#"):
        first -= 1
    return first


def bound_names(nodes: list[ast.stmt]) -> list[str]:
    """Returns the names that statements bind in their own scope, in order: assignments, definitions, imports, loops."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
            return
        if isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.extend(alias.asname or alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found.append(node.id)
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.append(node.name)
        if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            found.append(node.name)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for node in nodes:
        visit(node)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Use:
    """A name that a definition takes from its module, and the names that its enclosing functions bind there."""

    node: ast.Name
    locals: frozenset[str]


def global_uses(nodes: list[ast.stmt]) -> list[Use]:
    """Returns every load of a name that no enclosing function or comprehension binds.

    Imports inside functions count as global: their names are looked up like a module's own imports.
    """
    uses: list[Use] = []

    def visit(node: ast.AST, scope: frozenset[str], in_class: frozenset[str]) -> None:
        if isinstance(node, ast.Name):
            loaded = isinstance(node.ctx, ast.Load)
            if loaded and node.id not in scope and node.id not in in_class:
                uses.append(Use(node, scope))
        elif isinstance(node, FUNCTIONS):
            outside: list[ast.AST] = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            arguments = _arguments(node.args)
            outside += [argument.annotation for argument in arguments if argument.annotation]
            if not isinstance(node, ast.Lambda):
                outside += [*node.decorator_list, *filter(None, [node.returns])]
            for part in outside:
                visit(part, scope, in_class)
            body = [node.body] if isinstance(node, ast.Lambda) else node.body
            bound = set() if isinstance(node, ast.Lambda) else set(_local_names(node.body))
            inner = scope | bound | {argument.arg for argument in arguments}
            for part in body:
                visit(part, inner, frozenset())
        elif isinstance(node, ast.ClassDef):
            for part in [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]:
                visit(part, scope, in_class)
            # A class body sees its own bindings; its functions do not.
            bound_here: set[str] = set()
            for part in node.body:
                visit(part, scope, frozenset(bound_here))
                bound_here |= set(bound_names([part]))
        elif isinstance(node, COMPREHENSIONS):
            targets = {
                name.id
                for generator in node.generators
                for name in ast.walk(generator.target)
                if isinstance(name, ast.Name)
            }
            for child in ast.iter_child_nodes(node):
                visit(child, scope | targets, in_class)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, scope, in_class)

    for node in nodes:
        visit(node, frozenset(), frozenset())
    return uses


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    star = [part for part in (arguments.vararg, arguments.kwarg) if part]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *star]


def _local_names(body: list[ast.stmt]) -> list[str]:
    """Returns the names that a function body binds other than by import or as a global."""
    declared = {
        name
        for node in body
        for part in ast.walk(node)
        if isinstance(part, ast.Global)
        for name in part.names
    }
    imported = {name for node in local_imports(body) for name in bound_names([node])}
    return [name for name in bound_names(body) if name not in imported | declared]


def local_imports(nodes: list[ast.stmt]) -> list[ast.Import | ast.ImportFrom]:
    """Returns the import statements inside functions."""
    return [
        part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Import | ast.ImportFrom)
    ]


def is_stdlib(module: str) -> bool:
    """Whether a module belongs to Python's standard library."""
    return module.split(".")[0] in sys.stdlib_module_names
