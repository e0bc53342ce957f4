"""PTX text -> Program: entries, parameters, symbols, and instructions with decoded operands.

The parser covers what NVVM prints for CuTe DSL kernels, inline assembly included: nested ``{ }`` scopes with
registers and labels of their own (the same label may appear in many scopes), predicates, vectors, sinks,
``%r|%p`` pairs, hexadecimal floats, and debug directives. Handlers never see text: they get `Inst` records.
"""

import bisect
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from nvfp4_cute.errors import EmulatorError

TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "f16x2": 4,
    "bf16x2": 4, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f32x2": 8, "b64": 8, "u64": 8, "s64": 8, "f64": 8,
    "b128": 16, "tf32": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Reg:
    """A register; `name` is unique in the entry (scoped registers get a ``#n`` suffix), `type` as declared."""

    name: str
    type: str


@dataclass(frozen=True)
class Argument(Reg):
    """A scalar `.param` variable of a function body: an argument or a result of a `call`. Stored like a register."""


@dataclass(frozen=True)
class Imm:
    """A literal. `kind` is "int", "f32" or "f64"; for floats `value` is the bit pattern."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class Symbol:
    """A module variable or a kernel parameter, used as an address."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Label:
    """A branch target; `name` is unique in the entry."""

    name: str


@dataclass(frozen=True)
class Special:
    """A read-only machine register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; `base` is a Reg, a Symbol, or an Imm."""

    base: "Operand"
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``."""

    items: "tuple[Operand, ...]"


@dataclass(frozen=True)
class TensorAddress:
    """``[map, {c0, c1, ...}]`` with the innermost coordinate first."""

    map: "Operand"
    coords: "tuple[Operand, ...]"


@dataclass(frozen=True)
class Pair:
    """``a|b``: two destinations (elect.sync, shfl.sync, setp) in one operand place."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True)
class Not:
    """``!p``: a negated predicate as a source."""

    operand: "Operand"


@dataclass(frozen=True)
class Group:
    """``(a, b, ...)``: the argument and result lists of `call`."""

    items: "tuple[Operand, ...]"


@dataclass(frozen=True)
class Sink:
    """``_``: a discarded result."""


Operand = Reg | Imm | Symbol | Label | Special | Address | Vector | TensorAddress | Pair | Not | Group | Sink


@dataclass(frozen=True)
class Inst:
    """One instruction.

    Attributes:
        opcode: first dotted word; in a handler's `Inst`, the registered prefix that matched.
        mods: every dotted part after the first word (for ``mbarrier.arrive.shared.b64``: arrive, shared, b64).
        operands: destinations first, as written.
        pred: guarding predicate and whether it is negated.
        line: 1-based line in the PTX text.
        source: (file, line) of the last ``.loc``, if any.
    """

    opcode: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    text: str
    line: int
    pred: tuple[Reg, bool] | None = None
    source: tuple[str, int] | None = None

    @property
    def short_text(self) -> str:
        """The text for messages; long vectors of registers show only the first and the last one."""
        return re.sub(r"\{([^{},]+)(?:,[^{},]+){7,},\s*([^{},]+)\}", r"{\1, ..., \2}", self.text)

    @property
    def place(self) -> str:
        """The place for messages: PTX line, text, and source line if known."""
        source = f" ({self.source[0]}:{self.source[1]})" if self.source else ""
        return f"PTX line {self.line} `{self.short_text}`{source}"

    def unsupported(self, why: str) -> EmulatorError:
        """Returns an error for an instruction, modifier or operand form that is not modelled."""
        return self.error(f"not modelled: {why}")

    def error(self, what: str) -> EmulatorError:
        """Returns an error that names this instruction."""
        return EmulatorError(f"PTX line {self.line}: `{self.text}`: {what}")


@dataclass(frozen=True)
class Param:
    """A kernel parameter: `nbytes` at `offset` of the parameter buffer, aligned to `align`."""

    name: str
    nbytes: int
    align: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A module or function variable. `space`: shared, global, const, or local. `init`: initial bytes or None.

    `nbytes` is None for an ``.extern`` array without a size (dynamic shared memory).
    """

    name: str
    space: str
    align: int
    nbytes: int | None
    init: bytes | None = None


@dataclass(eq=False)
class Entry:
    """A kernel: its signature, its instructions, and its labels as indices into `insts`."""

    name: str
    params: tuple[Param, ...]
    directives: dict[str, tuple[int, ...]]
    insts: list[Inst] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        """Size of the parameter buffer."""
        return max((p.offset + p.nbytes for p in self.params), default=0)


@dataclass(eq=False)
class Program:
    """A parsed PTX module. Compares equal only to itself."""

    version: str
    target: str
    entries: dict[str, Entry]
    variables: dict[str, Variable]


_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(?:loc|file|version|target|address_size)\b[^\n]*")
_STATEMENT = re.compile(r"[^;]*;")
_REG = re.compile(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)", re.S)
_ARGUMENT = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)$")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?"
    r"(?:\.v(\d)\s+)?\.(\w+)\s+([\w$%]+)((?:\s*\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_ENTRY = re.compile(
    r"(?:\.(?:visible|weak)\s+)*\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*((?:\.[a-z][^{;]*)?)\{", re.S
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s*(?:\.\w+\s*)*(?:\.align\s+\d+\s*)?)?"
    r"([\w$]+)\s*(?:\[\s*(\d+)\s*\])?\s*$",
    re.S,
)
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT = re.compile(r"(-?)0([fFdD])([0-9a-fA-F]{8}|[0-9a-fA-F]{16})$")
_DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?$")
_PREDICATE = re.compile(r"@(!?)\s*([%\w$]+)\s+(.*)", re.S)
_BRACKET = re.compile(r"[\[\]{}()]")
_NAME = re.compile(r"[%A-Za-z_$][\w$]*(?:\.\w+)?$")
_OFFSET = re.compile(r"(.+?)\s*\+\s*(-?(?:0[xX][0-9a-fA-F]+|\d+))$", re.S)

COMPONENTS, COLOURS = ("x", "y", "z", "w"), ("r", "g", "b", "a")
"""Names of the components of a vector register, and their aliases."""

KEPT = 32
"""Number of modules, and of compiled entries, that a process caches for repeated launches."""

SPECIAL_NAMES = frozenset(
    [
        "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%clock", "%clock_hi", "%clock64",
        "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%lanemask_eq", "%lanemask_le", "%lanemask_lt",
        "%lanemask_ge", "%lanemask_gt", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster",
        "%dynamic_smem_size", "%total_smem_size", "WARP_SZ",
    ]
    + [
        f"%{name}.{axis}"
        for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
        for axis in "xyz"
    ]
)  # fmt: skip


class _Scope:
    """Registers and labels declared between one pair of braces."""

    def __init__(self, parent: "_Scope | None", number: int):
        self.parent = parent
        self.suffix = f"#{number}" if number else ""
        self.regs: dict[str, str] = {}
        self.ranges: list[tuple[str, int, str]] = []
        self.arguments: set[str] = set()
        self.vectors: dict[str, tuple[str, ...]] = {}  # component names of vector registers
        self.labels: set[str] = set()
        self.operands: dict[str, Operand] = {}  # operands by text, resolved after all declarations

    def find_reg(self, name: str) -> Reg | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.regs:
                kind = Argument if name in scope.arguments else Reg
                return kind(name + scope.suffix, scope.regs[name])
            for prefix, count, type_ in scope.ranges:
                if (
                    name.startswith(prefix)
                    and (digits := name[len(prefix) :]).isdecimal()
                    and int(digits) < count
                ):
                    scope.regs[name] = type_
                    return Reg(name + scope.suffix, type_)
            scope = scope.parent
        return None

    def find_vector(self, name: str) -> Vector | None:
        """Returns a vector register named as a whole, with its components."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.vectors:
                return Vector(tuple(Reg(c + scope.suffix, scope.regs[c]) for c in scope.vectors[name]))
            scope = scope.parent
        return None

    def find_label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return name + scope.suffix
            scope = scope.parent
        return None


@dataclass
class _Raw:
    """An instruction before its names are resolved (labels may be defined later)."""

    text: str
    line: int
    scope: _Scope
    source: tuple[str, int] | None


@lru_cache(KEPT)
def parse(text: str) -> Program:
    """Parses a PTX module. The latest modules are cached; callers must not change them.

    Raises:
        EmulatorError: a syntax that the parser does not know; names the PTX line.
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str):
        # Comments become blanks of equal length, so offsets and line numbers stay valid.
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
        self.pos = 0
        self.newlines = [m.start() for m in re.finditer("\n", self.text)]
        # Compilers write the table of files after the code that refers to it.
        self.files = {int(number): name for number, name in _FILE.findall(self.text)}
        self.source: tuple[str, int] | None = None
        self.variables: dict[str, Variable] = {}

    def line(self, pos: int) -> int:
        """1-based line number of a text position."""
        return bisect.bisect_left(self.newlines, pos) + 1

    def error(self, pos: int, what: str) -> EmulatorError:
        snippet = self.text[pos : pos + 80].strip().split("\n")[0]
        return EmulatorError(f"PTX line {self.line(pos)}: {what}: `{snippet}`")

    def module(self) -> Program:
        version, target = "", ""
        entries: dict[str, Entry] = {}
        while self._skip_space():
            if match := _LINE_DIRECTIVE.match(self.text, self.pos):
                words = match.group().split(None, 1)
                version = words[1].strip() if words[0] == ".version" else version
                target = words[1].strip() if words[0] == ".target" else target
                self._note_location(match.group())
                self.pos = match.end()
            elif self.text.startswith(".section", self.pos):
                self._skip_braces()
            elif match := _ENTRY.match(self.text, self.pos):
                self.pos = match.end()
                entry = self._entry(match)
                entries[entry.name] = entry
            elif re.compile(r"(?:\.(?:visible|weak)\s+)*\.func\b[^;{]*\{").match(self.text, self.pos):
                raise self.error(self.pos, "device functions (.func with a body) are not modelled")
            elif match := _STATEMENT.match(self.text, self.pos):
                self._module_statement(match)
                self.pos = match.end()
            else:
                raise self.error(self.pos, "cannot parse")
        if not version:
            raise EmulatorError("not a PTX module: no .version directive")
        return Program(version, target, entries, self.variables)

    def _module_statement(self, match: re.Match[str]) -> None:
        statement = match.group()[:-1].strip()
        if _VARIABLE.match(statement):
            variable = self._variable(statement)
            self.variables[variable.name] = variable
        elif not statement.startswith((".pragma", ".extern .func", ".extern\t.func", ".alias")):
            raise self.error(match.start(), "unknown module statement")

    def _skip_space(self) -> bool:
        self.pos = _SPACE.match(self.text, self.pos).end()  # type: ignore[union-attr]
        return self.pos < len(self.text)

    def _skip_braces(self) -> None:
        depth = 0
        for match in re.compile(r"[{}]").finditer(self.text, self.pos):
            depth += 1 if match.group() == "{" else -1
            if depth == 0:
                self.pos = match.end()
                return
        raise self.error(self.pos, "unbalanced braces")

    def _note_location(self, directive: str) -> None:
        if directive.startswith(".loc"):
            number, line = directive.split()[1:3]
            self.source = (self.files.get(int(number), number), int(line))

    def _variable(self, statement: str) -> Variable:
        match = _VARIABLE.match(statement)
        assert match is not None, "callers check the form"
        space, align, lanes, type_, name, dims, init = match.groups()
        size = TYPE_BYTES[type_]
        counts = re.findall(r"\[\s*(\d*)\s*\]", dims)
        nbytes: int | None = size * int(lanes or 1)
        for count in counts:
            nbytes = nbytes * int(count) if count and nbytes is not None else None
        return Variable(name, space, int(align or size), nbytes, _initial_bytes(init, type_, nbytes))

    def _entry(self, header: re.Match[str]) -> Entry:
        name, params, directives = header.groups()
        entry = Entry(name, _parse_params(params or "", self), _parse_directives(directives))
        self.source = None
        raws, label_at = self._body(entry)
        entry.labels = label_at
        for raw in raws:
            entry.insts.append(_resolve(raw))
        return entry

    def _body(self, entry: Entry) -> tuple[list[_Raw], dict[str, int]]:
        raws: list[_Raw] = []
        label_at: dict[str, int] = {}
        scope: _Scope | None = _Scope(None, 0)
        scopes = 0
        pending_table: str | None = None
        while scope is not None:
            if not self._skip_space():
                raise self.error(len(self.text), f"entry {entry.name} has no closing brace")
            char = self.text[self.pos]
            if char == "{":
                scopes += 1
                scope = _Scope(scope, scopes)
                self.pos += 1
            elif char == "}":
                scope = scope.parent
                self.pos += 1
            elif char == ";":
                self.pos += 1
            elif match := _LINE_DIRECTIVE.match(self.text, self.pos):
                self._note_location(match.group())
                self.pos = match.end()
            elif match := _LABEL.match(self.text, self.pos):
                label = match.group(1)
                if label in scope.labels:
                    raise self.error(self.pos, "label defined twice in one scope")
                scope.labels.add(label)
                label_at[label + scope.suffix] = len(raws)
                pending_table = label
                self.pos = match.end()
            elif match := _STATEMENT.match(self.text, self.pos):
                self._statement(match, scope, entry, raws, pending_table)
                self.pos = match.end()
            else:
                raise self.error(self.pos, "cannot parse")
        return raws, label_at

    def _statement(
        self, match: re.Match[str], scope: _Scope, entry: Entry, raws: list[_Raw], label: str | None
    ) -> None:
        statement = " ".join(match.group()[:-1].split())
        if not statement.startswith("."):
            raws.append(_Raw(statement, self.line(match.start()), scope, self.source))
        elif found := _REG.match(statement):
            _declare_registers(scope, found.group(2), found.group(3), int(found.group(1) or 1))
        elif found := _ARGUMENT.match(statement):
            _declare_registers(scope, found.group(1), found.group(2))
            scope.arguments.add(found.group(2))
        elif statement.startswith(".branchtargets"):
            entry.tables[label or ""] = tuple(
                t.strip() for t in statement[len(".branchtargets") :].split(",")
            )
        elif _VARIABLE.match(statement):
            variable = self._variable(statement)
            entry.variables[variable.name] = variable
        elif not statement.startswith(".pragma"):
            raise self.error(match.start(), "unknown directive")


def _declare_registers(scope: _Scope, type_: str, names: str, width: int = 1) -> None:
    """Declares registers in a scope. `width`: components of each, which are registers themselves (ISA, Vectors)."""
    if type_ not in TYPE_BYTES:
        raise EmulatorError(f"unknown register type .{type_}")
    for name in names.split(","):
        name = name.strip()
        if width > 1:
            if name.endswith(">"):
                raise EmulatorError(f"a range `{name}` of vector registers: not modelled")
            scope.vectors[name] = tuple(f"{name}.{part}" for part in COMPONENTS[:width])
            scope.regs.update(dict.fromkeys(scope.vectors[name], type_))
        elif name.endswith(">"):
            prefix, count = name[:-1].split("<")
            scope.ranges.append((prefix, int(count), type_))
        else:
            scope.regs[name] = type_


def _initial_bytes(init: str | None, type_: str, nbytes: int | None) -> bytes | None:
    if init is None:
        return None
    size = TYPE_BYTES[type_]
    literals = [
        _literal(t.strip()) for t in init.strip().strip("{}").replace("{", "").replace("}", "").split(",")
    ]
    if any(literal is None for literal in literals):
        raise EmulatorError(f"initialiser {init!r} is not a list of literals")
    data = b"".join((lit.value & ((1 << 8 * size) - 1)).to_bytes(size, "little") for lit in literals if lit)
    return data.ljust(nbytes or 0, b"\0")


def _parse_params(text: str, parser: _Parser) -> tuple[Param, ...]:
    params: list[Param] = []
    offset = 0
    for item in filter(None, (t.strip() for t in text.split(","))):
        match = _PARAM.match(" ".join(item.split()))
        if match is None:
            raise EmulatorError(f"cannot parse kernel parameter `{item}`")
        align, type_, name, count = match.groups()
        size = TYPE_BYTES[type_]
        alignment = int(align or size)
        offset = (offset + alignment - 1) // alignment * alignment
        params.append(Param(name, size * int(count or 1), alignment, offset))
        offset += params[-1].nbytes
    return tuple(params)


def _parse_directives(text: str) -> dict[str, tuple[int, ...]]:
    found = re.findall(r"\.(\w+)((?:\s*,?\s*\d+)*)", text)
    return {name: tuple(int(n) for n in re.findall(r"\d+", numbers)) for name, numbers in found}


def _literal(token: str) -> Imm | None:
    if _NUMBER.match(token):
        digits = token.rstrip("U")
        octal = re.match(r"(-?)0([0-7]+)$", digits)
        return Imm(int(octal.group(1) + octal.group(2), 8) if octal else int(digits, 0))
    if match := _FLOAT.match(token):
        sign, kind, bits = match.groups()
        single = kind in "fF"
        value = int(bits, 16) ^ ((1 << (31 if single else 63)) if sign else 0)
        return Imm(value, "f32" if single else "f64")
    if _DECIMAL.match(token):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(token)))[0], "f64")
    return None


def _resolve(raw: _Raw) -> Inst:
    text, pred = raw.text, None
    try:
        if match := _PREDICATE.match(text):
            reg = raw.scope.find_reg(match.group(2))
            if reg is None:
                raise EmulatorError(f"unknown predicate {match.group(2)}")
            pred, text = (reg, bool(match.group(1))), match.group(3)
        opcode, _, rest = text.partition(" ")
        words = opcode.split(".")
        operands = tuple(_operand(token, raw.scope) for token in _split(rest))
    except EmulatorError as error:
        raise EmulatorError(f"PTX line {raw.line}: `{raw.text}`: {error}") from None
    return Inst(words[0], tuple(words[1:]), operands, raw.text, raw.line, pred, raw.source)


def _split(text: str, separator: str = ",") -> Iterator[str]:
    """Yields the parts of `text` between separators that are not inside brackets."""
    if _BRACKET.search(text) is None:
        parts = [part.strip() for part in text.split(separator)]
        yield from parts if parts[-1] else parts[:-1]
        return
    depth = start = 0
    for index, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == separator and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if text[start:].strip():
        yield text[start:].strip()


def _operand(token: str, scope: _Scope) -> Operand:
    found = scope.operands.get(token)
    if found is None:
        found = scope.operands[token] = _new_operand(token, scope)
    return found


def _new_operand(token: str, scope: _Scope) -> Operand:
    if token == "_":
        return Sink()
    if _NAME.match(token):
        return _name(token, scope)
    if (literal := _literal(token)) is not None:
        return literal
    if token.startswith("["):
        return _address(token[1:-1].strip(), scope)
    if token.startswith("{"):
        return Vector(tuple(_operand(t, scope) for t in _split(token[1:-1])))
    if token.startswith("("):
        return Group(tuple(_operand(t, scope) for t in _split(token[1:-1])))
    if token.startswith("!"):
        return Not(_operand(token[1:].strip(), scope))
    parts = list(_split(token, "|"))
    if len(parts) == 2:
        return Pair(_operand(parts[0], scope), _operand(parts[1], scope))
    if match := _OFFSET.match(token):
        base = _operand(match.group(1), scope)
        if isinstance(base, Symbol):
            return Symbol(base.name, base.offset + int(match.group(2), 0))
    raise EmulatorError(f"cannot parse operand `{token}`")


def _name(token: str, scope: _Scope) -> Operand:
    if (reg := scope.find_reg(token)) is not None:
        return reg
    if (vector := scope.find_vector(token)) is not None:
        return vector
    name, _, part = token.rpartition(".")
    if part in COLOURS and scope.find_vector(name) is not None:
        return _name(f"{name}.{COMPONENTS[COLOURS.index(part)]}", scope)
    if token in SPECIAL_NAMES:
        return Special(token)
    if token.startswith("%"):
        raise EmulatorError(f"unknown register `{token}`")
    label = scope.find_label(token)
    return Label(label) if label is not None else Symbol(token)


def _address(token: str, scope: _Scope) -> Operand:
    parts = list(_split(token))
    if len(parts) == 2:
        coords = _operand(parts[1], scope)
        return TensorAddress(
            _operand(parts[0], scope), coords.items if isinstance(coords, Vector) else (coords,)
        )
    if len(parts) != 1:
        raise EmulatorError(f"cannot parse address `[{token}]`")
    if match := _OFFSET.match(token):
        return Address(_operand(match.group(1), scope), int(match.group(2), 0))
    return Address(_operand(token, scope))
