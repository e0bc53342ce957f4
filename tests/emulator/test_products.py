"""The short exact path of warp-sized tiles returns the bits of the general rule wherever it is used."""

import matrix_model as model
import numpy as np
import pytest

from nvfp4_cute.emulator import numerics
from nvfp4_cute.emulator.isa import products

FORMATS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
ACCUMULATOR = {"f32": np.float32, "f16": np.float16}


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32 if x.dtype == np.float32 else np.uint16)


def draw_range(rng: np.random.Generator, fmt: str, shape: tuple[int, ...], width: int) -> np.ndarray:
    """Codes whose exponents lie within `width` of a random one (subnormals included), some of them zero."""
    exponent_bits, mantissa_bits, _, _ = model.FORMATS[fmt]
    top = (1 << exponent_bits) - 1 - (fmt not in ("e2m3", "e3m2", "e2m1"))
    low = int(rng.integers(0, top + 1))
    field = rng.integers(low, min(low + width, top) + 1, shape)
    mantissa = rng.integers(0, 1 << mantissa_bits, shape) & -(1 << int(rng.integers(0, mantissa_bits + 1)))
    codes = rng.integers(0, 2, shape) << exponent_bits | field
    codes = np.where(rng.random(shape) < 0.2, 0, codes << mantissa_bits | mantissa)
    return (codes << (13 if fmt == "tf32" else 0)).astype(np.uint32)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("d", ["f32", "f16"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_same_as_the_general_rule(fmt, d, monkeypatch):
    rng = np.random.default_rng(FORMATS.index(fmt))
    general = numerics.mma_fused
    fallbacks = []
    monkeypatch.setattr(numerics, "mma_fused", lambda *a, **k: fallbacks.append(1) or general(*a, **k))
    with np.errstate(all="ignore"):
        for _ in range(200):
            a, b = (draw_range(rng, fmt, (rows, 16), int(rng.integers(0, 12))) for rows in (16, 8))
            c = draw_range(rng, d, (16, 8), int(rng.integers(0, 8)))
            c = c.astype(np.uint32 if d == "f32" else np.uint16).view(ACCUMULATOR[d])
            if d == "f32" and rng.random() < 0.5:  # near the size of the products, or far below
                scale = float(np.abs(numerics.decode_elements(a, fmt)[0]).max()) * 2.0 ** int(
                    rng.integers(-30, 30)
                )
                c = (rng.integers(-8, 9, c.shape) * scale).astype(np.float32)
            got = products.multiply(a, b, c, (fmt, fmt), d_type=d)
            want = general(a, b, c, a_format=fmt, b_format=fmt, d_type=d)
            np.testing.assert_array_equal(bits(got), bits(want))
    assert 0 < len(fallbacks) < 200, "both paths must have been taken"


@pytest.mark.parametrize("scale_type", ["ue4m3", "ue8m0"])
def test_fp4_same_as_the_general_rule(scale_type, monkeypatch):
    rng = np.random.default_rng(1)
    general = numerics.mma_block_scaled
    fallbacks = []
    monkeypatch.setattr(numerics, "mma_block_scaled", lambda *a, **k: fallbacks.append(1) or general(*a, **k))
    for _ in range(200):
        a, b = rng.integers(0, 256, (16, 32), np.uint8), rng.integers(0, 256, (8, 32), np.uint8)
        low, width = int(rng.integers(0, 256)), int(rng.integers(1, 40))
        sfa, sfb = (rng.integers(low, min(low + width, 256), (n, 4)).astype(np.uint8) for n in (16, 8))
        c = (rng.integers(-8, 9, (16, 8)) * 2.0 ** int(rng.integers(-40, 40))).astype(np.float32)
        with np.errstate(all="ignore"):
            got = products.multiply_fp4(a, b, c, sfa, sfb, scale_type)
        np.testing.assert_array_equal(bits(got), bits(general(a, b, sfa, sfb, c, scale_type=scale_type)))
    assert 0 < len(fallbacks) < 200, "both paths must have been taken"


def test_small_integers_take_the_short_path(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the general path was taken")

    monkeypatch.setattr(numerics, "mma_fused", refuse)
    monkeypatch.setattr(products, "_truncated", refuse)
    rng = np.random.default_rng(2)
    for fmt, rule in (("f16", products.STANDARD), ("tf32", products.STANDARD), ("e4m3", products.HOPPER_FP8)):
        a, b = (model.draw_codes(rng, fmt, (rows, 32), "integers") for rows in (16, 24))
        c = rng.integers(-64, 65, (16, 24)).astype(np.float32)
        values = [numerics.decode_elements(x, fmt)[0] for x in (a, b)]
        got = products.multiply(a, b, c, (fmt, fmt), d_type="f32", rule=rule)
        np.testing.assert_array_equal(got, values[0] @ values[1].T + c)
