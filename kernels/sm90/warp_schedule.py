"""Which warpgroup plays which role, and how many registers each may use: plain integers, fixed at compile time."""

from dataclasses import dataclass

WARP_SIZE = 32
WARPS_PER_GROUP = 4
GROUP_THREADS = WARP_SIZE * WARPS_PER_GROUP


@dataclass(frozen=True)
class WarpSchedule:
    """Warps 0-7: two MATH warpgroups. 8-15: two ACTIVATIONS warpgroups, the last warp of which is LOAD as well.

    Registers of a thread: a launch of 512 threads gives each 128; MATH takes over what ACTIVATIONS gives up (PTX ISA,
    setmaxnreg: multiples of 8, the same in every warp of a warpgroup). A seventeenth warp for LOAD would cost every
    thread a quarter of its registers: they are given out to four warps at a time.
    """

    num_math_groups: int = 2
    num_activation_groups: int = 2
    math_registers: int = 184
    activation_registers: int = 72

    @property
    def num_math_warps(self) -> int:
        """Warps that issue wgmma."""
        return WARPS_PER_GROUP * self.num_math_groups

    @property
    def num_activation_warps(self) -> int:
        """Warps that decode tokens."""
        return WARPS_PER_GROUP * self.num_activation_groups

    @property
    def load_warp_id(self) -> int:
        """The warp that issues every TMA besides."""
        return self.num_math_warps + self.num_activation_warps - 1

    @property
    def threads_per_cta(self) -> int:
        """Threads to launch."""
        return WARP_SIZE * (self.num_math_warps + self.num_activation_warps)
