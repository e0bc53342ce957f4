"""Matrix and instruction descriptors, and the placements in tensor memory, against formulas written per element."""

import itertools

import numpy as np
import pytest

from nvfp4_cute.emulator import descriptors as ds
from nvfp4_cute.emulator.tensormap import TensorMap, encode
from nvfp4_cute.errors import EmulatorError

A_SW128 = 0x4000404000010000  # K-major, 128-byte swizzle, stride 1024: what CuTe DSL emits for A and B
SCALE_COPY = 0x0000400800000000  # no swizzle, stride 128: what it emits for tcgen05.cp of scale factors


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
    """Four K steps through a tile that TMA wrote with the same swizzle give back the rows of the tensor."""
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
        (A_SW128 | 1 << 49, "not modelled"),
        (A_SW128 | 1 << 52, "not modelled"),
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
        (0x88400480, "mxf4nvf4", {"scale_block": 16}, "K=96"),
        (0x08C00480, "mxf4nvf4", {"scale_block": 32, "cta_group": 2}, None),
        (0x08400480, "mxf4nvf4", {"scale_block": 32}, "scale type ue4m3"),
        (0x08400480, "mxf4", {"scale_block": 32}, "scale type ue4m3"),
        (0x28400480, "mxf4nvf4", {"scale_block": 16}, "scale ids 1, 0"),
        (0x28C00480, "mxf4nvf4", {"scale_block": 32}, "scale ids 1, 0"),
        (0x08408480, "mxf4nvf4", {"scale_block": 16}, "K-major only"),
        (0x08400080, "mxf4nvf4", {"scale_block": 16}, "format codes"),
        (0x10400480, "mxf4nvf4", {"scale_block": 16}, "shape 256x256"),
        (0x08020480, "mxf4nvf4", {"scale_block": 16, "cta_group": 2}, "shape 128x8"),
        (0x08020490, "f16", {}, "shape 128x8"),
        (0x04020490, "f16", {}, None),
        (0x08000010, "f16", {}, "shape 128x0"),
        (0x08400918, "tf32", {}, "saturation"),
        (0x08400900, "tf32", {}, "D format"),
    ],
)
def test_rules_of_instruction_descriptors(value, kind, kwargs, words):
    if words is None:
        ds.decode_instruction_descriptor(value, kind, **kwargs)
        return
    with pytest.raises(EmulatorError, match=words):
        ds.decode_instruction_descriptor(value, kind, **kwargs)


def test_shapes():
    legal = lambda kind, m, n, **kw: ds.shape_reason(kind, m, n, **kw) is None
    assert all(legal("mxf4nvf4", 128, n, cta_group=1) for n in range(8, 257, 8))
    assert not legal("mxf4nvf4", 64, 64, cta_group=1) and not legal("mxf4nvf4", 128, 264, cta_group=1)
    assert legal("f16", 64, 8, cta_group=1) and legal("f16", 128, 16, cta_group=1)
    assert legal("f16", 32, 64, cta_group=1, ws=True) and not legal("f16", 32, 96, cta_group=1, ws=True)
    assert not legal("mxf4", 128, 128, cta_group=1, ws=True)


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
    assert (ds.read_scales(words, 8, 128, 4, 0) == scales).all()
    assert (ds.read_scales(words, 8, 40, 2, 2) == scales[:40, 2:]).all()
    assert (ds.read_scales(words, 10, 64, 1, 3) == scales[64:, 3:]).all()
    words[70, 9] ^= 1
    assert (ds.read_scales(words, 8, 38, 4, 0) == scales[:38]).all()  # row 38 is the first that lies there
    with pytest.raises(EmulatorError, match="not the same in all four"):
        ds.read_scales(words, 8, 39, 4, 0)


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
