"""Prepared calls: what a signature distinguishes, and which addresses make a call run all checks again."""

from functools import partial

import flat_parts as on_parts
import numpy as np
import pytest
import torch
from emulated_gpu import emulated_gpu
from expert_layers import moe, some_layer
from flat_parts import dual_gemm, gemm, gemv, grouped_dual_gemm, grouped_gemm
from list_checks import check_list_operands
from python_calls import python_calls

import nvfp4_cute as nv
from nvfp4_cute import NVFP4Tensor, grouped_quantize, quantize, route
from nvfp4_cute.backends.emulator import on_emulator
from nvfp4_cute.emulator.fronts.launch_shim import prepare_cutlass
from nvfp4_cute.experts.permutation import PermuteTask
from nvfp4_cute.formats import block_scaled, scale_layout
from nvfp4_cute.formats.silu import silu_mul
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch import prepared, simt
from nvfp4_cute.launch.plan import make_plan
from nvfp4_cute.launch.prepared import PreparedCall, signature
from nvfp4_cute.launch.table_task import TableTask
from nvfp4_cute.launch.task import Launch
from nvfp4_cute.operands import grouped, products, quantization
from nvfp4_cute.operands.grouped import Result, Weights, dual_weights
from nvfp4_cute.ops.parts import Parts
from nvfp4_cute.ops.parts.grouped_gemm import grouped_task
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Gate
from nvfp4_cute.reference import (
    grouped_dual_gemm_reference,
    grouped_gemm_reference,
    weight_only_reference,
)

SIZES = ((40, 72, 256), (0, 64, 128), (70, 128, 512))


def make_lists(sizes=SIZES):
    a = [torch.zeros(m, k // 2, dtype=torch.uint8) for m, _, k in sizes]
    b = [torch.zeros(n, k // 2, dtype=torch.uint8) for _, n, k in sizes]
    scales = [
        [torch.zeros(-(-rows // 128) * -(-k // 64) * 512, dtype=torch.uint8) for rows, k in pairs]
        for pairs in ([(m, k) for m, _, k in sizes], [(n, k) for _, n, k in sizes])
    ]
    out = [torch.zeros(m, n, dtype=torch.float16) for m, n, _ in sizes]
    return [a, b, *scales, out]


def flat(lists):
    return [tensor for tensors in lists for tensor in tensors]


def launch_of(plan, operands):
    return Launch(plan.kernel, plan.table(operands), plan.address_places(operands))


def make_call(sizes=SIZES):
    """Returns a prepared call with its lists and its plan."""
    prepare_cutlass()
    lists = make_lists(sizes)
    problem, operands = check_list_operands(*lists[:4], None, lists[4], out_dtype=torch.float16)
    with on_emulator(target=targets.lookup("sm_90a")):
        plan = make_plan(problem, "sm_90a", 132, for_emulator=True)
        call = PreparedCall(launch_of(plan, operands), flat(lists), len(sizes))
    return call, plan


@pytest.fixture(scope="module")
def call():
    return make_call()[0]


def test_equal_lists_have_equal_signatures():
    assert signature(flat(make_lists()), "auto") == signature(flat(make_lists()), "auto")


@pytest.mark.parametrize(
    "change",
    [
        lambda lists: lists[0].__setitem__(0, lists[0][0][:39]),
        lambda lists: lists[1].__setitem__(0, torch.zeros(72, 256, dtype=torch.uint8)[:, :128]),
        lambda lists: lists[4].__setitem__(2, lists[4][2].bfloat16()),
        lambda lists: lists.append([torch.ones(3)]),
        lambda lists: [tensors.pop() for tensors in lists],
    ],
)
def test_whatever_a_check_looks_at_changes_the_signature(change):
    lists = make_lists()
    change(lists)
    assert signature(flat(lists), "auto") != signature(flat(make_lists()), "auto")


@pytest.fixture
def nothing_prepared(monkeypatch):
    monkeypatch.setattr(prepared._local, "calls", {})
    monkeypatch.setattr(prepared._local, "recent", {})


def test_a_lookup_tells_calls_apart_as_signatures_do(nothing_prepared, call):
    lists = make_lists()
    key, found = prepared.lookup(flat(lists), "auto")
    assert key == signature(flat(lists), "auto") and found is None
    prepared._local.calls[key] = call
    assert prepared.lookup(flat(make_lists()), "auto") == (key, call)
    if prepared.TensorGuards is not None:
        assert prepared.lookup(flat(make_lists()), "auto") == (None, call)
    for changed in ("cuda", KernelConfig()):
        assert prepared.lookup(flat(lists), changed)[1] is None
    narrower = flat(lists)
    narrower[0] = narrower[0][:39]
    assert prepared.lookup(narrower, "auto")[1] is None
    assert prepared.lookup([*flat(lists)[:-1], None], "auto") == (None, None)
    assert prepared.lookup(flat(lists), "auto")[1] is call


@pytest.mark.skipif(prepared.TensorGuards is None, reason="this torch has no guards")
def test_calls_that_alternate_are_found_without_signatures(nothing_prepared, monkeypatch):
    """Alternating calls, like those of a model's layers, find the latest call with their shapes."""
    many = [[torch.zeros(rows, 16)] for rows in range(1, prepared.MAX_RECENT + 2)]
    prepared._local.calls.update({signature(tensors, "auto"): len(tensors[0]) for tensors in many})
    for tensors in many:
        assert prepared.lookup(tensors, "auto")[0] is not None
    monkeypatch.setattr(prepared, "signature", lambda *args, **options: None)
    for tensors in many[1:] + many[1:]:
        assert prepared.lookup(tensors, "auto") == (None, len(tensors[0]))
    assert prepared.lookup(many[0], "auto") == (None, None)


def test_settings_change_the_signature():
    assert signature(flat(make_lists()), "auto") != signature(flat(make_lists()), "cuda")
    assert signature(flat(make_lists()), None) != signature(flat(make_lists()), KernelConfig())


def test_what_has_to_be_refused_has_no_signature():
    assert signature([1.0]) is None
    assert signature([None]) is None
    factors = torch.ones(3, requires_grad=True)
    assert signature([factors]) is None
    with torch.no_grad():
        assert signature([factors]) is not None


def at(tensor, offset):
    """Returns bytes like a tensor's, at an offset from a tensor's start."""
    memory = torch.zeros(tensor.numel() + offset, dtype=torch.uint8)
    return memory[offset:].view(tensor.shape)


def test_addresses_are_checked_again_when_they_change(call):
    tensors = flat(make_lists())
    for own_out in (True, False):
        assert call.take(tensors, own_out)
        before = call.table.copy()
        for odd in (1, 8):
            moved = list(tensors)
            moved[2] = at(tensors[2], odd)
            for _ in range(2):
                assert not call.take(moved, own_out)
            np.testing.assert_array_equal(call.table, before)
        assert call.take(tensors, own_out)


def test_outputs_that_touch_an_operand_are_refused(call):
    lists = make_lists()
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    a, out = lists[0][0], lists[4][0]
    lists[4][0] = memory[: 2 * out.numel()].view(torch.float16).view(out.shape)
    for start, is_apart in ((2 * out.numel(), True), (2 * out.numel() - 64, False)):
        start += -(memory.data_ptr() + start) % 16 * is_apart
        lists[0][0] = memory[start:][: a.numel()].view(a.shape)
        for _ in range(2):
            assert call.take(flat(lists), own_out=True) == is_apart
    assert call.take(flat(lists), own_out=False), "new outputs overlap nothing"


def test_shared_weights_are_accepted(call):
    lists = make_lists(((40, 72, 256), (0, 64, 128), (70, 64, 128)))
    shared = make_call(((40, 72, 256), (0, 64, 128), (70, 64, 128)))[0]
    lists[1][2] = lists[1][1]
    assert shared.take(flat(lists), own_out=True)


def test_the_table_holds_the_addresses_of_the_call():
    """The launch table for other operands of the same kind equals the one that a plan would make."""
    call, plan = make_call()
    lists = make_lists()
    _, operands = check_list_operands(*lists[:4], None, lists[4], out_dtype=torch.float16)
    assert call.take(flat(lists), own_out=True)
    np.testing.assert_array_equal(call.table, plan.table(operands).reshape(-1))


def test_a_call_goes_to_the_current_stream_and_computes(monkeypatch):
    """Two launches of one call, with other addresses, both give the reference's output."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    sizes = ((8, 72, 128), (0, 64, 128), (3, 128, 128))
    call, plan = make_call(sizes)
    for seed in range(2):
        lists = make_lists(sizes)
        generator = torch.Generator().manual_seed(seed)
        for tensor in flat(lists[:4]):
            tensor.random_(0, 112, generator=generator)  # no NaN among scales
        with on_emulator(target=targets.lookup("sm_90a")) as emulator:
            emulator.register(plan.kernel.ptx)
            assert call.try_launch(flat(lists[:4]), lists[4]) is lists[4]
        expected = on_parts.grouped_gemm(*lists[:4], out_dtype=torch.float16, backend="reference")
        assert all(torch.equal(out, right) for out, right in zip(lists[4], expected, strict=True))


LAYOUTS = {
    "rows of several lines": [torch.zeros(m, 128, dtype=torch.float16) for m in (3, 0, 70)],
    "shorter rows": [torch.zeros(m, 40, dtype=torch.float16) for m in (3, 0, 70)],
    "of any size": [torch.zeros(m, n, dtype=torch.bfloat16) for m, n in ((3, 40), (5, 7), (1, 128))],
    "columns": [torch.zeros(n, m).T for m, n in ((3, 128), (5, 128), (8, 128))],
    "pitched": [torch.zeros(m, 32, dtype=torch.uint8)[:, :24] for m in (3, 0, 70)],
    "numbers": [torch.zeros(()), torch.zeros(()), torch.zeros(20)],
    "of two": [torch.zeros(m, 128, dtype=torch.float16) for m in (3, 70)],
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_new_outputs_are_like_the_checked_ones(kind):
    """Three outputs share an allocation, at separate cache lines; writing to one does not change another."""
    outs = LAYOUTS[kind]
    made = prepared._allocator(outs)()
    assert len(made) == len(outs)
    for number, (new, out) in enumerate(zip(made, outs, strict=True)):
        assert (new.shape, new.dtype, new.stride()) == (out.shape, out.dtype, out.stride())
        new.fill_(number + 1)
    assert all((new == number + 1).all() for number, new in enumerate(made))
    starts = [new.data_ptr() for new in made if new.numel()]
    is_one = len({new.untyped_storage().data_ptr() for new in made}) == 1
    assert is_one == (kind != "of two")
    assert not is_one or all((start - starts[0]) % prepared.OUT_ALIGN_BYTES == 0 for start in starts)


@pytest.mark.parametrize("kind", ["rows of several lines", "of any size"])
def test_gradients_of_one_new_output_are_not_the_others(kind):
    made = prepared._allocator(LAYOUTS[kind])()
    made[0].mul_(torch.ones((), dtype=made[0].dtype, requires_grad=True))
    assert [new.requires_grad for new in made] == [True, False, False]


def remember(key, plan, lists, operands):
    prepared.remember(key, launch_of(plan, operands), flat(lists), len(lists[4]))


def test_the_oldest_call_is_forgotten(nothing_prepared, monkeypatch):
    monkeypatch.setattr(prepared, "MAX_PREPARED", 2)
    lists, plan = make_lists(), make_call()[1]
    _, operands = check_list_operands(*lists[:4], None, lists[4], out_dtype=torch.float16)
    with on_emulator(target=targets.lookup("sm_90a")):
        for key in ((1,), (2,), (3,)):
            remember(key, plan, lists, operands)
    assert set(prepared._local.calls) == {(2,), (3,)}


def test_a_call_with_converted_operands_is_not_kept():
    lists, plan = make_lists(), make_call()[1]
    _, operands = check_list_operands(*make_lists()[:4], None, lists[4], out_dtype=torch.float16)
    remember(("converted",), plan, lists, operands)
    assert ("converted",) not in prepared._local.calls


@pytest.fixture
def gpu(nothing_prepared, monkeypatch):
    """CPU tensors take the path of CUDA tensors, to an emulated B200."""
    with emulated_gpu(monkeypatch) as emulator:
        yield emulator


@pytest.mark.parametrize("name", ["quantize", "gemm"])
def test_rows_that_are_not_aligned_take_the_long_way(gpu, name):
    """Kernels read 16-bit rows 16 bytes at a time; the first call's rows were aligned."""
    w = quantize(torch.randn(128, 64).bfloat16())
    give = {
        "quantize": lambda x: quantize(x).data,
        "gemm": lambda x: gemm(x, w.data, None, w.scale, backend="auto"),
    }[name]
    x, memory = torch.randn(3, 64).bfloat16(), torch.zeros(3 * 64 + 1).bfloat16()
    for _ in range(2):
        expected = give(x)
    apart = memory[1:].view(3, 64).copy_(x)
    if name == "quantize":
        torch.testing.assert_close(give(apart), expected, rtol=0, atol=0)
    else:
        with pytest.raises(ValueError, match="16"):
            give(apart)


def random_bytes(*shape):
    return torch.randint(0, 112, shape, dtype=torch.uint8)


def arguments_of(form):
    """Arguments of two groups with 5 and 3 rows, N = 64, K = 128."""
    b, b_scale = random_bytes(2, 64, 64), random_bytes(2, 1024)
    if form == "list":
        a, a_scale = [random_bytes(5, 64), random_bytes(3, 64)], list(random_bytes(2, 1024))
        return {"a": a, "b": list(b), "a_scale": a_scale, "b_scale": list(b_scale)}
    rows = {"a": random_bytes(8, 64), "offs": torch.tensor([5, 8], dtype=torch.int32)}
    if form == "masked":
        rows = {"a": random_bytes(2, 8, 64), "masked_m": torch.tensor([5, 3], dtype=torch.int32)}
    return rows | {
        "b": b,
        "a_scale": random_bytes(2, 1, 2, 32, 4, 4),
        "b_scale": b_scale.view(2, 1, 2, 32, 4, 4),
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["list", "ragged", "masked"])
@pytest.mark.parametrize("own_out", [True, False])
def test_the_second_call_is_launched_without_checks(gpu, monkeypatch, form, own_out):
    """The kernel's outputs equal those of the reference, which computed the first call."""
    alpha = torch.tensor([0.5, 2.0])
    grouped_gemm(**arguments_of(form), alpha=alpha)
    out = grouped_gemm(**arguments_of(form), alpha=alpha) if own_out else None
    if own_out:
        grouped_gemm(**arguments_of(form), alpha=alpha, out=out)
    again = arguments_of(form)
    expected = grouped_gemm(**again, alpha=alpha.clone(), backend="reference", config=KernelConfig())
    for name in ("check_lists", "check_device_groups"):
        monkeypatch.setattr(grouped, name, None)
    result = grouped_gemm(**again, alpha=alpha, out=out)
    if form == "masked":
        result, expected = ([t[0, :5], t[1, :3]] for t in (result, expected))
    for ours, right in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", ["packed", "16-bit"])
def test_the_second_gemm_adds_its_own_bias(gpu, monkeypatch, rows):
    """It does not add the first call's bias, at any address. A bias of another dtype makes the call another kind."""
    x, w = quantize(torch.randint(-2, 3, (2, 16, 64)).bfloat16()).dequantize(torch.float32)
    x, w = x.bfloat16() if rows == "16-bit" else quantize(x), quantize(w)
    biases = torch.arange(-20, 28).bfloat16().view(3, 16)
    sums = (x.float() if rows == "16-bit" else x.dequantize()) @ w.dequantize().T
    give = lambda bias: gemm(x, w, bias=bias, out_dtype=torch.float32)
    assert torch.equal(give(biases[0]), sums + biases[0])
    for check in ("check_gemm", "check_weight_only"):
        monkeypatch.setattr(products, check, None)
    for bias in (biases[1], torch.zeros(17).bfloat16()[1:].copy_(biases[2])):
        assert torch.equal(give(bias), sums + bias)
    with pytest.raises(TypeError, match="not callable"):
        give(biases[1].half())


@pytest.mark.parametrize("batches", [1, 2])
def test_the_second_gemm_is_launched_without_checks(gpu, monkeypatch, batches):
    def operands():
        a, b = (random_bytes(batches, rows, 64).permute(1, 2, 0) for rows in (5, 64))
        return [a, b, *random_bytes(2, batches, 1, 2, 32, 4, 4)]

    alpha = torch.linspace(0.5, 2.0, batches)
    first = gemm(*operands(), alpha)
    again = operands()
    expected = gemm(*again, alpha.clone(), backend="reference", config=KernelConfig())
    monkeypatch.setattr(products, "check_gemm", None)
    result = gemm(*again, alpha)
    assert result.stride() == first.stride()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("groups", "most"), [(None, 48), (8, 54)])
def test_repeated_quantized_results_take_few_python_calls(gpu, monkeypatch, groups, most):
    """One result of ``gemm``, or the results of a list, whose number adds no Python calls."""
    a, b = ([quantize(torch.randn(rows, 128).bfloat16()) for _ in range(groups or 1)] for rows in (5, 128))
    if groups is None:
        call = partial(nv.gemm, a[0], b[0], out_dtype="nvfp4")
    else:
        call = partial(nv.grouped_gemm, a, b, out_dtype="nvfp4")
    for _ in range(2):
        call()
    count, results = python_calls(call, (), monkeypatch)
    assert all(
        type(one) is NVFP4Tensor and one.shape == (5, 128)
        for one in ([results] if groups is None else results)
    )
    assert count <= most


@pytest.mark.parametrize(
    ("operation", "batches", "own_out"),
    [("gemv", 1, True), ("gemv", 2, False), ("gemm of one row", 2, True), ("gemm of one row", 1, False)],
)
def test_the_second_gemv_is_launched_without_checks(gpu, monkeypatch, batches, operation, own_out):
    monkeypatch.setattr(simt, "is_gemv_for_one_row", lambda arch: True)
    is_gemv = operation == "gemv"
    function = gemv if is_gemv else gemm

    def operands():
        weights, row = (random_bytes(batches, rows, 64).permute(1, 2, 0) for rows in (40, 1))
        scales = [*random_bytes(2, batches, 1, 2, 32, 4, 4)]
        return [weights, row[0], *scales] if is_gemv else [row, weights, *scales]

    alpha = torch.linspace(0.5, 2.0, batches)
    first = function(*operands(), alpha)
    out = function(*operands(), alpha) if own_out else None
    if own_out:
        function(*operands(), alpha, out=out)
    again = operands()
    expected = function(*again, alpha.clone(), backend="reference")
    monkeypatch.setattr(products, f"check_{function.__name__}", None)
    result = function(*again, alpha, out=out)
    assert result.stride() == first.stride() and (result is out) == own_out
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_an_output_that_touches_the_matrix_is_refused_after_a_prepared_gemv(gpu):
    weights, vector, scales = random_bytes(40, 64), random_bytes(64), random_bytes(2, 1024)
    gemv(weights, vector, *scales, out=torch.zeros(40, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out overlaps a in memory"):
        gemv(weights, vector, *scales, out=weights.view(-1)[:80].view(torch.bfloat16))


def dual_arguments(form, layout):
    """Arguments of a dual GEMM: 64 columns of each product, or twice 128 where one tensor holds both."""
    arguments = arguments_of(form)
    if layout == "separate":
        second = arguments_of(form)
        names = {"b": "b1", "b_scale": "b1_scale"}
        arguments = {names.get(name, name): value for name, value in arguments.items()}
        return arguments | {"b2": second["b"], "b2_scale": second["b_scale"]}
    del arguments["b"], arguments["b_scale"]
    b1, b1_scale = random_bytes(2, 256, 64), random_bytes(2, 2048)
    if form == "list":
        b1, b1_scale = list(b1), list(b1_scale)
    return arguments | {"b1": b1, "b1_scale": b1_scale, "b2": None, "b2_scale": None}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("list", "separate"),
        ("ragged", "interleaved_32_gate_first"),
        ("list", "concatenated"),
        ("ragged", "concatenated"),
        pytest.param("list", "interleaved_32_gate_first", marks=pytest.mark.slow),
        pytest.param("ragged", "separate", marks=pytest.mark.slow),
        pytest.param("masked", "separate", marks=pytest.mark.slow),
        pytest.param("masked", "interleaved_32_gate_first", marks=pytest.mark.slow),
    ],
)
def test_the_second_dual_gemm_is_launched_without_checks(gpu, monkeypatch, form, layout):
    """The exception is a call that needs a factor for only one product."""
    options = {"weight_layout": layout, "activation": "relu2"}
    factors = {"alpha1": torch.tensor([0.5, 2.0]), "alpha2": torch.tensor([0.25, 1.0])}
    grouped_dual_gemm(**dual_arguments(form, layout), **factors, **options)
    again = dual_arguments(form, layout)
    factors = {name: factor * 2 for name, factor in factors.items()}
    expected = grouped_dual_gemm(**again, **factors, **options, backend="reference")
    checks = ("check_lists", "check_device_groups")
    with monkeypatch.context() as patch:
        for name in checks:
            patch.setattr(grouped, name, None)
        result = grouped_dual_gemm(**again, **factors, **options)
    if form == "masked":
        result, expected = ([t[0, :5], t[1, :3]] for t in (result, expected))
    for ours, right in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=2**-7, atol=0)
    del factors["alpha2"]
    for _ in range(2):
        grouped_dual_gemm(**again, **factors, **options)  # runs all checks
    for name in checks:
        monkeypatch.setattr(grouped, name, None)
    with pytest.raises(TypeError):
        grouped_dual_gemm(**again, **factors, **options)


def test_sizes_given_twice_are_refused_after_a_prepared_call(gpu):
    arguments = arguments_of("ragged")
    grouped_gemm(**arguments)
    with pytest.raises(ValueError, match="both given"):
        grouped_gemm(**arguments, masked_m=arguments["offs"])


def quantized(*shape):
    return block_scaled.quantize(torch.randn(*shape), global_scale=0.01)


def repeated(name):
    """Returns a call with new operands each time, its reference, and the check that the second call skips."""
    x, up = torch.randn(2, 5, 64).bfloat16()
    w, u = quantized(40, 64), quantized(40, 64)
    a, factor = quantized(5, 64), torch.tensor(0.03)
    if name == "quantize":
        return (
            lambda: quantize(x, global_scale=factor),
            lambda: block_scaled.quantize(x, global_scale=factor),
            (quantization, "check_quantize"),
        )
    if name == "silu_quantize":
        return (
            lambda: quantize(x, up=up),
            lambda: block_scaled.quantize(silu_mul(x, up)),
            (quantization, "check_quantize"),
        )
    if name == "grouped_quantize":
        offs = torch.tensor([5], dtype=torch.int32)
        return (
            lambda: grouped_quantize(x, offs),
            lambda: block_scaled.quantize(x),
            (quantization, "check_grouped_quantize"),
        )
    if name == "16-bit gemm":
        alpha = torch.tensor([0.5])
        return (
            lambda: gemm(x, w.data, None, w.scale, alpha, out_dtype=torch.float32),
            lambda: weight_only_reference(x, w.data, w.scale, alpha[0], torch.float32),
            (products, "check_weight_only"),
        )
    if name == "nvfp4 gemm":
        w = quantized(48, 64)
        sums = grouped_gemm_reference([a.data], [w.data], [a.scale], [w.scale], None, out_dtype=torch.float32)
        return (
            lambda: gemm(a.data, w.data, a.scale, w.scale, out_dtype="nvfp4", out_global_scale=factor),
            lambda: block_scaled.quantize(sums[0], global_scale=factor),
            (products, "check_gemm"),
        )
    sides = [a.data], [w.data], [u.data], [a.scale], [w.scale], [u.scale]
    return (
        lambda: dual_gemm(*(side[0] for side in sides), activation="relu2"),
        lambda: grouped_dual_gemm_reference(*sides, activation="relu2")[0],
        (grouped, "check_lists"),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["quantize", "silu_quantize", "grouped_quantize", "16-bit gemm", "nvfp4 gemm", "dual_gemm"]
)
def test_the_second_call_of_every_operation_is_launched_without_checks(gpu, monkeypatch, name):
    torch.manual_seed(0)
    repeated(name)[0]()
    again, reference, (module, check) = repeated(name)
    expected = reference()
    monkeypatch.setattr(module, check, None)
    result = again()
    data = result[0] if isinstance(result, tuple) else getattr(result, "data", result)
    right = expected.data if hasattr(expected, "scale") else expected
    if "16-bit" in name or name == "dual_gemm":
        torch.testing.assert_close(data, right, rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(data.contiguous(), right)
        scale = result[1] if isinstance(result, tuple) else result.scale
        assert scale.dtype == torch.float8_e4m3fn
        rows = [
            scale_layout.from_blocked(s.view(1, -1, 32, 4, 4), 5, right.shape[-1] // 8)
            for s in (scale, expected.scale)
        ]
        assert torch.equal(*(s.view(torch.uint8) for s in rows))


def test_a_call_refused_at_first_is_refused_again(gpu):
    """Calls that were not stored are checked every time."""
    x = torch.randn(4, 24).bfloat16()
    for _ in range(2):
        with pytest.raises(ValueError, match="K=24 is not a positive multiple of 16"):
            quantize(x)


def concatenated(arch, activations):
    """Returns the launch of a ragged dual GEMM with weights in one tensor, its arguments, and what it writes."""
    generator = torch.Generator().manual_seed(len(arch))
    rows, groups, n, k = 12, 3, 256, 128
    b, b_scale = (
        torch.zeros(groups, n, k // 2, dtype=torch.uint8),
        torch.zeros(groups, n // 128, k // 64, 32, 4, 4),
    )
    b_scale = b_scale.to(torch.uint8)
    a, a_scale = (
        torch.zeros(rows, k // 2, dtype=torch.uint8),
        torch.zeros(groups, k // 64, 32, 4, 4).to(torch.uint8),
    )
    if activations == "16bit":
        a, a_scale = torch.zeros(rows, k).bfloat16(), None
    offs, alpha = torch.tensor([4, 8, 12], dtype=torch.int32), torch.rand(groups, generator=generator)
    dtype = torch.bfloat16 if a_scale is None else "nvfp4"
    given = [x for x in (a, b, a_scale, b_scale, offs, alpha, alpha) if x is not None]
    gpu = targets.lookup(arch).gpu
    weights = dual_weights(
        Weights("b1", b, b_scale, "alpha1", alpha), Weights("b2", None, None, "alpha2", alpha), 1.0
    )
    how = ("blocked", Gate("silu", None, "concatenated"), None, False)
    task, results = grouped_task(Parts(a, a_scale), weights, (offs, None), Result(None, dtype, None), *how)
    with on_emulator(target=targets.lookup(arch)):
        return task.launch(gpu, for_emulator=True), given, results


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_halves_of_concatenated_weights_move_with_them(activations):
    """A later call with other tensors has the table that the checks would make."""
    prepare_cutlass()
    launch, given, results = concatenated("sm_90a", activations)
    parts = prepared.parts_of(launch, given + results)
    assert [part.tensor for part in parts.values()] == [1, 2 if activations == "16bit" else 3]
    with on_emulator(target=targets.lookup("sm_90a")):
        call = PreparedCall(launch, given + results, len(results), parts)
    other, others, other_results = concatenated("sm_90a", activations)
    assert call.take(others + other_results, own_out=True)
    assert call.table.tolist() == other.table.reshape(-1).tolist()
    moved = [x.clone() for x in others]
    moved[-1] = moved[-2] = torch.ones(3)
    assert call.take(moved + other_results, own_out=True)
    assert call.table.tolist() != other.table.reshape(-1).tolist()


def test_an_address_that_belongs_to_no_tensor_is_no_part():
    prepare_cutlass()
    launch, given, results = concatenated("sm_90a", "nvfp4")
    copies = [x.clone() for x in given]
    assert prepared.parts_of(launch, copies + results) is None
    assert prepared.parts_of(launch, given + results + [torch.ones(1)]) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", [False, True], ids=["fused", "activated"])
def test_the_second_layer_of_experts_makes_no_table(gpu, monkeypatch, bias):
    """Routing, order, rows, products and sum for other tokens are launched from what the first call prepared."""
    layer = some_layer(40, 2, 4, 64, 128, seed=1)
    if bias:
        layer.options["bias13"] = torch.randint(-2, 3, (4, 256)).bfloat16()
    logits = torch.randn(40, 4)

    def run(x, logits, backend):
        ids, weights = route(logits, 2, backend=backend)
        return moe(x, ids, weights, layer.w13, layer.w2, **layer.options, backend=backend)

    run(layer.x, logits, "auto")
    x, logits = layer.x.flip(0).contiguous(), logits.roll(3, 0)
    want = run(x, logits, "reference")
    monkeypatch.setattr(TableTask, "table", None)
    monkeypatch.setattr(grouped, "check_device_groups", None)
    assert torch.equal(run(x, logits, "auto"), want)
    with pytest.raises(TypeError):
        run(x[:39], logits[:39], "auto")


def test_tasks_that_differ_in_a_number_are_told_apart():
    ids = torch.zeros(3, 2, dtype=torch.int32)
    order = (torch.zeros(4), torch.zeros(6), torch.zeros(3, 2), torch.zeros(3, 2))
    first, other = (PermuteTask(ids, *order, None, start, "whole").call()[2] for start in (0, 1))
    assert first != other and hash(first) is not None
    assert first == PermuteTask(ids.clone(), *order, None, 0, "whole").call()[2]


def test_a_tensor_that_comes_twice_is_known_without_a_signature():
    """The factor of gate and up is such a tensor."""
    if prepared.TensorGuards is None:
        pytest.skip("this torch has no guards")
    prepared.forget()
    a, b, call = torch.ones(3), torch.ones(3), object()
    key, found = prepared.lookup([a, a, b], "twice")
    assert found is None
    prepared.keep(key, call)
    assert prepared.lookup([a, a, b], "twice") == (key, call)
    assert prepared.lookup([b, b, a], "twice") == (None, call)
    assert prepared.lookup([a, b, b], "twice") == (key, call)
    assert prepared.lookup([b, a, a], "twice") == (None, call)
    assert prepared.lookup([a, a, b.double()], "twice")[1] is None
    prepared.forget()
