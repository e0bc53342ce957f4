"""Bundles modules into one readable file: the definitions that a root module needs, in dependency order, with comments.

Works on syntax trees and source lines; nothing is imported or executed. Every line of the result is a line of a source
file, unchanged or with named edits, or was generated for a named reason. :class:`Line` states which.

- Imports between our modules are resolved. Definitions that the root reaches are kept; all others are dropped, and so
  are methods and properties whose names occur in no kept code.
- Two definitions of one name are distinguished by the name of their module: ``_copy`` of load.py becomes
  ``_load_copy``.
- ``stream=`` arguments are dropped, so that launches use the default queue, as are parameters that served nothing else.
  The word, which competition servers refuse anywhere in a submission, is replaced in comments and docstrings, and names
  that contain it are replaced everywhere.
  that hold it are replaced everywhere.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from nvfp4_cute.competition.sources import (
    BundleError,
    Definition,
    Module,
    Target,
    Use,
    global_uses,
    is_stdlib,
    load,
    local_imports,
)

FORBIDDEN_WORD = "stream"
# Replacements in comments and docstrings, the longest word first.
REPLACEMENTS = (
    ("custream", "queue handle"),
    ("streaming", "one-pass"),
    ("streamed", "read once"),
    ("streams", "queues"),
    ("stream", "queue"),
)
# Our names that contain the word, and their names in a submission.
RENAMED = {"stream_k": "deal_k"}
SECTION_WIDTH = 110


@dataclass(frozen=True)
class Recipe:
    """How a problem's submission is assembled.

    Attributes:
        root: module whose public functions the submission offers.
        entry_points: these functions, and other required definitions of the root.
        left_out: methods whose calls are dropped if they are statements, and arguments that are dropped, because not
            every version of the runners has them.
        moved: external modules, and members in full (``cutlass.cute.arch.inline_ptx``), that not every version of the
            runners has, with the module of ours that replaces them.
        frozen: constants of the root that get another value: name to Python expression.
    """

    root: str
    entry_points: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    moved: Mapping[str, str] = field(default_factory=dict)
    frozen: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A line of the result.

    Attributes:
        text: the line without its end.
        source: path of the file in the repository; empty for a generated line.
        number: line number in that file, from 1; 0 for a generated line.
        reasons: reasons for the difference from the source line, or for generating it; empty for an unchanged line.
    """

    text: str
    source: str = ""
    number: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bundle:
    """The assembled file, line by line."""

    lines: tuple[Line, ...]

    @property
    def text(self) -> str:
        """Content of the file."""
        return "".join(f"{line.text}\n" for line in self.lines)

    def map_text(self) -> str:
        """Returns the origin of every line: number, source, reasons, separated by tabs."""
        return "".join(
            f"{number}\t{line.source + ':' + str(line.number) if line.source else '-'}\t{'; '.join(line.reasons)}\n"
            for number, line in enumerate(self.lines, start=1)
        )


def assemble(recipe: Recipe, reads: Callable[[], object] = lambda: None) -> Bundle:
    """Assembles a file.

    Args:
        reads: called after each read of a source file.

    Raises:
        BundleError: a source uses something that cannot be put into one file; the message names the place.
    """
    return _Assembly(recipe, reads).bundle()


@dataclass(frozen=True)
class _Edit:
    """Columns ``start`` to ``stop`` (bytes of UTF-8) of a source line are replaced."""

    start: int
    stop: int
    text: str
    reason: str


class _Assembly:
    """The state of one assembly."""

    def __init__(self, recipe: Recipe, reads: Callable[[], object]):
        self.recipe, self.reads = recipe, reads
        self.modules: dict[str, Module] = {}
        self.order: list[str] = []  # modules, dependencies first
        self.kept: set[tuple[str, int]] = set()  # module, index of the definition
        self.mentioned: set[str] = set()  # attribute names in what is kept
        self.external: dict[str, Target] = {}  # name in the file -> its meaning
        self.names: dict[Target, str] = {}
        self._references: dict[tuple[str, int, int], list[tuple[ast.expr, Target, Use]]] = {}

    # ---- kept definitions ----------------------------------------------------------------------
    def module(self, name: str) -> Module:
        if name not in self.modules:
            self.modules[name] = load(name)
            self.reads()
        return self.modules[name]

    def resolve(self, target: Target) -> Target:
        """Follows re-exports and moved modules to the definition."""
        if target.name is not None:
            moved = self.recipe.moved
            source = moved.get(target.module) or moved.get(f"{target.module}.{target.name}")
            target = Target(source, target.name) if source else target
        if not target.is_ours or target.name is None:
            return target
        module = self.module(target.module)
        if module.definition_of(target.name):
            return target
        if target.name in module.imports:
            return self.resolve(module.imports[target.name])
        raise BundleError(f"{module.label} has no {target.name}")

    def nodes(self, module: Module, definition: Definition) -> list[ast.stmt]:
        """Returns the definition's statements without the dropped methods."""
        node = definition.nodes[0]
        if not isinstance(node, ast.ClassDef):
            return definition.nodes
        dropped = set(self.dropped_members(node))
        body = [member for member in node.body if member not in dropped]
        thin = ast.ClassDef(**{**{name: getattr(node, name) for name in node._fields}, "body": body})
        return [ast.copy_location(thin, node), *definition.nodes[1:]]

    def dropped_members(self, node: ast.ClassDef) -> list[ast.stmt]:
        """Returns methods and properties that nothing mentions.

        Classes with bases keep all, because outside code may call them.
        """
        if node.bases:
            return []
        return [
            member
            for member in node.body
            if isinstance(member, ast.FunctionDef)
            and not (member.name in self.mentioned or _is_called_by_python(member.name))
        ]

    def binding(self, module: Module, definition: Definition, use: Use) -> Target | None:
        """Returns the meaning of a used name, or None for a builtin."""
        name = use.node.id
        for node in definition.local_imports:
            if name in module.targets(node) and not isinstance(definition.nodes[0], ast.Try):
                return self.resolve(module.targets(node)[name])
        if module.definition_of(name):
            return Target(module.name, name)
        if name in module.imports:
            return self.resolve(module.imports[name])
        return None

    def references(self, module: Module, definition: Definition) -> list[tuple[ast.expr, Target, Use]]:
        """Returns every reference to something outside of the definition: the naming expression, and its target.

        ``sm100.resolve`` with a module of ours is one expression, and its target is the function.
        """
        node = definition.nodes[0]
        dropped = len(self.dropped_members(node)) if isinstance(node, ast.ClassDef) else 0
        key = module.name, definition.first_line, dropped  # members are only ever restored
        if key not in self._references:
            self._references[key] = self._find_references(module, definition)
        return self._references[key]

    def _find_references(self, module: Module, definition: Definition) -> list[tuple[ast.expr, Target, Use]]:
        nodes = self.nodes(module, definition)
        if self.is_frozen(module, definition):
            nodes = []  # requirements of its value
        owners = {
            id(child): node for top in nodes for node in ast.walk(top) for child in ast.iter_child_nodes(node)
        }
        unused = {
            id(child)
            for top in nodes
            for node in ast.walk(top)
            if self.is_dropped(node)
            for child in ast.walk(node.value)
        }
        found = []
        for use in global_uses(nodes):
            if id(use.node) in unused:
                continue
            target = self.binding(module, definition, use)
            if target is None:
                continue
            expression: ast.expr = use.node
            while target.is_ours and target.name is None:
                owner = owners.get(id(expression))
                if not isinstance(owner, ast.Attribute):
                    raise BundleError(
                        f"{module.label}:{use.node.lineno}: module {target.module} is used as a value; "
                        "import what is needed of it"
                    )
                expression = owner
                member = Target(target.module, owner.attr)
                submodule = f"{target.module}.{owner.attr}"
                known = self.module(target.module)
                if not known.definition_of(owner.attr) and owner.attr not in known.imports:
                    member = Target(submodule)
                target = self.resolve(member)
            expression, target = self._moved_member(module, expression, target, owners)
            found.append((expression, target, use))
        return found

    def _moved_member(
        self, module: Module, expression: ast.expr, target: Target, owners: dict[int, ast.AST]
    ) -> tuple[ast.expr, Target]:
        """Returns the replacement in a module of ours for a member of an external module, or the given target."""
        path, longest = ".".join(filter(None, [target.module, target.name])), expression
        while not target.is_ours and isinstance(owner := owners.get(id(longest)), ast.Attribute):
            path, longest = f"{path}.{owner.attr}", owner
            source = self.recipe.moved.get(path)
            if source is not None and source != module.name:
                return longest, Target(source, owner.attr)
        return expression, target

    def collect(self) -> None:
        """Fills ``kept``, ``mentioned`` and ``external``. Kept definitions mention more; repeats until nothing is added."""
        root = self.module(self.recipe.root)
        wanted = [self.resolve(Target(root.name, name)) for name in self.recipe.entry_points]
        before = None
        while before != (len(self.kept), len(self.mentioned)):
            before = (len(self.kept), len(self.mentioned))
            for target in wanted:
                self.keep(target)
            for name, index in sorted(self.kept):
                module = self.modules[name]
                definition = module.definitions[index]
                for node in self.nodes(module, definition):
                    self.mentioned |= _mentions(node)
                for _, target, _ in self.references(module, definition):
                    self.keep(target)
        self.order_modules(root.name)

    def keep(self, target: Target) -> None:
        if not target.is_ours:
            return
        assert target.name is not None
        module = self.module(target.module)
        definition = module.definition_of(target.name)
        assert definition is not None
        self.kept.add((module.name, module.definitions.index(definition)))

    def order_modules(self, name: str) -> None:
        """Orders modules depth first: a module's references come before it."""
        done: set[str] = set()

        def visit(current: str) -> None:
            if current in done:
                return
            done.add(current)
            module = self.modules[current]
            needed = {
                target.module
                for definition in self.kept_of(module)
                for _, target, _ in self.references(module, definition)
                if target.is_ours and target.module != current
            }
            for other in sorted(needed):
                visit(other)
            self.order.append(current)

        visit(name)

    def kept_of(self, module: Module) -> list[Definition]:
        return [
            definition
            for index, definition in enumerate(module.definitions)
            if (module.name, index) in self.kept
        ]

    # ---- names ---------------------------------------------------------------------------------
    def choose_names(self) -> None:
        """Gives every kept definition a unique name, and every external name one meaning."""
        shadowed: dict[Target, set[str]] = {}
        for name in self.order:
            module = self.modules[name]
            for definition in self.kept_of(module):
                for expression, target, use in self.references(module, definition):
                    if target.is_ours:
                        shadowed.setdefault(target, set()).update(use.locals)
                    elif self.external.setdefault(use.node.id, target) != target:
                        raise BundleError(
                            f"{module.label}:{expression.lineno}: `{use.node.id}` means {target} here and "
                            f"{self.external[use.node.id]} elsewhere; give one of them another name"
                        )
        taken = set(self.external)
        for name in self.order:
            module = self.modules[name]
            for definition in self.kept_of(module):
                for bound in definition.names:
                    target = Target(name, bound)
                    chosen = bound
                    if chosen in taken or chosen in shadowed.get(target, ()):
                        chosen = _qualified(bound, name.rsplit(".", 1)[-1])
                    if chosen in taken:
                        raise BundleError(f"{module.label}: no free name for {bound}; rename it")
                    taken.add(chosen)
                    self.names[target] = chosen

    # ---- lines ---------------------------------------------------------------------------------
    def bundle(self) -> Bundle:
        self.collect()
        self.choose_names()
        lines = self.import_lines()
        for name in self.order:
            lines += self.module_lines(self.modules[name])
        return Bundle(tuple(_without_forbidden_word(lines)))

    def import_lines(self) -> list[Line]:
        """Returns imports of external modules: Python's own, then the others."""
        plain: dict[bool, list[str]] = {True: [], False: []}
        members: dict[str, list[str]] = {}
        for bound, target in self.external.items():
            if target.name is None:
                alias = "" if bound == target.module else f" as {bound}"
                plain[is_stdlib(target.module)].append(f"import {target.module}{alias}")
            else:
                alias = "" if bound == target.name else f" as {bound}"
                members.setdefault(target.module, []).append(target.name + alias)
        texts: list[str] = []
        for stdlib in (True, False):
            froms = [
                f"from {module} import {', '.join(sorted(names))}"
                for module, names in members.items()
                if is_stdlib(module) == stdlib
            ]
            texts += [*sorted(plain[stdlib]), *sorted(froms), ""]
        while texts and not texts[-1]:
            texts.pop()
        return [Line(text, reasons=("imports of all sources",)) for text in texts]

    def module_lines(self, module: Module) -> list[Line]:
        """Returns a section: the module's docstring as a comment, then its kept definitions."""
        lines = [Line("", reasons=("space",))] * 2
        title = f"# ---- {module.label} "
        lines.append(Line(title.ljust(SECTION_WIDTH, "-"), reasons=("section",)))
        document = module.tree.body[0]
        if isinstance(document, ast.Expr) and isinstance(document.value, ast.Constant):
            for number in range(document.lineno, (document.end_lineno or 0) + 1):
                text = module.lines[number - 1].replace('"""', "")
                if text or number < (document.end_lineno or 0):
                    lines.append(Line(f"# {text}".rstrip(), module.label, number, ("docstring as comment",)))
        previous: Definition | None = None
        for definition in self.kept_of(module):
            blank = 2
            if previous and _is_plain(previous) and _is_plain(definition):
                gap = module.lines[previous.last_line : definition.first_line - 1]
                blank = len(gap) if not any(gap) else 1
            lines += [Line("", reasons=("space",))] * blank
            lines += self.definition_lines(module, definition)
            previous = definition
        return lines

    def definition_lines(self, module: Module, definition: Definition) -> list[Line]:
        frozen = self.frozen_lines(module, definition)
        if frozen:
            return frozen
        edits: dict[int, list[_Edit]] = {}
        removed = self.removed_lines(module, definition)
        for node, text, reason in self.renamings(module, definition):
            if node.lineno != node.end_lineno:
                raise BundleError(f"{module.label}:{node.lineno}: put this name on one line")
            edits.setdefault(node.lineno, []).append(
                _Edit(node.col_offset, node.end_col_offset or 0, text, reason)
            )
        for function, argument in self.idle_parameters(module, definition):
            before = function.args.args[-2]
            if before.end_lineno != argument.lineno:
                raise BundleError(
                    f"{module.label}:{argument.lineno}: put `{argument.arg}` on the line before it"
                )
            reason = f"`{argument.arg}` served the dropped queue argument"
            edits.setdefault(argument.lineno, []).append(
                _Edit(before.end_col_offset or 0, argument.end_col_offset or 0, "", reason)
            )
        for edit_line, edit in self.header_edits(module, definition):
            edits.setdefault(edit_line, []).append(edit)
        lines = []
        for number in range(definition.first_line, definition.last_line + 1):
            if number in removed:
                continue
            text, reasons = _edited(module.lines[number - 1], edits.get(number, []))
            lines.append(Line(text, module.label, number, reasons))
        return _without_double_space(lines)

    def is_frozen(self, module: Module, definition: Definition) -> bool:
        """Whether a definition is a constant with a replaced value."""
        return module.name == self.recipe.root and definition.names[0] in self.recipe.frozen

    def frozen_lines(self, module: Module, definition: Definition) -> list[Line]:
        """Returns the lines of a constant with a replaced value; empty for all other definitions."""
        if not self.is_frozen(module, definition):
            return []
        node = definition.nodes[0]
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            raise BundleError(f"{module.label}:{node.lineno}: a frozen constant must be one assignment")
        comments = range(definition.first_line, node.lineno)
        kind = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
        before = f"{self.names[Target(module.name, definition.names[0])]}{kind} = "
        texts = (before + self.recipe.frozen[definition.names[0]]).splitlines()
        return [
            *(Line(module.lines[number - 1], module.label, number) for number in comments),
            *(Line(text, reasons=("frozen value",)) for text in texts),
        ]

    def renamings(self, module: Module, definition: Definition) -> Iterable[tuple[ast.expr, str, str]]:
        for expression, target, _ in self.references(module, definition):
            if target.is_ours:
                name = self.names[target]
                if ast.unparse(expression) != name:
                    yield expression, name, f"{ast.unparse(expression)} is {target.name} of {target.module}"

    def header_edits(self, module: Module, definition: Definition) -> Iterable[tuple[int, _Edit]]:
        """Yields the places where a renamed definition binds its name."""
        node = definition.nodes[0]
        for bound in definition.names:
            name = self.names[Target(module.name, bound)]
            if name == bound:
                continue
            reason = f"{bound} is taken by another module"
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                line = module.lines[node.lineno - 1]
                start = line.index(
                    bound, line.index("def " if isinstance(node, ast.FunctionDef) else "class ")
                )
                yield node.lineno, _Edit(start, start + len(bound), name, reason)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for part in ast.walk(node):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and part.id == bound:
                        yield part.lineno, _Edit(part.col_offset, part.end_col_offset or 0, name, reason)
            else:
                raise BundleError(f"{module.label}:{node.lineno}: {bound} must be renamed; bind it by itself")

    def removed_lines(self, module: Module, definition: Definition) -> set[int]:
        removed: set[int] = set()
        node = definition.nodes[0]
        if isinstance(node, ast.ClassDef):
            for member in self.dropped_members(node):
                removed.update(_member_lines(module, node, member))
        if not isinstance(node, ast.Try):
            for statement in local_imports(self.nodes(module, definition)):
                removed.update(_whole_lines(module, statement, "import"))
        for part in ast.walk(ast.Module(self.nodes(module, definition), [])):
            if self.is_dropped(part):
                removed.update(_whole_lines(module, part, f"argument {part.arg}"))
            elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
                function = part.value.func
                if isinstance(function, ast.Attribute) and function.attr in self.recipe.left_out:
                    removed.update(_whole_lines(module, part, f"call of {function.attr}"))
        for owner, argument in self.idle_parameters(module, definition):
            removed.update(_described(module, owner, argument))
        return removed

    def is_dropped(self, node: ast.AST) -> TypeGuard[ast.keyword]:
        """Whether a node is an argument that the file drops."""
        return (
            isinstance(node, ast.keyword)
            and node.arg is not None
            and (FORBIDDEN_WORD in node.arg.lower() or node.arg in self.recipe.left_out)
        )

    def idle_parameters(
        self, module: Module, definition: Definition
    ) -> Iterable[tuple[ast.FunctionDef, ast.arg]]:
        """Returns trailing parameters of functions whose only use is a dropped ``stream=`` argument."""
        for function in ast.walk(ast.Module(self.nodes(module, definition), [])):
            if not isinstance(function, ast.FunctionDef) or not function.args.args:
                continue
            last = function.args.args[-1]
            uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == last.arg]
            dropped = [part.value for part in ast.walk(function) if self.is_dropped(part)]
            if uses and all(use in dropped for use in uses):
                yield function, last


def _mentions(node: ast.AST) -> set[str]:
    """Returns attribute names, and strings that could be attribute names."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            found.add(part.value)
    return found


def _is_called_by_python(method: str) -> bool:
    """Whether statements call a method without naming it. Methods that return text for people are not needed."""
    return bool(re.fullmatch(r"__\w+__", method)) and method not in ("__str__", "__repr__")


def _qualified(name: str, module: str) -> str:
    """Qualifies a name: ``_copy`` of module load becomes ``_load_copy``; ``WorkTile`` of group_table ``GroupTableWorkTile``."""
    private = "_" if name.startswith("_") else ""
    bare = name.lstrip("_")
    if bare.isupper():
        return f"{private}{module.upper()}_{bare}"
    if bare[0].isupper():
        return private + "".join(part.capitalize() for part in module.split("_")) + bare
    return f"{private}{module}_{bare}"


def _is_plain(definition: Definition) -> bool:
    return isinstance(definition.nodes[0], ast.Assign | ast.AnnAssign)


def _member_lines(module: Module, owner: ast.ClassDef, member: ast.stmt) -> range:
    """Returns the lines of a method with its decorators, the comment above it, and the blank line above that."""
    decorators = getattr(member, "decorator_list", [])
    first = min([member.lineno, *(decorator.lineno for decorator in decorators)])
    while first - 1 > owner.lineno and module.lines[first - 2].strip().startswith("#"):
        first -= 1
    while first - 1 > owner.lineno and not module.lines[first - 2].strip():
        first -= 1
    return range(first, (member.end_lineno or member.lineno) + 1)


def _whole_lines(module: Module, node: ast.stmt | ast.keyword, what: str) -> range:
    """Returns the lines of a node that shares them with no other node."""
    end = node.end_lineno or node.lineno
    before = module.lines[node.lineno - 1].encode()[: node.col_offset].decode().strip()
    after = module.lines[end - 1].encode()[node.end_col_offset :].decode().split("#")[0].strip()
    if before or after not in ("", ","):
        raise BundleError(f"{module.label}:{node.lineno}: {what} is dropped; put it on a line of its own")
    return range(node.lineno, end + 1)


def _described(module: Module, function: ast.FunctionDef, argument: ast.arg) -> range:
    """Returns the docstring lines about a parameter."""
    first = function.body[0]
    for number in range(first.lineno, (first.end_lineno or first.lineno) + 1):
        if re.match(rf"\s*{argument.arg}: ", module.lines[number - 1]):
            return range(number, number + 1)
    return range(0)


def _edited(line: str, edits: list[_Edit]) -> tuple[str, tuple[str, ...]]:
    data = line.encode()
    for edit in sorted(edits, key=lambda edit: -edit.start):
        data = data[: edit.start] + edit.text.encode() + data[edit.stop :]
    return data.decode(), tuple(dict.fromkeys(edit.reason for edit in edits))


def _without_double_space(lines: list[Line]) -> list[Line]:
    """Merges blank lines that became neighbours, and removes those at the start of a body."""
    kept: list[Line] = []
    for line in lines:
        gap = kept and line.number - kept[-1].number > 1
        if not line.text and gap and (not kept[-1].text or kept[-1].text.endswith((":", '"""'))):
            continue
        kept.append(line)
    while kept and not kept[-1].text:
        kept.pop()
    return kept


def _without_forbidden_word(lines: list[Line]) -> list[Line]:
    """Replaces our names that contain the word, and the word in comments and docstrings.

    Raises:
        BundleError: it occurs in other code; the message names the place.
    """
    lines = [_renamed(line) for line in lines]
    text = "".join(f"{line.text}\n" for line in lines)
    spans = _prose(text)
    result = []
    for number, line in enumerate(lines, start=1):
        new, reasons = line.text, line.reasons
        for match in reversed(list(re.finditer(FORBIDDEN_WORD, line.text, re.IGNORECASE))):
            if not any(begin <= (number, match.start()) < end for begin, end in spans):
                place = f"{line.source}:{line.number}" if line.source else f"line {number}"
                raise BundleError(
                    f"{place}: {line.text.strip()!r} holds the word {FORBIDDEN_WORD!r} in code, which servers "
                    "refuse; rename it or leave it out of the submission"
                )
        if FORBIDDEN_WORD in new.lower():
            for word, instead in REPLACEMENTS:
                new = re.sub(word, instead, new, flags=re.IGNORECASE)
            reasons = (*reasons, "refused word in a comment")
        result.append(Line(new, line.source, line.number, reasons))
    return result


def _renamed(line: Line) -> Line:
    """Returns the line with the submission's names for ours."""
    text = re.sub(r"\w+", lambda match: RENAMED.get(match[0], match[0]), line.text)
    if text == line.text:
        return line
    return Line(text, line.source, line.number, (*line.reasons, "a name that holds the refused word"))


def _prose(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns the (line, column) spans of comments and of strings that are statements."""
    spans = []
    starts_line = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and starts_line):
            spans.append((token.start, token.end))
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            starts_line = True
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            starts_line = False
    return spans
