"""Forms of hardware use in a kernel: instructions with their modifiers, and the fields that they use.

A form is small and comparable: two kernels with the same form use the hardware in the same way, whatever their sizes
and data. `static_forms` reads the forms that PTX text shows. A `FormLog` notes the forms that only a run shows:
descriptors, columns, tensor maps, launch attributes, and the instructions before and after fences. Without a log it
costs nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from nvfp4_cute.emulator.ptx import Entry, Imm, Operand, Program
from nvfp4_cute.emulator.record.form_names import family_of, is_fence, is_ordered, operation, scope_of

if TYPE_CHECKING:
    from nvfp4_cute.emulator.state import Launch, Warp


REMEMBERED = 4
"""Number of earlier instructions among which the partner of a fence is searched."""


class Form(NamedTuple):
    """One form of hardware use.

    Attributes:
        scope: the family of architectures that it is a form of ("sm_100"), or "any" for a form of every GPU.
        kind: "opcode", "mma", "scale columns", "matrix", "copy", "tensor map", "launch", "registers", "directive",
            "fence".
        text: the complete form, for people and for comparison.
    """

    scope: str
    kind: str
    text: str

    def __str__(self) -> str:
        """Returns the form as one line."""
        return f"{self.scope} {self.kind}: {self.text}"


# ---- forms in the text -----------------------------------------------------------------------------------------------
def static_forms(program: Program) -> set[Form]:
    """Returns the forms in the text of a module: opcodes, launch directives, register budgets."""
    family = family_of(program.target)
    return set().union(*(entry_forms(entry, family) for entry in program.entries.values()))


def entry_forms(entry: Entry, family: str) -> set[Form]:
    """Returns the forms in the text of one kernel."""
    found, budgets = set(), set()
    for inst in entry.insts:
        name = operation(inst)
        found.add(Form(scope_of(name, family), "opcode", name))
        if inst.opcode == "setmaxnreg":
            budgets.add(f"{inst.mods[0]} {_literal(inst.operands[0])}")
    if budgets:
        threads = 1
        for extent in entry.directives.get("reqntid") or entry.directives.get("maxntid") or ():
            threads *= extent
        found.add(Form(family, "registers", f"{threads} threads: {', '.join(sorted(budgets))}"))
    for name, values in entry.directives.items():
        shown = "" if name in ("reqntid", "maxntid") else " " + ", ".join(map(str, values))
        found.add(Form(family, "directive", f".{name}{shown}".strip()))
    return found


def _literal(operand: Operand) -> str:
    return str(operand.value) if isinstance(operand, Imm) else "of a register"


# ---- forms in a run --------------------------------------------------------------------------------------------------
class FormLog:
    """Notes the forms of launches on machines that are made inside `recorded`.

    Attributes:
        forms: forms of all launches so far.
    """

    def __init__(self) -> None:
        """Starts without forms."""
        self.forms: set[Form] = set()
        # By warp: the last fence that no instruction has followed yet, and the last instructions, the newest first.
        self._last: dict[Any, tuple[str | None, tuple[str, ...]]] = {}
        self._codes: set[Any] = set()

    def note(self, family: str, kind: str, text: str) -> None:
        """Adds a form."""
        self.forms.add(Form(family, kind, text))

    def begin(self, launch: "Launch") -> None:
        """Starts a launch: notes the forms of its text and its attributes, and forgets warps of earlier launches."""
        self._last.clear()
        code = launch.code
        family = family_of(str(code.builder.arch))
        if code not in self._codes:
            self._codes.add(code)
            self.forms |= entry_forms(code.entry, family)
        size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        if size > 1:
            self.note(family, "launch", f"cluster of {'x'.join(map(str, launch.cluster))}")
        if launch.cooperative:
            self.note(family, "launch", "cooperative")
        if launch.programmatic:
            self.note(
                family, "launch", f"programmatic, {'no cluster' if size == 1 else f'cluster of {size}'}"
            )

    def passed(self, warp: "Warp", family: str, name: str) -> None:
        """Notes the pair of a warp's fence with the instruction before or after it."""
        fence, earlier = self._last.get(warp, (None, ()))
        if fence is None and earlier[:1] == (name,):
            return
        if fence is not None and name != fence and is_ordered(fence, name, after=True):
            self.note(family, "fence", f"{fence} -> {name}")
            fence = None
        if is_fence(name):
            before = next((x for x in earlier if x != name and is_ordered(name, x, after=False)), None)
            if before is not None:
                self.note(family, "fence", f"{before} -> {name}")
            fence = name
        if earlier[:1] != (name,):
            earlier = (name, *earlier[: REMEMBERED - 1])
        self._last[warp] = fence, earlier


_current: ContextVar[FormLog | None] = ContextVar("forms", default=None)


def current() -> FormLog | None:
    """Returns the log of the current block, or None outside."""
    return _current.get()


@contextmanager
def recorded() -> Iterator[FormLog]:
    """Context manager that notes the forms of every launch on machines made inside the block."""
    token = _current.set(FormLog())
    try:
        log = _current.get()
        assert log is not None
        yield log
    finally:
        _current.reset(token)
