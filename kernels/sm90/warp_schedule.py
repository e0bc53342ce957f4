"""Which warpgroup plays which role, and how many registers each may use: plain integers, fixed at compile time."""

from dataclasses import dataclass

from nvfp4_cute.arch.sm90 import ctas_per_sm
from nvfp4_cute.config import KernelConfig

WARP_SIZE = 32
WARPS_PER_GROUP = 4
GROUP_THREADS = WARP_SIZE * WARPS_PER_GROUP
# An SM's, to which warps belong in turn.
NUM_SCHEDULERS = 4
MAX_ACTIVATION_WARPS = 2 * WARPS_PER_GROUP - 1
# Tokens that an ACTIVATIONS warp decodes at a time.
STEP_TOKENS = 8


@dataclass(frozen=True)
class WarpSchedule:
    """Warps 0-7: two MATH warpgroups. From 8 on: ACTIVATIONS, at most 7. 15: LOAD.

    Registers of a thread: a launch of 512 threads gives each 128, or 64 where two CTAs share an SM; MATH takes over what
    the others give up (PTX ISA, setmaxnreg: multiples of 8, the same in every warp of a warpgroup).

    Attributes:
        num_activation_warps: no more than there are steps of tokens.
    """

    num_activation_warps: int
    math_registers: int
    other_registers: int

    num_math_groups = 2
    num_math_warps = WARPS_PER_GROUP * num_math_groups
    load_warp_id = num_math_warps + MAX_ACTIVATION_WARPS
    threads_per_cta = WARP_SIZE * (load_warp_id + 1)

    @classmethod
    def of(cls, config: KernelConfig) -> "WarpSchedule":
        """The schedule of a config."""
        num_activation_warps = min(-(-config.work_tile_mnk[0] // STEP_TOKENS), MAX_ACTIVATION_WARPS)
        return cls(num_activation_warps, *((88, 40) if ctas_per_sm(config) == 2 else (200, 56)))
