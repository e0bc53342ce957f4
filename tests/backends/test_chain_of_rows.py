"""Chains of many rows: prepared once for a range of numbers of rows, with the bits of launches one by one, and few Python calls."""

import gc
from types import SimpleNamespace

import pytest
import torch
from emulated_gpu import emulated_gpu
from oracle import assert_bitwise_equal
from python_calls import python_calls

from nvfp4_cute import MoE, QuantizedLinear, backends, dequantize, quantize, route
from nvfp4_cute.backends import calls, cuda
from nvfp4_cute.compile import cache
from nvfp4_cute.compile.compiler import CompiledKernel, Launcher
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.compile.simt_keys import QuantizeKey, W4A16Key
from nvfp4_cute.experts import moe as layers
from nvfp4_cute.gpus import targets
from nvfp4_cute.launch import prepared
from nvfp4_cute.launch.prepared_chain import ChainRows, PreparedChain, PreparedSteps
from nvfp4_cute.launch_table import NUM_COLUMNS, W4A16, Group, Quantize
from nvfp4_cute.nn import by_rows, products
from nvfp4_cute.ops.parts import dequantized
from nvfp4_cute.planning.rows import rounded_rows

E, H, I, TOP_K = 4, 128, 128, 2
K, N = 64, 128
# Python calls of a layer with a number of rows that was never seen. The second call of a range computes its signature.
MOST_OF_LINEAR, MOST_OF_SECOND, MOST_BY_ROWS, MOST_OF_EXPERTS, MOST_WITH_TORCH = 31, 40, 35, 32, 95


@pytest.fixture
def h100(monkeypatch):
    with torch.no_grad(), emulated_gpu(monkeypatch, targets.lookup("H100")) as emulator:
        yield emulator


def some_rows(rows, k=K, dtype=torch.bfloat16):
    return torch.randn(rows, k).to(dtype)


def linear(activations, bias=True, out_dtype=torch.bfloat16):
    """A layer's op as a graph calls it, and its arguments for some rows."""
    scale = {"input_scale": 0.01} if activations == "nvfp4" else {}
    plain = torch.nn.Linear(K, N, bias=bias).bfloat16()
    layer = QuantizedLinear.from_linear(plain, activations=activations, **scale)
    given = layer.given_input_scale()
    parts = *layer.parts(given), given, False, layer.mode, out_dtype, "auto", layer.bias_now()
    return torch.ops.nvfp4_cute.linear.default, lambda x: (x, *parts)


def linear_by_rows():
    """The op of a layer that chooses its activations by the number of rows."""
    call, given = linear("nvfp4")
    x, *parts, alpha, input_scale, finds, _, out_dtype, backend, bias = given(None)
    rest = *parts, alpha, alpha, input_scale, finds, out_dtype, backend, bias
    return by_rows.linear_by_rows._opoverload, lambda x: (x, *rest)


def of_format(format, activations):
    """A call of a layer with weights in a format without global scales, and its arguments for some rows."""
    plain = torch.nn.Linear(2 * K, N).bfloat16()
    layer = QuantizedLinear.from_linear(plain, format=format, activations=activations)
    parts = layer.packed_weight, layer.scale, layer.bias_now()
    how = layer.format.name, layer.mode, torch.bfloat16, "auto"
    return torch.ops.nvfp4_cute.linear_of_format.default, lambda x: (torch.cat([x, x], 1), *parts, *how)


def experts(activations, bias=False):
    """A layer, and its arguments for some rows."""
    of_bias = {"bias13": torch.randn(E, 2 * I).bfloat16(), "bias2": torch.randn(E, H).bfloat16()}
    weights = torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 8
    layer = MoE.from_experts(*weights, activations=activations, **(of_bias if bias else {}))

    def given(x):
        wide = torch.cat([x, x], 1)
        choices = route(x[:, :E].float(), TOP_K, backend="reference")
        return wide, *choices, wide if activations == "16bit" else None

    return layer, given


def kept(kind):
    return [one for one in prepared.of_thread().values() if isinstance(one, kind)]


def one_by_one(call, arguments, monkeypatch):
    """The result of launches one by one: their second call, because the reference computes the first one."""
    run = lambda backend, run, with_rows, *arguments: run(*arguments)
    with monkeypatch.context() as patch:
        for module in (products, layers):
            patch.setattr(module, "chain_of_rows", run)
        call(*arguments)
        return call(*arguments)


KINDS = [
    pytest.param(lambda: linear("nvfp4"), MOST_OF_LINEAR, id="linear, nvfp4"),
    pytest.param(lambda: linear("16bit"), MOST_OF_LINEAR, id="linear, 16bit"),
    pytest.param(linear_by_rows, MOST_BY_ROWS, id="linear by rows"),
    pytest.param(lambda: of_format("mxfp4", "16bit"), MOST_OF_LINEAR, id="linear, mxfp4"),
    pytest.param(lambda: of_format("fp8_128x128", "fp8"), MOST_OF_LINEAR, id="linear, fp8"),
    pytest.param(lambda: of_format("int8", "int8"), MOST_OF_LINEAR, id="linear, int8"),
    pytest.param(lambda: experts("nvfp4"), MOST_OF_EXPERTS, id="experts, nvfp4"),
    pytest.param(lambda: experts("16bit"), MOST_OF_EXPERTS, id="experts, 16bit"),
    pytest.param(lambda: experts("nvfp4", bias=True), MOST_OF_EXPERTS, id="experts with biases"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("make", "most"), KINDS)
def test_one_preparation_for_a_range_of_rows(h100, monkeypatch, make, most):
    """Numbers of rows that were never seen, fewer and more than before, up to the capacity."""
    (call, given), rehearsed, rehearse = make(), [], calls._rehearse
    monkeypatch.setattr(calls, "_rehearse", lambda *given: rehearsed.append(1) or rehearse(*given))
    monkeypatch.setattr(calls, "chain", None)
    for rows in (67, 72, 68):
        arguments = given(some_rows(rows))
        assert_bitwise_equal(call(*arguments), one_by_one(call, arguments, monkeypatch))
    assert len(rehearsed) == len(kept(PreparedChain)) == 1
    assert python_calls(call, given(some_rows(70)), monkeypatch)[0] <= most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_dequantized_weights_serve_any_number_of_rows(h100, monkeypatch, bias, dtype):
    """The launch of one layer is prepared once for all ranges; torch multiplies the rows of the call, also under autocast."""
    monkeypatch.setattr(dequantized, "dequantizes_first", lambda *_: True)
    planned, plan = [], backends.planned
    monkeypatch.setattr(backends, "planned", lambda *given: planned.append(1) or plan(*given))
    call, given = linear("16bit", bias, dtype)
    for rows in (67, 66, 128, 300):
        arguments = given(some_rows(rows))
        got = call(*arguments)
        with torch.autocast("cpu", torch.float16):
            assert_bitwise_equal(call(*arguments), got)
        assert_bitwise_equal(got, one_by_one(call, arguments, monkeypatch))
    assert len(planned) == 1 and len(kept(PreparedSteps)) == 3
    assert python_calls(call, given(some_rows(299)), monkeypatch)[0] <= MOST_OF_SECOND


def test_experts_with_dequantized_weights(h100, monkeypatch):
    """Torch multiplies between launches, which are prepared like those of a chain."""
    monkeypatch.setattr(dequantized, "dequantizes_first", lambda *_: True)
    call, given = experts("16bit", bias=True)
    for rows in (67, 72, 66):
        arguments = given(some_rows(rows))
        assert_bitwise_equal(call(*arguments), one_by_one(call, arguments, monkeypatch))
    assert len(kept(PreparedSteps)) == 1
    assert python_calls(call, given(some_rows(70)), monkeypatch)[0] <= MOST_WITH_TORCH


def test_weights_of_the_call(h100, monkeypatch):
    """Other layers of the same kind, and rows that lie otherwise, get their own results."""
    first, second = (linear("nvfp4") for _ in range(2))
    wide, flat = some_rows(70, 3 * K), torch.randn(70 * K + 1).bfloat16()
    for x in (some_rows(70), wide[:, K : 2 * K], some_rows(140)[::2], flat[1:].view(70, K)):
        for call, given in (first, second):
            plain = given(x.clone(memory_format=torch.contiguous_format))
            assert_bitwise_equal(call(*given(x)), one_by_one(call, plain, monkeypatch))


def test_what_cannot_be_rehearsed_runs_one_by_one(h100, monkeypatch):
    """A layer that finds the global scale of its input. The decision is kept, and errors name the call's rows."""
    layer = QuantizedLinear.from_linear(torch.nn.Linear(K, N).bfloat16(), activations="nvfp4")
    rehearsed, rehearse = [], calls._rehearse
    monkeypatch.setattr(calls, "_rehearse", lambda *given: rehearsed.append(1) or rehearse(*given))
    for rows in (67, 67, 66):
        x = some_rows(rows)
        q = quantize(x, global_scale="auto", backend="reference")
        want = dequantize(q, torch.float32) @ dequantize(layer.quantized_weight, torch.float32).T + layer.bias
        assert (layer(x).float() - want).norm() < 1e-2 * want.norm()
    assert len(rehearsed) == 1
    layer, given = experts("16bit")
    x, ids, weights, _ = given(some_rows(67))
    with pytest.raises(ValueError, match="67"):
        layer(x, ids, weights[:, :1])


def test_memory_may_come_back(h100, monkeypatch):
    """Without memory for the most rows, a call runs its launches one by one, and a later one prepares them. Faults are raised."""
    (call, given), run = linear("nvfp4"), products._product
    arguments = given(some_rows(67))
    right = one_by_one(call, arguments, monkeypatch)

    def refused(error):
        def product(x, *rest):
            if len(x) == rounded_rows(67):
                raise error
            return run(x, *rest)

        return product

    with monkeypatch.context() as patch:
        patch.setattr(products, "_product", refused(torch.OutOfMemoryError("no memory")))
        for _ in range(2):
            assert_bitwise_equal(call(*arguments), right)
        patch.setattr(products, "_product", refused(KeyError("a fault")))
        with pytest.raises(KeyError, match="a fault"):
            call(*arguments)
    for _ in range(2):
        assert_bitwise_equal(call(*arguments), right)
    assert python_calls(call, arguments, monkeypatch)[0] <= MOST_OF_LINEAR


def test_tensors_with_other_numbers_of_rows_are_refused(h100, monkeypatch):
    """Also after all of them were seen with numbers of the same range."""
    monkeypatch.setattr(Launcher, "__call__", lambda launcher, stream: None)
    layer, given = experts("16bit")
    for rows in (70, 69, 70):
        arguments = given(some_rows(rows))
        layer(*arguments)
    for number, name in enumerate(("x", "ids", "weights", "shared")):
        other = [*arguments]
        other[number] = other[number][:69]
        with pytest.raises(ValueError, match="69" if name != "shared" else "shared"):
            layer(*other)


def test_few_rows_keep_their_own_chains(h100):
    call, given = linear("16bit")
    for rows in (calls.MANY_ROWS - 1, calls.MANY_ROWS - 1, calls.MANY_ROWS - 2, calls.MANY_ROWS - 2):
        call(*given(some_rows(rows)))
    assert len(kept(PreparedChain)) == 2


def test_kernels_of_the_most_rows_are_planned(h100, monkeypatch):
    """Planning prepares nothing: the next call rehearses, and finds the kernels that planning named."""
    call, given = linear("nvfp4")
    with cache.planning() as asked:
        call(*given(some_rows(67)))
    assert asked and not kept((PreparedChain, calls._RunsOneByOne))
    call(*given(some_rows(67)))
    (chain,) = kept(PreparedChain)
    assert len(chain._launchers) == 2
    seen, run = [], products._product
    monkeypatch.setattr(products, "_product", lambda x, *rest: seen.append(len(x)) or run(x, *rest))
    with cache.planning():
        call(*given(some_rows(90)))
    assert seen == [rounded_rows(90), 90]


def test_the_garbage_collector_is_not_counted(monkeypatch):
    def call():
        return [[number] for number in range(100)]

    right, _ = python_calls(call, (), monkeypatch)
    called_back, thresholds = [], gc.get_threshold()
    gc.callbacks.append(lambda phase, info: called_back.append(phase))
    gc.set_threshold(1)
    try:
        assert python_calls(call, (), monkeypatch)[0] == right
        call()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()
    assert called_back


# ---- tables ----
LAYERS = {
    "linear, nvfp4": lambda x: products._product(
        x, *weights_of(1536, 512), None, False, "nvfp4", torch.bfloat16, "auto", None
    ),
    "linear, 16bit": lambda x: products._product(
        x, *weights_of(1536, 512), None, False, "16bit", torch.bfloat16, "auto", None
    ),
    "linear, float32": lambda x: products._product(
        x, *weights_of(200, 512), None, False, "16bit", torch.float32, "auto", None
    ),
}

OF_GROUP = (NUM_COLUMNS + Group.OUT_BATCH_PITCH, NUM_COLUMNS + Group.SFA_ROW_BLOCKS)
# Places that no launch reads here: distances of batches (there is one), and blocks of scales of the memory between launches.
UNUSED = {
    QuantizeKey: (Quantize.X_BATCH,),
    W4A16Key: (W4A16.X_BATCH, W4A16.OUT_BATCH),
    KernelKey: OF_GROUP,
}


def weights_of(n, k):
    w = quantize(torch.zeros(n, k))
    return w.data, w.scale, torch.ones(())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("gpu", ["H200", "B200", "RTX 5090", "A100"])
def test_tables_of_fewer_rows(monkeypatch, gpu, layer):
    """Numbers that follow from the rows are those of a table that was made for them."""
    target, launches = targets.lookup(gpu), []
    if gpu == "A100" and "nvfp4" in layer:
        pytest.skip("no kernel for quantized rows")
    stub = lambda key: CompiledKernel(key, SimpleNamespace(), "", b"", b"")
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setattr(cache, "compile_kernel", stub)
    monkeypatch.setattr(cache.disk_cache, "fetch", lambda folder, key: stub(key))
    monkeypatch.setattr(dequantized, "dequantizes_first", lambda *_: False)
    with torch.no_grad(), emulated_gpu(monkeypatch, target):
        run = lambda task: launches.append(task.launch(target.gpu)) or launches[-1]
        monkeypatch.setattr(cuda, "run", run)
        monkeypatch.setattr(prepared, "remember", lambda *given: None)
        for capacity in (80, 256, 896, 2048):
            launches.clear()
            LAYERS[layer](torch.zeros(capacity, 512, dtype=torch.bfloat16))
            first = launches[:]
            for rows in (capacity - 1, capacity - 7, capacity * 7 // 8 + 1):
                assert rounded_rows(rows) == capacity
                launches.clear()
                LAYERS[layer](torch.zeros(rows, 512, dtype=torch.bfloat16))
                for one, other in zip(first, launches, strict=True):
                    assert one.kernel.key == other.kernel.key
                    table, right = one.table.flatten(), other.table.flatten()
                    assert one.rows.rows == capacity
                    numbers = ChainRows(capacity, [(number, 1) for number in one.rows.numbers])
                    assert numbers.write(table, rows)
                    unused = [*one.places, *UNUSED[type(one.kernel.key)]]
                    table[unused] = right[unused] = 0
                    assert table.tolist() == right.tolist()


def test_more_rows_than_prepared():
    rows = ChainRows(8, [])
    assert rows.write(torch.zeros(1).numpy(), 8) and not rows.write(torch.zeros(1).numpy(), 9)
