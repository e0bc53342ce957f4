"""Special registers: the values that a warp reads from %tid, %ctaid, %laneid and similar registers."""

from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from nvfp4_cute.emulator.lanes import LANE_IDS, LANES

Dim3 = tuple[int, int, int]


class Shape(Protocol):
    """Launch parameters that special registers show (`state.Launch`)."""

    @property
    def grid(self) -> Dim3:
        """CTAs along each axis."""
        ...

    @property
    def block(self) -> Dim3:
        """Threads of a CTA along each axis."""
        ...

    @property
    def cluster(self) -> Dim3:
        """CTAs of a cluster along each axis."""
        ...

    @property
    def explicit_cluster(self) -> bool:
        """Whether the launch was made with clusters."""
        ...

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per CTA, static and dynamic."""
        ...


def cta_specials(launch: Shape, idx: Dim3, rank: int, warps: int, sm_count: int) -> dict[str, Any]:
    """Returns the special registers that are equal for all warps of the CTA at `idx`."""
    grid, cluster = launch.grid, launch.cluster
    linear = idx[0] + grid[0] * (idx[1] + grid[1] * idx[2])
    values: dict[str, Any] = {
        "%nwarpid": warps,
        "%smid": linear % sm_count,
        "%nsmid": sm_count,
        "%gridid": 0,
        "%laneid": LANE_IDS,
        "%cluster_ctarank": rank,
        "%cluster_nctarank": cluster[0] * cluster[1] * cluster[2],
        "%is_explicit_cluster": launch.explicit_cluster,
        "%dynamic_smem_size": launch.smem_bytes,
        "%total_smem_size": launch.shared_bytes,
        "WARP_SZ": LANES,
    }
    for i, axis in enumerate("xyz"):
        values[f"%ctaid.{axis}"] = idx[i]
        values[f"%nctaid.{axis}"] = grid[i]
        values[f"%ntid.{axis}"] = launch.block[i]
        values[f"%clusterid.{axis}"] = idx[i] // cluster[i]
        values[f"%nclusterid.{axis}"] = grid[i] // cluster[i]
        values[f"%cluster_ctaid.{axis}"] = idx[i] % cluster[i]
        values[f"%cluster_nctaid.{axis}"] = cluster[i]
    return values | _LANE_MASKS


_BITS = np.uint64(1) << np.arange(LANES, dtype=np.uint64)
_LANE_MASKS = {
    "%lanemask_eq": _BITS.astype(np.uint32),
    "%lanemask_lt": (_BITS - np.uint64(1)).astype(np.uint32),
    "%lanemask_le": (2 * _BITS - np.uint64(1)).astype(np.uint32),
    "%lanemask_gt": (0xFFFFFFFF - (2 * _BITS - np.uint64(1))).astype(np.uint32),
    "%lanemask_ge": (0xFFFFFFFF - (_BITS - np.uint64(1))).astype(np.uint32),
}


def fill_constants(regs: Any, slots: dict[int, str], warp: int, block: Dim3, values: dict[str, Any]) -> None:
    """Stores the special registers of warp number `warp` in their slots (slot -> name)."""
    for slot, name in slots.items():
        if name.startswith("%tid."):
            regs[slot] = _thread_index(warp, block, "xyz".index(name[-1]))
        else:
            regs[slot] = warp if name == "%warpid" else values[name]


@lru_cache(4096)
def _thread_index(warp: int, block: Dim3, axis: int) -> Any:
    """Returns %tid of a warp along an axis, uniform or per lane. All CTAs share the array, so callers must not write it."""
    linear = LANE_IDS + np.uint32(warp * LANES)
    index = (linear, linear // np.uint32(block[0]), linear // np.uint32(block[0] * block[1]))[axis]
    index = index % np.uint32(block[axis]) if axis < 2 else index
    index.setflags(write=False)
    return int(index[0]) if (index == index[0]).all() else index
