"""The middle of a layer of experts if a product's epilogue does not compute it: bias, activation, and quantization, in one pass.

h (rows, N) fp16 or bf16, or (rows, 2 N) for a gated layer: gate's columns, then up's, or alternating columns. Results:
data (rows, bytes of N) and blocked scales, with the rows of every expert starting at a block of 128; or (rows, N) of
h's type. Every operation is one float32 operation, in the order of ``experts.activation``, so the bits are equal
everywhere. Rows after the last expert's are not read.

Work: a warp takes 512 columns of a row, a lane 16: a block of NVFP4, or half a block of MXFP4 and MXFP8. With a global
scale per row, a CTA takes a row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from nvfp4_cute.activation import (
    GELU_CUBIC,
    GELU_LINEAR,
    IDENTITY,
    NORMAL,
    NORMAL_MAX,
    NORMAL_SLOPE,
    TANH,
    TANH_SMALL,
    parse,
)
from nvfp4_cute.formats.block_format import BlockFormat
from nvfp4_cute.launch_table import Activate
from nvfp4_cute.planning.arch.simt import ROW_WARPS, WARP_SIZE

from ..common import ptx
from ..common.encode import Encoding
from ..common.global_access import KEEP, global_scalar, load_words, store_word
from ..common.launch_record import read_record
from ..common.quantize_block import encode_block
from ..common.select import select
from ..common.versions import PROGRAMMATIC_FROM, compiles_for
from .expert_rows import PlainRows, QuantizedRows, scale_word
from .global_scale import largest_of_cta, largest_of_values, scale_of_values
from .quantize import unpack
from .silu import exp_minus, sigmoid

BLOCK = 16
BLOCK_WORDS = BLOCK // 2
ROW_THREADS = ROW_WARPS * WARP_SIZE


@dataclass(frozen=True)
class ActivateOperands:
    """Addresses and the byte pitch are Int64, extents Int32, the bits of a float Uint32."""

    h: Int64
    bias: Int64
    ids: Int64
    slots: Int64
    places: Int64
    offs: Int64
    global_scale: Int64
    h_pitch: Int64
    id_bytes: Int32
    rows: Int32
    n: Int32
    first_expert: Int32
    experts: Int32
    limit: Uint32


class ActivateKernel:
    """One compiled variant.

    Args:
        is_bf16: whether h and bias are bfloat16, else float16.
        format: format of the results; None for results of h's type.
        activation: text of ``nvfp4_cute.activation``, or ``IDENTITY`` for rows that are only quantized.
        gate_layout: "concatenated" or "interleaved"; "none" without a gate.
        has_limit: whether gate and up are clamped.
        has_bias: whether each expert has a row that is added to its rows.
        has_global_scale: whether each expert has a factor.
        finds_scales: whether a global scale per row is found and written.
        is_programmatic: whether the kernel may start before the end of the previous launch, which writes no other operand than h.
        has_fp4_convert: whether e2m1 conversions are instructions.
        name: name of the kernel in profilers and in the emulator's reports.
    """

    def __init__(
        self,
        is_bf16: bool,
        format: BlockFormat | None,
        activation: str,
        gate_layout: str,
        has_limit: bool,
        has_bias: bool,
        has_global_scale: bool,
        finds_scales: bool,
        is_programmatic: bool,
        has_fp4_convert: bool,
        name: str,
    ):
        self.is_bf16 = is_bf16
        self.quantizes = format is not None
        self.activation = None if activation == IDENTITY else parse(activation)
        self.gate_layout = gate_layout
        self.has_limit = has_limit
        self.has_bias = has_bias
        self.has_global_scale = has_global_scale
        self.finds_scales = finds_scales
        self.is_programmatic = is_programmatic
        self.encode = None if format is None else Encoding.of(format, has_fp4_convert)
        # Lanes that share a block.
        self.lanes = 1 if format is None else format.block_k // BLOCK
        self.name = name

    @cute.jit
    def __call__(self, table: cute.Pointer, stream):
        """Launches one warp per 32 blocks of a row.

        Args:
            table: Int64 in host memory: ``launch_table.Activate``.
            stream: CUstream.
        """
        t = cute.make_tensor(table, cute.make_layout(len(Activate)))
        n = Int32(t[Activate.N])
        operands = read_record(ActivateOperands, Activate, t, n=n)
        results = PlainRows(t[Activate.DATA], n // BLOCK)
        if cutlass.const_expr(self.quantizes):
            results = QuantizedRows(t[Activate.DATA], t[Activate.SCALE], n // BLOCK)
        chunks = cute.ceil_div(n, BLOCK * WARP_SIZE)
        if cutlass.const_expr(self.finds_scales):
            self.kernel_of_rows.set_name_prefix(self.name)
            self.kernel_of_rows(operands, results).launch(
                grid=(operands.rows, 1, 1),
                block=(ROW_THREADS, 1, 1),
                stream=stream,
                use_pdl=self.is_programmatic,
            )
        else:
            self.kernel.set_name_prefix(self.name)
            self.kernel(operands, results).launch(
                grid=(cute.ceil_div(operands.rows * chunks, ROW_WARPS), 1, 1),
                block=(ROW_THREADS, 1, 1),
                stream=stream,
                use_pdl=self.is_programmatic,
            )

    @cute.jit
    def wait(self):
        """Waits until h is complete. All CTAs must call it."""
        if cutlass.const_expr(self.is_programmatic):
            cute.arch.griddepcontrol_wait()

    @cute.kernel
    def kernel(self, operands: ActivateOperands, results: QuantizedRows | PlainRows):
        """Finds the row's expert, loads, computes, and stores."""
        if cutlass.const_expr(compiles_for(PROGRAMMATIC_FROM)):
            # The next launch may load weights meanwhile.
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        chunks = cute.ceil_div(results.k_blocks, WARP_SIZE)
        work = block_idx * ROW_WARPS + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        row = work // chunks
        num_rows = global_scalar(Int32, operands.offs + Int64(operands.experts - 1) * 4)[0]
        if row < num_rows:
            slot = Int64(global_scalar(Int32, operands.slots + Int64(row) * 4)[0])
            place = global_scalar(Int32, operands.places + slot * 4)[0]
            expert = global_scalar(Int32, operands.ids + slot * operands.id_bytes)[0] - operands.first_expert
            self.wait()
            block = work % chunks * WARP_SIZE + tidx % WARP_SIZE
            values = cute.make_rmem_tensor(BLOCK, Float32)
            values.fill(0.0)
            if block < results.k_blocks:
                self.compute(operands, Int64(row), Int64(expert), block * BLOCK, values)
            if cutlass.const_expr(self.quantizes):
                factor = None
                if cutlass.const_expr(self.has_global_scale):
                    factor = global_scalar(Float32, operands.global_scale + Int64(expert) * 4)[0]
                words, code = encode_block([values[i] for i in range(BLOCK)], factor, self.encode)
                results.store(row, place, block, words, scale_word(code, self.lanes), self.lanes)
            else:
                pairs = range(0, BLOCK, 2)
                words = [ptx.pack_16x2(values[i], values[i + 1], self.is_bf16) for i in pairs]
                results.store(row, block, words)
        else:
            self.wait()

    @cute.kernel
    def kernel_of_rows(self, operands: ActivateOperands, results: QuantizedRows):
        """Computes a row's results twice: to find its global scale, then to encode and store; a CTA has one row."""
        if cutlass.const_expr(compiles_for(PROGRAMMATIC_FROM)):
            cute.arch.griddepcontrol_launch_dependents()
        tidx, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        num_rows = global_scalar(Int32, operands.offs + Int64(operands.experts - 1) * 4)[0]
        if row < num_rows:
            slot = Int64(global_scalar(Int32, operands.slots + Int64(row) * 4)[0])
            place = global_scalar(Int32, operands.places + slot * 4)[0]
            expert = global_scalar(Int32, operands.ids + slot * operands.id_bytes)[0] - operands.first_expert
            self.wait()
            most, k_blocks = Uint32(0), results.k_blocks
            values = cute.make_rmem_tensor(BLOCK, Float32)
            for block in cutlass.range(tidx, k_blocks, ROW_THREADS, unroll=1):
                self.compute(operands, Int64(row), Int64(expert), block * BLOCK, values)
                most = largest_of_values(most, [values[i] for i in range(BLOCK)])
            most = largest_of_cta(most, tidx, ROW_THREADS)
            factor = scale_of_values(most, self.encode.format.global_scale_divisor)
            if tidx == 0:
                store_word(operands.global_scale + Int64(row) * 4, ptx.bits_of(factor))
            first_block = cute.arch.make_warp_uniform(tidx // WARP_SIZE) * WARP_SIZE
            for first in cutlass.range(first_block, k_blocks, ROW_THREADS, unroll=1):
                block = first + tidx % WARP_SIZE
                values.fill(0.0)
                if block < k_blocks:
                    self.compute(operands, Int64(row), Int64(expert), block * BLOCK, values)
                words, code = encode_block([values[i] for i in range(BLOCK)], factor, self.encode)
                results.store(row, place, block, words, scale_word(code, self.lanes), self.lanes)
        else:
            self.wait()

    @cute.jit
    def compute(
        self, operands: ActivateOperands, row: Int64, expert: Int64, column: Int32, values: cute.Tensor
    ):
        """Returns the sixteen results from ``column`` on."""
        h = operands.h + row * operands.h_pitch
        parts = 1 if self.gate_layout == "none" else 2
        bias = operands.bias + expert * operands.n * (2 * parts)
        limit = ptx.float_of(operands.limit)
        x = self.load(operands, h, bias, column)
        for i in cutlass.range_constexpr(BLOCK):
            if cutlass.const_expr(self.activation is None):
                values[i] = x[i]
            elif cutlass.const_expr(self.gate_layout == "none"):
                values[i] = self.activate(x[i])
            else:
                gate, up = x[2 * i], x[2 * i + 1]
                if cutlass.const_expr(self.has_limit):
                    gate = ptx.min_nan(gate, limit)
                    up = ptx.max_nan(ptx.min_nan(up, limit), -limit)
                if cutlass.const_expr(self.activation.name == "swiglu_oai"):
                    up = ptx.add_f32(up, Float32(1.0))
                if cutlass.const_expr(self.activation.linear_beta is not None):
                    up = _bounded(up, self.activation.linear_beta)
                values[i] = ptx.mul_f32(self.activate(gate), up)

    def load(self, operands: ActivateOperands, h: Int64, bias: Int64, column: Int32) -> list:
        """Returns the inputs of the results: sixteen values, or sixteen pairs for a gated layer."""
        if self.gate_layout == "none":
            return self.values(h, bias, column, BLOCK_WORDS)
        if self.gate_layout == "interleaved":
            return self.values(h, bias, 2 * column, 2 * BLOCK_WORDS)
        gate, up = (self.values(h, bias, column + first, BLOCK_WORDS) for first in (0, operands.n))
        return [value for pair in zip(gate, up, strict=True) for value in pair]

    def values(self, h: Int64, bias: Int64, column: Int32, num_words: int) -> list:
        """Returns values of a row from ``column`` on, two per word, plus the bias."""
        sources = (h, bias) if self.has_bias else (h,)
        loaded = [
            [
                value
                for first in range(0, num_words, 4)
                for word in load_words(source + Int64(column) * 2 + first * 4, 4, KEEP)
                for value in unpack(word, self.is_bf16)
            ]
            for source in sources
        ]
        if not self.has_bias:
            return loaded[0]
        return [ptx.add_f32(value, added) for value, added in zip(*loaded, strict=True)]

    @cute.jit
    def activate(self, x: Float32) -> Float32:
        """Returns the activation of one value."""
        result = x
        if cutlass.const_expr(self.activation.name == "relu2"):
            positive = select(x < 0.0, Float32(0.0), x)
            result = ptx.mul_f32(positive, positive)
        elif cutlass.const_expr(self.activation.name == "relu"):
            result = select(x < 0.0, Float32(0.0), x)
        elif cutlass.const_expr(self.activation.name == "gelu"):
            result = _gelu(x)
        elif cutlass.const_expr(self.activation.name == "situ"):
            result = ptx.mul_f32(_bounded(x, self.activation.beta), sigmoid(x))
        elif cutlass.const_expr(self.activation.name == "gelu_tanh"):
            cube = ptx.mul_f32(ptx.mul_f32(x, x), x)
            inner = ptx.add_f32(x, ptx.mul_f32(cube, Float32(GELU_CUBIC)))
            result = ptx.mul_f32(x, sigmoid(ptx.mul_f32(inner, Float32(GELU_LINEAR))))
        elif cutlass.const_expr(self.activation.name == "swiglu_oai"):
            result = ptx.mul_f32(x, sigmoid(ptx.mul_f32(x, Float32(self.activation.alpha))))
        else:
            result = ptx.mul_f32(x, sigmoid(x))
        return result


@cute.jit
def _gelu(x: Float32) -> Float32:
    """Returns "gelu" of one value."""
    a = ptx.min_nan(ptx.abs_f32(x), Float32(NORMAL_MAX))
    t = ptx.rcp_f32(ptx.add_f32(ptx.mul_f32(a, Float32(NORMAL_SLOPE)), Float32(1.0)))
    power = exp_minus(ptx.mul_f32(ptx.mul_f32(a, a), Float32(0.5)))
    below = ptx.mul_f32(ptx.mul_f32(_series(NORMAL, t), t), power)
    return ptx.add_f32(select(x < 0.0, Float32(0.0), x), -ptx.mul_f32(a, below))


@cute.jit
def _bounded(x: Float32, bound: cutlass.Constexpr) -> Float32:
    """Returns ``bounded`` of ``experts.activation``."""
    z = ptx.mul_f32(x, Float32(1.0 / bound))
    square, a = ptx.mul_f32(z, z), ptx.abs_f32(z)
    small = ptx.add_f32(ptx.mul_f32(z, ptx.mul_f32(square, _series(TANH, square))), z)
    e = exp_minus(ptx.add_f32(a, a))
    rest, whole = ptx.add_f32(Float32(1.0), -e), ptx.add_f32(e, Float32(1.0))
    large = ptx.mul_f32(rest, ptx.rcp_f32(whole))
    # exp_minus of NaN is a number, and the series is chosen for NaN.
    tanh = select(a > TANH_SMALL, select(z < 0.0, -large, large), small)
    return ptx.mul_f32(tanh, Float32(bound))


def _series(coefficients: tuple, x: Float32) -> Float32:
    """Returns a polynomial by Horner's rule, products and sums rounded each."""
    total = Float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = ptx.add_f32(ptx.mul_f32(total, x), Float32(coefficient))
    return total
