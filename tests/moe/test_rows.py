"""gather and finalize: the bits of formats.quantize, of copies, and of float32 sums in order."""

import math

import pytest
import torch
from oracle import assert_bitwise_equal, bits

from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.experts.combine import finalize
from nvfp4_cute.experts.gather import gather
from nvfp4_cute.experts.permutation import permute
from nvfp4_cute.formats.block_format import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4

ARCHS = ["sm_80", "sm_90a", "sm_100a", pytest.param("sm_120a", marks=pytest.mark.slow)]
DTYPES = (torch.bfloat16, torch.float16)


def spread(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(*shape[:-1], shape[-1] // 16, 16, generator=generator)
    exponents = torch.randint(-12, 10, (*blocks.shape[:-1], 1), generator=generator)
    return (blocks * torch.exp2(exponents)).flatten(-2).to(dtype)


def some_ids(tokens, top_k, experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, experts + 1, (tokens, top_k), generator=generator, dtype=torch.int32)


def real_scales(scale, order, k_blocks):
    """Returns the bytes of the existing rows, including padding columns."""
    data = scale.view(torch.uint8)
    atoms, atoms_k = data.shape[:2]
    rowmajor = data.permute(0, 3, 2, 1, 4).reshape(atoms * 128, atoms_k * 4)
    return rowmajor[order.places[order.places >= 0].long()]


def check(x, ids, experts, arch="sm_90a", mode="eager", **options):
    options = {"format": NVFP4} | options
    with observe(check=True, mode=mode) as observer:
        (data, scale, _), order = gather(x, ids, experts, backend=f"emulator:{arch}", **options)
    (want_data, want_scale, _), want_order = gather(x, ids, experts, backend="reference", **options)
    few = ids.numel() <= 64
    assert len(observer.stats) == (bool(ids.numel()) if few else 2)
    format = options["format"]
    rows = int(want_order.offs[-1])
    for name in ("offs", "rows", "places"):
        assert torch.equal(getattr(order, name), getattr(want_order, name)), name
    assert torch.equal(order.slots[:rows], want_order.slots[:rows])
    assert scale.shape == want_scale.shape
    assert_bitwise_equal(data[:rows].view(torch.uint8), want_data[:rows].view(torch.uint8))
    k_blocks = format.num_k_blocks(x.shape[1])
    assert_bitwise_equal(real_scales(scale, order, k_blocks), real_scales(want_scale, want_order, k_blocks))
    check_copies(x, ids, experts, f"emulator:{arch}", mode, order, options.get("first_expert", 0))
    return order


def check_copies(x, ids, experts, backend, mode, order, first_expert):
    """Checks that rows are copied without quantization."""
    with observe(check=True, mode=mode) as observer:
        rows, same = gather(x, ids, experts, first_expert=first_expert, backend=backend)
    assert len(observer.stats) == (bool(ids.numel()) if ids.numel() <= 64 else 2)
    end = int(order.offs[-1])
    assert torch.equal(same.offs, order.offs) and torch.equal(same.slots[:end], order.slots[:end])
    assert_bitwise_equal(rows.data[:end], x[order.slots[:end].long() // ids.shape[1]])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP4, MXFP8_E5M2], ids=str)
@pytest.mark.parametrize("tokens, top_k, experts, k", [(3, 4, 9, 96), (70, 2, 3, 544)])
def test_gather_in_mx_formats(tokens, top_k, experts, k, format, arch):
    x, ids = spread((tokens, k), DTYPES[tokens % 2], tokens), some_ids(tokens, top_k, experts, k)
    x[0, :40] = math.nan
    check(x, ids, experts, arch, format=format)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens, top_k, experts, k", [(3, 4, 9, 96), (8, 8, 70, 544), (70, 2, 3, 64), (0, 3, 4, 32)]
)
def test_gather(tokens, top_k, experts, k, dtype, arch):
    x, ids = spread((tokens, k), dtype, tokens), some_ids(tokens, top_k, experts, k)
    for factors in (None, torch.tensor(0.02), torch.rand(experts) + 0.01):
        check(x, ids, experts, arch, global_scale=factors)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("mode", ["lazy", "random:3"])
def test_gather_modes(mode, few):
    tokens = 16 if few else 40
    check(spread((tokens, 160), torch.bfloat16), some_ids(tokens, 4, 12), 12, mode=mode)


def test_few_choices_have_the_order_of_permute():
    """Every warp finds the order of ``permute`` by itself: duplicates, skewed and foreign ids, all sizes."""
    for seed, (tokens, top_k, experts) in enumerate(
        [(1, 1, 1), (1, 8, 512), (9, 7, 2), (64, 1, 40), (32, 2, 1), (5, 3, 1000)]
    ):
        ids = some_ids(tokens, top_k, experts, seed)
        for first in (0, 1):
            order = check(spread((tokens, 32), torch.float16), ids, experts, first_expert=first)
            want = permute(ids, experts, first_expert=first, backend="emulator:sm_90a")
            assert torch.equal(order.offs, want.offs) and torch.equal(order.places, want.places)


def test_special_numbers_reach_their_rows():
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, 448.0, -6.0] * 12).to(torch.bfloat16)
    check(x.view(3, 32), torch.tensor([[0, 1], [1, 1], [2, 0]]), 3)


# ---- back to tokens --------------------------------------------------------------------------------------------


def check_sum(h, rows, weights, arch="sm_90a", mode="eager", **options):
    with observe(check=True, mode=mode) as observer:
        got = finalize(h, rows, weights, backend=f"emulator:{arch}", **options)
    assert_bitwise_equal(got, finalize(h, rows, weights, backend="reference", **options))
    assert len(observer.stats) == 1
    return got


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, top_k, n", [(1, 1, 8), (5, 8, 264), (3, 11, 600), (2, 16, 48), (4, 3, 264)])
def test_finalize(tokens, top_k, n, dtype, arch):
    ids = some_ids(tokens, top_k, 7, n)
    order = permute(ids, 7)
    h = torch.randn(tokens * top_k, n, generator=torch.Generator().manual_seed(n)).to(dtype)
    h[int(order.offs[-1]) :] = math.nan
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(1))
    weights[ids < 0] = math.nan
    shared, bias = h.new_ones(tokens, n) / 3, torch.randn(7, n).to(dtype)
    assert check_sum(h, order.rows, weights, arch).isfinite().all()
    check_sum(h, order.rows, weights, arch, shared=shared)
    check_sum(h, order.rows, weights, arch, shared=shared, bias=bias, ids=ids)
    check_sum(h, order.rows, weights, arch, bias=bias, ids=ids.long() + 5, first_expert=5)


def test_finalize_takes_no_time_for_choices_that_tokens_do_not_have():
    """A step adds the rows of all choices of a token: of 1, 2, 4 or 8."""
    issued = {}
    for top_k in (1, 2, 4, 8):
        h, rows = torch.ones(2 * top_k, 256).bfloat16(), torch.arange(2 * top_k, dtype=torch.int32)
        with observe() as observer:
            finalize(h, rows.view(2, top_k), torch.ones(2, top_k), backend="emulator")
        issued[top_k] = observer.stats[0].instructions
    assert issued[1] < issued[2] < issued[4] < issued[8] and issued[2] < issued[8] / 2


@pytest.mark.parametrize("mode", ["lazy", "random:3"])
def test_finalize_modes(mode):
    order = permute(some_ids(20, 4, 7), 7)
    h = torch.randn(80, 72).bfloat16()
    check_sum(h, order.rows, torch.rand(20, 4), mode=mode)


def test_finalize_adds_in_place_what_tokens_share():
    order, h = permute(some_ids(6, 2, 3), 3), torch.randn(12, 16).half()
    weights, shared = torch.rand(6, 2), torch.randn(6, 16).half()
    want = finalize(h, order.rows, weights, shared=shared)
    got = finalize(h, order.rows, weights, shared=shared, out=shared, backend="emulator")
    assert got is shared and torch.equal(bits(got), bits(want))


def test_a_token_without_experts_is_zero():
    rows = torch.full((3, 2), -1, dtype=torch.int32)
    got = finalize(torch.full((6, 16), math.nan).half(), rows, torch.ones(3, 2), backend="emulator")
    assert torch.equal(bits(got), bits(torch.zeros(3, 16).half()))


def test_refusals():
    x, ids = torch.zeros(4, 64).bfloat16(), torch.zeros(4, 2, dtype=torch.int32)
    rows, weights = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2)
    for call, error, text in (
        (lambda: gather(x.float(), ids, 2), TypeError, "dtype of x"),
        (lambda: gather(x[:3], ids, 2), ValueError, "ids has 4 rows and x 3"),
        (lambda: gather(x[:, :48], ids, 2), ValueError, "K=48 is not a multiple of 32"),
        (
            lambda: gather(x, ids, 2, format=NVFP4, global_scale=torch.ones(3)),
            ValueError,
            r"\[2\], one per expert",
        ),
        (lambda: finalize(x, rows, weights[:3]), ValueError, "weights is"),
        (lambda: finalize(x[:, :12], rows, weights), ValueError, "N=12"),
        (lambda: finalize(x, rows, weights, shared=x[:2]), ValueError, "shared is"),
        (lambda: finalize(x, rows, weights, bias=x), ValueError, "comes with ids"),
        (lambda: finalize(x, rows, weights, out=x), ValueError, "out overlaps h"),
    ):
        with pytest.raises(error, match=text):
            call()
