"""wgmma in small kernels: every type, layout and swizzle compared with the rational model, and refusals with their line."""

import matrix_kernels as kernels
import matrix_model as model
import numpy as np
import pytest
from matrix_cases import SPAN, WGMMA_TYPES, Layout, WgmmaCase

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.errors import EmulatorError


# ---- types -------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(40)
@pytest.mark.parametrize("a_registers", [False, True], ids=["a in smem", "a in registers"])
@pytest.mark.parametrize("regime", ["integers", "moderate", "tiny", "any"])
@pytest.mark.parametrize("types", WGMMA_TYPES, ids=".".join)
def test_types(types, regime, a_registers):
    WgmmaCase(*types, regime=regime, a_registers=a_registers, seed=1).check()


@pytest.mark.parametrize("regime", ["integers", "moderate"])
@pytest.mark.parametrize("n", [8, 40, 256])
def test_widths(n, regime):
    WgmmaCase("f32", "f16", "f16", n, regime=regime).check(24)
    WgmmaCase("f16", "e4m3", "e5m2", n, regime=regime).check(24)


@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("types", [("f32", "bf16", "bf16"), ("f32", "e4m3", "e4m3")], ids=".".join)
def test_signs(types, signs):
    WgmmaCase(*types, regime="moderate", signs=signs).check()


@pytest.mark.parametrize("a_registers", [False, True])
@pytest.mark.parametrize("saturate", ["", ".satfinite"])
@pytest.mark.parametrize("types", [("s8", "s8"), ("u8", "u8"), ("s8", "u8"), ("u8", "s8")], ids=".".join)
def test_integers(types, saturate, a_registers):
    problem = WgmmaCase("s32", *types, 24, saturate=saturate, a_registers=a_registers)
    problem.c[::3], problem.c[1::3] = 0x7FFFFFFF, 0x80000000
    problem.check()


def test_without_accumulation_old_registers_do_not_matter():
    problem = WgmmaCase("f32", "f16", "f16", accumulate=False)
    problem.c[:] = 0x7FFFFFFF
    problem.check()


def test_each_instruction_rounds_once():
    # Four instructions walk along rows of 128 bytes; the model rounds after each.
    WgmmaCase("f32", "f16", "f16", regime="moderate", k_steps=4).check()
    WgmmaCase("f32", "e4m3", "e4m3", regime="moderate", k_steps=4).check()


@pytest.mark.parametrize("tiny, bits", [(0x24, 0x3F800400), (0x20, 0x3F800000)], ids=["2**-6", "2**-7"])
def test_hopper_fp8_keeps_13_fractional_bits(tiny, bits):
    # 1*1 + tiny * 2**-7 in e5m2: 1 + 2**-13 survives the adder, 1 + 2**-14 does not.
    case = WgmmaCase("f32", "e5m2", "e5m2", 8, accumulate=False, a_registers=True)
    a, b = np.zeros((16, 32), np.uint32), np.zeros((8, 32), np.uint32)
    a[:, 0], a[:, 1] = 0x3C, tiny
    b[:, 0], b[:, 1] = 0x3C, 0x20
    case.a_words = np.tile(model.pack_a(a, 8), 4)
    Layout(8, 1, "128B", False).store(case.image.view(np.uint8), (case.descriptors[1] & 0x3FFF) << 4, b)
    assert (case.emulate() == bits).all()


# ---- layouts -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mn_b", [False, True], ids=["B k-major", "B n-major"])
@pytest.mark.parametrize("mn_a", [False, True], ids=["A k-major", "A m-major"])
@pytest.mark.parametrize("swizzle", SPAN)
def test_layouts_of_16_bit_operands(swizzle, mn_a, mn_b):
    other = {"none": "128B", "128B": "64B", "64B": "32B", "32B": "none"}[swizzle]
    WgmmaCase(
        "f32", "f16", "f16", 64, swizzle_a=swizzle, swizzle_b=other, mn_a=mn_a, mn_b=mn_b, regime="moderate"
    ).check()
    WgmmaCase(
        "f32", "bf16", "bf16", 128, swizzle_b=swizzle, mn_b=mn_b, a_registers=True, regime="moderate"
    ).check()


@pytest.mark.parametrize("swizzle", SPAN)
@pytest.mark.parametrize("types", [("f32", "tf32", "tf32"), ("f32", "e4m3", "e5m2")], ids=".".join)
def test_k_major_layouts(types, swizzle):
    WgmmaCase(*types, 32, swizzle_a=swizzle, swizzle_b=swizzle, regime="moderate").check()


def test_each_warpgroup_computes_its_own_rows():
    WgmmaCase("f32", "f16", "f16", threads=256, a_registers=True, regime="moderate").check(96)


# ---- refusals ----------------------------------------------------------------------------------------------------
def with_opcode(opcode: str, literals: str, registers: int = 8, a_registers: bool = False) -> None:
    text = kernels.wgmma_kernel(opcode, literals, registers, 1024, a_registers=a_registers)
    words = np.zeros((max(registers, 4), 128), np.uint32)
    run_ptx(text, block=128, args=[np.zeros(256, np.uint32), words, 0, 0, words, 0], smem_bytes=1024)


GOOD = "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"


@pytest.mark.parametrize(
    "opcode, literals, message",
    [
        (GOOD.replace("n16", "n12"), ", 1, 1, 0, 0", "shape m64n12k16"),
        (GOOD.replace("n16", "n264"), ", 1, 1, 0, 0", "shape m64n264k16"),
        (GOOD.replace("k16", "k32"), ", 1, 1, 0, 0", "shape m64n16k32"),
        (GOOD.replace("m64", "m128"), ", 1, 1, 0, 0", "shape, types, or modifiers .m128"),
        (GOOD + ".relu", ", 1, 1, 0, 0", "shape, types, or modifiers .*.relu"),
        (GOOD.replace(".sync", ".sp.sync"), ", 1, 1, 0, 0", "shape, types, or modifiers .sp"),
        (GOOD.replace(".sync", ""), ", 1, 1, 0, 0", "without .sync.aligned"),
        (GOOD.replace("f16.f16", "f16.bf16"), ", 1, 1, 0, 0", "shape, types, or modifiers"),
        (GOOD.replace("f32.f16.f16", "f16.bf16.bf16"), ", 1, 1, 0, 0", "shape, types, or modifiers"),
        (GOOD.replace("k16", "k16.satfinite"), ", 1, 1, 0, 0", ".satfinite with floating-point"),
        (GOOD, ", 1, 1, 0", "3 literals after scale-d, expected 4"),
        (GOOD, ", 2, 1, 0, 0", "scales must be 1 or -1"),
        (GOOD, ", 1, 1, 0, 2", "transpositions 0 or 1"),
        ("wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32", ", 1, 1, 0, 0", "4 literals after scale-d, expected 2"),
        ("wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8", "", "shape m64n40k32"),
        ("wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8", ", 1, 1", "2 literals after scale-d, expected 0"),
    ],
)  # fmt: skip
def test_unknown_forms_are_refused_with_their_line(opcode, literals, message):
    with pytest.raises(EmulatorError, match=rf"PTX line \d+: `.*{message}"):
        with_opcode(opcode, literals)


def test_fragment_size_is_checked():
    with pytest.raises(EmulatorError, match="6 registers for D, this shape and type have 8"):
        with_opcode(GOOD, ", 1, 1, 0, 0", registers=6)


def test_warpgroup_must_be_complete():
    problem = WgmmaCase("f32", "f16", "f16")
    args = [problem.image, problem.a_words, *problem.descriptors, problem.arguments()[4], 1]
    with pytest.raises(EmulatorError, match="its warpgroup of 4 warps is not complete"):
        run_ptx(problem.text, block=96, args=args, smem_bytes=problem.image.nbytes)


@pytest.mark.parametrize(
    "bits, message",
    [
        (1 << 46, "a reserved bit is set"),
        (1 << 55, "a reserved bit is set"),
        (1 << 49, "a base offset"),
        (0x3000, "shared access of .* is outside"),
    ],
)
def test_bad_descriptors(bits, message):
    problem = WgmmaCase("f32", "f16", "f16")
    args = problem.arguments()
    args[3] += bits
    with pytest.raises(EmulatorError, match=message):
        run_ptx(problem.text, block=128, args=args, smem_bytes=problem.image.nbytes)


@pytest.mark.parametrize(
    "line, message",
    [
        ("wgmma.fence.aligned;", "without .sync.aligned"),
        ("wgmma.commit_group.sync.aligned.cta;", "unknown modifier .cta"),
        ("wgmma.wait_group.sync.aligned;", "0 operands, expected 1"),
        ("wgmma.wait_group.sync.aligned %r0;", "integer literal"),
        ("wgmma.wait_group.sync.aligned -1;", "pending groups of -1"),
        ("wgmma.commit_group.sync.aligned 0;", "1 operands, expected 0"),
    ],
)
def test_group_instructions_check_their_form(line, message, ptx_kernel):
    with pytest.raises(EmulatorError, match=message):
        run_ptx(ptx_kernel(line, 0, arch="sm_90a"), block=128)
