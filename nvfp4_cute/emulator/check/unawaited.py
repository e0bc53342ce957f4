"""Registers that tcgen05.ld or wgmma has written and no wait has covered, on machines that perform operations at issue.

The registers hold their values at once. Their uses are noted instruction by instruction, like the `Deferred` values of
`late_registers` on other machines. Moves that pack registers disappear in machine code, so a use of their results
counts as a use of their sources. A use of an accumulator before wgmma.wait_group is a fault.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from nvfp4_cute.emulator.late_registers import always, copies, executes, late_uses, must_be_awaited
from nvfp4_cute.emulator.modes import Operation

if TYPE_CHECKING:
    from nvfp4_cute.emulator.code import Code
    from nvfp4_cute.emulator.state import Warp

Used = Callable[[Operation, int], None]


class Moved:
    """Content of a move's targets. It uses its sources once."""

    __slots__ = ("done", "sources")

    def __init__(self, sources: "list[Held]"):
        """Starts without uses."""
        self.sources, self.done = sources, False


Held: TypeAlias = tuple[Operation, int] | Moved
"""Content of a register: ``operation.result[index]``, or the result of a move."""


def _use_held(one: Held, used: Used) -> None:
    if not isinstance(one, Moved):
        must_be_awaited(one[0])
        used(*one)
    elif not one.done:
        one.done = True
        for source in one.sources:
            _use_held(source, used)


def _unwritten(one: Held) -> bool:
    """Whether the loaded memory was never written."""
    if isinstance(one, Moved):
        return any(map(_unwritten, one.sources))
    operation, index = one
    return operation.record.unwritten is not None and bool(operation.record.unwritten[index])


class Unawaited:
    """Results of operations, by warp and register slot."""

    def __init__(self, used: Used):
        """`used`: called for every use of a register that an operation wrote."""
        self._used = used
        self.begin()

    def begin(self) -> None:
        """Starts new warps."""
        self._held: dict[Warp, dict[int | None, Held]] = {}
        self._doubtful: set[Warp] = set()  # warps that loaded unwritten words

    def held(self, warp: "Warp") -> "dict[int | None, Held] | None":
        """Returns what the warp's registers hold; None or empty for nothing."""
        return self._held.get(warp)

    def loaded(self, operation: Operation, slots: Sequence[int | None]) -> None:
        """Notes that an operation wrote registers (None: a sink)."""
        held = self._held.setdefault(operation.warp, {})
        if operation.record.unwritten is not None:
            self._doubtful.add(operation.warp)
            held.update(zip(slots, zip(repeat(operation), range(len(slots)), strict=False), strict=True))
        else:  # it does not matter which of them is used
            held.update(dict.fromkeys(slots, (operation, 0)))
        held.pop(None, None)

    def awaited(self, warp: "Warp") -> None:
        """Notes that the warp's operations are complete: later uses tell nothing, except of unwritten words."""
        held = self._held.get(warp)
        if held and warp in self._doubtful:
            self._held[warp] = {slot: one for slot, one in held.items() if _unwritten(one)}
        elif held:
            held.clear()

    def use(self, warp: "Warp", slots: Iterable[int]) -> None:
        """Notes that registers are used, or overwritten."""
        held = self._held[warp]
        for slot in slots:
            one = held.pop(slot, None)
            if one is not None:
                _use_held(one, self._used)

    def move(self, warp: "Warp", sources: Sequence[int], targets: Sequence[int], *, copy: bool) -> None:
        """Notes that registers get values of others unchanged. `copy`: of one register, to one of the same type."""
        held = self._held[warp]
        found = [held[slot] for slot in sources if slot in held]
        if found and (warp.groups or not warp.all_active):  # lanes that wait elsewhere do not move
            self.use(warp, sources)
            found = []
        if not found:
            for slot in targets:
                held.pop(slot, None)
        else:
            held.update(dict.fromkeys(targets, found[0] if copy else Moved(found)))


def prepare_unawaited(code: "Code") -> None:
    """Watches the instructions of an entry that touch registers which tcgen05.ld or wgmma may have written."""
    for pc, passes_on, slots in late_uses(code):
        code.watch(pc, _held(code, pc), _move(code, pc) if passes_on else _use(slots))


def _held(code: "Code", pc: int) -> "Callable[[Warp], bool]":
    """Returns a test of whether an instruction is executed while a warp has registers that hold results."""
    runs = executes(code, pc)
    return _holds if runs is always else lambda warp: _holds(warp) and runs(warp)


def _holds(warp: "Warp") -> bool:
    return bool(_of(warp).held(warp))


def _move(code: "Code", pc: int) -> "Callable[[Warp], None]":
    sources, targets, copy = sorted(code.reads[pc]), sorted(code.writes[pc]), copies(code.insts[pc])
    return lambda warp: _of(warp).move(warp, sources, targets, copy=copy)


def _use(slots: tuple[int, ...]) -> "Callable[[Warp], None]":
    return lambda warp: _of(warp).use(warp, slots)


def _of(warp: "Warp") -> Unawaited:
    checker: Any = warp.cta.machine.checker
    assert checker is not None, "a watched step on an unchecked machine"
    found: Unawaited = checker.unawaited
    return found
