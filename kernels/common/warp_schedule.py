"""Which warp plays which role: plain integers, fixed at compile time."""

from dataclasses import dataclass

WARP_SIZE = 32


@dataclass(frozen=True)
class WarpSchedule:
    """Warp ids by role. The epilogue warps must be a whole warpgroup: warp i reads tensor-memory lanes 32i..32i+31."""

    epilogue_warp_ids: tuple[int, ...] = (0, 1, 2, 3)
    mma_warp_id: int = 4
    load_warp_id: int = 5

    @property
    def num_warps(self) -> int:
        """All warps of the CTA."""
        return len(self.epilogue_warp_ids) + 2

    @property
    def threads_per_cta(self) -> int:
        """Threads to launch."""
        return WARP_SIZE * self.num_warps

    @property
    def num_tmem_threads(self) -> int:
        """Threads that use tensor memory and therefore wait for its allocation: the MMA and the epilogue warps."""
        return WARP_SIZE * (1 + len(self.epilogue_warp_ids))
