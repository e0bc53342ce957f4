"""A format that only this test defines: all code but the kernels takes it, and sm_100 does with a row in its MMA table."""

from dataclasses import replace

import pytest
import torch
from list_checks import check_list_operands
from oracle import assert_bitwise_equal

from nvfp4_cute import backends
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import E2M1, NVFP4, UE8M0, BlockFormat
from nvfp4_cute.formats.block_scaled import quantize
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.operands.grouped import Result, Weights, check_device_groups
from nvfp4_cute.planning.arch import ARCHS, FAMILIES
from nvfp4_cute.planning.arch.base import Mma
from nvfp4_cute.planning.arch.sm100 import limits
from nvfp4_cute.planning.config import KernelConfig

OURS = BlockFormat("e2m1_by_32", E2M1, UE8M0, block_k=32)
SIZES = ((5, 130, 96), (0, 72, 64), (140, 40, 320))


def tensors(seed=0, sizes=SIZES):
    """Operands of every group with few magnitudes and few scales, so that all sums are exact in float32."""
    generator = torch.Generator().manual_seed(seed)

    def one(rows, k):
        numbers = torch.randint(-3, 4, (rows, k), generator=generator).float()
        powers = torch.randint(-1, 2, (rows, k // 32), generator=generator)
        # Every block contains 6, which makes its scale this power of two.
        numbers[:, ::32] = 6.0
        return quantize(numbers * torch.exp2(powers.float()).repeat_interleave(32, dim=1), format=OURS)

    return [one(m, k) for m, _, k in sizes], [one(n, k) for _, n, k in sizes]


def checked(a, b, **options):
    return check_list_operands(
        [x.data for x in a], [x.data for x in b], [x.scale for x in a], [x.scale for x in b],
        out_dtype=torch.float32, a_format=OURS, b_format=OURS, **options,
    )  # fmt: skip


def expected(a, b):
    products = (
        x.dequantize(torch.float64) @ y.dequantize(torch.float64).T for x, y in zip(a, b, strict=True)
    )
    return [product.float() for product in products]


def test_checks_problem_and_reference_take_it():
    a, b = tensors()
    problem, operands = checked(a, b)
    assert (problem.sizes, problem.a_format, problem.b_format) == (SIZES, OURS, OURS)
    assert [(x.format, x.rows, x.k, x.pitch) for x in operands.a] == [(OURS, m, k, k) for m, _, k in SIZES]
    read = sum((m + n) * (k // 2 + k // 32) for m, n, k in SIZES)
    assert problem.bytes == read + sum(4 * m * n for m, n, _ in SIZES)
    assert "of e2m1_by_32 x e2m1_by_32 -> float32" in str(problem)
    backends.run_task("reference", GroupedTask(problem, operands))
    for got, want in zip(operands.out, expected(a, b), strict=True):
        assert_bitwise_equal(got, want)


def test_ragged_groups_take_it():
    a, b = tensors(sizes=((130, 40, 96), (7, 40, 96)))
    out = torch.empty(137, 40)
    weights = [
        Weights("b", torch.stack([x.data for x in b]), torch.stack([x.scale for x in b]), "alpha", None, OURS)
    ]
    problem, operands, _ = check_device_groups(
        torch.cat([x.data for x in a]), torch.cat([x.scale for x in a]), weights,
        (torch.tensor([130, 137], dtype=torch.int32), None), Result(out, torch.float32, None), a_format=OURS,
    )  # fmt: skip
    assert (problem.a_format, problem.b_format, problem.form) == (OURS, OURS, "ragged")
    backends.run_task("reference", GroupedTask(problem, operands))
    assert_bitwise_equal(out, torch.cat(expected(a, b)))


def test_messages_speak_of_it():
    a, b = tensors()
    with pytest.raises(
        ValueError, match=r"group 0: a: K=48 is not a multiple of 32 \(E2M1_BY_32 block size\); pad K to 64"
    ):
        checked([_Cut(a[0], 24)], b[:1])
    with pytest.raises(
        TypeError, match="scales are torch.uint8 or torch.float8_e8m0fnu; got torch.float8_e4m3fn"
    ):
        checked([_Cut(a[0], 48, a[0].scale.view(torch.float8_e4m3fn))], b[:1])


class _Cut:
    """A tensor with fewer bytes per row and other scales."""

    def __init__(self, t, row_bytes, scale=None):
        self.data, self.scale = t.data[:, :row_bytes].contiguous(), t.scale if scale is None else scale


@pytest.mark.parametrize("arch", sorted({family.ARCHS[0] for family in FAMILIES} & set(ARCHS)))
def test_kernels_refuse_it(arch):
    problem, operands = checked(*tensors())
    with pytest.raises(
        UnsupportedProblem, match=rf"^{arch}: no kernel for e2m1_by_32 x e2m1_by_32 \(there is one for nvfp4"
    ):
        backends.run_task(f"emulator:{arch}", GroupedTask(problem, operands))


def test_keys_tell_formats_apart(monkeypatch):
    monkeypatch.setitem(limits.MMA, (OURS, OURS), Mma("mxf4nvf4", 64))
    problem, _ = checked(*tensors())
    config = KernelConfig()
    key = KernelKey.of("sm_100a", config, problem)
    nvfp4 = KernelKey.of("sm_100a", config, replace(problem, a_format=NVFP4, b_format=NVFP4))
    assert key != nvfp4 and key.to_name() == f"{nvfp4.to_name()}_e2m1_by_32_x_e2m1_by_32"
    assert "nvfp4_x" not in nvfp4.to_name()


@pytest.mark.parametrize("config", [
    KernelConfig((128, 128, 256), num_acc_stage=2),
    KernelConfig((128, 64, 256), use_2cta_instrs=True, swap_ab=True),
], ids=str)  # fmt: skip
def test_a_row_of_the_table_is_a_kernel(monkeypatch, config):
    """The scales of an atom belong to 128 elements of K, which two MMAs read."""
    monkeypatch.setitem(limits.MMA, (OURS, OURS), Mma("mxf4nvf4", 64))
    a, b = tensors(1)
    problem, operands = checked(a, b)
    with observe() as observer:
        backends.run_task("emulator:sm_100a", GroupedTask(problem, operands, config))
    for got, want in zip(operands.out, expected(a, b), strict=True):
        assert_bitwise_equal(got, want)
    assert not observer.hazards
