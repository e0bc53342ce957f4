"""What a CuTe DSL script needs of a machine: architecture, packages, names of CuTe DSL. Nothing of it is executed."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from nvfp4_cute.emulator.fronts.script_arch import named_archs

DSL, DSL_MODULE = "nvidia-cutlass-dsl", "cutlass"

GONE = {"make_fragment": "4.3.5", "ProxyKind": "4.3.5", "ThrMma": "4.3.5", "get_tensor": "4.3.5"}
"""Names that newer versions of CuTe DSL lack, and a version that has them."""

REQUIREMENT = re.compile(rf"{DSL}(?:\[[\w,\- ]*\])?\s*([=<>!~][^\"'\n;#]*)")
FILES = ("pyproject.toml", "requirements*.txt", "setup.py", "setup.cfg")
LEVELS = 5
"""Folders above a script in which its project may have requirements and modules."""


@dataclass(frozen=True)
class Lacking:
    """A name that a script uses and that is not installed: dotted, and the first line that uses it."""

    name: str
    line: int


@dataclass(frozen=True)
class Needs:
    """What a script needs.

    Attributes:
        archs: architectures that its names stand for, each with the first such name.
        dsl: version of CuTe DSL that is installed, or None.
        names: names of CuTe DSL that this version lacks.
        modules: modules that cannot be imported.
        pins: requirements of CuTe DSL that the script or its project state, and where.
    """

    archs: dict[str, str]
    dsl: str | None
    names: tuple[Lacking, ...]
    modules: tuple[Lacking, ...]
    pins: tuple[tuple[str, str], ...]

    def lines(self, script: str) -> Iterator[str]:
        """Yields what to tell a person, for a script of this name."""
        named = ", ".join(f"{arch} ({name})" for arch, name in self.archs.items())
        if len(self.archs) == 1:
            yield f"architecture: {named}: cute-emulate --arch {next(iter(self.archs))} {script}"
        else:
            found = f"the script has names of {named}" if named else "nothing in the script decides it"
            yield f"architecture: {found}: choose one with --arch (default sm_100a)"
        if self.dsl is None:
            yield f"CuTe DSL: not installed: pip install {DSL}"
        elif not self.names:
            yield f"CuTe DSL: {self.dsl} is installed and has every name that the script uses"
        for lacking in self.names if self.dsl else ():
            had = GONE.get(lacking.name.rpartition(".")[2])
            fix = f'pip install "{DSL}=={had}" has it' if had else "another version may have it"
            yield f"CuTe DSL: {self.dsl} has no {lacking.name} (line {lacking.line}): {fix}"
        for where, what in self.pins:
            yield f"CuTe DSL: {where} asks for {what}"
        for lacking in self.modules:
            yield f"missing package: {lacking.name} (line {lacking.line})"


def needs(script: Path) -> Needs:
    """Reads a script. Imports CuTe DSL, and nothing else, to see which names it has.

    Raises:
        SyntaxError: the script is not Python.
    """
    text = script.read_text(encoding="utf-8")
    tree = ast.parse(text, str(script))
    with suppress(PackageNotFoundError):
        return Needs(named_archs(script), version(DSL), *_lacking(tree, script.parent), _pins(script, text))
    return Needs(named_archs(script), None, (), _lacking(tree, script.parent)[1], _pins(script, text))


def _lacking(tree: ast.Module, folder: Path) -> tuple[tuple[Lacking, ...], tuple[Lacking, ...]]:
    """Names of CuTe DSL that are not there, and modules that are not there."""
    names: dict[str, int] = {}
    modules: dict[str, int] = {}
    aliases: dict[str, tuple[str, Any]] = {}  # what a name of the script stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                found = _module(one.name, node.lineno, folder, names, modules)
                if found is not None:
                    name = one.name if one.asname else one.name.partition(".")[0]
                    aliases[one.asname or name] = name, found if one.asname else importlib.import_module(name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = _module(node.module, node.lineno, folder, names, modules)
            for one in node.names if found is not None else ():
                value = _member(found, one.name)
                if value is not None:
                    aliases[one.asname or one.name] = f"{node.module}.{one.name}", value
                elif one.name != "*":
                    names.setdefault(f"{node.module}.{one.name}", node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _attribute(node, aliases, names)
    return (
        tuple(Lacking(name, line) for name, line in names.items()),
        tuple(Lacking(name, line) for name, line in modules.items()),
    )


def _module(
    name: str, line: int, folder: Path, names: dict[str, int], modules: dict[str, int]
) -> ModuleType | None:
    """The module if it is one of CuTe DSL; notes it if it is not there."""
    top = name.partition(".")[0]
    if top != DSL_MODULE:
        near = [folder.resolve(), *list(folder.resolve().parents)[:LEVELS]]  # scripts extend sys.path by hand
        if find_spec(top) is None and not any(
            (at / top).is_dir() or (at / f"{top}.py").is_file() for at in near
        ):
            modules.setdefault(top, line)
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        if find_spec(DSL_MODULE) is not None:
            names.setdefault(name, line)
        return None


def _member(owner: Any, name: str) -> Any:
    value = getattr(owner, name, None)
    if value is None and isinstance(owner, ModuleType):
        with suppress(ImportError):
            value = importlib.import_module(f"{owner.__name__}.{name}")
    return value


def _attribute(node: ast.Attribute, aliases: dict[str, tuple[str, Any]], names: dict[str, int]) -> None:
    """Follows `a.b.c` from a module or class of CuTe DSL as long as it leads to others."""
    chain: list[str] = []
    base: ast.expr = node
    while isinstance(base, ast.Attribute):
        chain.append(base.attr)
        base = base.value
    if not isinstance(base, ast.Name) or base.id not in aliases:
        return
    dotted, value = aliases[base.id]
    for name in reversed(chain):
        if not (isinstance(value, ModuleType) or (inspect.isclass(value) and _is_dsl(value))):
            return
        dotted, value = f"{dotted}.{name}", _member(value, name)
        if value is None:
            names.setdefault(dotted, node.lineno)
            return


def _is_dsl(value: type) -> bool:
    return value.__module__.partition(".")[0] == DSL_MODULE


def _pins(script: Path, text: str) -> tuple[tuple[str, str], ...]:
    """Requirements in the script's own metadata and in files of its project."""
    own = REQUIREMENT.search(text)
    found = {script.name: own[0].strip()} if own else {}
    for folder in list(script.resolve().parents)[:LEVELS]:
        for pattern in FILES:
            for file in sorted(folder.glob(pattern)):
                with suppress(OSError, UnicodeDecodeError):
                    match = REQUIREMENT.search(file.read_text(encoding="utf-8"))
                    if match:
                        found.setdefault(file.name, match[0].strip().rstrip(","))
        if (folder / ".git").exists():
            break
    return tuple(found.items())
