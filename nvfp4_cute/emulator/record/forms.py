"""Forms of what a kernel asks of the hardware: instructions with their modifiers, and the fields that they run with.

A form is small and comparable: two kernels that use the same form ask for the same thing, whatever their sizes and data.
`static_forms` reads those that PTX text shows. A `FormLog` notes those that only a run shows: descriptors, columns, tensor
maps, launch attributes, and what stands before and behind fences. It costs nothing where there is none.
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
"""Instructions among which that in front of a fence is looked for."""


class Form(NamedTuple):
    """One form.

    Attributes:
        scope: the family of architectures that it is a form of ("sm_100"), or "any" for what every GPU has.
        kind: "opcode", "mma", "scale columns", "matrix", "copy", "tensor map", "launch", "registers", "directive", "fence".
        text: all of it, for people and for comparison.
    """

    scope: str
    kind: str
    text: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.scope} {self.kind}: {self.text}"


# ---- what the text shows ---------------------------------------------------------------------------------------------
def static_forms(program: Program) -> set[Form]:
    """Forms that the text of a module shows: opcodes, launch directives, register budgets."""
    family = family_of(program.target)
    return set().union(*(entry_forms(entry, family) for entry in program.entries.values()))


def entry_forms(entry: Entry, family: str) -> set[Form]:
    """Those of one kernel."""
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


# ---- what a run shows ------------------------------------------------------------------------------------------------
class FormLog:
    """Notes the forms of launches. Machines that are made inside `recorded` write to it.

    Attributes:
        forms: what has been noted, of all launches.
    """

    def __init__(self) -> None:
        """Nothing noted."""
        self.forms: set[Form] = set()
        # Of each warp: the fence that nothing has come behind yet, and what came last, the newest first.
        self._last: dict[Any, tuple[str | None, tuple[str, ...]]] = {}
        self._codes: set[Any] = set()

    def note(self, family: str, kind: str, text: str) -> None:
        """Add a form."""
        self.forms.add(Form(family, kind, text))

    def begin(self, launch: "Launch") -> None:
        """A launch: what its text shows, and its attributes. Warps of earlier ones are forgotten."""
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
        """A warp comes to an instruction that fences are there for, or to a fence: what stands before and behind it."""
        fence, earlier = self._last.get(warp, (None, ()))
        if fence is None and earlier[:1] == (name,):
            return
        if fence is not None and name != fence and is_ordered(fence, name, behind=True):
            self.note(family, "fence", f"{fence} -> {name}")
            fence = None
        if is_fence(name):
            before = next((x for x in earlier if x != name and is_ordered(name, x, behind=False)), None)
            if before is not None:
                self.note(family, "fence", f"{before} -> {name}")
            fence = name
        if earlier[:1] != (name,):
            earlier = (name, *earlier[: REMEMBERED - 1])
        self._last[warp] = fence, earlier


_current: ContextVar[FormLog | None] = ContextVar("forms", default=None)


def current() -> FormLog | None:
    """The log of the block that runs, None outside."""
    return _current.get()


@contextmanager
def recorded() -> Iterator[FormLog]:
    """Note the forms of every launch on machines that are made inside the block."""
    token = _current.set(FormLog())
    try:
        log = _current.get()
        assert log is not None
        yield log
    finally:
        _current.reset(token)
