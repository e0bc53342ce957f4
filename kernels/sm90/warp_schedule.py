"""Role and register budget of every warpgroup: plain integers, fixed at compile time."""

from dataclasses import dataclass

from nvfp4_cute.planning.arch.sm90 import MATH_WARPS, ctas_per_sm, stages_of_k_tile
from nvfp4_cute.planning.config import KernelConfig

WARP_SIZE = 32
WARPS_PER_GROUP = 4
GROUP_THREADS = WARP_SIZE * WARPS_PER_GROUP
MAX_ACTIVATION_WARPS = 2 * WARPS_PER_GROUP
# One warp loads weights, one loads tokens.
NUM_LOAD_WARPS = 2
NUM_WARPS = 16
# Without ACTIVATIONS: the two MATH warpgroups and one more.
NUM_WARPS_DECODED = 12
# Tokens per pass of an ACTIVATIONS warp, which dequantizes eight values of every block at a time. A K tile has four such eights;
# a stage of dequantized tokens holds those of one slab or of both.
LANES_OF_EIGHT = 8


@dataclass(frozen=True)
class WarpSchedule:
    """Assigns warps to roles.

    Warps 0-7 are two MATH warpgroups. ACTIVATIONS starts at warp 8 and has at most 8 warps. LOAD is the last two warps. If
    ACTIVATIONS needs all 8, two of its warps also load: more warps would take registers that large tiles need for accumulators.

    Registers per thread: a launch of 16 warps gives each thread 128, or 64 where two CTAs share an SM; a launch of 12 warps
    gives 168. MATH takes over what the other roles give up (PTX ISA, setmaxnreg: multiples of 8, equal in all warps of a
    warpgroup).

    Attributes:
        num_activation_warps: at most the number of token steps, and 0 where tokens arrive dequantized. Where each slab of a K
            tile is a stage of its own, half of the warps work on each slab.
        step_tokens: tokens that an ACTIVATIONS warp dequantizes at a time, of one slab or of both.
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
        """Most tokens per MMA whose accumulators and weights fit the registers that a thread is launched with."""
        return 128 if self.num_activation_warps else 256

    @property
    def threads_per_cta(self) -> int:
        """Threads to launch."""
        return WARP_SIZE * self.num_warps

    @property
    def first_load_warp_id(self) -> int:
        """First of the two LOAD warps."""
        return self.num_warps - NUM_LOAD_WARPS

    @property
    def fixup_warp_id(self) -> int:
        """FIXUP warp. It is neither MATH nor LOAD, because stream-K has no ACTIVATIONS."""
        return self.num_math_warps

    @property
    def scheduler_warp_id(self) -> int:
        """SCHEDULER warp, the one after FIXUP."""
        return self.fixup_warp_id + 1

    @property
    def shares_load(self) -> bool:
        """Whether two ACTIVATIONS warps also play LOAD."""
        return self.num_math_warps + self.num_activation_warps > self.first_load_warp_id

    @classmethod
    def of(cls, config: KernelConfig) -> "WarpSchedule":
        """Returns the schedule of a config."""
        step_tokens = LANES_OF_EIGHT * stages_of_k_tile(config)
        if config.decode_first:
            return cls(0, step_tokens, 232, 40)
        num_activation_warps = min(-(-config.work_tile_mnk[0] // step_tokens), MAX_ACTIVATION_WARPS)
        return cls(num_activation_warps, step_tokens, *((88, 40) if ctas_per_sm(config) == 2 else (200, 56)))

    @classmethod
    def of_weight_only(cls, ctas_per_sm: int) -> "WarpSchedule":
        """Returns the schedule for 16-bit tokens, which no warp dequantizes, for one or two CTAs per SM.

        LOAD needs 21 registers.
        """
        return cls(0, 0, *((104, 32) if ctas_per_sm == 2 else (232, 40)))
