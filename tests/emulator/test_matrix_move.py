"""Matrix loads and stores of byte elements, expansion of 4- and 6-bit elements, and movmatrix."""

import numpy as np
import pytest
from matrix_cases import MoveCase

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.errors import EmulatorError

ROWS = 32
HEAD = ".version 8.8\n.target sm_120a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"


def shared_kernel(instruction: str, loads: int, stores: int) -> str:
    """A warp whose lane i addresses row (5*i) % 32 of 16 bytes in %r1. Shared memory is copied from `image` and back.

    Registers %x0.. are loaded from `words` (uint32 (loads, 32)) before the instruction, and stored there after it.
    """
    lines = [
        "mov.u32 %r0, %tid.x;",
        "mov.u32 %r2, smem;",
        "ld.param.u64 %rd1, [image];",
        "ld.param.u64 %rd2, [words];",
    ]
    lines += ["mul.wide.u32 %rd0, %r0, 4;", "add.u64 %rd1, %rd1, %rd0;", "add.u64 %rd2, %rd2, %rd0;"]
    lines += ["shl.b32 %r3, %r0, 2;", "add.u32 %r4, %r2, %r3;"]
    for i in range(4):
        lines += [f"ld.global.b32 %r5, [%rd1+{128 * i}];", f"st.shared.b32 [%r4+{128 * i}], %r5;"]
    lines += ["bar.warp.sync -1;", "mul.lo.u32 %r1, %r0, 5;", "and.b32 %r1, %r1, 31;", "shl.b32 %r1, %r1, 4;"]
    lines += ["add.u32 %r1, %r1, %r2;", "cvt.u64.u32 %rd3, %r1;", "cvta.shared.u64 %rd3, %rd3;"]
    lines += [f"ld.global.b32 %x{i}, [%rd2+{128 * i}];" for i in range(loads)]
    lines += [instruction, "bar.warp.sync -1;"]
    lines += [f"st.global.b32 [%rd2+{128 * i}], %x{i};" for i in range(stores)]
    for i in range(4):
        lines += [f"ld.shared.b32 %r5, [%r4+{128 * i}];", f"st.global.b32 [%rd1+{128 * i}], %r5;"]
    body = "\n".join(lines)
    return (
        f"{HEAD}.visible .entry k(.param .u64 image, .param .u64 words)\n{{\n"
        f".reg .b32 %r<8>;\n.reg .b32 %x<4>;\n.reg .b64 %rd<4>;\n{body}\nret;\n}}\n"
    )


def run(instruction: str, loads: int, stores: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Shared memory (32 rows, 16) and registers (4, 32), each before and after the instruction."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (ROWS, 16), np.uint8)
    words = rng.integers(0, 1 << 32, (4, 32), np.uint32)
    args = [image.copy(), words.copy()]
    run_ptx(shared_kernel(instruction, loads, stores), args=args, smem_bytes=512)
    return image, args[0], words, args[1]


def row_of(lane: int) -> int:
    return 5 * lane % 32


def element(row: np.ndarray, i: int, stored: str) -> int:
    """Extracts element i of a 16-byte row from its bits."""
    width = {"b8": 8, "b8x16.b4x16_p64": 4, "b8x16.b6x16_p32": 6}[stored]
    return int.from_bytes(row.tobytes(), "little") >> width * i & (1 << width) - 1


def registers(count: int) -> str:
    return "{" + ", ".join(f"%x{i}" for i in range(count)) + "}"


@pytest.mark.parametrize("address", [".shared", ".shared::cta", ""])
@pytest.mark.parametrize("stored", ["b8x16.b4x16_p64", "b8x16.b6x16_p32"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_m8n16(count, stored, address):
    where = "%r1" if address else "%rd3"
    opcode = f"ldmatrix.sync.aligned.m8n16.x{count}{address}.{stored} {registers(count)}, [{where}];"
    image, _, _, got = run(opcode, 0, count)
    for j in range(count):
        for lane in range(32):
            row = image[row_of(8 * j + lane // 4)]
            expected = [element(row, 4 * (lane % 4) + i, stored) for i in range(4)]
            assert list(int(got[j, lane]).to_bytes(4, "little")) == expected


@pytest.mark.parametrize("stored", ["b8", "b8x16.b4x16_p64", "b8x16.b6x16_p32"])
@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_m16n16_transposed(count, stored):
    opcode = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.{stored} {registers(2 * count)}, [%r1];"
    image, _, _, got = run(opcode, 0, 2 * count)
    for register in range(2 * count):
        matrix, half = divmod(register, 2)
        for lane in range(32):
            g, t = divmod(lane, 4)
            expected = [
                element(image[row_of(16 * matrix + 4 * t + i)], g + 8 * half, stored) for i in range(4)
            ]
            assert list(int(got[register, lane]).to_bytes(4, "little")) == expected


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_m16n8_transposed(count):
    opcode = f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r1], {registers(count)};"
    before, after, words, _ = run(opcode, count, 0)
    expected = before.copy()
    for j in range(count):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for i, byte in enumerate(int(words[j, lane]).to_bytes(4, "little")):
                expected[row_of(8 * j + 2 * t + (i & 1)), g + 8 * (i >> 1)] = byte
    np.testing.assert_array_equal(after, expected)


def test_stored_tiles_load_back_for_the_other_operand():
    # A 16 x 16 tile stored by columns (two m16n8) and loaded transposed gives each lane 4 columns of 2 rows.
    store = "stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r1], {%x0, %x1};"
    load = "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%x0, %x1}, [%r1];"
    _, _, words, got = run(f"{store}\nbar.warp.sync -1;\n{load}", 2, 2)
    tile = np.zeros((16, 16), np.uint8)
    for j in range(2):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for i, byte in enumerate(int(words[j, lane]).to_bytes(4, "little")):
                tile[g + 8 * (i >> 1), 8 * j + 2 * t + (i & 1)] = byte
    for half in range(2):
        for lane in range(32):
            g, t = divmod(lane, 4)
            assert (
                list(int(got[half, lane]).to_bytes(4, "little"))
                == tile[g + 8 * half, 4 * t : 4 * t + 4].tolist()
            )


def test_movmatrix_transposes():
    case = MoveCase()
    before, after = (w.view(np.uint16).reshape(8, 8) for w in (case.words, case.emulate()))
    np.testing.assert_array_equal(after, before.T)


@pytest.mark.parametrize(
    "instruction, message",
    [
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%x0}, [%r1];", "m8n16 is for"),
        ("ldmatrix.sync.aligned.m8n16.x3.shared.b8x16.b4x16_p64 {%x0}, [%r1];", "number of matrices"),
        (
            "ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b4x16_p64 {%x0}, [%r1];",
            "1 registers for the matrices",
        ),
        (
            "ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b4x16_p64 {%x0}, [%r1];",
            "unknown modifier .trans",
        ),
        ("ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%x0, %x1}, [%r1];", "m16n16 needs .trans"),
        ("ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8 {%x0, %x1}, [%r1];", "number of matrices"),
        (
            "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8x16.b7x16 {%x0, %x1}, [%r1];",
            "unknown modifier .b7x16",
        ),
        ("stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r1], {%x0};", "m16n8 needs .trans"),
        ("stmatrix.sync.aligned.m16n8.x1.trans.shared.b16 [%r1], {%x0};", "unknown modifier .b16"),
        ("movmatrix.sync.aligned.m8n8.b16 %x0, %x1;", "movmatrix needs .trans.b16"),
        (
            "add.u32 %r1, %r1, 8;\nldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%x0}, [%r1];",
            "not aligned",
        ),
        (
            "add.u32 %r1, %r1, 512;\nstmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r1], {%x0};",
            "is outside",
        ),
    ],
)
def test_refusals(instruction, message):
    with pytest.raises(EmulatorError, match=rf"PTX line \d+ ?:? ?`.*{message}"):
        run(instruction, 2, 0)


def test_part_of_a_warp_cannot_load_a_matrix():
    text = shared_kernel("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%x0}, [%r1];", 0, 0)
    text = text.replace("bar.warp.sync -1;", "")
    with pytest.raises(EmulatorError, match="ldmatrix needs all 32 lanes"):
        run_ptx(text, block=16, args=[np.zeros(128, np.uint32), np.zeros(128, np.uint32)], smem_bytes=512)
