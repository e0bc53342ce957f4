"""Grouped GEMM on sm_103a: as on sm_100a (``..grouped_gemm``), and with MMAs of 96 elements of K where the config says so.

Stages, their loads, scales and release are as there. What differs is who reads them: three K tiles of 128 bytes of a row are
eight MMAs of 48 bytes, so that two of the eight read two stages (``mma``).
"""

import cutlass
from cutlass import Int32

from ..grouped_gemm import GroupedGemmSm100
from ..mma import MmaArgs
from .mma import run_k96_mma


class K96GemmSm103(GroupedGemmSm100):
    """One compiled variant. Args as of ``GroupedGemmSm100``; a config that ``arch.sm103.unsupported_reason`` accepts."""

    def _run_mma(self, args: MmaArgs, first_tile: Int32, stride: Int32):
        if cutlass.const_expr(self.config.use_k96_instrs):
            run_k96_mma(args, first_tile, stride)
        else:
            super()._run_mma(args, first_tile, stride)
