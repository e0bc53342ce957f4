"""The MMAs of a K tile as one operation of the compiler, which ends when they are done.

Of CuTe's atoms each MMA is an operation that takes all of its sums and gives them back; here they are one block of PTX. What
it gives is free to be used: the wait is inside.
"""

from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from ..wgmma import DISTANCE, MMA_M, TOKEN_UNITS, UNIT_BYTES, UPPER_WORD

# K of an MMA of 8-bit values, and MMAs in a K tile, whose rows are 128 bytes.
MMA_K = 32
STEPS = 128 // MMA_K
STEP_UNITS = MMA_K // UNIT_BYTES


def matrix(address: Int32) -> Int32:
    """Lower word of the descriptor of rows of 128 bytes at a shared address, their 16-byte units swizzled by the row."""
    return address // UNIT_BYTES | DISTANCE


def rows_apart(rows: Int32 | int) -> Int32 | int:
    """What is added to :func:`matrix` for the matrix that begins so many rows on."""
    return rows * TOKEN_UNITS


def multiply(weights: Int32, tokens: Int32, num_tokens: int) -> list:
    """Products of 64 rows of weights and so many tokens over a K tile, e4m3 in shared memory (PTX ISA 9.7.15.5).

    Args:
        weights, tokens: ``matrix``, the same in all lanes of a warpgroup.

    Returns:
        Fp32 sums: value 4i + 2h + e of a lane: row h * 8 of its own, token 8i + 2 * (lane % 4) + e.
    """
    count = num_tokens // 2
    names = [f"${i}" for i in range(count + 2)]
    sums = ", ".join(names[:count])
    lines = [
        ".reg .pred first, further;",
        ".reg .b64 a, b;",
        "setp.ne.b32 first, 0, 0;",
        "setp.eq.b32 further, 0, 0;",
        f"mov.b64 a, {{{names[count]}, {UPPER_WORD:#x}}};",
        f"mov.b64 b, {{{names[count + 1]}, {UPPER_WORD:#x}}};",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(STEPS):
        if step:
            lines += [f"add.s64 a, a, {STEP_UNITS};", f"add.s64 b, b, {STEP_UNITS};"]
        lines.append(
            f"wgmma.mma_async.sync.aligned.m{MMA_M}n{num_tokens}k{MMA_K}.f32.e4m3.e4m3 {{{sums}}}, a, b, "
            f"{'further' if step else 'first'}, 1, 1;"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    results = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
        [weights.ir_value(), tokens.ir_value()],
        "\n".join(["{", *lines, "}"]),
        ",".join(["=f"] * count + ["r", "r"]),
        has_side_effects=True,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, results, [i])) for i in range(count)]
