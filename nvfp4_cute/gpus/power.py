"""The power that a GPU draws, and the time of a kernel that is repeated at the power limit.

A single launch, or a few milliseconds of launches, runs at the clock of ``timing_figures``. Longer runs reach the power limit,
and the GPU lowers its clock until it draws no more. The energy of matrix pipes depends on the products that they compute, and
hardly on the clock: on an H100 (``bench/probes/h100_power.txt``), one cycle of an SM's matrix pipes on random data takes 3.7 to
3.9 nJ in bf16 and 4.0 nJ in fp8, between 1.3 and 1.8 GHz, in addition to a constant 100 W. A launch therefore takes at least
its energy divided by the remaining power. Zeros take two fifths to one half of that energy, small integers nine tenths.
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
    """Power figures of one GPU.

    Attributes:
        limit: power limit in watts.
        base: watts that are always drawn.
        matrix_cycle: joules per cycle of one SM's matrix pipes on random data.
        source: origin of the figures.
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
    """Returns the least time of operations that are repeated for seconds on random data; None if power or rate is unknown.

    Args:
        flops: operations, two per multiply-add.
        math: the format in which tensor cores multiply, a key of ``target.rates``.
        target: the GPU.
    """
    power, rate = POWER.get(target.name), target.rates.get(math)
    if power is None or rate is None:
        return None
    return 1e6 * flops / rate * power.matrix_cycle / (power.limit - power.base)


def sustained_us(timing: Timing, target: Target) -> float | None:
    """Returns the time of a modelled launch that is repeated for seconds on random data; None if the GPU's power is unknown."""
    power = POWER.get(target.name)
    if power is None:
        return None
    return max(timing.us, 1e6 * sum(timing.mma_busy) * power.matrix_cycle / (power.limit - power.base))
