"""Extended-precision arithmetic: instruction chains compared with Python's integers."""

import numpy as np
import pytest

EDGES32 = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]


def pairs(bits: int) -> tuple[list[int], list[int]]:
    """Operands of 2 * bits: edge cases of each half in all combinations, and random ones."""
    top = 1 << bits
    halves = [0, 1, top // 2 - 1, top // 2, top - 2, top - 1]
    edges = [high << bits | low for high in halves for low in halves]
    rng = np.random.default_rng(1)
    random = [int.from_bytes(rng.bytes(bits // 4), "little") for _ in range(len(edges) ** 2 // 9)]
    left = [x for x in edges for _ in edges][::9] + random
    right = [y for _ in edges for y in edges][::9] + random[::-1]
    return left, right


def words(values: list[int], bits: int, part: int) -> np.ndarray:
    return np.array([v >> bits * part & (1 << bits) - 1 for v in values], f"u{bits // 8}")


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("operation", ["add", "sub"])
def test_double_words(operation: str, bits: int, elementwise) -> None:
    left, right = pairs(bits)
    inputs = {f"{n}{i}": words(v, bits, i) for n, v in (("a", left), ("b", right)) for i in (0, 1)}
    body = f"""{operation}.cc.u{bits} %d0, %a0, %b0;
    {operation}c.cc.u{bits} %d1, %a1, %b1;
    {operation}c.u{bits} %d2, 0, 0;"""
    whole = [x + y if operation == "add" else x - y for x, y in zip(left, right, strict=True)]
    expected = {f"d{i}": words([w & (1 << 3 * bits) - 1 for w in whole], bits, i) for i in range(3)}
    elementwise(body, inputs, {name: f"u{bits // 8}" for name in expected}, expected)


@pytest.mark.parametrize("bits", [32, 64])
def test_product_of_double_words(bits: int, elementwise) -> None:
    """The example of the ISA's `madc`: {a1,a0} * {b1,b0} in four words."""
    left, right = pairs(bits)
    inputs = {f"{n}{i}": words(v, bits, i) for n, v in (("a", left), ("b", right)) for i in (0, 1)}
    t = f"u{bits}"
    body = f"""mul.lo.{t} %d0, %a0, %b0;
    mul.hi.{t} %d1, %a0, %b0;
    mad.lo.cc.{t} %d1, %a0, %b1, %d1;
    madc.hi.{t} %d2, %a0, %b1, 0;
    mad.lo.cc.{t} %d1, %a1, %b0, %d1;
    madc.hi.cc.{t} %d2, %a1, %b0, %d2;
    addc.{t} %d3, 0, 0;
    mad.lo.cc.{t} %d2, %a1, %b1, %d2;
    madc.hi.{t} %d3, %a1, %b1, %d3;"""
    whole = [x * y for x, y in zip(left, right, strict=True)]
    expected = {f"d{i}": words(whole, bits, i) for i in range(4)}
    elementwise(body, inputs, {name: f"u{bits // 8}" for name in expected}, expected)


def test_high_part_of_signed_products(elementwise) -> None:
    left = [x for x in EDGES32 for _ in EDGES32]
    right = [y for _ in EDGES32 for y in EDGES32]
    signed = lambda v: v - (1 << 32) if v >> 31 else v
    sums = [(signed(x) * signed(y) >> 32 & 0xFFFFFFFF) + 0xFFFFFFF0 for x, y in zip(left, right, strict=True)]
    inputs = {"a": np.array(left, np.uint32), "b": np.array(right, np.uint32)}
    body = "mad.hi.cc.s32 %d, %a, %b, 0xFFFFFFF0; addc.u32 %c, 0, 0;"
    expected = {
        "d": np.array([s & 0xFFFFFFFF for s in sums], np.uint32),
        "c": np.array([s >> 32 for s in sums], np.uint32),
    }
    elementwise(body, inputs, {"d": np.uint32, "c": np.uint32}, expected)
