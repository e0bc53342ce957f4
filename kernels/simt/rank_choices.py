"""Destinations of the choices of a rank's tokens, by tables of a placement of experts.

ids int32 or int64 (tokens, k); to_rank int32 (experts, period): token t's choice e goes to rank to_rank[e, t % period];
to_local int32 (ranks, experts). Outputs, all int32: ranks (tokens, k), the rank of every choice; locals (tokens, k),
the number of its expert there; goals (tokens, ranks), r if any choice of the token goes to r. -1 means none.

Work: a warp takes a token, a lane a choice, then a rank.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from nvfp4_cute.launch_table import RankChoices
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common.global_access import global_scalar
from ..common.launch_record import read_record
from ..common.select import select
from .placement import Placement


@dataclass(frozen=True)
class RankChoicesOperands:
    """Addresses are Int64, extents Int32."""

    ids: Int64
    to_rank: Int64
    to_local: Int64
    ranks: Int64
    locals: Int64
    goals: Int64
    id_bytes: Int32
    tokens: Int32
    top_k: Int32
    experts: Int32
    period: Int32
    num_ranks: Int32


class RankChoicesKernel:
    """The compiled kernel. Args: name: name in profilers and in the emulator's reports."""

    def __init__(self, name: str):
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one warp per token.

        Args:
            table: Int64 in host memory: ``launch_table.RankChoices``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(RankChoices)))
        operands = read_record(RankChoicesOperands, RankChoices, t)
        self.kernel.set_name_prefix(self.name)
        self.kernel(operands).launch(
            grid=(cute.ceil_div(operands.tokens, ROW_WARPS), 1, 1),
            block=(ROW_WARPS * WARP_SIZE, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: RankChoicesOperands):
        """Looks up, exchanges the lanes' ranks, and stores."""
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        token = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        lane = tidx % WARP_SIZE
        placement = Placement(operands.to_rank, operands.to_local, operands.experts, operands.period)
        if token < operands.tokens:
            slot = Int64(token) * operands.top_k + lane
            rank = Int32(-1)
            if lane < operands.top_k:
                expert = global_scalar(Int32, operands.ids + slot * operands.id_bytes)[0]
                choice = placement.choice(expert, token)
                rank = choice.rank
                global_scalar(Int32, operands.ranks + slot * 4)[0] = rank
                global_scalar(Int32, operands.locals + slot * 4)[0] = choice.local
            goal = Int32(-1)
            for k in cutlass.range(operands.top_k, unroll=1):
                goal = select(cute.arch.shuffle_sync(rank, k) == lane, lane, goal)
            if lane < operands.num_ranks:
                address = operands.goals + (Int64(token) * operands.num_ranks + lane) * 4
                global_scalar(Int32, address)[0] = goal
