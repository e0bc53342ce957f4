"""Grouped products of 16-bit activations through the public functions: every form against ``gemm``, refusals, graphs."""

import pytest
import torch
from flat_parts import dual_gemm, gemm, grouped_dual_gemm, grouped_gemm

from nvfp4_cute import quantize
from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.launch import weight_only
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.simt import W4A16Task
from nvfp4_cute.launch.weight_only import product_task
from nvfp4_cute.operands.grouped import Result, Weights, check_device_groups, check_lists
from nvfp4_cute.operands.products import check_weight_only
from nvfp4_cute.problem import Gate

EMULATED = "emulator:sm_90a"
ROWS, N, K = (5, 0, 20), 128, 128


def operands(dtype=torch.bfloat16):
    """Returns the rows of every group, their weights, and other weights."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(m, K, generator=generator).to(dtype) for m in ROWS]
    weights = [[quantize(torch.randn(N, K, generator=generator)) for _ in ROWS] for _ in range(2)]
    return x, *weights


def stacked(weights):
    return torch.stack([w.data for w in weights]), torch.stack([w.scale for w in weights])


OFFS = torch.tensor(ROWS).cumsum(0).int()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_forms_agree(dtype):
    """Every form gives the results of one ``gemm`` per group."""
    x, weights, _ = operands(dtype)
    options = {"out_dtype": torch.float32, "backend": "reference"}
    want = [gemm(a, w.data, None, w.scale, 0.5, **options) for a, w in zip(x, weights, strict=True)]
    b, scale = stacked(weights)
    alpha = [0.5] * len(ROWS)
    listed = grouped_gemm(
        x, [w.data for w in weights], None, [w.scale for w in weights], alpha=alpha, **options
    )
    ragged = grouped_gemm(torch.cat(x), b, None, scale, OFFS, alpha, **options)
    padded = torch.nn.utils.rnn.pad_sequence(x, batch_first=True)
    masked = grouped_gemm(padded, b, None, scale, None, alpha, masked_m=torch.tensor(ROWS).int(), **options)
    whole = grouped_gemm(x, weights, **options)
    for group, (m, expected) in enumerate(zip(ROWS, want, strict=True)):
        assert torch.equal(listed[group], expected)
        assert torch.equal(masked[group, :m], expected)
        assert torch.equal(whole[group], 2 * expected)
    assert torch.equal(ragged, torch.cat(want))


def test_dual_is_of_every_group():
    x, gate, up = operands()
    (b1, s1), (b2, s2) = stacked(gate), stacked(up)
    got = grouped_dual_gemm(torch.cat(x), b1, b2, None, s1, s2, offs=OFFS, backend="reference")
    one = [
        dual_gemm(a, g.data, u.data, None, g.scale, u.scale, backend="reference")
        for a, g, u in zip(x, gate, up, strict=True)
    ]
    assert torch.equal(got, torch.cat(one))
    assert got.abs().max() > 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["list", "ragged"])
def test_emulated(form):
    """The kernel's results differ from the reference's only by the order of summation."""
    x, gate, up = operands()

    def run(backend):
        if form == "list":
            return torch.cat(grouped_gemm(x, gate, out_dtype=torch.float32, backend=backend))
        (b1, s1), (b2, s2) = stacked(gate), stacked(up)
        return grouped_dual_gemm(
            torch.cat(x),
            b1,
            b2,
            None,
            s1,
            s2,
            offs=OFFS,
            activation="relu2",
            out_dtype=torch.float32,
            backend=backend,
        )

    expected = run("reference")
    torch.testing.assert_close(run(EMULATED), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_compiled():
    """A traced graph calls the custom operations, with separate weights and with both in one tensor."""
    x, gate, up = operands()
    (b1, s1), (b2, s2), rows = stacked(gate), stacked(up), torch.cat(x)

    def layers(rows, x):
        single = grouped_gemm(rows, b1, None, s1, OFFS, backend="reference")
        listed = grouped_gemm(x, [w.data for w in gate], None, [w.scale for w in gate], backend="reference")
        separate = grouped_dual_gemm(rows, b1, b2, None, s1, s2, offs=OFFS, backend="reference")
        one = grouped_dual_gemm(
            rows, b1, None, None, s1, offs=OFFS, weight_layout="interleaved_64_up_first", backend="reference"
        )
        return single, *listed, separate, one

    traced = torch.compile(layers, fullgraph=True, backend="aot_eager")
    for got, want in zip(traced(rows, x), layers(rows, x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"a": torch.zeros(25, K // 2, dtype=torch.uint8)}, TypeError, "pass those of its NVFP4 values as a_scale"),
        ({"a": torch.zeros(25, K)}, TypeError, "a has dtype float32; expected"),
        ({"a": torch.zeros(25, K + 32).half()}, ValueError, "expected .* K=160 in a"),
        ({"a": torch.zeros(25, K + 4).half()[:, :K]}, ValueError, "not a multiple of 16"),
        ({"a": torch.zeros(3, 25, K).half()}, ValueError, r"with offs it is \[sum of M, K\]"),
        ({"out_dtype": "nvfp4"}, UnsupportedProblem, "16-bit a: call quantize on the result"),
        ({"out": torch.zeros(N, 25).bfloat16().T}, UnsupportedProblem, "allocate it as torch.empty"),
    ],
)  # fmt: skip
def test_refusals(changed, error, message):
    """Each message names rule, value and fix, and nothing is written."""
    x, weights, _ = operands()
    b, scale = stacked(weights)
    given = {"a": torch.cat(x), "b": b, "b_scale": scale, "offs": OFFS, "backend": EMULATED} | changed
    with pytest.raises(error, match=message):
        grouped_gemm(**given)


def test_lists_are_of_one_dtype():
    x, weights, _ = operands()
    x[0] = x[0].half()
    with pytest.raises(TypeError, match="a has groups of bfloat16 and of float16; convert"):
        grouped_gemm(x, weights, backend="reference")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batches", [1, 2])
def test_gemm_by_the_grouped_kernel(monkeypatch, batches):
    """A batch, whose results are batch by batch in memory, also has the reference's results."""
    monkeypatch.setattr(weight_only, "is_faster_than_few_rows", lambda *sizes: True)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches, 20, K, generator=generator).bfloat16().permute(1, 2, 0)
    w = quantize(torch.randn(batches, N, K, generator=generator))
    alpha = torch.linspace(0.5, 2.0, batches)
    got, want = (
        gemm(
            x, w.data.permute(1, 2, 0), None, w.scale, alpha, out_dtype=torch.float32, backend=backend,
            out=torch.full((20, batches, N), float("nan")).permute(0, 2, 1),
        )
        for backend in (EMULATED, "reference")
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def places_match(task, tensors):
    launch = task.launch(lookup("sm_90a").gpu, for_emulator=True)
    return launch.table.reshape(-1)[launch.places].tolist() == [t.data_ptr() for t in tensors]


def test_tensors_are_in_the_order_of_arguments():
    """This order lets a repeated call fill in only addresses."""
    x, gate, up = operands()
    (b1, s1), (b2, s2), rows = stacked(gate), stacked(up), torch.cat(x)
    alpha1, alpha2 = torch.ones(3), torch.ones(3)
    weights = [Weights("b1", b1, s1, "alpha1", alpha1), Weights("b2", b2, s2, "alpha2", alpha2)]
    result, layers = Result(None, torch.bfloat16, None), Gate("silu", None, "separate")
    problem, checked, outs = check_device_groups(rows, None, weights, (OFFS, None), result, "blocked", layers)
    task = GroupedTask(problem, checked)
    assert places_match(task, [rows, b1, s1, OFFS, alpha1, b2, s2, alpha2, *outs])
    sides = x, [w.data for w in gate], [w.scale for w in gate]
    weights = [Weights("b", *sides[1:], "alpha", alpha1)]
    problem, checked = check_lists(x, None, weights, result, "blocked")
    task = GroupedTask(problem, checked)
    assert places_match(task, [*(t for side in sides for t in side), alpha1, *checked.out])


def test_kernel_of_a_product():
    """The estimate decides, on the architecture that has both kernels, where results have contiguous rows."""

    def task_of(m, arch, out=None):
        n = k = 4096
        x, w = torch.empty(m, k).bfloat16(), torch.empty(n, k // 2, dtype=torch.uint8)
        scale, names = torch.empty(n * k // 16, dtype=torch.uint8), ("a", "b", "b_scale")
        product, _ = check_weight_only(x, w, scale, None, NVFP4, out, names, torch.bfloat16, "blocked")
        return type(product_task(product, lookup(arch).gpu))

    assert task_of(8, "sm_90a") is W4A16Task
    assert task_of(256, "sm_90a") is GroupedTask
    assert task_of(8, "sm_100a") is W4A16Task
    assert task_of(256, "sm_100a") is GroupedTask
    assert task_of(256, "sm_90a", torch.empty(4096, 256).bfloat16().T) is W4A16Task
    overlapping = torch.empty(8 * 255 + 4096).bfloat16().as_strided((256, 4096), (8, 1))
    with pytest.raises(ValueError, match="elements share memory"):
        task_of(256, "sm_90a", overlapping)
