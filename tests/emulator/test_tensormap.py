"""Tensor maps: the binary format, and tile copies compared with an element-by-element model."""

import itertools

import numpy as np
import pytest

from nvfp4_cute.emulator import reductions
from nvfp4_cute.emulator.faults import AlignmentFault
from nvfp4_cute.emulator.tensormap import TensorMap, encode
from nvfp4_cute.errors import EmulatorError

# An fp4 operand (K=512, M=256, box 256 x 128, 128B swizzle) as encoded by CuTe DSL's host code.
REAL_WORDS = "00007f0012345670 00000010000465a2 0000000000001000 0 000000ff000001ff 0 ff00000000000000 000000000000007f"
REAL = b"".join(int(x, 16).to_bytes(8, "little") for x in REAL_WORDS.split())


class Memory:
    """Global memory with one allocation at an invented address. Refuses accesses outside of it."""

    def __init__(self, nbytes, base=0x7F0000000000, seed=0):
        self.base = base
        self.bytes = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    def view(self, address, nbytes):
        start = address - self.base
        assert 0 <= start and start + nbytes <= len(self.bytes), "access outside the tensor"
        return self.bytes[start : start + nbytes]


def test_decode_of_a_real_descriptor():
    m = TensorMap.decode(REAL)
    assert (m.address, m.element.name, m.swizzle, m.atom) == (0x7F0012345670, "b4x16", "128B", "16B")
    assert (m.dims, m.strides, m.box, m.nan_fill) == ((512, 256, 1), (256, 1 << 16), (256, 128, 1), False)
    assert (m.row_bytes, m.tile_bytes, m.tile_shape) == (128, 16384, (1, 128, 256))
    assert m.transaction_bytes == m.tile_bytes
    again = encode(m.address, "b4x16", m.dims, m.strides, m.box, swizzle="128B")
    assert len(again) == 128 and TensorMap.decode(again) == m
    # L2 promotion (bits 17-18) is a hint and the only difference
    assert again[:8] == REAL[:8] and again[0x0C:64] == REAL[0x0C:64]
    assert int.from_bytes(again[8:12], "little") == int.from_bytes(REAL[8:12], "little") & ~(3 << 17)


def test_encode_decode_round_trip():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rank = int(rng.integers(1, 6))
        element = str(rng.choice(["u8", "u16", "s32", "u64", "f16", "bf16", "f32", "tf32", "f64", "b4x16"]))
        bits = {"u8": 8, "u16": 16, "f16": 16, "bf16": 16, "u64": 64, "f64": 64, "b4x16": 4}.get(element, 32)
        box = (128 // bits * int(rng.integers(1, 3)), *(int(x) for x in rng.integers(1, 257, rank - 1)))
        dims = (2 * int(rng.integers(1, 1 << 30)), *(int(x) for x in rng.integers(1, 1 << 32, rank - 1)))
        strides = tuple(int(x) * 16 for x in rng.integers(0, 1 << 36, rank - 1))
        steps = (1, *(int(x) for x in rng.integers(1, 9, rank - 1)))
        nan = element in ("f16", "bf16", "f32", "tf32", "f64") and bool(rng.integers(2))
        kwargs = {
            "element_strides": steps,
            "swizzle": str(rng.choice(["none", "32B", "64B", "128B"])),
            "nan_fill": nan,
        }
        m = TensorMap.decode(encode(int(rng.integers(1 << 40)) * 16, element, dims, strides, box, **kwargs))
        assert (m.element.name, m.dims, m.strides, m.box, m.element_strides) == (
            element,
            dims,
            strides,
            box,
            steps,
        )
        assert (m.swizzle, m.nan_fill) == (kwargs["swizzle"], nan)


# ---- loads -------------------------------------------------------------------------------------------------------
def model_swizzle(address, swizzle, atom):
    """The bit tables of the PTX ISA."""
    bit = lambda i: address >> i & 1
    flips = {
        ("none", "16B"): (), ("32B", "16B"): ((4, 7),), ("64B", "16B"): ((4, 7), (5, 8)),
        ("128B", "16B"): ((4, 7), (5, 8), (6, 9)), ("128B", "32B"): ((5, 7), (6, 8)), ("128B", "64B"): ((6, 7),),
    }  # fmt: skip
    return address ^ sum(bit(source) << target for target, source in flips[swizzle, atom])


def model_load(m: TensorMap, coords, memory, smem, dst):
    """Copies one element (or nibble) at a time."""
    counts = [-(-b // s) for b, s in zip(m.box, m.element_strides, strict=True)]
    for index in itertools.product(*(range(n) for n in counts[::-1])):
        index = index[::-1]
        position = [c + i * s for c, i, s in zip(coords, index, m.element_strides, strict=True)]
        inside = all(0 <= p < d for p, d in zip(position, m.dims, strict=True))
        span = {"none": 0, "32B": 32, "64B": 64, "128B": 128}[m.swizzle]
        linear, pitch = 0, span * 8 // m.element.bits or counts[0]
        for i, n in zip(index[1:], counts[1:], strict=True):
            linear += i * pitch
            pitch *= n
        offset = m.address - memory.base + sum(p * s for p, s in zip(position[1:], m.strides, strict=True))
        bits = m.element.bits
        if bits >= 8:
            size = bits // 8
            fill = np.full(-(-size // 2), 0x7FF7 if m.nan_fill else 0, np.uint16).view(np.uint8)
            start = offset + position[0] * size
            value = memory.bytes[start : start + size] if inside else fill
            for i in range(size):
                smem[model_swizzle(dst + (linear + index[0]) * size + i, m.swizzle, m.atom)] = value[i]
        else:
            nibble = memory.bytes[offset + position[0] // 2] >> 4 * (position[0] % 2) & 15 if inside else 0
            at = model_swizzle(dst + (linear + index[0]) // 2, m.swizzle, m.atom)
            smem[at] = smem[at] & (0xF0 >> 4 * (index[0] % 2)) | nibble << 4 * (index[0] % 2)


def load(m, coords, memory, dst, size=1 << 16):
    smem = np.full(size, 0xEE, np.uint8)
    smem.view(np.complex128)[m.chunk_index(dst)] = m.read_tile(coords, memory.view)
    return smem


def random_map(rng, memory):
    element = str(rng.choice(["u8", "u16", "f32", "f64", "bf16", "b4x16"]))
    bits = {"u8": 8, "u16": 16, "bf16": 16, "f64": 64, "b4x16": 4}.get(element, 32)
    rank = int(rng.integers(1, 5))
    swizzle = str(rng.choice(["none", "32B", "64B", "128B"]))
    atom = str(rng.choice(["16B", "32B", "64B"])) if swizzle == "128B" else "16B"
    row_bytes = {"none": 64, "32B": 32, "64B": 64, "128B": 128}[swizzle] if rng.random() < 0.7 else 16
    dims = (int(rng.integers(1, 80)) * 2, *(int(x) for x in rng.integers(1, 9, rank - 1)))
    strides, pitch = [], -(-dims[0] * bits // 8 // 16) * 16
    for d in dims[1:]:
        strides.append(pitch + 16 * int(rng.integers(0, 3)))
        pitch = strides[-1] * d
    box = (row_bytes * 8 // bits, *(int(x) for x in rng.integers(1, 7, rank - 1)))
    steps = (1, *(int(x) for x in rng.integers(1, 4, rank - 1)))
    nan = element in ("f32", "f64", "bf16") and rng.random() < 0.5
    descriptor = encode(
        memory.base + 256, element, dims, tuple(strides), box, element_strides=steps, swizzle=swizzle, atom=atom,
        nan_fill=bool(nan),
    )  # fmt: skip
    return TensorMap.decode(descriptor)


def random_coords(rng, m, low=-4):
    coords = [int(rng.integers(low, d + 2)) for d in m.dims]
    coords[0] -= coords[0] % (128 // m.element.bits if m.element.bits % 8 == 0 else 2)
    return tuple(coords)


@pytest.mark.parametrize("seed", range(8))
def test_loads_match_the_model(seed):
    rng, memory = np.random.default_rng(seed), Memory(1 << 18)
    outside = 0
    for _ in range(25):
        m = random_map(rng, memory)
        coords, dst = random_coords(rng, m), 1024 + 128 * int(rng.integers(0, 9))
        want = np.full(1 << 16, 0xEE, np.uint8)
        model_load(m, coords, memory, want, dst)
        region = m._clip(coords)
        whole = region is not None and region.count == m.tile_shape[::-1]
        aligned = coords[0] * m.element.bits % 128 == 0 and not m.element.padded
        assert (m._contiguous_rows(coords, memory.view) is not None) == (whole and aligned)
        outside += not whole
        assert (load(m, coords, memory, dst) == want).all(), (m, coords, dst)
    assert 0 < outside


def test_load_of_a_whole_operand_tile():
    memory = Memory(256 * 256)
    m = TensorMap.decode(encode(memory.base, "b4x16", (512, 256), (256,), (256, 128), swizzle="128B"))
    smem = load(m, (256, 128), memory, 2048)
    rows = memory.bytes.reshape(256, 256)[128:, 128:]
    for r in (0, 1, 7, 8, 127):
        for chunk in range(8):
            at = 2048 + 128 * r + 16 * (chunk ^ r % 8)
            assert (smem[at : at + 16] == rows[r, 16 * chunk : 16 * chunk + 16]).all()
    assert (smem[:2048] == 0xEE).all() and (smem[2048 + 16384 :] == 0xEE).all()


@pytest.mark.parametrize("store", [False, True])
def test_addresses_wrap_modulo_two_to_the_64(store):
    """A ragged map: mode 1 ends with the group, and 2^30 steps of 2^34 bytes wrap to zero."""
    memory, far, most = Memory(64 * 100), 1 << 34, (1 << 31) - 1
    dims, strides = (64, 1 << 30, most, most), (64, far - 64, 64)
    m = TensorMap.decode(encode(memory.base, "u8", dims, strides, (64, 8, 1, 1)))
    offset, length = 40, 5  # rows of the group
    coords = (0, (1 << 30) - length, 1 << 30, offset + length)
    group = memory.bytes.reshape(100, 64)[offset : offset + length]
    assert m.rows_at(coords)[0].tolist() == [memory.base + 64 * (offset + i) for i in range(length)]
    assert m.extent(coords) == (memory.base + 64 * offset, length, 64, 64)
    if store:
        tile = np.arange(512, dtype=np.uint8).view(np.complex128).reshape(1, 1, 8, 4)
        m.write_tile(coords, tile, memory.view)
        assert group.tobytes() == np.arange(64 * length, dtype=np.uint8).tobytes()
    else:
        tile = m.read_tile(coords, memory.view).view(np.uint8).reshape(8, 64)
        assert (tile[:length] == group).all() and not tile[length:].any()


@pytest.mark.parametrize("element,data", [("b4x16_p64", 8), ("b6x16_p32", 12)])
def test_padded_types_leave_poison_in_the_padding(element, data):
    memory = Memory(1 << 14)
    pitch = 256 * data // 16
    m = TensorMap.decode(encode(memory.base, element, (256, 8), (pitch,), (128, 4)))
    assert m.tile_bytes == 4 * 128 and m.transaction_bytes == 4 * 128 * data // 16
    smem = load(m, (128, 6), memory, 1024)[1024 : 1024 + 512].reshape(4, 8, 16)
    rows = memory.bytes[: 8 * pitch].reshape(8, 16, data)
    assert (smem[:2, :, :data] == rows[6:, 8:]).all() and (smem[2:, :, :data] == 0).all()
    assert (smem[:, :, data:] == 0xFF).all()
    with pytest.raises(EmulatorError, match="can only be loaded"):
        m.write_tile((0, 0), m.read_tile((0, 0), memory.view), memory.view)


# ---- stores ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_stores_are_the_inverse_and_clip(seed):
    """A stored tile changes the elements in bounds, and the rest of the 16 bytes that contain the last of them."""
    rng = np.random.default_rng(seed)
    for _ in range(30):
        memory = Memory(1 << 17)
        m = random_map(rng, memory)
        coords = random_coords(rng, m, low=0)
        counts = m.tile_shape[::-1]
        tile = rng.integers(0, 256, (*m.tile_shape[:-1], m.row_bytes), dtype=np.uint8)
        want = memory.bytes.copy()
        for index in itertools.product(*(range(n) for n in counts[:0:-1])):
            index = index[::-1]
            row = [c + i * s for c, i, s in zip(coords[1:], index, m.element_strides[1:], strict=True)]
            count = min(counts[0], m.dims[0] - coords[0])
            if count <= 0 or any(p >= d for p, d in zip(row, m.dims[1:], strict=True)):
                continue
            start = (
                256
                + sum(p * s for p, s in zip(row, m.strides, strict=True))
                + coords[0] * m.element.bits // 8
            )
            nbytes = count * m.element.bits // 8
            if m.element.bits % 8 == 0 and row != [d - 1 for d in m.dims[1:]]:  # nothing follows the last row
                nbytes += -nbytes % 16
            want[start : start + nbytes] = tile[index[::-1]][:nbytes]
        m.write_tile(coords, tile.view(np.complex128), memory.view)
        assert (memory.bytes == want).all()


@pytest.mark.parametrize(
    "op,element,function",
    [
        ("add", "u32", np.add), ("min", "s32", np.minimum), ("max", "u64", np.maximum), ("add", "f32", np.add),
        ("add", "f16", np.add), ("max", "f16", np.maximum), ("and", "u32", np.bitwise_and),
        ("or", "s64", np.bitwise_or), ("xor", "u32", np.bitwise_xor),
    ],
)  # fmt: skip
def test_reductions(op, element, function):
    memory = Memory(4096)
    m = TensorMap.decode(encode(memory.base, element, (30, 5), (256,), (16, 4)))
    dtype = {"u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "f32": "f4", "f16": "f2"}[element]
    small = lambda seed, n: np.random.default_rng(seed).integers(0, 9, n).astype(dtype)
    memory.bytes[: 5 * 256] = np.resize(small(0, 5 * 256 // np.dtype(dtype).itemsize).view(np.uint8), 5 * 256)
    before = memory.bytes[: 5 * 256].view(dtype).reshape(5, -1).copy()
    values = small(1, 64).reshape(4, 16)
    m.write_tile((16, 2), values.view(np.complex128), memory.view, op)
    before[2:5, 16:30] = function(before[2:5, 16:30], values[:3, :14])
    assert (memory.bytes[: 5 * 256].view(dtype).reshape(5, -1) == before).all()


def test_tf32_is_rounded_on_load_and_not_on_store():
    memory = Memory(256)
    m = TensorMap.decode(encode(memory.base, "tf32", (8, 4), (32,), (8, 2)))
    codes = np.array(
        [0x3F800FFF, 0x3F801001, 0xBF80F000, 0x7F7FFFFF, 0x7F800001, 0xFFC00000, 0x1001, 0], np.uint32
    )
    memory.bytes[:32] = codes.view(np.uint8)
    rounded = [0x3F800000, 0x3F802000, 0xBF810000, 0x7F800000, 0x7FFFE000, 0x7FFFE000, 0x2000, 0]
    assert m.read_tile((0, 0), memory.view)[0].copy().view(np.uint32).tolist() == rounded
    assert m.read_tile((0, 3), memory.view)[1].copy().view(np.uint32).tolist() == [0] * 8
    m.write_tile((0, 1), np.stack([codes, codes]).view(np.complex128), memory.view)
    assert (memory.bytes[32:64].view(np.uint32) == codes).all()


def test_a_copy_starts_at_16_bytes():
    m = TensorMap.decode(encode(1 << 20, "f16", (64, 4), (128,), (16, 4)))
    for copy in (lambda: m.read_tile((4, 0), None), lambda: m.write_tile((4, 0), None, None)):
        with pytest.raises(
            AlignmentFault, match=r"coordinate 4 of f16: 8 bytes into a row, must be a multiple of 16"
        ):
            copy()


def test_bf16_add_rounds_to_nearest_even():
    f = lambda bits: np.array(bits, np.uint16).view(np.uint8)
    add = lambda x, y: int(reductions.reduce_elements("add", "bf16", f([x]), f([y])).view(np.uint16)[0])
    assert add(0x3F80, 0x3B80) == 0x3F80  # 1 + 2**-8: a tie, to even
    assert add(0x3F81, 0x3B80) == 0x3F82  # the next one up, a tie as well
    assert add(0x3F80, 0x3BC0) == 0x3F81  # above the tie
    assert add(0x7F80, 0xFF80) == 0x7FFF


def test_increments_wrap():
    old, limit = np.array([0, 4, 5, 9], np.uint32), np.full(4, 5, np.uint32)
    assert list(reductions._wrapping_step("inc", old, limit)) == [1, 5, 0, 0]
    assert list(reductions._wrapping_step("dec", old, limit)) == [5, 3, 4, 5]


# ---- refusals ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change,words",
    [
        ({"address": 8}, "not a multiple of 16"),
        ({"box": (257, 1)}, "boxes are 1 to 256"),
        ({"strides": (100,)}, "multiples of 16 bytes"),
        ({"box": (4, 8)}, "not a multiple of 16 bytes"),
        ({"box": (64, 8), "swizzle": "32B"}, "exceeds the 32B swizzle span"),
        ({"element_strides": (2, 1)}, "dimension 0 must be 1"),
        ({"element": "b4x16", "dims": (33, 4), "box": (32, 1)}, "must be even"),
        ({"element": "b4x16", "nan_fill": True, "box": (32, 1)}, "NaN fill needs a float type"),
        ({"swizzle": "64B", "atom": "32B"}, "needs the 128B swizzle"),
        ({"swizzle": "128B", "atom": "32B_flip_8B"}, "not modelled"),
        ({"element": "b4x16_p64", "dims": (64, 4), "box": (128, 1)}, "multiple of 128"),
    ],
)
def test_refusals_name_the_rule(change, words):
    base = {"address": 0, "element": "f16", "dims": (64, 4), "strides": (128,), "box": (16, 4)}
    with pytest.raises((EmulatorError, ValueError), match=words):
        encode(**base | change)


def test_unmodelled_modes_and_misplaced_tiles():
    for bits, words in ((1 << 11, "interleaved"), (1 << 22, "96B"), (15 << 7, "element type")):
        data = bytearray(REAL)
        data[8:12] = (int.from_bytes(data[8:12], "little") | bits).to_bytes(4, "little")
        with pytest.raises(EmulatorError, match=words):
            TensorMap.decode(bytes(data))
    m = TensorMap.decode(REAL)
    with pytest.raises(EmulatorError, match="multiple of 128"):
        m.chunk_index(1040)
    with pytest.raises(EmulatorError, match="rank 3"):
        m.read_tile((0, 0), lambda a, n: None)
    with pytest.raises(EmulatorError, match="whole byte"):
        m.read_tile((1, 0, 0), lambda a, n: None)
    with pytest.raises(EmulatorError, match="negative coordinates"):
        m.write_tile((0, -1, 0), None, None)
