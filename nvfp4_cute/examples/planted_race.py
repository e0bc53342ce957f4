"""A kernel with a race, for the checker to find: nvfp4-cute emulate --check planted_race.py

Each warp writes its row of shared memory and then reads its neighbor's row. The barrier between the two is missing, so the read
may come first. With `--fixed` the barrier is there, and the checker reports nothing.
"""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

try:
    from cutlass.memory import SmemAllocator
except ImportError:  # CuTe DSL before 4.8
    from cutlass.utils import SmemAllocator

WARPS, LANES = 4, 32


@cute.kernel
def neighbours(out: cute.Tensor, fixed: cutlass.Constexpr):
    """Writes to row w of `out` [WARPS, LANES] what warp w + 1 stored in shared memory."""
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    smem = SmemAllocator()
    rows = smem.allocate_tensor(cutlass.Int32, cute.make_layout((WARPS, LANES), stride=(LANES, 1)), 16)
    rows[warp, lane] = warp * LANES + lane
    if cutlass.const_expr(fixed):
        cute.arch.sync_threads()
    out[warp, lane] = rows[(warp + 1) % WARPS, lane]


@cute.jit
def launch(out: cute.Tensor, fixed: cutlass.Constexpr):
    """Launches one CTA of four warps."""
    neighbours(out, fixed).launch(grid=(1, 1, 1), block=(WARPS * LANES, 1, 1))


if __name__ == "__main__":
    result = torch.zeros(WARPS, LANES, dtype=torch.int32, device="cuda")
    launch(from_dlpack(result), "--fixed" in sys.argv)
    print(result[:, 0].tolist())
