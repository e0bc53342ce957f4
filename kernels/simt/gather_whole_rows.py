"""Tokens to rows of their experts with one fp32 scale each: each row is quantized once and written for every choice of it.

x (tokens, K) fp16 or bf16; data (rows, K) e4m3 and scales (rows, 1) fp32, bit for bit those of ``formats.quantize``. An earlier
launch found the order of rows.

Work: a CTA takes a token, as in ``quantize_whole_rows``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from nvfp4_cute.launch_table import GatherQuantize

from ..common import ptx
from ..common.global_access import global_scalar, store_word, store_words
from .quantize_rows import divisor_of
from .quantize_whole_rows import LANE_VALUES, THREADS, UNROLL, WORD_BYTES, QuantizeWholeRowsKernel


class GatherWholeRowsKernel(QuantizeWholeRowsKernel):
    """One compiled variant. Arguments are those of the base class without ``has_up``."""

    def __init__(self, is_bf16: bool, format, name: str):
        super().__init__(is_bf16, False, name, format)

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one CTA per token.

        Args:
            table: Int64 in host memory: ``launch_table.GatherQuantize``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(GatherQuantize)))
        units = Int32(t[GatherQuantize.K]) // LANE_VALUES
        x, pitch = t[GatherQuantize.X], t[GatherQuantize.X_PITCH]
        rows, data, scale = t[GatherQuantize.ROWS], t[GatherQuantize.DATA], t[GatherQuantize.SCALE]
        self.kernel.set_name_prefix(self.name)
        self.kernel(x, pitch, rows, data, scale, units, Int32(t[GatherQuantize.TOP_K])).launch(
            grid=(Int32(t[GatherQuantize.TOKENS]), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, x: Int64, pitch: Int64, rows: Int64, data: Int64, scales: Int64, units: Int32, top_k: Int32
    ):
        """Finds the scale of the token, then encodes it and stores it to its rows."""
        tidx, token = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        places = [x + token * pitch]
        scale = self.scale_of_row(places, units)
        divisor, first = divisor_of(scale), rows + Int64(token * top_k) * WORD_BYTES
        if tidx < top_k:
            row = global_scalar(Int32, first + tidx * WORD_BYTES)[0]
            if row >= 0:
                store_word(scales + Int64(row) * WORD_BYTES, ptx.bits_of(scale))
        for unit in cutlass.range(tidx, units, THREADS, unroll=UNROLL):
            words = self.encoded_unit(places, unit, divisor)
            for k in cutlass.range(top_k, unroll=1):
                row = global_scalar(Int32, first + k * WORD_BYTES)[0]
                if row >= 0:
                    store_words(data + (Int64(row) * units + unit) * LANE_VALUES, words)
