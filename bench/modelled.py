"""Times of cases on a GPU that need not be there: the kernel's launch recorded on the emulator and replayed in time."""

from nvfp4_cute.backends import emulator
from nvfp4_cute.bench import ours
from nvfp4_cute.bench.cases import Case
from nvfp4_cute.bench.operands import empty_operands
from nvfp4_cute.bench.report import MODELLED, Time
from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.targets import Target

MOST_FLOPS = 7e10
"""Cases with more operations take longer to record than anyone waits: about a minute for so many."""


def time_case(case: Case, target: Target) -> tuple[Time | None, dict[str, Time], dict[str, str]]:
    """The modelled time of our kernel, or why there is none."""
    if case.work.flops > MOST_FLOPS:
        return None, {}, {ours.NAME: f"not modelled: more than {MOST_FLOPS / 1e9:.0f} GFLOP"}
    try:
        prepared = ours.prepare(case, empty_operands(case), f"emulator:{target.name}")
        with emulator.observe(timing=True) as observer:
            prepared.run()
    except (UnsupportedProblem, UnsupportedTarget) as error:
        return None, {}, {ours.NAME: str(error)}
    return Time(sum(timing.us for timing in observer.timings), MODELLED), {}, {}
