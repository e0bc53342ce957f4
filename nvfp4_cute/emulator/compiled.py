"""An entry compiled for a machine, with the wrappers that watch its instructions."""

from functools import cache

from nvfp4_cute.emulator.check.bank_watch import counted
from nvfp4_cute.emulator.check.early_release import prepare_uses
from nvfp4_cute.emulator.check.touches import TOUCHES
from nvfp4_cute.emulator.check.unawaited import prepare_unawaited
from nvfp4_cute.emulator.check.watch import WATCHERS
from nvfp4_cute.emulator.check.wgmma_registers import prepare_wgmma
from nvfp4_cute.emulator.code import Code
from nvfp4_cute.emulator.ptx import Entry, Program
from nvfp4_cute.emulator.record.form_watch import watched
from nvfp4_cute.emulator.record.steps import RECORDERS, prepare


def compiled(
    program: Program,
    entry: Entry,
    *,
    late: bool = False,
    checked: bool = False,
    timed: bool = False,
    count_banks: bool = False,
    forms: bool = False,
) -> Code:
    """Compiles an entry.

    Args:
        late: asynchronous operations may happen after their issue.
        checked: the machine looks for hazards.
        timed: the machine records everything that takes time.
        count_banks: the machine counts bank conflicts.
        forms: the machine notes the forms of hardware use.

    Raises:
        EmulatorError: see `Code`.
    """
    choices = (
        (count_banks, counted),
        (checked, WATCHERS.wrap),
        (timed and not checked, RECORDERS.wrap),
        (forms, watched),
    )
    wrappers = [wrap for chosen, wrap in choices if chosen]
    code = Code(program, entry, late=late, noted=checked, wrappers=wrappers)
    if checked:
        prepare_uses(code)
        prepare_wgmma(code)
        if not late:
            prepare_unawaited(code)
        code.together = cache(lambda: Code(program, entry, wrappers=[TOUCHES.wrap]))
    if timed:
        prepare(code)
    return code
