"""The MMAs of a K tile as one block of inline PTX that includes the wait, so that its results may be used at once.

With CuTe's atoms, each MMA would be an operation that takes and returns all accumulators.

Ping-pong: while one warpgroup promotes its products, tensor cores should work for the other. Left alone, both multiply at the
same time and then promote at the same time: a K tile of 128 x 128 took 920 cycles on an H100, while its MMAs take 512. So a
warpgroup starts when the last MMA of the other one has been issued (:class:`Turns`).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, vector

from ..wgmma import DISTANCE, MMA_M, TOKEN_UNITS, UNIT_BYTES, UPPER_WORD

# K per MMA of 8-bit values, and MMAs per K tile, whose rows are 128 bytes.
MMA_K = 32
STEPS = 128 // MMA_K
STEP_UNITS = MMA_K // UNIT_BYTES


@dataclass(frozen=True)
class Kind:
    """A kind of MMA: types of accumulators and operands, and the sign literals after the predicate, which only floats have."""

    types: str
    signs: str = ""


FP8 = Kind("f32.e4m3.e4m3", ", 1, 1")
INTEGERS = Kind("s32.s8.s8")


def matrix(address: Int32) -> Int32:
    """Returns the lower descriptor word of 128-byte rows at a shared address, with 16-byte units swizzled by the row."""
    return address // UNIT_BYTES | DISTANCE


def rows_apart(rows: Int32 | int) -> Int32 | int:
    """Returns the increment of :func:`matrix` for a matrix that starts ``rows`` rows later."""
    return rows * TOKEN_UNITS


# Named barriers of ``Turns``, numbered after those of the epilogue, and the threads of both warpgroups.
FIRST_TURN_BARRIER = 8
TURN_THREADS = 256
# Tiles of fewer tokens are bound by memory and do not ping-pong.
LEAST_TURN_TOKENS = 64


@dataclass(frozen=True)
class Turns:
    """Named barriers by which two warpgroups alternate on the tensor cores.

    Attributes:
        own, other: barrier of this warpgroup's turn and of the other's.
        is_used: false for tiles that are bound by memory.
    """

    own: Int32
    other: Int32
    is_used: bool

    @classmethod
    def of(cls, group: Int32, num_tokens: int) -> "Turns":
        """Returns the barriers of warpgroup 0 or 1."""
        own = FIRST_TURN_BARRIER + group
        return cls(own, 2 * FIRST_TURN_BARRIER + 1 - own, num_tokens >= LEAST_TURN_TOKENS)

    @cute.jit
    def begin(self):
        """Gives warpgroup 0 the first turn; called once by both before the first K tile."""
        if cutlass.const_expr(self.is_used):
            if self.own != FIRST_TURN_BARRIER:
                cute.arch.barrier_arrive(barrier_id=FIRST_TURN_BARRIER, number_of_threads=TURN_THREADS)

    @cute.jit
    def end(self):
        """Consumes the last arrival, which nobody waits for otherwise; called once by both after the last K tile."""
        if cutlass.const_expr(self.is_used):
            if self.own == FIRST_TURN_BARRIER:
                cute.arch.barrier(barrier_id=FIRST_TURN_BARRIER, number_of_threads=TURN_THREADS)


def multiply(weights: Int32, tokens: Int32, num_tokens: int, turns: Turns) -> list:
    """Multiplies 64 rows of weights by ``num_tokens`` tokens over a K tile, e4m3 in shared memory (PTX ISA 9.7.15.5).

    Args:
        weights, tokens: descriptor words (:func:`matrix`), equal in all lanes of a warpgroup.
        num_tokens: tokens of the tile.
        turns: barriers of the warpgroup.

    Returns:
        Float32 sums. Number 4i + 2h + e of a lane belongs to its row 8h and token 8i + 2 * (lane % 4) + e.
    """
    count = num_tokens // 2
    names = [f"${i}" for i in range(count + 4)]
    lines = [".reg .pred first, further;", "setp.ne.b32 first, 0, 0;", "setp.eq.b32 further, 0, 0;"]
    lines += _descriptors(*names[count : count + 2])
    if turns.is_used:
        lines.append(f"bar.sync {names[count + 2]}, {TURN_THREADS};")
    lines.append("wgmma.fence.sync.aligned;")
    for step in range(STEPS):
        lines += _mma(FP8, num_tokens, names[:count], step, "further" if step else "first")
        if turns.is_used and step == STEPS - 2:
            lines.append("wgmma.commit_group.sync.aligned;")
    lines.append("wgmma.commit_group.sync.aligned;")
    if turns.is_used:
        lines += ["wgmma.wait_group.sync.aligned 1;", f"bar.arrive {names[count + 3]}, {TURN_THREADS};"]
    lines.append("wgmma.wait_group.sync.aligned 0;")
    results = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
        [value.ir_value() for value in (weights, tokens, turns.own, turns.other)],
        "\n".join(["{", *lines, "}"]),
        ",".join(["=f"] * count + ["r"] * 4),
        has_side_effects=True,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, results, [i])) for i in range(count)]


def add_products(sums: cute.Tensor, weights: list, tokens: Int32, num_tokens: int) -> None:
    """Issues the MMAs of 64 rows of weights of every block and ``num_tokens`` tokens over a K tile, int8 in shared memory.

    Returns when the MMAs of the previous K tile have completed. Use :func:`wait` for the last ones.

    Args:
        sums: int32, (VALUE, BLOCK): values as :func:`multiply` returns them.
        weights: descriptor words (:func:`matrix`), one per block, equal in all lanes of a warpgroup.
        tokens: descriptor word of the tokens.
        num_tokens: tokens of the tile.
    """
    count, values = num_tokens // 2, cute.size(sums)
    # Results come first among the operands of the block; the first inputs are tied to the same registers.
    names = [f"${i}" for i in range(2 * values + len(weights) + 1)]
    lines = [".reg .pred further;", "setp.eq.b32 further, 0, 0;", "wgmma.fence.sync.aligned;"]
    for block, matrix_name in enumerate(names[2 * values : -1]):
        own = names[block * count : (block + 1) * count]
        lines += ["{", *_descriptors(matrix_name, names[-1])]
        for step in range(STEPS):
            lines += _mma(INTEGERS, num_tokens, own, step, "further")
        lines.append("}")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 1;"]
    _update(sums, [*weights, tokens], lines)


def begin_products(products: cute.Tensor, rows: Int32, columns: Int32, zero: Int32 | None = None) -> None:
    """Issues the MMAs of 64 rows and twice ``size(products)`` columns over a K tile of e4m3, as one group.

    The products are complete after :func:`wait`.

    Args:
        products: float32, in the order of :func:`multiply`; previous values are overwritten. rows, columns: descriptor words
            (:func:`matrix`), equal in all lanes of a warpgroup. zero: a 0 that the compiler cannot see through, which keeps the
            products in the registers of the previous ones. Where ptxas
            knows that the old values are not read, it gives each call registers of its own.
    """
    count, is_tied = cute.size(products), zero is not None
    words = [rows, columns, *([zero] if is_tied else [])]
    names = [f"${i}" for i in range(count * (1 + is_tied) + len(words))]
    at_words = names[-len(words) :]
    lines = [".reg .pred first, further;", f"setp.ne.b32 first, {at_words[2] if is_tied else 0}, 0;"]
    lines += ["setp.eq.b32 further, 0, 0;", *_descriptors(*at_words[:2]), "wgmma.fence.sync.aligned;"]
    for step in range(STEPS):
        lines += _mma(FP8, 2 * count, names[:count], step, "further" if step else "first")
    _block(products, is_tied, words, [*lines, "wgmma.commit_group.sync.aligned;"])


def wait(values: cute.Tensor, pending: int = 0) -> None:
    """Waits until at most ``pending`` groups of MMAs are in flight. ``values``: accumulators of a group that has completed."""
    _update(values, [], [f"wgmma.wait_group.sync.aligned {pending};"])


def _update(values: cute.Tensor, words: list, lines: list[str]) -> None:
    """Emits a block of PTX that updates ``values`` in place and reads ``words``."""
    _block(values, True, words, lines)


def _block(values: cute.Tensor, is_tied: bool, words: list, lines: list[str]) -> None:
    """Emits a block of PTX that writes ``values``, with ``is_tied`` in the registers of the old values."""
    count, before, dtype = cute.size(values), values.load().ir_value(), values.element_type
    name, constraint = ("f32", "=f") if dtype is Float32 else ("i32", "=r")
    tied = range(count if is_tied else 0)
    results = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join([name] * count)})>"),
        [*(vector.extract(before, [], [i]) for i in tied), *(word.ir_value() for word in words)],
        "\n".join(["{", *lines, "}"]),
        ",".join([constraint] * count + [str(i) for i in tied] + ["r"] * len(words)),
        has_side_effects=True,
    )
    after = [llvm.extractvalue(dtype.mlir_type, results, [i]) for i in range(count)]
    stored = vector.from_elements(ir.VectorType.get([count], dtype.mlir_type), after)
    values.store(cute.TensorSSA(stored, values.shape, dtype))


def _descriptors(weights: str, tokens: str) -> list[str]:
    """Returns code that builds the descriptors a and b from their lower words."""
    words = {"a": weights, "b": tokens}
    moved = [f"mov.b64 {name}, {{{word}, {UPPER_WORD:#x}}};" for name, word in words.items()]
    return [".reg .b64 a, b;", *moved]


def _mma(kind: Kind, num_tokens: int, sums: list[str], step: int, accumulates: str) -> list[str]:
    """Returns code for MMA ``step`` of a K tile; it advances the descriptors from the previous step."""
    lines = [f"add.s64 a, a, {STEP_UNITS};", f"add.s64 b, b, {STEP_UNITS};"] if step else []
    shape = f"m{MMA_M}n{num_tokens}k{MMA_K}"
    operands = f"{{{', '.join(sums)}}}, a, b, {accumulates}{kind.signs}"
    return [*lines, f"wgmma.mma_async.sync.aligned.{shape}.{kind.types} {operands};"]
