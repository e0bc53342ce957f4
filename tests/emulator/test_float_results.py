"""Float results that PTX leaves open, as an H200 computes them (NaN, flushing, saturation), and directed float64 rounding."""

import numpy as np
import pytest

from nvfp4_cute.emulator.nans import nan_f64


def words32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def f64(*values: float) -> np.ndarray:
    return np.array(values, np.float64).view(np.uint64)


QUIET, SIGNALLING, INF, LEAST, TINY = 0x7FC00001, 0x7F800001, 0x7F800000, 0x00000001, 0x00800000


@pytest.mark.parametrize(
    "body, a, b, want",
    [
        ("add.f32 %d, %a, %b;", (QUIET, SIGNALLING), (0, 0), (0x7FFFFFFF,) * 2),
        # a number also wins over a signalling NaN
        ("min.f32 %d, %a, %b;", (SIGNALLING, 0x3F800000), (0x3F800000, SIGNALLING), (0x3F800000,) * 2),
        ("max.f32 %d, %a, %b;", (SIGNALLING, QUIET), (0xFF800000, QUIET), (0xFF800000, 0x7FFFFFFF)),
        # -0 and NaN saturate to +0
        ("add.sat.f32 %d, %a, %b;", (0x80000000, QUIET, 0x40000000), (0x80000000, 0, 0), (0, 0, 0x3F800000)),
        # just below the smallest normal number: rounds up to it, but is still flushed
        ("mul.ftz.f32 %d, %a, %b;", (TINY, TINY), (0x3F7FFFFF, 0x3F800000), (0, TINY)),
        # the reciprocal of a divisor above 2**126 is 0
        ("div.approx.f32 %d, %a, %b;", (0x7F000000, 0xFF000000, INF), (0x7F000001, 0x7F000001, 0x7F000001), (0, 0x80000000, 0x7FFFFFFF)),
        ("div.full.f32 %d, %a, %b;", (0x7F000000,), (0x7F000000,), (0x3F800000,)),
        # the selector is flushed before its sign is tested
        ("slct.ftz.b32.f32 %d, 7, 9, %a;", (0x80000001, 0x80800000), (0, 0), (7, 9)),
        # rounding away works on the bits, so NaN and infinity also change
        ("cvt.rna.tf32.f32 %d, %a;", (0x3F801000, 0x7FFFFFFF, INF), (0, 0, 0), (0x3F802000, 0x80000000, INF)),
        ("cvt.rna.satfinite.tf32.f32 %d, %a;", (INF, 0xFF7FFFFF), (0, 0), (0x7F7FE000, 0xFF7FE000)),
    ],
)  # fmt: skip
def test_binary32(elementwise, body, a, b, want):
    elementwise(body, {"a": words32(*a), "b": words32(*b)}, {"d": np.uint32}, {"d": words32(*want)})


def test_flushing_half_precision(elementwise):
    """.ftz flushes operands and results of f16. It tests results before their exponent is limited."""
    a, b = np.array([0x03FF, 0x0400, 0x0400], np.uint16), np.array([0x3C00, 0x3800, 0x3C00], np.uint16)
    want = {"d": np.array([0, 0, 0x0400], np.uint16), "e": np.array([0x03FF, 0x0200, 0x0400], np.uint16)}
    body = "mul.ftz.f16 %d, %a, %b; mul.f16 %e, %a, %b;"
    elementwise(body, {"a": a, "b": b}, dict.fromkeys("de", np.uint16), want)


def test_normal_numbers_include_zero(elementwise):
    a = words32(0, 0x80000000, LEAST, TINY, INF, QUIET)
    body = "testp.normal.f32 %d, %a; testp.subnormal.f32 %e, %a;"
    want = {"d": np.array([1, 1, 0, 1, 0, 0], bool), "e": np.array([0, 0, 1, 0, 0, 0], bool)}
    elementwise(body, {"a": a}, dict.fromkeys("de", bool), want)


def test_high_half_of_16_bit_products(elementwise):
    a, b = np.array([0x8000, 0xFFFF, 0x7FFF], np.uint16), np.array([0x8000, 0xFFFF, 0x7FFF], np.uint16)
    want = {"d": np.array([0x4000, 0xFFFE, 0x3FFF], np.uint16), "e": np.array([0x4000, 0, 0x3FFF], np.uint16)}
    body = "mul.hi.u16 %d, %a, %b; mul.hi.s16 %e, %a, %b;"
    elementwise(body, {"a": a, "b": b}, dict.fromkeys("de", np.uint16), want)


# ---- binary64 ----------------------------------------------------------------------------------------------------
NAN64, OTHER64 = 0x7FF0000000001234, 0xFFF8000000000077


def test_nan_of_binary64_is_handed_on(elementwise):
    """The result is the last NaN operand, made quiet. abs and neg keep its sign; narrowing keeps sign and top bits."""
    a, b = np.array([NAN64, NAN64, OTHER64], np.uint64), np.array([NAN64 | 1 << 63, 0, 0], np.uint64)
    quiet = np.uint64(1 << 51)
    want = {
        "d": np.array([NAN64 | 1 << 63, NAN64, OTHER64], np.uint64) | quiet,
        "e": a | quiet,
        "f": np.array([0x7FC00000, 0x7FC00000, 0xFFC00000], np.uint32),
    }
    body = "add.f64 %d, %a, %b; neg.f64 %e, %a; cvt.rn.f32.f64 %f, %a;"
    elementwise(body, {"a": a, "b": b}, {"d": np.uint64, "e": np.uint64, "f": np.uint32}, want)


MADE64 = 0xFFF8000000000000


def test_nan_that_an_operation_of_binary64_makes(elementwise):
    """The NaN's bits are the GPU's, whatever sign the host's processor gives it."""
    a, b = f64(np.inf, 0.0, -1.0), f64(-np.inf, np.inf, 0.0)
    want = {
        "d": np.array([MADE64, 0x7FF0000000000000, 0xBFF0000000000000], np.uint64),
        "e": np.array([0xFFF0000000000000, MADE64, 1 << 63], np.uint64),
        "f": np.array([0x7FF0000000000000, 0, MADE64], np.uint64),
    }
    body = "add.f64 %d, %a, %b; mul.f64 %e, %a, %b; sqrt.rn.f64 %f, %a;"
    elementwise(body, {"a": a, "b": b}, dict.fromkeys("def", np.uint64), want)


def test_nan_of_binary64_depends_on_no_host():
    """The plain results hold a NaN with the other sign, as 64-bit Arm processors produce."""
    positive = np.array([0x7FF8000000000000] * 3, np.uint64).view(np.float64)
    a = np.array([np.inf, np.nan, 1.0])
    b = np.array([NAN64, NAN64, OTHER64], np.uint64).view(np.float64)
    b[0] = -np.inf
    found = nan_f64(positive, [a, b]).view(np.uint64).tolist()
    assert found == [MADE64, NAN64 | 1 << 51, OTHER64]


LARGEST = float(np.finfo(np.float64).max)


@pytest.mark.parametrize(
    "mode, largest, smallest",
    [("rn", np.inf, -np.inf), ("rz", LARGEST, -LARGEST), ("rm", LARGEST, -np.inf), ("rp", np.inf, -LARGEST)],
)
def test_overflow_follows_the_rounding_mode(elementwise, mode, largest, smallest):
    a, b = f64(LARGEST, -LARGEST), f64(2.0, 2.0)
    want = f64(largest, smallest)
    elementwise(f"mul.{mode}.f64 %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint64}, {"d": want})


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_roots(elementwise, mode):
    a = f64(2.0, 4.0, 3.0, 0.0)
    nearest = np.sqrt(a.view(np.float64))
    below = [float(r) ** 2 > x for r, x in zip(nearest, a.view(np.float64), strict=True)]
    assert below == [True, False, False, False], "sqrt(2) is rounded up, sqrt(3) down"
    want = nearest.copy()
    if mode == "rp":
        want[2] = np.nextafter(nearest[2], np.inf)
    else:
        want[0] = np.nextafter(nearest[0], 0)
    elementwise(f"sqrt.{mode}.f64 %d, %a;", {"a": a}, {"d": np.uint64}, {"d": want.view(np.uint64)})


def test_exact_zero_sums_rounded_down_are_negative(elementwise):
    a, b, c = f64(2.0, 2.0, -2.0), f64(3.0, 3.0, 0.0), f64(-6.0, -6.5, 0.0)
    want = f64(-0.0, -0.5, -0.0)
    elementwise("fma.rm.f64 %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": np.uint64}, {"d": want})
