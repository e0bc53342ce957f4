"""mma.sync in one-instruction kernels, compared with the rational model and the ISA's fragment tables."""

import re

import matrix_kernels as kernels
import matrix_model as model
import numpy as np
import pytest
from matrix_cases import MmaCase, compare, fragment_counts

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.errors import EmulatorError

FP8 = ("e4m3", "e5m2")
NARROW = (*FP8, "e3m2", "e2m3", "e2m1")

FLOAT_FORMS = [
    *(("", k, a, a, d) for k in (8, 16) for a in ("f16", "bf16") for d in ("f32", "f16") if (a, d) != ("bf16", "f16")),
    *(("", k, "tf32", "tf32", "f32") for k in (4, 8)),
    *(("", k, a, b, d) for k in (16, 32) for a, b, d in (("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f16"))),
    *((".kind::f8f6f4", 32, a, b, "f32") for a in NARROW for b in NARROW),
    (".kind::f8f6f4", 32, "e2m1", "e3m2", "f16"),
]  # fmt: skip


def instruction(kind: str, k: int, a: str, b: str, d: str, tail: str = "") -> str:
    return f"mma.sync.aligned.m16n8k{k}.row.col{kind}.{d}.{a}.{b}.{d}{tail}"


def run(
    opcode: str, counts: dict[str, int], fragments: dict[str, np.ndarray], operands: str = "", extra: str = ""
):
    """Returns D's registers, uint32 (registers, 32)."""
    for name, words in fragments.items():
        assert words.shape == (counts[name], 32)
    out = np.full((counts["d"], 32), 0xDEADBEEF, np.uint32)
    order = [n for n in counts if n != "d"]
    text = kernels.register_kernel(
        f"{opcode} {{d}}, {{a}}, {{b}}, {{c}}{operands};", {n: counts[n] for n in (*order, "d")}, extra=extra
    )
    run_ptx(text, args=[*(fragments[n] for n in order), out])
    return out


# ---- plain floating point ----------------------------------------------------------------------------------------
@pytest.mark.sampled(60)
@pytest.mark.parametrize("regime", ["integers", "moderate", "tiny", "any"])
@pytest.mark.parametrize("form", FLOAT_FORMS, ids=lambda f: ".".join(map(str, f)).lstrip("."))
def test_float_forms(form, regime):
    MmaCase(*form, regime=regime).check()


def test_products_are_truncated_at_25_fractional_bits():
    # 2 + 2**-24 (from 2**-14 * 2**-10): 25 bits below the exponent 1 of 2 end at 2**-24, which therefore counts, and
    # 2**-25 does not. Two of the former make 2 + 2**-23, a float32 only where nothing was dropped before the sum.
    one, two, tiny, less = 0x3C00, 0x4000, 0x0400, 0x1400
    a, b = np.zeros((16, 16), np.uint32), np.zeros((16, 8), np.uint32)
    a[:, 0], b[0] = one, two
    a[:, 1:5], b[1:5] = tiny, less
    c = np.zeros((16, 8), np.uint32)
    fragments = {"a": model.pack_a(a, 16), "b": model.pack_b(b, 16), "c": model.pack_c(c, 32)}
    opcode = instruction("", 16, "f16", "f16", "f32")
    assert (model.unpack_c(run(opcode, fragment_counts(16, 16, "f32"), fragments), 32) == 0x40000001).all()
    b[1:5] = less - 0x0400  # half of it
    fragments["b"] = model.pack_b(b, 16)
    assert (model.unpack_c(run(opcode, fragment_counts(16, 16, "f32"), fragments), 32) == 0x40000000).all()


# ---- integers ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("saturate", ["", ".satfinite"])
@pytest.mark.parametrize("types", [("s8", "s8"), ("s8", "u8"), ("u8", "s8"), ("u8", "u8")])
@pytest.mark.parametrize("k", [16, 32])
def test_integer_forms(k, types, saturate):
    MmaCase("", k, *types, "s32", saturate=saturate).check()


# ---- block scaling -----------------------------------------------------------------------------------------------
SCALED = {
    "mxf4": ("kind::mxf4.block_scale.scale_vec::2X", 2, "ue8m0"),
    "mxf4 default": ("kind::mxf4.block_scale", 2, "ue8m0"),
    "nvf4 2X": ("kind::mxf4nvf4.block_scale.scale_vec::2X", 2, "ue8m0"),
    "nvf4 4X ue8m0": ("kind::mxf4nvf4.block_scale.scale_vec::4X", 4, "ue8m0"),
    "nvf4 4X": ("kind::mxf4nvf4.block_scale.scale_vec::4X", 4, "ue4m3"),
}
LEGAL_BYTES = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}


def scale_registers(rng, sfa, sfb, selectors):
    """Scale words with the given scales at the selected places and noise elsewhere."""
    byte_a, thread_a, byte_b, thread_b = selectors
    words_a, words_b = rng.integers(0, 256, (2, 32, 4), np.uint8)
    count = sfa.shape[1]
    for row in range(16):
        words_a[4 * (row % 8) + 2 * thread_a + row // 8, byte_a : byte_a + count] = sfa[row]
    for column in range(8):
        words_b[4 * column + thread_b, byte_b : byte_b + count] = sfb[column]
    return words_a.reshape(1, -1).view(np.uint32), words_b.reshape(1, -1).view(np.uint32)


def draw_scales(rng, rows, count, scale_type, regime):
    one = 127 if scale_type == "ue8m0" else 7 << 3
    step = 1 if scale_type == "ue8m0" else 8
    if regime == "integers":
        return (one + step * rng.integers(0, 2, (rows, count))).astype(np.uint8)
    if regime == "moderate":
        return rng.integers(one - 3 * step, one + 3 * step, (rows, count)).astype(np.uint8)
    return rng.integers(0, 256, (rows, count)).astype(np.uint8)


def run_scaled(opcode, bits, a, b, c, sfa, sfb, selectors):
    counts = {**fragment_counts(a.shape[1], bits, "f32"), "sa": 1, "sb": 1}
    words_a, words_b = scale_registers(np.random.default_rng(9), sfa, sfb, selectors)
    fragments = {
        "a": model.pack_a(a, bits), "b": model.pack_b(b, bits), "c": model.pack_c(c, 32), "sa": words_a, "sb": words_b,
    }  # fmt: skip
    ids = "{{{{{}, {}}}}}"
    operands = f", %sa0, {ids.format(*selectors[:2])}, {{sb}}, {ids.format(*selectors[2:])}"
    return model.unpack_c(run(opcode, counts, fragments, operands), 32)


@pytest.mark.parametrize("regime", ["integers", "moderate", "any"])
@pytest.mark.parametrize("name", SCALED)
def test_fp4_forms(name, regime):
    words, count, scale_type = SCALED[name]
    rng = np.random.default_rng([len(name), len(regime)])
    a, b = rng.integers(0, 16, (16, 64)), rng.integers(0, 16, (64, 8))
    c = model.draw_codes(rng, "f32", (16, 8), regime)
    sfa, sfb = draw_scales(rng, 16, count, scale_type, regime), draw_scales(rng, 8, count, scale_type, regime)
    for selectors in ((0, 0, 0, 0), (LEGAL_BYTES[count][-1], 1, LEGAL_BYTES[count][-1], 3)):
        opcode = f"mma.sync.aligned.{words}.m16n8k64.row.col.f32.e2m1.e2m1.f32.{scale_type}"
        got = run_scaled(opcode, 4, a, b, c, sfa, sfb, selectors)
        compare(got, lambda i, j: model.fp4_dot(a[i], b[:, j], c[i, j], sfa[i], sfb[j], scale_type), 32)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("regime", ["integers", "moderate", "any"])
@pytest.mark.parametrize("formats", [(a, b) for a in NARROW for b in NARROW], ids=".".join)
def test_mxf8f6f4_forms(formats, regime):
    rng = np.random.default_rng([len(regime), NARROW.index(formats[0]), NARROW.index(formats[1])])
    a = model.draw_codes(rng, formats[0], (16, 32), regime)
    b = model.draw_codes(rng, formats[1], (32, 8), regime)
    c = model.draw_codes(rng, "f32", (16, 8), regime)
    sfa, sfb = draw_scales(rng, 16, 1, "ue8m0", regime), draw_scales(rng, 8, 1, "ue8m0", regime)
    selectors = tuple(int(x) for x in rng.integers(0, (4, 2, 4, 4)))
    opcode = (
        "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col."
        f"f32.{formats[0]}.{formats[1]}.f32.ue8m0"
    )
    containers = model.container(a, formats[0]), model.container(b, formats[1])
    got = run_scaled(opcode, 8, *containers, c, sfa, sfb, selectors)
    types = (*formats, "f32")
    compare(
        got, lambda i, j: model.fused_dot(a[i], b[:, j], c[i, j], types, scales=(sfa[i, 0], sfb[j, 0])), 32
    )


MXF8 = "mma.sync.aligned.kind::mxf8f6f4.block_scale.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0"
MXF8_COUNTS = {**fragment_counts(32, 8, "f32"), "sa": 1, "sb": 1}


def mxf8_fragments():
    rng = np.random.default_rng(3)
    return {n: rng.integers(0, 0x38, (c, 32)).astype(np.uint32) for n, c in MXF8_COUNTS.items() if n != "d"}


def test_selectors_may_be_registers():
    literal = run(MXF8, MXF8_COUNTS, mxf8_fragments(), ", {sa}, {{3, 1}}, {sb}, {{2, 3}}")
    extra = "mov.b16 %h0, 3;\nmov.b16 %h1, 1;\nmov.b16 %h2, 2;\nmov.b16 %h3, 3;"
    registers = run(MXF8, MXF8_COUNTS, mxf8_fragments(), ", {sa}, {{%h0, %h1}}, {sb}, {{%h2, %h3}}", extra)
    np.testing.assert_array_equal(registers, literal)


@pytest.mark.parametrize(
    "selectors, message",
    [
        (", {sa}, {{4, 0}}, {sb}, {{0, 0}}", r"byte-id 4 for A; legal are \(0, 1, 2, 3\)"),
        (", {sa}, {{0, 2}}, {sb}, {{0, 0}}", r"thread-id 2 for A; legal are \(0, 1\)"),
        (", {sa}, {{0, 0}}, {sb}, {{0, 4}}", r"thread-id 4 for B; legal are \(0, 1, 2, 3\)"),
        (", {sa}, {{0, 0}}, {sb}, {{%h0, 0}}", r"byte-id of B is 5; legal are"),
        (", {sa}, {{0, 0}}, {sb}, {{0}}", "expected {byte-id, thread-id} for B"),
        (", {sa}, {{0, 0}}", "6 operands"),
    ],
)
def test_bad_selectors(selectors, message):
    with pytest.raises(EmulatorError, match=message):
        run(MXF8, MXF8_COUNTS, mxf8_fragments(), selectors, "mov.b16 %h0, 5;")


@pytest.mark.parametrize(
    ("kind", "scale", "legal"),
    [("mxf4", "2X", (0, 2)), ("mxf4nvf4", "2X", (0, 2)), ("mxf4nvf4", "4X", (0,))],
)
def test_bytes_that_leave_no_room_for_the_scales_of_a_row(kind, scale, legal):
    opcode = f"mma.sync.aligned.kind::{kind}.block_scale.scale_vec::{scale}.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0"
    for byte in range(4):
        selectors = f", {{sa}}, {{{{{byte}, 0}}}}, {{sb}}, {{{{0, 0}}}}"
        if byte in legal:
            run(opcode, MXF8_COUNTS, mxf8_fragments(), selectors)
            continue
        with pytest.raises(EmulatorError, match=rf"byte-id {byte} for A; legal are {re.escape(str(legal))}"):
            run(opcode, MXF8_COUNTS, mxf8_fragments(), selectors)


# ---- refusals ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "opcode, message",
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16", r"types or modifiers"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32.relu", r"types or modifiers .f32, .f16, .f16, .f32, .relu"),
        ("mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32", "without .col"),
        ("mma.sync.m16n8k16.row.col.f32.f16.f16.f32", "without .aligned"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", "shape; modelled are"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32", "m16n8k16 with types"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", "m16n8k32 with types"),
        ("mma.sync.aligned.m16n8k8.row.col.f16.tf32.tf32.f16", "m16n8k8 with types"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16", "C of type .f16 with D of type .f32"),
        ("mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16", "m16n8k16 with types"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e2m1.e4m3.f32", "m16n8k32 with types"),
        ("mma.sync.aligned.m16n8k16.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32", "m16n8k16 with types"),
        ("mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32", ".satfinite with floating-point"),
        ("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.f32.e4m3.e4m3.f32.ue8m0", "do not go together"),
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32.ue8m0", "without .block_scale"),
        (MXF8.replace("block_scale", "block_scale.scale_vec::2X"), "do not go together"),
        (MXF8.replace("ue8m0", "ue4m3"), "scale type .ue4m3"),
        (MXF8.replace("m16n8k32", "m16n8k64"), "m16n8k64 with types"),
        (MXF8.replace("mxf8f6f4", "mxf4nvf4"), "do not go together"),
        ("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue4m3",
         r"scale type .ue4m3 with .kind::mxf4nvf4.scale_vec::2X; legal are \('ue8m0',\)"),
        ("mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue4m3",
         "scale type .ue4m3"),
        *((f"mma.sync.aligned.m16n8k64.row.col.{d}.{a}.{a}.{d}", "m16n8k64 with types")
          for d, a in (("f32", "f16"), ("f32", "bf16"), ("f32", "tf32"), ("f32", "e4m3"), ("s32", "s8"))),
    ],
)  # fmt: skip
def test_unknown_forms_are_refused_with_their_line(opcode, message):
    with pytest.raises(EmulatorError, match=rf"PTX line \d+: `.*{message}"):
        run(opcode, MXF8_COUNTS, mxf8_fragments(), ", {sa}, {{0, 0}}, {sb}, {{0, 0}}")


def test_fragment_sizes_are_checked():
    counts = {**fragment_counts(16, 16, "f32"), "a": 2}
    fragments = {n: np.zeros((c, 32), np.uint32) for n, c in counts.items() if n != "d"}
    with pytest.raises(EmulatorError, match="2 registers for A, this shape and type have 4"):
        run(instruction("", 16, "f16", "f16", "f32"), counts, fragments)


def test_part_of_a_warp_cannot_multiply():
    counts = fragment_counts(16, 16, "f32")
    arrays = [np.zeros((c, 32), np.uint32) for c in counts.values()]
    text = kernels.register_kernel(instruction("", 16, "f16", "f16", "f32") + " {d}, {a}, {b}, {c};", counts)
    with pytest.raises(EmulatorError, match="mma.sync needs all 32 lanes"):
        run_ptx(text, block=16, args=arrays)
