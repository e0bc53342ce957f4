"""House rules that a machine can check, as functions over source text.

test_style.py runs them over the tree and over planted faults. Nothing here imports the checked code.

Pipeline state (`pipeline_state_findings`): CuTe DSL carries a value through a dynamic loop only if the loop body
rebinds a local name. Other state restarts at stage 0, phase 0 in every iteration, without a message from the DSL. So
four rules hold for everything in `ADVANCERS`:

    P1  the receiver is a plain local name, not `args.consumer`, `self.state`, or `states[0]`
    P2  the name belongs to the function itself, not to an enclosing one
    P3  a function that advances a parameter returns it from every `return`
    P4  a caller of such a function rebinds the argument: `consumer, acc = mma_tile(consumer, ...)`

Functions are matched by name (the same file first), so calls through an alias are not found.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

ADVANCERS = frozenset(
    {
        "advance",
        "acquire_and_advance",
        "wait_and_advance",
        "advance_to_next_work",
        "reset",
        "reset_count",
        "reverse",
        "mark_valid",
        "mark_invalid",
    }
)
# A family or an architecture, as a whole name or a part of one.
ARCHITECTURE = re.compile(r"(?<![a-zA-Z])[sS][mM]_?\d{2}|[a-z]Sm\d{2}")
ENVIRONMENT_NAMES = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")

# Matches K or row bytes at the end of a dividend, and bytes or strides in a product with two.
COUNTS_K = re.compile(r"(\b[kK]|\bin_features|row_bytes|k_bytes|\.shape\[-1\])\)?$")
COUNTS_BYTES = re.compile(r"row_bytes|k_bytes|stride\(|pitch|\.shape\[-1\]")
BLOCK_EXTENTS = (2, 16, 32, 64)
# Attributes of ``formats.block_format`` records, which depend on the format.
OF_ONE_FORMAT = ("SF_VEC_SIZE", "ATOM_BYTES", "num_k_blocks", "atom_counts", "padded_shape")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True, order=True)
class Finding:
    """One broken rule: file, line, rule, and what was written."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule} {self.message}"


@dataclass(frozen=True)
class Import:
    """One imported dotted name; `deferred` when it runs only inside a function or for type checkers."""

    name: str
    line: int
    deferred: bool


# ---- imports and environment -----------------------------------------------------------------------------------


def imports(source: str, module: str, known_modules: frozenset[str] = frozenset()) -> list[Import]:
    """List what `module` imports; `from a import b` counts as `a.b` where that is one of `known_modules`."""
    found: list[Import] = []

    def visit(node: ast.AST, deferred: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, known_modules)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append(Import(full if full in known_modules else base, node.lineno, deferred))
        inner = deferred or isinstance(node, FunctionNode) or _is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse(source), False)
    return found


def _absolute(node: ast.ImportFrom, module: str, known_modules: frozenset[str]) -> str:
    if not node.level:
        return node.module or ""
    is_package = any(name.startswith(module + ".") for name in known_modules)
    parts = module.split(".") if is_package else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns sets of modules that import one another in a circle, sorted. `graph`: module -> the modules that it imports."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        pending, seen = [start], set[str]()
        while pending:
            for following in graph[pending.pop()] - seen:
                seen.add(following)
                pending.append(following)
        reached[start] = seen
    found = {
        tuple(sorted(m for m in reached[start] if start in reached[m]))
        for start in graph
        if start in reached[start]
    }
    return [list(circle) for circle in sorted(found)]


def environment_findings(path: str, source: str) -> list[Finding]:
    """Every use of the process environment, except plain writes, which pass a setting to a library."""
    tree = ast.parse(source)
    written = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del))
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES and node not in written:
            found.append(Finding(path, node.lineno, "E1", ast.unparse(node)))
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names if alias.name in ENVIRONMENT_NAMES]
            found.extend(Finding(path, node.lineno, "E1", f"from os import {name}") for name in names)
    return found


# ---- pipeline state ----------------------------------------------------------------------------------------------


def architecture_findings(path: str, source: str) -> list[Finding]:
    """Identifiers and imports that name a family of architectures, and comparisons with the name of an architecture."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Compare):
            parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
            names = [
                part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
        else:
            names = [getattr(node, field, "") for field in ("id", "attr", "arg", "name")]
        found += [
            Finding(path, getattr(node, "lineno", 0), "architecture", name)
            for name in names
            if isinstance(name, str) and ARCHITECTURE.search(name)
        ]
    return found


def element_size_findings(path: str, source: str) -> list[Finding]:
    """Places that assume how many bits an element has or how many elements share a scale: ``2 * row_bytes``, ``k // 16``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if alias.name in OF_ONE_FORMAT]
            found += [Finding(path, node.lineno, "B3", f"import {name}") for name in names]
        if not isinstance(node, ast.BinOp):
            continue
        values = [side.value if isinstance(side, ast.Constant) else None for side in (node.left, node.right)]
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        if isinstance(node.op, ast.FloorDiv) and values[1] in BLOCK_EXTENTS and COUNTS_K.search(left):
            found.append(Finding(path, node.lineno, "B1", ast.unparse(node)))
        if isinstance(node.op, ast.Mult) and 2 in values and COUNTS_BYTES.search(left + right):
            found.append(Finding(path, node.lineno, "B2", ast.unparse(node)))
    return found


def pipeline_state_findings(sources: dict[str, str]) -> list[Finding]:
    """Checks rules P1 to P4 over a set of files, path -> text."""
    functions = [
        _Function(path, node) for path, text in sources.items() for node in _functions(ast.parse(text))
    ]
    table = _Table(functions)
    found = [finding for function in functions for finding in _check(function, table)]
    return sorted(set(found))


@dataclass(frozen=True)
class _Touch:
    """An expression that advances `receiver`: a method of `ADVANCERS`, or an argument of a function that advances it."""

    node: ast.Call
    receiver: ast.expr
    by_call: bool


class _Function:
    """A function, its own nodes (nested functions excluded), and the names that belong to it."""

    def __init__(self, path: str, node: FunctionNode):
        self.path, self.node = path, node
        args = node.args
        self.positional = [a.arg for a in (*args.posonlyargs, *args.args) if a.arg != "self"]
        self.params = {*self.positional, *(a.arg for a in args.kwonlyargs)}
        self.own = list(_own_nodes(node))
        stored = {n.id for n in self.own if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.local = self.params | stored
        self.parents = {child: parent for parent in self.own for child in ast.iter_child_nodes(parent)}
        self.returns = [n for n in self.own if isinstance(n, ast.Return)]

    def argument(self, call: ast.Call, param: str) -> ast.expr | None:
        """Finds the expression that `call`, a call of this function, passes for `param`."""
        for keyword in call.keywords:
            if keyword.arg == param:
                return keyword.value
        index = self.positional.index(param) if param in self.positional else len(call.args)
        return call.args[index] if index < len(call.args) else None


class _Table:
    """Which function advances which of its parameters, including through calls of other functions."""

    def __init__(self, functions: list[_Function]):
        self._named: dict[str, list[_Function]] = {}
        for function in functions:
            self._named.setdefault(function.node.name, []).append(function)
        self._advanced: dict[_Function, set[str]] = {function: set() for function in functions}
        changed = True
        while changed:
            changed = False
            for function in functions:
                names = {t.receiver.id for t in self.touches(function) if isinstance(t.receiver, ast.Name)}
                if not names & function.params <= self._advanced[function]:
                    self._advanced[function] |= names & function.params
                    changed = True

    def advanced(self, function: _Function) -> set[str]:
        """Parameters of `function` that it advances, itself or through another function."""
        return self._advanced[function]

    def touches(self, function: _Function) -> Iterator[_Touch]:
        """Everything in `function` that advances state."""
        for node in function.own:
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr in ADVANCERS:
                yield _Touch(node, node.func.value, by_call=False)
            for callee in self._callees(function, node):
                for param in self._advanced[callee]:
                    argument = callee.argument(node, param)
                    if argument is not None:
                        yield _Touch(node, argument, by_call=True)

    def _callees(self, caller: _Function, call: ast.Call) -> list[_Function]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        named = self._named.get(name or "", [])
        return [f for f in named if f.path == caller.path] or named


def _check(function: _Function, table: _Table) -> Iterator[Finding]:
    name = function.node.name
    for touch in table.touches(function):
        receiver = ast.unparse(touch.receiver)
        if not isinstance(touch.receiver, ast.Name) or receiver == "self":
            rule, why = "P1", f"advances {receiver}, which is not a local name"
        elif receiver not in function.local:
            rule, why = "P2", f"advances {receiver}, a name of an enclosing scope"
        elif touch.by_call and not _rebinds(function, touch.node, receiver):
            rule, why = "P4", f"drops the advanced {receiver}; rebind it"
        else:
            continue
        yield Finding(function.path, touch.node.lineno, rule, f"{name}: {ast.unparse(touch.node)} {why}")
    for param in sorted(table.advanced(function)):
        if not function.returns or not all(param in _names(r.value) for r in function.returns):
            why = f"{name} advances its parameter {param} without returning it"
            yield Finding(function.path, function.node.lineno, "P3", why)


def _rebinds(function: _Function, call: ast.Call, name: str) -> bool:
    """Whether the statement of `call` stores its result in `name` or returns it."""
    parent = function.parents.get(call)
    while isinstance(parent, (ast.Tuple, ast.Starred, ast.Subscript)):
        parent = function.parents.get(parent)
    if isinstance(parent, ast.Return):
        return True
    if isinstance(parent, ast.Assign):
        return any(name in _names(target) for target in parent.targets)
    return isinstance(parent, ast.AnnAssign) and name in _names(parent.target)


def _names(node: ast.AST | None) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node is not None else set()


def _functions(tree: ast.AST) -> list[FunctionNode]:
    return [node for node in ast.walk(tree) if isinstance(node, FunctionNode)]


def _own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, SCOPES):
            pending.extend(ast.iter_child_nodes(node))
