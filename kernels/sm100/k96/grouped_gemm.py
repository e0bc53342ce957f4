"""Grouped GEMM on sm_103a: the sm_100a kernel (``..grouped_gemm``) with MMAs of 96 elements of K, if the config says so.

Stages, loads, scales and releases are equal. The MMAs differ: three K tiles of 128 bytes per row are eight MMAs of 48 bytes, so
that two of the eight read two stages (``mma``).
"""

import cutlass
from cutlass import Int32

from ..grouped_gemm import GroupedGemmSm100
from ..mma import MmaArgs
from .mma import run_k96_mma


class K96GemmSm103(GroupedGemmSm100):
    """One compiled variant.

    Takes the arguments of ``GroupedGemmSm100`` and a config that ``arch.sm103.unsupported_reason`` accepts.
    """

    def _run_mma(self, args: MmaArgs, first_tile: Int32, stride: Int32):
        if cutlass.const_expr(self.config.use_k96_instrs):
            run_k96_mma(args, first_tile, stride)
        else:
            super()._run_mma(args, first_tile, stride)
