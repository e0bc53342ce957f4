"""How a competition server tests and times a problem: the figures in which harnesses differ."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class HarnessRules:
    """Figures of one harness.

    Attributes:
        num_inputs: inputs per timing, launched back to back.
        seed_step: difference of the seeds of consecutive inputs.
        benchmark_repeats, benchmark_s: limits of a case in benchmark mode: timings, and seconds of kernel time.
        ranked_repeats, ranked_s: limits of a case in leaderboard mode.
        warm_repeats, warm_s: limits of a warm-up before ranked timings.
        warms_all: whether every case is warmed up before ranked timings, or only the first.
        l2_clear_bytes: memory written before a timing, so that L2 holds none of the inputs.
        test_timeout_s, benchmark_timeout_s, ranked_timeout_s: limits of a whole mode.
        gpus: names of the leaderboard's runners.
    """

    num_inputs: int
    seed_step: int
    benchmark_repeats: int
    benchmark_s: float
    ranked_repeats: int
    ranked_s: float
    warm_repeats: int
    warm_s: float
    warms_all: bool
    l2_clear_bytes: int
    test_timeout_s: int = 180
    benchmark_timeout_s: int = 180
    ranked_timeout_s: int = 180
    gpus: tuple[str, ...] = ("NVIDIA",)


# One input per timing, a clear of 4 GiB.
SINGLE = HarnessRules(1, 13, 200, 10, 1000, 30, 1000, 0.5, False, 4 * GIB)
# Fifty inputs back to back after one clear of 62.5 GiB.
BACK_TO_BACK = HarnessRules(50, 42, 200, 10, 1000, 30, 1000, 0.5, True, 16000 * 1024 * 1024 * 4)
# Fifteen inputs.
GROUPED = HarnessRules(
    15,
    42,
    100,
    10,
    100,
    30,
    50,
    0.5,
    True,
    16000 * 1024 * 1024 * 4,
    ranked_timeout_s=300,
    gpus=("B200", "NVIDIA"),
)
