"""Matrix and instruction descriptors and placements in tensor memory, compared with formulas per element."""

import itertools

import numpy as np
import pytest

from nvfp4_cute.emulator import descriptors as ds
from nvfp4_cute.emulator.tensormap import TensorMap, encode
from nvfp4_cute.errors import EmulatorError

A_SW128 = 0x4000404000010000  # K-major, 128-byte swizzle, stride 1024, as CuTe DSL emits for A and B
SCALE_COPY = 0x0000400800000000  # no swizzle, stride 128, as CuTe DSL emits for tcgen05.cp of scale factors


def descriptor(start, leading=0, stride=0, code=0):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | code << 61


# ---- shared-memory descriptors -----------------------------------------------------------------------------------
def test_fields_of_real_descriptors():
    d = ds.decode_smem_descriptor(A_SW128 | 0x1400 >> 4)
    assert (d.start, d.stride, d.swizzle.mode, d.swizzle.atom) == (0x1400, 1024, "128B", "16B")
    d = ds.decode_smem_descriptor(SCALE_COPY | 0x800 >> 4)
    assert (d.start, d.leading, d.stride, d.swizzle.mode) == (0x800, 0, 128, "none")


@pytest.mark.parametrize("base", [1024, 1152, 5 * 1024])
def test_operand_gather_undoes_a_tma_tile(base):
    """Four K steps through a tile that TMA wrote with the same swizzle return the rows of the tensor."""
    m = TensorMap.decode(encode(0, "b4x16", (256, 128), (128,), (256, 128), swizzle="128B"))
    rows = np.random.default_rng(0).integers(0, 256, (128, 128), dtype=np.uint8)
    smem = np.zeros(1 << 16, np.uint8)
    chunks = smem.view(np.complex128)
    chunks[m.chunk_index(base)] = rows.view(np.complex128)
    for step in range(4):
        gather = ds.k_major_chunks(A_SW128 | (base + 32 * step) >> 4, 128)
        got = chunks.take(gather.indices).view(np.uint8)
        assert (got == rows[:, 32 * step : 32 * step + 32]).all()
        assert base <= gather.first_byte and gather.first_byte + gather.nbytes <= base + (1 << 14) + 1024


FLIP = {0: (), 6: ((4, 7),), 4: ((4, 7), (5, 8)), 2: ((4, 7), (5, 8), (6, 9)), 1: ((5, 7), (6, 8))}
WIDTH = {0: 16, 6: 32, 4: 64, 2: 128, 1: 128}


def swizzled(code, address):
    return address ^ sum((address >> source & 1) << target for target, source in FLIP[code])


@pytest.mark.parametrize("code", [0, 6, 4, 2])
def test_k_major_formula(code):
    start, leading, stride = 4096 + 128, 2048, 768
    index = ds.k_major_chunks(descriptor(start, leading, stride, code), 24).indices
    for r, kb in itertools.product(range(24), (0, 16)):
        within = kb // 16 * leading if code == 0 else kb
        want = swizzled(code, start + r // 8 * stride + r % 8 * WIDTH[code] + within)
        assert index[r, kb // 16] * 16 == want


@pytest.mark.parametrize("code,size", [(0, 1), (0, 2), (6, 2), (4, 1), (2, 2), (2, 1), (1, 4)])
def test_mn_major_formula(code, size):
    start, leading, stride = 4096, 8192, 1024
    gather = ds.mn_major_bytes(descriptor(start, leading, stride, code), 96, size)
    assert gather.indices.shape == (96, 32 // size, size)
    group = 4 if code == 1 else 8
    for mn, k, i in itertools.product(range(0, 96, 5), range(32 // size), range(size)):
        b = mn * size + i
        if code == 0:
            want = start + b // 16 * stride + k // 8 * leading + k % 8 * 16 + b % 16
        else:
            w = WIDTH[code]
            want = swizzled(code, start + b // w * leading + k // group * stride + k % group * w + b % w)
        assert gather.indices[mn, k, i] == want


@pytest.mark.parametrize(
    "value,words",
    [
        (0x4000004000010000, "bits 46-48"),
        (A_SW128 | 1 << 61, "code 3 is reserved"),
        (A_SW128 | 1 << 53, "reserved bits 53-60"),
    ],
)
def test_bad_matrix_descriptors(value, words):
    with pytest.raises(EmulatorError, match=words):
        ds.decode_smem_descriptor(value)


def test_32_byte_atom_is_not_k_major():
    with pytest.raises(EmulatorError, match="MN-major"):
        ds.k_major_chunks(descriptor(1024, 0, 1024, 1), 8)


# ---- instruction descriptors -------------------------------------------------------------------------------------
def test_real_instruction_descriptors():
    nvfp4 = ds.decode_instruction_descriptor(0x08400480, "mxf4nvf4", scale_block=16)
    assert (nvfp4.m, nvfp4.n, nvfp4.a_format, nvfp4.scale_type) == (128, 256, "e2m1", "ue4m3")
    assert not any((nvfp4.negate_a, nvfp4.negate_b, nvfp4.a_mn_major, nvfp4.b_mn_major))
    assert (
        ds.decode_instruction_descriptor(0x08401480, "mxf4nvf4", scale_block=16) == nvfp4
    )  # bit 12 is reserved
    pair = ds.decode_instruction_descriptor(0x10400480, "mxf4nvf4", scale_block=16, cta_group=2)
    assert (pair.m, pair.n) == (256, 256)
    mxf8 = ds.decode_instruction_descriptor(0x08A18000, "mxf8f6f4", scale_block=32)
    assert (mxf8.m, mxf8.n, mxf8.a_format, mxf8.scale_type) == (128, 128, "e4m3", "ue8m0")
    assert mxf8.a_mn_major and mxf8.b_mn_major
    negated = ds.decode_instruction_descriptor(0x08400480 | 0x6000, "mxf4nvf4", scale_block=16)
    assert negated.negate_a and negated.negate_b


@pytest.mark.parametrize(
    "value,kind,kwargs,words",
    [
        (0x08400484, "mxf4nvf4", {"scale_block": 16}, "sparse"),
        (0x88400480, "mxf4nvf4", {"scale_block": 16}, None),
        (0xC8400480, "mxf4nvf4", {"scale_block": 16}, None),
        (0xA8C00480, "mxf4nvf4", {"scale_block": 32}, None),
        (0xA8400480, "mxf4nvf4", {"scale_block": 16}, "scale ids 1, 0"),
        (0x88400480, "mxf4nvf4", {"scale_block": 16, "cta_group": 2}, "K=96 with M=128"),
        (0x88C00000, "mxf8f6f4", {"scale_block": 32}, "reserved bit"),
        (0x08C09400, "mxf8f6f4", {"scale_block": 32}, None),
        (0x08C08280, "mxf8f6f4", {"scale_block": 32}, "MN-major A of e2m1 elements"),
        (0x08050010, "f8f6f4", {}, None),
        (0x08051010, "f8f6f4", {}, "MN-major B of e3m2 elements"),
        (0x04030010, "f8f6f4", {}, "N in steps of 16, N is 8"),
        (0x080800A0, "i8", {}, None),
        (0x080800A8, "i8", {}, None),
        (0x08080020, "i8", {"cta_group": 2}, None),
        (0x080A0020, "i8", {"cta_group": 2}, "shape 128x40"),
        (0x080A0020, "i8", {}, "shape 128x40"),
        (0x08060020, "i8", {}, None),
        (0x08080010, "i8", {}, "D format code 1"),
        (0x08082020, "i8", {}, "cannot be negated"),
        (0x84100010, "f16", {"ws": True}, None),
        (0x84100010, "f16", {}, "B reuse shifts without .ws"),
        (0x08C00480, "mxf4nvf4", {"scale_block": 32, "cta_group": 2}, None),
        (0x08400480, "mxf4nvf4", {"scale_block": 32}, "scale type ue4m3"),
        (0x08400480, "mxf4", {"scale_block": 32}, "scale type ue4m3"),
        (0x28400480, "mxf4nvf4", {"scale_block": 16}, "scale ids 1, 0"),
        (0x28C00480, "mxf4nvf4", {"scale_block": 32}, "scale ids 1, 0"),
        (0x08408480, "mxf4nvf4", {"scale_block": 16}, "K-major only"),
        (0x08400080, "mxf4nvf4", {"scale_block": 16}, "format codes"),
        (0x10400480, "mxf4nvf4", {"scale_block": 16}, "shape 256x256"),
        (0x08020480, "mxf4nvf4", {"scale_block": 16, "cta_group": 2}, "shape 128x8"),
        (0x08020490, "f16", {}, None),
        (0x04020490, "f16", {}, None),
        (0x08000010, "f16", {}, "shape 128x0"),
        (0x08020000, "f16", {}, None),
        (0x08020020, "f16", {}, "D format code 2"),
        (0x08020000, "f8f6f4", {}, None),
        (0x08020020, "f8f6f4", {}, "D format code 2"),
        (0x08020910, "tf32", {}, None),
        (0x08400918, "tf32", {}, "reserved bit"),
        (0x08400900, "tf32", {}, "D format"),
    ],
)
def test_rules_of_instruction_descriptors(value, kind, kwargs, words):
    if words is None:
        ds.decode_instruction_descriptor(value, kind, **kwargs)
        return
    with pytest.raises(EmulatorError, match=words):
        ds.decode_instruction_descriptor(value, kind, **kwargs)


EIGHTS, SIXTEENS, THIRTYTWOS = (range(step, 257, step) for step in (8, 16, 32))
LEGAL_SHAPES = {
    ("f16", 1): ((64, 128), EIGHTS),
    ("tf32", 1): ((64, 128), EIGHTS),
    ("f8f6f4", 1): ((64, 128), EIGHTS),
    ("i8", 1): ((64, 128), (8, 16, 24, 32, *range(48, 257, 16))),
    ("mxf8f6f4", 1): ((128,), EIGHTS),
    ("mxf4", 1): ((128,), EIGHTS),
    ("mxf4nvf4", 1): ((128,), EIGHTS),
    ("f16", 2): ((128, 256), SIXTEENS),
    ("tf32", 2): ((128, 256), SIXTEENS),
    ("f8f6f4", 2): ((128, 256), SIXTEENS),
    ("i8", 2): ((128, 256), THIRTYTWOS),
    ("mxf8f6f4", 2): ((128, 256), SIXTEENS),
    ("mxf4", 2): ((128, 256), SIXTEENS),
    ("mxf4nvf4", 2): ((128, 256), SIXTEENS),
    ("f16", "ws"): ((32, 64, 128), (64, 128, 256)),
    ("tf32", "ws"): ((32, 64, 128), (64, 128, 256)),
    ("f8f6f4", "ws"): ((32, 64, 128), (64, 128, 256)),
    ("i8", "ws"): ((32, 64, 128), (64, 128, 256)),
    ("mxf4", "ws"): ((), ()),
}
"""Legal M and N of dense instructions by kind and `.cta_group`, or `.ws` (PTX ISA 9.7.16.2.1)."""


@pytest.mark.parametrize(("kind", "group"), LEGAL_SHAPES)
def test_shapes(kind, group):
    options = {"cta_group": 1, "ws": True} if group == "ws" else {"cta_group": group}
    sizes = itertools.product(range(0, 321, 16), range(0, 321, 8))
    legal = [(m, n) for m, n in sizes if ds.shape_reason(kind, m, n, **options) is None]
    assert legal == [*itertools.product(*LEGAL_SHAPES[kind, group])]


# ---- accumulators ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "m,n,cta_group,ws,where",
    [
        (128, 64, 1, False, lambda m, n, N: (0, m, n)),
        (64, 64, 1, False, lambda m, n, N: (0, m % 16 + 32 * (m // 16), n)),
        (256, 64, 2, False, lambda m, n, N: (m // 128, m % 128, n)),
        (128, 64, 2, False, lambda m, n, N: (m // 64, m % 64 + 64 * (n >= N // 2), n % (N // 2))),
        (64, 64, 1, True, lambda m, n, N: (0, m + 64 * (n // (N // 2)), n % (N // 2))),
        (32, 64, 1, True, lambda m, n, N: (0, m + 32 * (n // (N // 4)), n % (N // 4))),
    ],
)
def test_accumulator_placement(m, n, cta_group, ws, where):
    place = np.full((m, n, 3), -1)
    for block in ds.accumulator_blocks(m, n, cta_group, ws, 0):
        lanes = np.arange(128)[block.lanes]
        view = place[block.rows, block.columns]
        assert view.shape[0] == len(lanes) and (view == -1).all()
        view[..., 0] = block.cta
        view[..., 1] = lanes[:, None]
        view[..., 2] = block.column_offset + np.arange(view.shape[1])
    for i, j in itertools.product(range(m), range(n)):
        assert tuple(place[i, j]) == where(i, j, n)


def test_accumulator_base_lane():
    blocks = ds.accumulator_blocks(64, 8, 1, False, 16)
    assert [b.lanes.start for b in blocks] == [16, 48, 80, 112]
    with pytest.raises(EmulatorError, match="must start at lane 0"):
        ds.accumulator_blocks(128, 8, 1, False, 16)


# ---- scale factors and tcgen05.cp --------------------------------------------------------------------------------
def test_scale_path():
    """The 512-byte block of a 128 x 4 scale tile, through the cp map, to the bytes of each row."""
    scales = np.random.default_rng(0).integers(0, 256, (128, 4), dtype=np.uint8)
    smem = np.zeros(2048, np.uint8)
    for m, k in itertools.product(range(128), range(4)):
        smem[1024 + m % 32 * 16 + m // 32 % 4 * 4 + k] = scales[m, k]
    words = np.zeros((128, 512), np.uint32)
    shape = ds.COPY_SHAPES["32x128b.warpx4"]
    gather = ds.k_major_chunks(SCALE_COPY | 1024 >> 4, shape.rows, shape.row_bytes)
    rows = smem.view(np.complex128).take(gather.indices).view(np.uint32)
    for lanes in shape.lanes:
        words[lanes, 8:12] = rows
    read = lambda column, *args: ds.read_scales(words, column, ds.scale_places(*args))
    assert (read(8, 128, 4, 0) == scales).all()
    assert (read(8, 40, 2, 2) == scales[:40, 2:]).all()
    assert (read(10, 64, 1, 3) == scales[64:, 3:]).all()
    words[70, 9] ^= 1
    assert (read(8, 38, 4, 0) == scales[:38]).all()  # row 38 is the first one stored there
    with pytest.raises(EmulatorError, match="not the same in all"):
        read(8, 39, 4, 0)


@pytest.mark.parametrize("rows", [64, 128, 192, 256])
@pytest.mark.parametrize("count,sf_ids", [(6, (0, 2)), (3, (0, 1, 2, 3))])
def test_scales_of_96_elements_go_on_in_the_next_words(rows, count, sf_ids):
    """Scale s of row r: byte s % 4 of column 4 * ceil(rows / 128) * (s / 4) + r / 32; an instruction begins at any s."""
    group = 4 * -(-rows // 128)
    words = np.full((128, 512), 0xFFFFFFFF, np.uint32)
    data = words.view(np.uint8)
    scales = np.random.default_rng(rows).integers(0, 256, (rows, 12), dtype=np.uint8)
    for r, s, quadrant in itertools.product(range(rows), range(12), range(4)):
        data[32 * quadrant + r % 32, 4 * (16 + group * (s // 4) + r // 32) + s % 4] = scales[r, s]
    for sf_id in sf_ids:
        places = ds.scale_places(rows, count, sf_id)
        assert (ds.read_scales(words, 16, places) == scales[:, sf_id : sf_id + count]).all()
        later = ds.read_scales(words, 16 + group, places)
        assert (later == scales[:, 4 + sf_id : 4 + sf_id + count]).all()


@pytest.mark.parametrize("n", [32, 96, 256])
def test_scales_of_b_for_a_pair_with_m_128(n):
    """Column n0 + 32 n1 + N/2 n2 of B: lanes n0 + 64 n2 and n0 + 64 n2 + 32, tensor-memory column n1."""
    words = np.full((128, 512), 0xFFFFFFFF, np.uint32)
    data = words.view(np.uint8)
    scales = np.random.default_rng(n).integers(0, 256, (n, 4), dtype=np.uint8)
    for row, k, copy in itertools.product(range(n), range(4), range(2)):
        half, rest = divmod(row, n // 2)
        data[rest % 32 + 64 * half + 32 * copy, 4 * (40 + rest // 32) + k] = scales[row, k]
    assert (ds.read_scales(words, 40, ds.scale_places(n, 4, 0, True)) == scales).all()
    words[96, 40] ^= 1
    with pytest.raises(EmulatorError, match="not the same"):
        ds.read_scales(words, 40, ds.scale_places(n, 4, 0, True))


# ---- zero-column masks -------------------------------------------------------------------------------------------
def mask_descriptor(starts, spans, skip, use, nonzero=1, shift=0) -> int:
    value = nonzero << 39 | skip << 40 | use << 48 | shift << 56
    for i, (start, span) in enumerate(zip(starts, spans, strict=True)):
        value |= start << 8 * i | span << 32 + i
    return value


@pytest.mark.parametrize(
    "m, starts, spans, masks",
    [
        (128, (0, 0, 0, 0), (0, 0, 0, 0), ["11100001110000"]),
        (64, (0, 0, 0, 0), (1, 0, 0, 0), ["11100001110000111", "00001110000111" "0000"]),
        (32, (0, 1, 2, 1), (1, 1, 0, 0), ["00001110000111", "0000111000011", "111000011100", "1110000111000"]),
    ],
)  # fmt: skip
def test_examples_of_zero_column_masks(m, starts, spans, masks):
    """The ISA's examples 2 to 4 (without the shift of the last): skip span 2, use span 3, lowest column last."""
    n = 128
    got = ds.zero_columns(mask_descriptor(starts, spans, 2, 3), m, n).reshape(128 // m, -1)
    for part, text in zip(got, masks, strict=True):
        assert "".join(str(int(x)) for x in part[: len(text)])[::-1] == text


def test_a_zero_column_mask_that_is_none_or_not_modelled():
    assert not ds.zero_columns(mask_descriptor((0,), (1,), 4, 3, nonzero=0), 128, 64).any()
    with pytest.raises(EmulatorError, match="column shifts"):
        ds.zero_columns(mask_descriptor((0,), (1,), 4, 3, shift=2), 128, 64)
    with pytest.raises(EmulatorError, match="reserved bits 36-38"):
        ds.zero_columns(1 << 37, 128, 64)


# ---- base offset and absolute leading dimension ------------------------------------------------------------------
@pytest.mark.parametrize("code", [2, 4, 6])
@pytest.mark.parametrize("base", range(8))
def test_a_pattern_that_starts_elsewhere(code, base):
    """A tile 128 * base bytes above an aligned address, with that base offset, is the aligned tile moved."""
    moved = ds.k_major_chunks(descriptor(4096 + 128 * base, 0, 1024, code) | base << 49, 24).indices
    aligned = ds.k_major_chunks(descriptor(4096, 0, 1024, code), 24).indices
    assert (moved == aligned + 8 * base).all()
    bytes_moved = ds.mn_major_bytes(
        descriptor(4096 + 128 * base, 2048, 1024, code) | base << 49, 64, 2
    ).indices
    assert (
        bytes_moved == ds.mn_major_bytes(descriptor(4096, 2048, 1024, code), 64, 2).indices + 128 * base
    ).all()


@pytest.mark.parametrize("step", range(8))
def test_rows_of_48_bytes_go_on_in_the_next_buffer(step):
    """Eight instructions of K=96 read 3 buffers of 128 bytes per row. A read past the end of one continues in the next."""
    rows, buffers = 16, (2048, 8192, 20480)
    first, at = divmod(48 * step, 128)
    following = buffers[min(first + 1, 2)]
    value = descriptor(buffers[first] + at, following, 1024, 2) | 1 << 52
    indices = ds.k_major_chunks(value, rows, 48).indices
    for r, chunk in itertools.product(range(rows), range(3)):
        buffer, byte = divmod(48 * step + 16 * chunk, 128)
        assert 16 * indices[r, chunk] == swizzled(2, buffers[buffer] + r // 8 * 1024 + r % 8 * 128 + byte)


@pytest.mark.parametrize(
    "shape,where",
    [
        ("128x256b", lambda r: [r]),
        ("128x128b", lambda r: [r]),
        ("4x256b", lambda r: [32 * r]),
        ("64x128b.warpx2::02_13", lambda r: [r, r + 64]),
        ("64x128b.warpx2::01_23", lambda r: [r, r + 32] if r < 32 else [r + 32, r + 64]),
        ("32x128b.warpx4", lambda r: [r, r + 32, r + 64, r + 96]),
    ],
)
def test_copy_shapes(shape, where):
    rows, row_bytes, lanes = ds.COPY_SHAPES[shape]
    assert rows * row_bytes * 8 == np.prod([int(x) for x in shape.split("b")[0].split("x")])
    for r in range(rows):
        assert sorted(lanes[:, r]) == where(r)


# ---- tcgen05.ld and .st ------------------------------------------------------------------------------------------
LOADS = {
    "32x32b": lambda t, r: (t, r),
    "16x64b": lambda t, r: (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2),
    "16x128b": lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)),
    "16x256b": lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)),
    "16x32bx2": lambda t, r: (t % 16, r + 64 * (t // 16)),
}


@pytest.mark.parametrize("shape", LOADS)
@pytest.mark.parametrize("repeat", [1, 2, 8])
def test_load_maps(shape, repeat):
    info = ds.LOAD_SHAPES[shape]
    lane, column = ds.load_map(shape, repeat, 64)
    count = info.registers * repeat
    assert lane.shape == column.shape == (count, 32)
    places = set()
    for t, r in itertools.product(range(32), range(count)):
        assert (lane[r, t], column[r, t]) == LOADS[shape](t, r)
        places.add((int(lane[r, t]), int(column[r, t])))
    assert len(places) == 32 * count and {p[0] for p in places} == set(range(info.lanes))
