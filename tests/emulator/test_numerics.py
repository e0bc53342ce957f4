"""The matrix arithmetic compared with a scalar model in exact rationals, which follows only the rounding rules."""

from fractions import Fraction

import numpy as np
import pytest

from nvfp4_cute.emulator import numerics as nm

NAN_BITS = 0x7FFFFFFF
E2M1 = [Fraction(x) / 2 for x in (0, 1, 2, 3, 4, 6, 8, 12)]
E2M1 += [-x for x in E2M1]


# ---- the scalar model --------------------------------------------------------------------------------------------
def truncate(x: Fraction) -> int:
    return -(-x.numerator // x.denominator) if x < 0 else x.numerator // x.denominator


def power(e: int) -> Fraction:
    return Fraction(2) ** e


def split(x: Fraction, least: int) -> tuple[Fraction, int]:
    """Signed significand and exponent: 1 <= |s| < 2, or smaller at the least exponent; zero has exponent -126."""
    if x == 0:
        return Fraction(0), -126
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    e = max(e - (abs(x) < power(e)), least)
    return x / power(e), e


def f32_bits_toward_zero(x: Fraction) -> int:
    if x == 0:
        return 0
    _, e = split(x, -126)
    mantissa = truncate(abs(x) / power(e - 23))
    if mantissa == 0:
        return 0
    sign = 0x80000000 if x < 0 else 0
    if e > 127:
        return sign | 0x7F800000
    return sign | (mantissa if mantissa < 1 << 23 else ((e + 127) << 23) | (mantissa - (1 << 23)))


def align_and_sum(terms: list[tuple[Fraction, int]], fraction_bits: int) -> Fraction:
    emax = max(e for _, e in terms)
    units = [truncate(s * power(fraction_bits + e - emax)) for s, e in terms]
    return sum(units) * power(emax - fraction_bits)


def ue4m3(code: int) -> Fraction | None:
    code &= 0x7F
    if code == 0x7F:
        return None
    field, mantissa = code >> 3, code & 7
    return (Fraction(mantissa, 8) + (1 if field else 0)) * power(max(field, 1) - 7)


def ue8m0(code: int) -> Fraction | None:
    return None if code == 255 else power(code - 127)


def f32_fraction(bits: int) -> Fraction | None:
    """Exact value of float32 bits; None for NaN (no infinities here)."""
    value = np.uint32(bits).view(np.float32)
    return None if np.isnan(value) else Fraction(float(value))


def model_fp4(a, b, sfa, sfb, c_bits, scale, least, sign=1) -> int:
    """Bits of one element: a, b are 64 or 96 codes; sfa, sfb one byte for each 16 or 32 of them."""
    scales_a, scales_b, c = [scale(int(s)) for s in sfa], [scale(int(s)) for s in sfb], f32_fraction(c_bits)
    if c is None or None in scales_a or None in scales_b:
        return NAN_BITS
    terms = [split(c, -126)]
    groups = len(a) // 16
    for g in range(groups):
        dot = sign * sum(E2M1[a[i]] * E2M1[b[i]] for i in range(16 * g, 16 * g + 16))
        sig_a, exp_a = split(scales_a[g * len(sfa) // groups], least)
        sig_b, exp_b = split(scales_b[g * len(sfb) // groups], least)
        terms.append((dot * sig_a * sig_b, exp_a + exp_b))
    return f32_bits_toward_zero(align_and_sum(terms, 35))


SCALES = {"ue4m3": (ue4m3, -6), "ue8m0": (ue8m0, -127)}


def unpack(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1).astype(int)


def check_against_model(a, b, sfa, sfb, c, scale_type, negate_a=False, negate_b=False):
    got = nm.mma_block_scaled(a, b, sfa, sfb, c, scale_type=scale_type, negate_a=negate_a, negate_b=negate_b)
    assert got.dtype == np.float32
    c_bits = np.zeros(got.shape, np.uint32) if c is None else c.view(np.uint32)
    codes_a, codes_b = unpack(a), unpack(b)
    scale, least = SCALES[scale_type]
    sign = -1 if negate_a != negate_b else 1
    for m in range(len(a)):
        for n in range(len(b)):
            want = model_fp4(codes_a[m], codes_b[n], sfa[m], sfb[n], int(c_bits[m, n]), scale, least, sign)
            assert int(got.view(np.uint32)[m, n]) == want, (m, n, hex(want), got[m, n])
    return got


# ---- 4-bit kinds -------------------------------------------------------------------------------------------------
def random_codes(rng, rows, density=1.0, k=64):
    packed = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    return np.where(rng.random(packed.shape) < density, packed, 0).astype(np.uint8)


def random_f32(rng, shape, lo, hi):
    bits = rng.integers(0, 1 << 23, shape) | (rng.integers(lo + 127, hi + 128, shape) << 23)
    return (bits | (rng.integers(0, 2, shape) << 31)).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scale_type,blocks", [("ue4m3", 4), ("ue8m0", 4), ("ue8m0", 2)])
def test_random_bytes_match_the_model(seed, scale_type, blocks):
    """Every scale byte including NaN, with accumulators from far below to far above the products."""
    rng = np.random.default_rng(seed)
    a, b = random_codes(rng, 6), random_codes(rng, 6, 0.5)
    sfa, sfb = rng.integers(0, 256, (2, 6, blocks), dtype=np.uint8)
    c = random_f32(rng, (6, 6), -126, 127) if seed % 2 else random_f32(rng, (6, 6), -20, 20)
    check_against_model(a, b, sfa, sfb, c, scale_type, negate_a=seed == 3, negate_b=seed in (3, 4))
    check_against_model(a, b, sfa, sfb, None, scale_type)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale_type,blocks", [("ue4m3", 6), ("ue8m0", 6), ("ue8m0", 3)])
def test_96_elements_match_the_model(seed, scale_type, blocks):
    """Scales of any size, which need the general path, and of similar size, for the short paths."""
    rng = np.random.default_rng(seed)
    a, b = random_codes(rng, 5, k=96), random_codes(rng, 7, 0.5, k=96)
    low, high = (0, 256) if seed % 2 else (0x38, 0x40) if scale_type == "ue4m3" else (126, 129)
    sfa, sfb = (rng.integers(low, high, (rows, blocks), dtype=np.uint8) for rows in (5, 7))
    check_against_model(a, b, sfa, sfb, random_f32(rng, (5, 7), -20, 20), scale_type)
    check_against_model(a, b, sfa, sfb, None, scale_type)


def test_every_pair_of_e4m3_scales():
    """All 256 x 256 pairs of scale bytes in one term, compared with the model."""
    a = np.zeros((256, 32), np.uint8)
    a[:, 0] = 0x07  # one element: 6
    sfa = np.full((256, 4), 0x38, np.uint8)
    sfa[:, 0] = np.arange(256)
    got = nm.mma_block_scaled(a, a, sfa, sfa, None).view(np.uint32)
    for i in range(256):
        for j in range(256):
            x, y = ue4m3(i), ue4m3(j)
            want = NAN_BITS if x is None or y is None else f32_bits_toward_zero(36 * x * y)
            assert int(got[i, j]) == want


def element(code_pairs, scale_a, scale_b, c, scale_type="ue4m3"):
    """One element, compared with the model. code_pairs: {k: (a code, b code)}."""
    a, b = np.zeros((2, 1, 64), np.uint8)
    for k, (x, y) in code_pairs.items():
        a[0, k], b[0, k] = x, y
    pack = lambda codes: codes[:, 0::2] | (codes[:, 1::2] << 4)
    args = pack(a), pack(b), np.array([scale_a], np.uint8), np.array([scale_b], np.uint8)
    return check_against_model(*args, np.array([[c]], np.float32), scale_type)[0, 0]


ONE, SIX = 2, 7


def test_zero_dot_product_carries_its_scale_exponent():
    """Block 1 is zero with scales 448*448 (exponent 16): C keeps only multiples of 2**(16-35)."""
    c = 1 + 2.0**-23
    assert element({0: (ONE, ONE)}, [0x38] * 4, [0x38] * 4, c) == np.float32(
        2
    )  # rounding of the sum toward zero
    small = 2.0**-8 + 2.0**-20
    assert element({}, [0x38, 0x7E, 0, 0], [0x38, 0x7E, 0, 0], small) == np.float32(2.0**-8)
    assert element({}, [0x38, 0x38, 0, 0], [0x38, 0x38, 0, 0], small) == np.float32(small)


def test_zero_scales_on_nonzero_data():
    """Every scale of one or both operands is zero: D = C, with +0 for -0, for any values of the other operand."""
    rng = np.random.default_rng(12)
    a, b = random_codes(rng, 6), random_codes(rng, 5)
    zero, other = np.zeros((6, 4), np.uint8), rng.integers(1, 127, (5, 4)).astype(np.uint8)
    c = random_f32(rng, (6, 5), -5, 5)
    for sfb in (other, zero[:5], zero[:5] | 0x80):
        check_against_model(a, b, zero, sfb, c, "ue4m3")
        check_against_model(a, b, zero, sfb, None, "ue4m3")


def test_corners():
    element({0: (SIX, SIX)}, [1, 0, 0, 0], [1, 0, 0, 0], 2.0**100)  # huge C, least subnormal scales
    element({0: (SIX, SIX), 16: (SIX, SIX)}, [1, 0x7E, 0, 0], [1, 0x7E, 0, 0], 0.0)  # terms 34 binades apart
    element({0: (ONE, ONE)}, [0x38] * 4, [0x38] * 4, -1.0)  # cancels to +0
    assert (
        np.signbit(element({0: (8, 15)}, [0x38] * 4, [0x38] * 4, -0.0)) == np.False_
    )  # -0 products, -0 accumulator
    element({0: (ONE, ONE)}, [0xB8] * 4, [0x38] * 4, 0.0)  # the scale's sign bit is ignored
    element({0: (15, 7)}, [0x38] * 4, [0x38] * 4, 1e-30)  # negative sum with a lost tail
    element(
        {0: (ONE, ONE)}, [0, 0, 0, 0], [0, 0, 0, 0], 1e-45, "ue8m0"
    )  # 2**-254 and a subnormal accumulator
    element({0: (SIX, SIX)}, [255, 0, 0, 0], [0, 0, 0, 0], 1.0, "ue8m0")
    assert np.isinf(element({0: (SIX, SIX)}, [254] * 4, [254] * 4, 1.0, "ue8m0"))  # overflows
    element({0: (SIX, SIX)}, [127 + 60] * 4, [127 + 61] * 4, 3e38, "ue8m0")
    assert (
        element({}, [220] * 4, [220] * 4, 2.0**-126, "ue8m0") == 0
    )  # below the quantum of a zero dot product
    element({i: (SIX, 15) for i in range(64)}, [0x7E] * 4, [0x7E] * 4, 1.0)


def test_infinite_and_nan_accumulators_stay_in_their_element():
    rng = np.random.default_rng(1)
    a, b = random_codes(rng, 8), random_codes(rng, 8)
    ones = np.full((8, 4), 0x38, np.uint8)
    c = np.zeros((8, 8), np.float32)
    plain = nm.mma_block_scaled(a, b, ones, ones, c)
    c[1, 2], c[3, 4], c[5, 6] = np.inf, -np.inf, np.nan
    got = nm.mma_block_scaled(a, b, ones, ones, c)
    assert got[1, 2] == np.inf and got[3, 4] == -np.inf and got.view(np.uint32)[5, 6] == NAN_BITS
    plain[1, 2], plain[3, 4], plain[5, 6] = got[1, 2], got[3, 4], got[5, 6]
    assert plain.tobytes() == got.tobytes()
    assert np.isinf(c[1, 2])  # the caller's accumulator is untouched


def exact_case(rng):
    """Scales 1, 2 or narrow e4m3 ranges with sparse values, which every path supports."""
    rows, columns = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    low = int(rng.integers(0x28, 0x40))
    draw = lambda n: rng.integers(low, low + 12, (n, 4)).astype(np.uint8)
    a, b = random_codes(rng, rows, rng.random()), random_codes(rng, columns, rng.random())
    c = rng.integers(-4096, 4096, (rows, columns)).astype(np.float32) / 4 if rng.random() < 0.8 else None
    return a, b, draw(rows), draw(columns), c


def operands(a, b, sfa, sfb, c):
    table = nm.SCALE_TABLES["ue4m3"]
    return (
        nm._Fp4Operand.make(a, sfa, table, False),
        nm._Fp4Operand.make(b, sfb, table, False),
        nm._Accumulator.make(c, (len(a), len(b))),
    )


def test_all_paths_give_the_same_bits():
    """Thousands of cases, of which enough take the fast paths."""
    rng = np.random.default_rng(2)
    taken32 = taken64 = 0
    for _ in range(2500):
        args = operands(*exact_case(rng))
        general = nm._sum_general(*args)
        fast32, fast64 = nm._sum_float32(*args, 35), nm._sum_float64(*args, 35)
        taken32 += fast32 is not None
        taken64 += fast64 is not None
        assert fast32 is None or fast32.tobytes() == general.tobytes()
        assert fast64 is None or fast64.tobytes() == general.tobytes()
    assert taken32 > 1500 and taken64 == 2500


def test_fast_paths_refuse_what_they_cannot_do():
    """Wide scales and odd accumulators: a fast path may refuse them or return the general path's bits."""
    rng = np.random.default_rng(3)
    refused32 = refused64 = taken64 = 0
    for trial in range(1500):
        a, b = random_codes(rng, 4, 0.3), random_codes(rng, 4, 0.3)
        low, high = sorted(rng.integers(0, 127, 2))
        sfa, sfb = rng.integers(low, high + 1, (2, 4, 4)).astype(np.uint8)
        lowest = trial % 60 - 20
        args = operands(a, b, sfa, sfb, random_f32(rng, (4, 4), lowest, lowest + trial % 3))
        general = nm._sum_general(*args)
        fast32, fast64 = nm._sum_float32(*args, 35), nm._sum_float64(*args, 35)
        refused32 += fast32 is None
        refused64 += fast64 is None
        taken64 += fast64 is not None
        assert fast32 is None or fast32.tobytes() == general.tobytes()
        assert fast64 is None or fast64.tobytes() == general.tobytes()
    assert refused32 > 1000 and refused64 > 300 and taken64 > 300


@pytest.mark.parametrize("columns", [8, 32, 40, 64, 136, 256])
@pytest.mark.parametrize("path", ["_sum_float32", "_sum_float64", "_sum_general"])
def test_full_tiles(columns, path):
    """Tiles of 128 x N, whose products are split into stripes; each path is compared with integer arithmetic."""
    rng = np.random.default_rng(columns)
    a, b = random_codes(rng, 128), random_codes(rng, columns)
    sfa, sfb = rng.choice(np.array([0x38, 0x40], np.uint8), (128, 4)), np.full((columns, 4), 0x38, np.uint8)
    c = rng.integers(-99, 99, (128, columns)).astype(np.float32)
    bits = () if path == "_sum_general" else (35,)
    got = getattr(nm, path)(*operands(a, b, sfa, sfb, c), *bits)
    values = nm.E2M1_VALUES[unpack(a)] * np.repeat((sfa >> 3) - 6.0, 16, 1)
    assert (got == values @ nm.E2M1_VALUES[unpack(b)].T.astype(float) + c).all()


def chain(rng, count, kind, rows=(24, 40)):
    """Operands of instructions that add to one accumulator, with narrow or wide scales or NaN scales."""
    low, high = {"narrow": (0x34, 0x3C), "wide": (0x01, 0x7E), "mixed": (0x30, 0x48)}[kind]
    products = []
    for number in range(count):
        data = [rng.integers(0, 256, (n, 32), dtype=np.uint8) for n in rows]
        scales = [rng.integers(low, high, (n, 4), dtype=np.uint8) for n in rows]
        if kind == "mixed" and number == count // 2:
            scales[0][5, 1] = scales[1][7, 3] = 0x7F
        if kind == "mixed" and number == count - 1:
            scales[0][3] = 0x7E  # far larger than all previous ones
        products.append((*data, *scales))
    return products


@pytest.mark.parametrize("kind", ["narrow", "wide", "mixed"])
@pytest.mark.parametrize("accumulator", ["none", "small", "special"])
@pytest.mark.parametrize("negate", [False, True])
def test_a_chain_gives_the_bits_of_its_instructions_one_by_one(kind, accumulator, negate):
    rng = np.random.default_rng(7)
    for count in (1, 2, 5, 16):
        products = chain(rng, count, kind)
        c = None
        if accumulator != "none":
            c = (rng.integers(-64, 64, (24, 40)) / 16).astype(np.float32)
        if accumulator == "special":
            c[0, 0], c[1, 1], c[2, 2], c[3, 3] = np.inf, -np.inf, np.nan, 1e-30
        before = None if c is None else c.copy()
        want = c
        for a, b, sfa, sfb in products:
            want = nm.mma_block_scaled(a, b, sfa, sfb, want, negate_b=negate)
        got = nm.accumulate_block_scaled(products, c, negate_b=negate)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
        assert before is None or np.array_equal(before, c, equal_nan=True)


@pytest.mark.parametrize("kind", ["narrow", "wide", "mixed"])
@pytest.mark.parametrize("rows", [(0, 40), (24, 0), (7, 40), (24, 33), (3, 5)])
def test_rows_of_zeros_at_the_end_are_left_out(kind, rows):
    """Rows of zeros at the end of A, B or both are skipped without a change of the result, also with NaN scales."""
    rng = np.random.default_rng(11)
    products = chain(rng, 4, kind)
    for a, b, _, _ in products:
        a[rows[0] :], b[rows[1] :] = 0x80, 0x08  # one negative zero
    c = (rng.integers(-64, 64, (24, 40)) / 16).astype(np.float32)
    c[20, 36] = -0.0
    got = nm.accumulate_block_scaled(products, c)
    turned = [
        [x[::-1].copy() for x in product] for product in products
    ]  # zeros first: all rows are multiplied
    want = nm.accumulate_block_scaled(turned, c[::-1, ::-1])[::-1, ::-1]
    np.testing.assert_array_equal(got.view(np.uint32), np.ascontiguousarray(want).view(np.uint32))
    assert (
        len(nm._Fp4Operand.make(*products[0][::2], nm.SCALE_TABLES["ue4m3"], False).scaled(np.float32))
        == rows[0]
    )


def test_chains_are_taken_as_long_as_they_are_exact(monkeypatch):
    """A chain is computed as a whole if the bound allows it, else in halves, and one by one where a product is truncated."""
    runs = []
    original = nm._multiply_add

    def noting(a, b, c, **options):
        found = original(a, b, c, **options)
        if found is not None:
            runs.append(a.depth // 64)
        return found

    monkeypatch.setattr(nm, "_multiply_add", noting)
    rng = np.random.default_rng(3)
    ones = [(a, b, sfa * 0 + 0x38, sfb * 0 + 0x38) for a, b, sfa, sfb in chain(rng, 16, "narrow")]
    nm.accumulate_block_scaled(ones, None)
    assert runs == [16]
    runs.clear()
    # Products are multiples of 2**-12, and a sum of 64 of them is at most 64 * 36 * 1.375**2: three sums stay below
    # 2**24 multiples.
    nm.accumulate_block_scaled(chain(rng, 16, "narrow"), None)
    assert runs == [3, 3, 3, 3, 3, 1]
    runs.clear()
    nm.accumulate_block_scaled(chain(rng, 6, "wide"), None)
    assert runs == [1] * 6


def test_nan_rows_do_not_leave_the_fast_path(monkeypatch):
    """Garbage scales in zero-filled padding rows, and the NaN rows that they produce in the accumulator."""
    monkeypatch.setattr(nm, "_sum_general", None)
    monkeypatch.setattr(nm, "_sum_float64", None)
    rng = np.random.default_rng(4)
    a, b = random_codes(rng, 128), random_codes(rng, 64)
    a[100:] = 0
    sfa, sfb = rng.choice(np.array([0x38, 0x40], np.uint8), (128, 4)), np.full((64, 4), 0x38, np.uint8)
    sfa[100:] = rng.integers(0, 256, (28, 4))
    sfa[100, 2] = 0xFF
    c = nm.mma_block_scaled(a, b, sfa, sfb, None)
    assert (c.view(np.uint32)[100] == NAN_BITS).all() and np.isfinite(c[:100]).all()
    sfa[100] = 0x38
    c = nm.mma_block_scaled(a, b, sfa, sfb, c)
    assert (c.view(np.uint32)[100] == NAN_BITS).all() and np.isfinite(c[:100]).all()


def test_competition_data_takes_the_float32_path(monkeypatch):
    """Values +-{0, .5, 1, 1.5}, scales 1 and 2, a full chain of K=7168."""
    monkeypatch.setattr(nm, "_sum_general", None)
    monkeypatch.setattr(nm, "_sum_float64", None)
    rng = np.random.default_rng(5)
    c, want = None, np.zeros((16, 16))
    for _ in range(7168 // 64):
        a, b = random_codes(rng, 16) & 0xBB, random_codes(rng, 16) & 0xBB
        sfa, sfb = rng.choice(np.array([0x38, 0x40], np.uint8), (2, 16, 4))
        c = nm.mma_block_scaled(a, b, sfa, sfb, c)
        values = [
            nm.E2M1_VALUES[unpack(x)] * np.repeat((s >> 3) - 6.0, 16, 1) for x, s in ((a, sfa), (b, sfb))
        ]
        want += values[0] @ values[1].T
    assert (c == want).all()


# ---- the other kinds ---------------------------------------------------------------------------------------------
FORMATS = {
    "f16": (5, 10, 15), "bf16": (8, 7, 127), "tf32": (8, 10, 127), "e4m3": (4, 3, 7), "e5m2": (5, 2, 15),
    "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1),
}  # fmt: skip


def element_fraction(code: int, fmt: str) -> tuple[Fraction, int]:
    """Significand (signed) and exponent of a finite code."""
    exponent_bits, mantissa_bits, bias = FORMATS[fmt]
    mantissa = code % (1 << mantissa_bits)
    field = (code >> mantissa_bits) % (1 << exponent_bits)
    sign = -1 if (code >> (mantissa_bits + exponent_bits)) & 1 else 1
    significand = sign * (Fraction(mantissa, 1 << mantissa_bits) + (1 if field else 0))
    return significand, (max(field, 1) - bias if significand else -126)


def model_fused(a, b, c: Fraction, formats, scale_exponent, d_type) -> Fraction:
    terms = [split(c, -126 if d_type == "f32" else -14)]
    for x, y in zip(a, b, strict=True):
        (sig_a, exp_a), (sig_b, exp_b) = (
            element_fraction(int(x), formats[0]),
            element_fraction(int(y), formats[1]),
        )
        terms.append((sig_a * sig_b, exp_a + exp_b + scale_exponent))
    return align_and_sum(terms, 25)


def finite_codes(rng, fmt, shape):
    exponent_bits, mantissa_bits, bias = FORMATS[fmt]
    top = (1 << exponent_bits) - (2 if fmt in ("f16", "bf16", "tf32", "e5m2", "e4m3") else 1)
    low = max(0, bias - 12) if rng.random() < 0.7 else 0
    field = rng.integers(low, min(top, bias + 12) + 1 if low else top + 1, shape)
    code = (rng.integers(0, 2, shape) << exponent_bits | field) << mantissa_bits
    code |= rng.integers(0, 1 << mantissa_bits, shape)
    return np.where(rng.random(shape) < 0.1, 0, code)


@pytest.mark.parametrize(
    "formats,k",
    [
        (("f16", "f16"), 16), (("bf16", "bf16"), 16), (("tf32", "tf32"), 8), (("e4m3", "e5m2"), 32),
        (("e5m2", "e2m1"), 32), (("e2m3", "e3m2"), 32), (("e4m3", "e4m3"), 32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scaled", [False, True])
def test_other_kinds_match_the_model(formats, k, scaled):
    rng = np.random.default_rng(k)
    for trial in range(6):
        codes = [finite_codes(rng, fmt, (4, k)) for fmt in formats]
        args = [(x << 13 | rng.integers(0, 1 << 13, x.shape)) if formats[0] == "tf32" else x for x in codes]
        sf = rng.integers(1, 250, (2, 4)) if scaled else None
        c = random_f32(rng, (4, 4), -40, 20) if trial else None
        scale = {} if sf is None else {"sfa": sf[0], "sfb": sf[1]}
        got = nm.mma_fused(*args, c, a_format=formats[0], b_format=formats[1], **scale)
        for m in range(4):
            for n in range(4):
                shift = 0 if sf is None else int(sf[0, m]) + int(sf[1, n]) - 254
                c_value = Fraction(0) if c is None else Fraction(float(c[m, n]))
                exact = model_fused(codes[0][m], codes[1][n], c_value, formats, shift, "f32")
                assert int(got.view(np.uint32)[m, n]) == f32_bits_toward_zero(exact), (trial, m, n)


def test_fast_paths_of_the_other_kinds(monkeypatch):
    """Small integers take the fast paths and get the bits of the general one. The result may be float16."""
    rng = np.random.default_rng(11)
    taken = {"_sum_float32": 0, "_sum_float64": 0}
    for trial in range(400):
        fmt = ("f16", "bf16", "e4m3")[trial % 3]
        values = [np.round(rng.normal(size=(5, 16)) * 2.0 ** rng.integers(0, 4)) for _ in range(2)]
        if fmt == "e4m3":
            codes = [rng.integers(0x30, 0x48, (5, 16)) for _ in range(2)]
        else:
            to_code = {
                "f16": lambda x: x.astype(np.float16).view(np.uint16),
                "bf16": lambda x: x.astype(np.float32).view(np.uint32) >> 16,
            }
            codes = [to_code[fmt](x) for x in values]
        a, b = (nm._Elements.make(x, fmt, None, False) for x in codes)
        c = nm._Accumulator.make(
            rng.integers(-9, 9, (5, 5)).astype(np.float32) * np.float32(2.0 ** rng.integers(-8, 24)), (5, 5)
        )
        general = nm._round_toward_zero(nm._sum_elements(a, b, c, -126, 0), may_be_tiny=True)
        for name in taken:
            fast = getattr(nm, name)(a, b, c, 25)
            taken[name] += fast is not None
            assert fast is None or fast.tobytes() == general.tobytes()
    assert min(taken.values()) > 100 and taken["_sum_float32"] < 400
    monkeypatch.setattr(nm, "_sum_elements", None)
    half = nm.mma_fused(codes[0], codes[1], None, a_format=fmt, b_format=fmt, d_type="f16")
    single = nm.mma_fused(codes[0], codes[1], None, a_format=fmt, b_format=fmt)
    assert (half == single.astype(np.float16)).all()


def test_subnormal_half_accumulator_holds_the_exponent_up():
    """A subnormal f16 C counts with exponent -14, so products below 2**(-14-25) are cut off."""
    a, b = np.zeros((1, 16), int), np.zeros((1, 16), int)
    a[0, 0], b[0, 0] = 0x0001, 0x0400  # 2**-24 * 2**-14
    a[0, 1], b[0, 1] = 0x0001, 0x0002  # 2**-47
    c = np.array([[2.0**-24]], np.float16)
    got = nm.mma_fused(a, b, c, a_format="f16", b_format="f16", d_type="f16")
    exact = model_fused(a[0], b[0], Fraction(1, 1 << 24), ("f16", "f16"), 0, "f16")
    assert exact == Fraction(1, 1 << 24) + Fraction(1, 1 << 38) and float(got[0, 0]) == 2.0**-24
    operands_ = (nm._Elements.make(x, "f16", None, False) for x in (a, b))
    assert nm._sum_float32(*operands_, nm._Accumulator.make(np.float32(c), (1, 1)), 25, -14) is None


def test_half_precision_results_round_to_nearest_even():
    rng = np.random.default_rng(0)
    codes = [finite_codes(rng, "f16", (16, 16)) for _ in range(2)]
    c = rng.normal(size=(16, 16)).astype(np.float16)
    got = nm.mma_fused(*codes, c, a_format="f16", b_format="f16", d_type="f16")
    assert got.dtype == np.float16
    for m in range(16):
        for n in range(16):
            exact = model_fused(codes[0][m], codes[1][n], Fraction(float(c[m, n])), ("f16", "f16"), 0, "f16")
            _, e = split(exact, -14)
            units = exact / power(e - 10)
            want = np.float16(float(round(units)) * 2.0 ** (e - 10)) if abs(exact) < 65536 else np.inf
            assert abs(got[m, n]) == want if np.isinf(want) else got[m, n] == want


def test_special_elements_of_the_other_kinds():
    a = np.full((4, 16), 0x3C00)  # 1.0
    b = a.copy()
    a[0, 3], a[1, 3], a[2, 3], b[2, 3] = 0x7C00, 0xFC00, 0x7C00, 0  # inf, -inf, inf * 0
    got = nm.mma_fused(a, b, None, a_format="f16", b_format="f16")
    assert (got[0, :2] == np.inf).all() and (got[1, :2] == -np.inf).all() and (got[3, :2] == 16).all()
    assert got.view(np.uint32)[2, 2] == NAN_BITS
    half = nm.mma_fused(a, b, None, a_format="f16", b_format="f16", d_type="f16")
    assert half.view(np.uint16)[2, 2] == 0x7FFF
    sf = np.array([127, 255, 127, 127])
    ones = np.full((4, 32), 0x38)
    got = nm.mma_fused(ones, ones, None, a_format="e4m3", b_format="e4m3", sfa=sf, sfb=np.full(4, 128))
    assert (got.view(np.uint32)[1] == NAN_BITS).all() and (got[[0, 2, 3]] == 64).all()


def test_negation_and_scaled_accumulator():
    ones = np.full((2, 16), 0x3F80)
    c = np.full((2, 2), 8, np.float32)
    run = lambda **kw: nm.mma_fused(ones, ones, c, a_format="bf16", b_format="bf16", **kw)
    assert (
        (run() == 24).all()
        and (run(negate_a=True) == -8).all()
        and (run(negate_a=True, negate_b=True) == 24).all()
    )
    assert (run(scale_c=2) == 18).all()
