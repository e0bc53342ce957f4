"""The MMAs of a slab for every number of tokens that a tile may have, as one block of inline PTX.

With CuTe's atoms, each MMA is an operation that takes and returns all accumulators, and so is the region of every token count.
These took more than half of the compile time. Here a token count is a label within one block.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, vector

MMA_M, MMA_K = 64, 16
# A lane's words of weights per MMA.
STEP_WORDS = 4
# Matrix descriptor (PTX ISA 9.7.15.5.1), in units of 16 bytes. Upper word: stride of 1024 bytes between groups of eight rows,
# and the 128-byte swizzle. Lower word: start address, and the leading dimension offset, which is 1 with this swizzle.
UNIT_BYTES = 16
UPPER_WORD = 1 << 30 | 1024 // UNIT_BYTES
DISTANCE = 1 << 16
# Distance in units from one MMA's tokens to the next MMA's along K (32 bytes for any type), and from one token to the next.
STEP_UNITS = MMA_K * 2 // UNIT_BYTES
TOKEN_UNITS = 128 // UNIT_BYTES


@dataclass(frozen=True)
class Operands:
    """Weights in registers and tokens in shared memory, of one type.

    Attributes:
        name: PTX's name of the type.
        k: values of K per MMA, 32 bytes.
        literals: literals after the predicate: both signs and, for 16-bit types, whether tokens are transposed.
    """

    name: str
    k: int
    literals: str


F16, BF16 = (Operands(name, MMA_K, "1, 1, 0") for name in ("f16", "bf16"))
E4M3 = Operands("e4m3", 2 * MMA_K, "1, 1")


def slab_matrix(address: Int32, slab: Int32, num_tokens: int) -> Int32:
    """Returns the lower word of the descriptor of a slab's tokens.

    Args:
        address: shared address of (SLAB, TOKEN, 128 bytes), with 16-byte units swizzled by the row.
        num_tokens: tokens per slab.
    """
    return (address // UNIT_BYTES | DISTANCE) + slab * (num_tokens * TOKEN_UNITS)


def multiply_slab(
    acc: cute.Tensor,
    weights: list,
    tokens: Int32,
    counts: list,
    most: int,
    matrix: Int32,
    operands: Operands = F16,
) -> None:
    """Issues the MMAs of a slab as one group: m64nNk16, or m64nNk32 of e4m3 (PTX ISA 9.7.15.5).

    Args:
        acc: float32 accumulators; number 4i + 2h + e of a lane belongs to its row 8h and token 8i + 2 * (lane % 4) + e.
        weights: ``STEP_WORDS`` Uint32 per MMA along K: rows r and r + 8, then both rows 16 bytes of K further.
        tokens: tokens to multiply, one of ``counts``.
        counts: possible numbers of tokens, ascending. The last one, which most tiles have, is tried first.
        most: largest number of tokens per MMA.
        matrix: descriptor word of the tokens (``slab_matrix``).
        operands: type of weights and tokens.
    """
    num_sums, sums = cute.size(acc), acc.load().ir_value()
    inputs = [vector.extract(sums, [], [i]) for i in range(num_sums)]
    inputs += [value.ir_value() for value in (*weights, tokens, matrix)]
    # Results come first among the operands of the block; the first inputs are tied to the same registers.
    tied = [str(i) for i in range(num_sums)]
    results = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * num_sums)})>"),
        inputs,
        _Block(num_sums, len(weights), most, operands).text(counts),
        ",".join(["=f"] * num_sums + tied + ["r"] * (len(inputs) - num_sums)),
        has_side_effects=True,
    )
    values = [llvm.extractvalue(Float32.mlir_type, results, [i]) for i in range(num_sums)]
    stored = vector.from_elements(ir.VectorType.get([num_sums], Float32.mlir_type), values)
    acc.store(cute.TensorSSA(stored, num_sums, Float32))


def finish(acc: cute.Tensor) -> None:
    """Waits until all MMAs have completed; the accumulators may be read afterwards."""
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
    """PTX of a slab's MMAs: ``num_sums`` accumulators, ``num_words`` words of weights, at most ``most`` tokens per MMA."""

    def __init__(self, num_sums: int, num_words: int, most: int, operands: Operands):
        self.most = most
        self.operands = operands
        names = [f"${i}" for i in range(2 * num_sums + num_words + 2)]
        self.sums = names[:num_sums]
        *self.words, self.tokens, self.matrix = names[2 * num_sums :]

    def text(self, counts: list) -> str:
        """Returns the block: a scope with registers and labels of its own."""
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
        """Returns code that sets predicates for the bits in which the counts differ.

        It runs before the branch, overlapped with dequantizing; after the branch each predicate would be waited for.
        """
        lines = []
        for bit in _differing_bits(counts):
            lines += [f"and.b32 low, {self.tokens}, {1 << bit};", f"setp.ne.s32 upper{bit}, low, 0;"]
        return lines

    def _choice(self, counts: list[int], label: str) -> list[str]:
        """Returns a branch tree over the counts, upper bits first."""
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
        """Returns all MMAs of one token count with their own commit, so that ptxas knows which MMAs a wait covers."""
        lines = ["wgmma.fence.sync.aligned;"]
        name, k = self.operands.name, self.operands.k
        for step in range(len(self.words) // STEP_WORDS):
            words = ", ".join(self.words[STEP_WORDS * step : STEP_WORDS * (step + 1)])
            for first in range(0, tokens, self.most):
                last = min(first + self.most, tokens)
                sums = ", ".join(self.sums[first // 2 : last // 2])
                lines += [
                    *self._matrix(first * TOKEN_UNITS + step * STEP_UNITS, is_most),
                    f"wgmma.mma_async.sync.aligned.m{MMA_M}n{last - first}k{k}.f32.{name}.{name}",
                    f"{{{sums}}}, {{{words}}}, tokens, accumulate, {self.operands.literals};",
                ]
        return [*lines, "wgmma.commit_group.sync.aligned;", "bra.uni DONE;"]

    def _matrix(self, units: int, is_most: bool) -> list[str]:
        """Returns code for the descriptor ``units`` after the slab's first token.

        ptxas turns a 64-bit addition into one uniform instruction in the first group of the block and into three in later
        groups, so later groups add 32 bits and combine.
        """
        if is_most:
            return [
                f"mov.b64 tokens, {{{self.matrix}, {UPPER_WORD:#x}}};",
                f"add.s64 tokens, tokens, {units};",
            ]
        return [f"add.s32 low, {self.matrix}, {units};", f"mov.b64 tokens, {{low, {UPPER_WORD:#x}}};"]


def _differing_bits(counts: list[int]) -> list[int]:
    return [bit for bit in range(max(counts).bit_length()) if len({count >> bit & 1 for count in counts}) > 1]
