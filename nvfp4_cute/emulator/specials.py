"""Special registers: what a warp reads from %tid, %ctaid, %laneid and their kind."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4_cute.emulator.lanes import LANE_IDS, LANES, Warp

if TYPE_CHECKING:
    from nvfp4_cute.emulator.machine import Cta


def special_values(cta: "Cta") -> dict[str, Any]:
    """Special registers that are the same for all warps of a CTA."""
    launch = cta.launch
    grid, cluster = launch.grid, launch.cluster
    linear = cta.idx[0] + grid[0] * (cta.idx[1] + grid[1] * cta.idx[2])
    values: dict[str, Any] = {
        "%nwarpid": len(cta.warps),
        "%smid": linear % cta.machine.sm_count,
        "%nsmid": cta.machine.sm_count,
        "%gridid": 0,
        "%laneid": LANE_IDS,
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": cluster[0] * cluster[1] * cluster[2],
        "%is_explicit_cluster": launch.explicit_cluster,
        "%dynamic_smem_size": launch.smem_bytes,
        "%total_smem_size": launch.smem_bytes + launch.code.static_shared,
        "WARP_SZ": LANES,
    }
    for i, axis in enumerate("xyz"):
        values[f"%ctaid.{axis}"] = cta.idx[i]
        values[f"%nctaid.{axis}"] = grid[i]
        values[f"%ntid.{axis}"] = launch.block[i]
        values[f"%clusterid.{axis}"] = cta.idx[i] // cluster[i]
        values[f"%nclusterid.{axis}"] = grid[i] // cluster[i]
        values[f"%cluster_ctaid.{axis}"] = cta.idx[i] % cluster[i]
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


def fill_constants(warp: Warp, values: dict[str, Any]) -> None:
    """Put the special registers into their slots."""
    for slot, name in warp.code.builder.specials.items():
        if name.startswith("%tid."):
            warp.regs[slot] = _thread_index(warp, "xyz".index(name[-1]))
        else:
            warp.regs[slot] = warp.idx if name == "%warpid" else values[name]


def _thread_index(warp: Warp, axis: int) -> Any:
    block = warp.cta.launch.block
    linear = LANE_IDS + np.uint32(warp.idx * LANES)
    index = (linear, linear // np.uint32(block[0]), linear // np.uint32(block[0] * block[1]))[axis]
    index = index % np.uint32(block[axis]) if axis < 2 else index
    return int(index[0]) if (index == index[0]).all() else index
