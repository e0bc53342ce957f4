"""permute: a stable sort of choices by expert, equal in one launch and in two."""

import pytest
import torch

from nvfp4_cute import UnsupportedProblem
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.experts import permutation
from nvfp4_cute.experts.permutation import permute
from nvfp4_cute.planning.arch import simt

ARCHS = ["sm_80", "sm_90a", "sm_100a", pytest.param("sm_120a", marks=pytest.mark.slow)]


def check(ids, experts, arch="sm_90a", mode="eager", launches=1, **options):
    with observe(check=True, mode=mode) as observer:
        got = permute(ids, experts, backend=f"emulator:{arch}", **options)
    want = permute(ids, experts, backend="reference", **options)
    assert len(observer.stats) == launches
    for name in ("offs", "rows", "places"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    num_rows = int(want.offs[-1])
    assert torch.equal(got.slots[:num_rows], want.slots[:num_rows])
    return got


def some(tokens, top_k, experts, seed=0, first=0, dtype=torch.int32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2 + first, first + experts + 2, (tokens, top_k), generator=generator).to(dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "tokens, top_k, experts",
    [
        (1, 1, 1),
        (1, 8, 128),
        (0, 4, 5),
        (40, 8, 128),
        (7, 3, 300),
        (130, 9, 600),
        (300, 4, 1024),
        (600, 2, 3),
    ],
)
def test_orders(tokens, top_k, experts, arch):
    check(some(tokens, top_k, experts, tokens), experts, arch)


@pytest.mark.parametrize("mode", ["lazy", "random:1", "random:2"])
def test_modes(mode):
    check(some(90, 8, 60), 60, mode=mode)


def test_parts_of_the_experts_and_wide_ids():
    ids = some(64, 8, 32, dtype=torch.int64)
    whole = check(ids, 32)
    parts = [check(ids, 8, first_expert=first) for first in range(0, 32, 8)]
    ends = [part.offs + sum(int(p.offs[-1]) for p in parts[:i]) for i, part in enumerate(parts)]
    assert torch.equal(torch.cat(ends), whole.offs)
    slots = [part.slots[: int(part.offs[-1])] for part in parts]
    assert torch.equal(torch.cat(slots), whole.slots[: int(whole.offs[-1])])


def test_one_expert_and_none():
    check(torch.full((150, 2), 3, dtype=torch.int32), 8)
    order = check(torch.full((5, 2), -1, dtype=torch.int32), 8)
    assert not order.offs.any() and bool((order.rows == -1).all())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
def test_two_launches(arch, monkeypatch):
    """Several CTAs give the same order. Lowered limits make few slots take two launches."""
    for name, limit in (("SLOTS_OF_CTA", 100), ("SLOTS_AT_ONCE", 101), ("SLOTS_PER_CTA", 128)):
        monkeypatch.setattr(
            permutation, f"PERMUTE_{name}", {True: limit, False: limit} if name == "SLOTS_OF_CTA" else limit
        )
    check(some(200, 8, 40, 3), 40, arch, launches=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mode", ["eager", "lazy", "random:1"])
def test_a_cluster(arch, mode, monkeypatch):
    """Some CTAs have no slots. Before Hopper, which introduced clusters, there are two launches."""
    launches = 1 if simt.has_clusters(arch) else 2
    check(some(300, 8, 150, 3), 150, arch, mode, launches)
    monkeypatch.setattr(permutation, "PERMUTE_SLOTS_OF_CTA", {True: 2, False: 2})
    check(some(3, 1, 7, 3), 7, arch, mode, launches)
    check(some(50, 3, 600, 3), 600, arch, mode, launches)


def test_refusals():
    ids = torch.zeros(4, 2, dtype=torch.int32)
    for arguments, error, text in (
        ((ids.float(), 2), TypeError, "dtype of ids"),
        ((ids.t(), 2), ValueError, r"expected contiguous \[T, k\]"),
        ((ids[0], 2), ValueError, r"expected contiguous \[T, k\]"),
        ((ids, 0), UnsupportedProblem, "num_experts=0"),
        ((ids, 1025), UnsupportedProblem, "num_experts=1025"),
    ):
        with pytest.raises(error, match=text):
            permute(*arguments)
