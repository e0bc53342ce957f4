"""Role of every warp: plain integers, fixed at compile time."""

from dataclasses import dataclass

WARP_SIZE = 32


@dataclass(frozen=True)
class WarpSchedule:
    """Warp ids by role. Epilogue warps form whole warpgroups: warp i of one reads tensor-memory lanes 32i..32i+31.

    Attributes:
        scale_warp_id: warp that loads scales without TMA; None if there is none.
    """

    epilogue_warp_ids: tuple[int, ...] = (0, 1, 2, 3)
    mma_warp_id: int = 4
    load_warp_id: int = 5
    scale_warp_id: int | None = None

    @property
    def num_warps(self) -> int:
        """Warps of the CTA."""
        return len(self.epilogue_warp_ids) + 2 + (self.scale_warp_id is not None)

    @property
    def threads_per_cta(self) -> int:
        """Threads to launch."""
        return WARP_SIZE * self.num_warps

    @property
    def num_tmem_threads(self) -> int:
        """Threads that use tensor memory and therefore wait for its allocation: the MMA and the epilogue warps."""
        return WARP_SIZE * (1 + len(self.epilogue_warp_ids))
