"""Which warpgroup plays which role, and how many registers each may use: plain integers, fixed at compile time."""

from dataclasses import dataclass

from nvfp4_cute.planning.arch.sm90 import MATH_WARPS, ctas_per_sm, stages_of_k_tile
from nvfp4_cute.planning.config import KernelConfig

WARP_SIZE = 32
WARPS_PER_GROUP = 4
GROUP_THREADS = WARP_SIZE * WARPS_PER_GROUP
MAX_ACTIVATION_WARPS = 2 * WARPS_PER_GROUP
# One for the weights, one for the tokens.
NUM_LOAD_WARPS = 2
NUM_WARPS = 16
# Where no warp decodes tokens: as many as fill a warpgroup beside the two of MATH.
NUM_WARPS_DECODED = 12
# Rows of tokens whose eight values of every block an ACTIVATIONS warp decodes at a time: of these eights a K tile has four, and
# a stage of decoded tokens those of one or both of its slabs.
LANES_OF_EIGHT = 8


@dataclass(frozen=True)
class WarpSchedule:
    """Warps 0-7: two MATH warpgroups. From 8 on: ACTIVATIONS, at most 8. LOAD: the last two of all, or, where ACTIVATIONS
    take those, two of them besides: accumulators of large tiles need the registers that more warps would take.

    Registers of a thread: a launch of 16 warps gives each 128, or 64 where two CTAs share an SM, one of 12 gives 168; MATH
    takes over what the others give up (PTX ISA, setmaxnreg: multiples of 8, the same in every warp of a warpgroup).

    Attributes:
        num_activation_warps: no more than there are steps of tokens, and none where tokens come decoded. Where each slab of
            a K tile is a stage, half of them for each slab.
        step_tokens: tokens that an ACTIVATIONS warp decodes at a time, of a slab or of both.
    """

    num_activation_warps: int
    step_tokens: int
    math_registers: int
    other_registers: int

    num_math_warps = MATH_WARPS
    num_math_groups = MATH_WARPS // WARPS_PER_GROUP

    @property
    def num_warps(self) -> int:
        """Warps of a CTA."""
        return NUM_WARPS if self.num_activation_warps else NUM_WARPS_DECODED

    @property
    def mma_tokens(self) -> int:
        """Most tokens of an MMA, whose sums and weights fit the registers that a thread is launched with."""
        return 128 if self.num_activation_warps else 256

    @property
    def threads_per_cta(self) -> int:
        """Threads to launch."""
        return WARP_SIZE * self.num_warps

    @property
    def first_load_warp_id(self) -> int:
        """The first of the two of LOAD."""
        return self.num_warps - NUM_LOAD_WARPS

    @property
    def handover_warp_id(self) -> int:
        """That of HANDOVER, which is neither MATH nor, where tokens come decoded, LOAD."""
        return self.num_math_warps

    @property
    def scheduler_warp_id(self) -> int:
        """That of SCHEDULER, beside HANDOVER."""
        return self.handover_warp_id + 1

    @property
    def shares_load(self) -> bool:
        """Whether two warps of ACTIVATIONS are LOAD, too."""
        return self.num_math_warps + self.num_activation_warps > self.first_load_warp_id

    @classmethod
    def of(cls, config: KernelConfig) -> "WarpSchedule":
        """The schedule of a config."""
        step_tokens = LANES_OF_EIGHT * stages_of_k_tile(config)
        if config.decode_first:
            return cls(0, step_tokens, 232, 40)
        num_activation_warps = min(-(-config.work_tile_mnk[0] // step_tokens), MAX_ACTIVATION_WARPS)
        return cls(num_activation_warps, step_tokens, *((88, 40) if ctas_per_sm(config) == 2 else (200, 56)))

    @classmethod
    def of_weight_only(cls, ctas_per_sm: int) -> "WarpSchedule":
        """Where tokens have 16 bits and no warp decodes any: of one CTA an SM, or of two, where LOAD needs 21 registers."""
        return cls(0, 0, *((104, 32) if ctas_per_sm == 2 else (232, 40)))
