"""The MMAs of a slab, for each number of tokens that a tile may have, as one operation of the compiler.

Of CuTe's atoms each MMA is an operation that takes all of its sums and gives them back, and every number of tokens is a
region that does so, too: more than half of what there was to compile. Here a number is a label in one block of PTX.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, vector

MMA_M, MMA_K = 64, 16
# MMAs along K in a slab of 64 values, and a lane's words of weights for each.
SLAB_STEPS = 4
STEP_WORDS = 4
# A matrix descriptor (PTX ISA 9.7.15.5.1) counts in 16 bytes. Upper word: 1024 bytes from eight rows to the next eight, and
# a swizzle of 128 bytes. Lower word: where the matrix begins, and a distance that such a swizzle makes 1.
UNIT_BYTES = 16
UPPER_WORD = 1 << 30 | 1024 // UNIT_BYTES
DISTANCE = 1 << 16
# From one MMA's tokens to the next one's along K, and from a token to the next.
STEP_UNITS = MMA_K * 2 // UNIT_BYTES
TOKEN_UNITS = 128 // UNIT_BYTES


def slab_matrix(address: Int32, slab: Int32, num_tokens: int) -> Int32:
    """Lower word of the descriptor of a slab's tokens.

    Args:
        address: shared address of (SLAB, TOKEN, 64) 16-bit floats: rows of 128 bytes, their 16-byte units swizzled by the row.
        num_tokens: of a slab.
    """
    return (address // UNIT_BYTES | DISTANCE) + slab * (num_tokens * TOKEN_UNITS)


def multiply_slab(
    acc: cute.Tensor,
    weights: list,
    tokens: Int32,
    counts: list,
    most: int,
    matrix: Int32,
    is_bf16: bool = False,
) -> None:
    """Issue a group of MMAs, m64nNk16 of fp16 or bf16 (PTX ISA 9.7.15.5).

    Args:
        acc: fp32 sums; value 4i + 2h + e of a lane: row h * 8 of its own, token 8i + 2 * (lane % 4) + e.
        weights: ``STEP_WORDS`` Uint32 of two floats for each MMA along K: rows r, r + 8, then both eight K on.
        tokens: how many are multiplied, one of ``counts``, which ascend: the last, which most tiles have, is tried first.
        most: tokens of an MMA.
        matrix: of the tokens: ``slab_matrix``.
        is_bf16: whether weights and tokens are bfloat16, else float16.
    """
    num_sums, sums = cute.size(acc), acc.load().ir_value()
    inputs = [vector.extract(sums, [], [i]) for i in range(num_sums)]
    inputs += [value.ir_value() for value in (*weights, tokens, matrix)]
    # Results come first among the operands of the block; the first inputs are in the same registers.
    tied = [str(i) for i in range(num_sums)]
    results = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * num_sums)})>"),
        inputs,
        _Block(num_sums, most, "bf16" if is_bf16 else "f16").text(counts),
        ",".join(["=f"] * num_sums + tied + ["r"] * (len(inputs) - num_sums)),
        has_side_effects=True,
    )
    values = [llvm.extractvalue(Float32.mlir_type, results, [i]) for i in range(num_sums)]
    stored = vector.from_elements(ir.VectorType.get([num_sums], Float32.mlir_type), values)
    acc.store(cute.TensorSSA(stored, num_sums, Float32))


def finish(acc: cute.Tensor) -> None:
    """Wait until all MMAs are in the sums, which are read behind this."""
    count, sums = cute.size(acc), acc.load().ir_value()
    results = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
        [vector.extract(sums, [], [i]) for i in range(count)],
        "wgmma.wait_group.sync.aligned 0;",
        ",".join(["=f"] * count + [str(i) for i in range(count)]),
        has_side_effects=True,
    )
    values = [llvm.extractvalue(Float32.mlir_type, results, [i]) for i in range(count)]
    stored = vector.from_elements(ir.VectorType.get([count], Float32.mlir_type), values)
    acc.store(cute.TensorSSA(stored, count, Float32))


class _Block:
    """PTX of a slab's MMAs with so many sums, and at most so many tokens each."""

    def __init__(self, num_sums: int, most: int, dtype: str):
        self.most = most
        self.dtype = dtype
        names = [f"${i}" for i in range(2 * num_sums + SLAB_STEPS * STEP_WORDS + 2)]
        self.sums = names[:num_sums]
        *self.words, self.tokens, self.matrix = names[2 * num_sums :]

    def text(self, counts: list) -> str:
        """A scope with registers and labels of its own."""
        *others, most = counts
        lines = [
            ".reg .pred is_other, accumulate, upper<32>;",
            ".reg .b32 low;",
            ".reg .b64 tokens;",
            "setp.eq.b32 accumulate, 0, 0;",
        ]
        if others:
            lines += [
                f"setp.ne.s32 is_other, {self.tokens}, {most};",
                *self._bits(others),
                "@is_other bra OTHERS;",
            ]
        lines += self._group(most, is_most=True)
        if others:
            lines += ["OTHERS:", *self._choice(others, "OTHERS")]
        return "\n".join(["{", *lines, "DONE:", "}"])

    def _bits(self, counts: list[int]) -> list[str]:
        """Predicates of the bits in which the numbers differ: here, beside the weights. Behind a branch each is waited for."""
        lines = []
        for bit in _differing_bits(counts):
            lines += [f"and.b32 low, {self.tokens}, {1 << bit};", f"setp.ne.s32 upper{bit}, low, 0;"]
        return lines

    def _choice(self, counts: list[int], label: str) -> list[str]:
        """One of the groups, by the upper bits first."""
        if len(counts) == 1:
            return self._group(*counts)
        bit = max(_differing_bits(counts))
        upper = [count for count in counts if count >> bit & 1]
        lower = [count for count in counts if count not in upper]
        return [
            f"@upper{bit} bra {label}_U;",
            *self._choice(lower, f"{label}_L"),
            f"{label}_U:",
            *self._choice(upper, f"{label}_U"),
        ]

    def _group(self, tokens: int, is_most: bool = False) -> list[str]:
        """All MMAs of one number of tokens, and their end: so the assembler knows what waits for them."""
        lines = ["wgmma.fence.sync.aligned;"]
        for step in range(SLAB_STEPS):
            words = ", ".join(self.words[STEP_WORDS * step : STEP_WORDS * (step + 1)])
            for first in range(0, tokens, self.most):
                last = min(first + self.most, tokens)
                sums = ", ".join(self.sums[first // 2 : last // 2])
                lines += [
                    *self._matrix(first * TOKEN_UNITS + step * STEP_UNITS, is_most),
                    f"wgmma.mma_async.sync.aligned.m{MMA_M}n{last - first}k{MMA_K}.f32.{self.dtype}.{self.dtype}",
                    f"{{{sums}}}, {{{words}}}, tokens, accumulate, 1, 1, 0;",
                ]
        return [*lines, "wgmma.commit_group.sync.aligned;", "bra.uni DONE;"]

    def _matrix(self, units: int, is_most: bool) -> list[str]:
        """The descriptor of tokens so far behind the slab's first.

        Of 64-bit sums the assembler makes one uniform instruction each in the group that comes first, and three in the others.
        """
        if is_most:
            return [
                f"mov.b64 tokens, {{{self.matrix}, {UPPER_WORD:#x}}};",
                f"add.s64 tokens, tokens, {units};",
            ]
        return [f"add.s32 low, {self.matrix}, {units};", f"mov.b64 tokens, {{low, {UPPER_WORD:#x}}};"]


def _differing_bits(counts: list[int]) -> list[int]:
    return [bit for bit in range(max(counts).bit_length()) if len({count >> bit & 1 for count in counts}) > 1]
