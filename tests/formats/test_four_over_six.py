"""4over6 against fouroversix's values, exact sums, and what its parts say."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from nvfp4_cute.formats.block_format import FOUR_OVER_SIX, MXFP4, NVFP4
from nvfp4_cute.formats.block_scaled import NVFP4Tensor, dequantize, quantize
from nvfp4_cute.formats.four_over_six import fma

# Made by the script that "source" names, of the values below; nothing of that package runs here.
FROZEN = json.loads((Path(__file__).parents[1] / "data" / "four_over_six.json").read_text())


def values(kind, dtype, rows=16, k=64):
    """Values that no generator of random numbers makes, so that frozen results stay theirs."""
    i = torch.arange(rows * k, dtype=torch.int64)
    u = ((i * i * 2654435761 + i * 40503 + 12345) % 65521).double() / 65521 - 0.5
    made = {
        "uniform": u * 3.7,
        "heavy": torch.sign(u) * -torch.log(1 - 2 * u.abs() + 1e-9),
        "sparse": torch.where((i * 7919 % 13) < 2, u * 8, torch.zeros(()).double()).abs(),
    }
    return made[kind].float().reshape(rows, k).to(dtype)


@pytest.mark.parametrize("case", FROZEN["cases"], ids=lambda case: f"{case['values']}-{case['dtype']}")
def test_bits_are_those_of_fouroversix(case):
    x = values(case["values"], getattr(torch, case["dtype"]))
    inverse = torch.tensor(1536.0) / torch.tensor(case["amax"])
    got = quantize(x, method="four_over_six", global_scale_inv=inverse, scale_layout="rowmajor")
    assert bytes(got.scale.view(torch.uint8).flatten().tolist()).hex() == case["scale"]
    assert bytes(got.data.flatten().tolist()).hex() == case["data"]


def test_the_better_of_two_scales_is_kept():
    """Block by block, never a larger error than that of amax; and both candidates are chosen."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    errors = []
    for method in ("amax", "four_over_six"):
        t = quantize(x, global_scale=x.abs().max() / 1536, method=method, scale_layout="rowmajor")
        errors.append((dequantize(t) - x).square().unflatten(-1, (-1, 16)).sum(-1))
    assert (errors[1] <= errors[0] * (1 + 1e-6)).all()
    share = (errors[1] < errors[0] * (1 - 1e-6)).float().mean()
    assert 0.3 < share < 0.6
    assert errors[1].sum() < 0.9 * errors[0].sum()


def test_a_block_between_four_and_six_is_exact_at_four():
    """5/6 of the largest value is lost at 6, and exact at 4, whose grid has 4 * 3/4 = 3."""
    x = torch.tensor([[4.0, 3.0, 2.0, 1.0] * 4])
    assert torch.equal(dequantize(quantize(x, method="four_over_six")), x)
    assert not torch.equal(dequantize(quantize(x)), x)


def test_equal_errors_keep_six():
    x = torch.zeros(1, 16)
    x[0, 0] = 6.0
    assert quantize(x, method="four_over_six").scale.float().flatten()[0] == 1.0


def test_special_values_are_those_of_amax():
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    x[0, 3], x[1, 2], x[1, 5], x[2] = float("nan"), float("inf"), -float("inf"), 0.0
    plain, ours = (quantize(x, method=m, scale_layout="rowmajor") for m in ("amax", "four_over_six"))
    assert torch.equal(ours.scale.view(torch.uint8)[:3], plain.scale.view(torch.uint8)[:3])
    assert torch.equal(ours.data[:3], plain.data[:3])


def test_auto_leaves_room_for_scales_of_four():
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    assert quantize(x, method="four_over_six", global_scale="auto").global_scale == x.abs().max() / 1536
    each = quantize(x, method="four_over_six", global_scale="per_batch")
    assert torch.equal(each.global_scale, x.abs().amax((1, 2)) / 1536)
    assert torch.equal(each[1].data, quantize(x[1], method="four_over_six", global_scale="auto").data)


def test_what_it_makes_is_nvfp4():
    made = quantize(torch.ones(2, 16), format="nvfp4_four_over_six")
    assert type(made) is NVFP4Tensor and made.format == NVFP4
    assert FOUR_OVER_SIX != NVFP4 and FOUR_OVER_SIX.stored == NVFP4


def test_misuse():
    with pytest.raises(ValueError, match='method="four_over_six" chooses scales of NVFP4, not of MXFP4'):
        quantize(torch.ones(2, 32), format=MXFP4, method="four_over_six")
    with pytest.raises(ValueError, match="is neither"):
        quantize(torch.ones(2, 32), method="best")


def test_fma_rounds_once():
    """Against exact fractions, for products whose sum with c lies next to a tie of float32."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2000, generator=generator) for _ in range(2))
    c = -(a.double() * b.double()).float() * (
        1 + torch.randint(-3, 4, (2000,), generator=generator) * 2.0**-23
    )
    # 2^-64 below a tie, which float64 does not see.
    a[0], b[0], c[0] = 2.0**-24 * (1 + 2.0**-20), 1 - 2.0**-20, 1 + 2.0**-23
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), fma(a, b, c).tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = [
            Fraction(v)
            for v in torch.tensor(got).nextafter(torch.tensor([-float("inf"), float("inf")])).tolist()
        ]
        assert all(abs(Fraction(got) - exact) <= abs(other - exact) for other in near)
