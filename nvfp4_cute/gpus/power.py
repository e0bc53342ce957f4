"""What a GPU draws, and how long a kernel takes that runs again and again at the power limit.

A launch of its own, or a few milliseconds of them, run at the clock that ``timing_figures`` says. Longer runs meet the power
limit, and the GPU slows its clock until it draws no more. What matrix pipes draw follows the products that they compute. It
hardly follows the clock: on an H100 (``bench/probes/h100_power.txt``) a cycle of an SM's matrix pipes on random data costs 3.7
to 3.9 nJ in bf16 and 4.0 in fp8, between 1.3 and 1.8 GHz, beside 100 W that are always drawn. So a launch takes at least its
energy over the power that is left for it. Zeros cost two fifths to a half of that, small integers nine tenths.
"""

from dataclasses import dataclass

from nvfp4_cute.gpus import targets
from nvfp4_cute.gpus.targets import Target
from nvfp4_cute.timing.result import Timing

PROBE = "bench/probes/h100_power.txt"
QUICKRUN = (
    "ademeure/QuickRunCUDA: NVFP4 GEMM on random data draws 1095 W at 1455 MHz on a B300; assumed: matrix pipes busy 90 % of the "
    "time, and 150 W drawn besides"
)


@dataclass(frozen=True)
class Power:
    """Figures of one GPU.

    Attributes:
        limit: in watts, that it keeps.
        base: watts that are drawn besides.
        matrix_cycle: joules of a cycle of one SM's matrix pipes on random data.
        source: of the figures.
    """

    limit: float
    base: float
    matrix_cycle: float
    source: str


HOPPER = 700, 100, 3.7e-9, PROBE
BLACKWELL = 150, 4.876e-9, QUICKRUN
POWER = {
    targets.H100_SXM.name: Power(*HOPPER),
    targets.H200.name: Power(*HOPPER),
    targets.B200.name: Power(1000, *BLACKWELL),
    targets.GB200.name: Power(1200, *BLACKWELL),
    targets.B300.name: Power(1100, *BLACKWELL),
}


def least_us(flops: int, math: str, target: Target) -> float | None:
    """Least time of so many operations that are repeated for seconds on random data; None where power or the rate is not known.

    Args:
        flops: two a multiply-add.
        math: the format that tensor cores multiply in, of ``target.rates``.
    """
    power, rate = POWER.get(target.name), target.rates.get(math)
    if power is None or rate is None:
        return None
    return 1e6 * flops / rate * power.matrix_cycle / (power.limit - power.base)


def sustained_us(timing: Timing, target: Target) -> float | None:
    """Time of a modelled launch that is repeated for seconds on random data; None for a GPU whose power is not known."""
    power = POWER.get(target.name)
    if power is None:
        return None
    return max(timing.us, 1e6 * sum(timing.mma_busy) * power.matrix_cycle / (power.limit - power.base))
