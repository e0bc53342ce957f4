"""With ``batch_invariant``, the bits of a row are those of that row alone, wherever it lies and whatever lies around it."""

import random
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nvfp4_cute import (
    ActivationFormat,
    Experts,
    GateUp,
    KernelConfig,
    Options,
    QuantizedLinear,
    dual_gemm,
    gemm,
    grouped_gemm,
    moe,
    quantize,
    route,
    set_batch_invariant,
)
from nvfp4_cute.activation import SILU
from nvfp4_cute.backends import last_chains
from nvfp4_cute.backends.last_chains import LastChains
from nvfp4_cute.batch_invariance import is_batch_invariant, refuse_capture
from nvfp4_cute.errors import ConfigError, UnsupportedProblem
from nvfp4_cute.experts import tensor_parallel
from nvfp4_cute.experts.products import LocalExperts
from nvfp4_cute.experts.records import LayerOfExperts
from nvfp4_cute.formats.block_format import BFLOAT16, FORMATS
from nvfp4_cute.launch.plan import config_of
from nvfp4_cute.nn.gated_mlp import GatedMLP
from nvfp4_cute.nn.products import QUANTIZED_HIDDEN_ROWS
from nvfp4_cute.planning.arch import ARCHS, WEIGHT_ONLY_ARCHS, choose_weight_only, warp_mma
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.problem import GroupedProblem

K, N = 1024, 128  # enough of K, and few enough tiles, to divide it among CTAs
PAIRS = {
    "w4a4": ("nvfp4", "nvfp4"), "per_row": ("per_row", "nvfp4"), "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"), "fp8": ("fp8_1x128", "fp8_128x128"), "w4a16": (None, "nvfp4"),
}  # fmt: skip
EMULATED = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


def normal(*shape, seed=0):
    """Normal values; blocks of 16 have magnitudes of 2^-6 to 2^6, so that sums of NVFP4 products are not exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if shape[-1] % 16 == 0:
        exponents = torch.randint(-6, 7, (*shape[:-1], shape[-1] // 16), generator=generator)
        x *= (2.0**exponents).repeat_interleave(16, -1)
    return x.bfloat16()


def rows_of(x, format, backend="auto"):
    if format == "per_row":
        return quantize(x, global_scale="per_row", backend=backend)
    return x if format is None else quantize(x, format=format)


def assert_alike(of_some, of_all, places):
    """Rows of a result that was computed of some rows, against the rows of the result of all."""
    assert torch.equal(of_some.view(torch.int32), of_all[places].contiguous().view(torch.int32))


@pytest.fixture(autouse=True)
def invariant():
    with set_batch_invariant():
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", EMULATED)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rows", [20, pytest.param(150, marks=pytest.mark.slow)])
def test_a_row_alone_and_among_others(arch, pair, rows):
    a_format, b_format = PAIRS[pair]
    x, w = normal(rows, K), quantize(normal(N, K, seed=1), format=b_format)
    how = {"out_dtype": torch.float32, "backend": f"emulator:{arch}"}
    whole = gemm(rows_of(x, a_format), w, **how)
    draw = random.Random(f"{arch} {pair} {rows}")
    for count in (1, 3):
        places = draw.sample(range(rows), count)
        assert_alike(gemm(rows_of(x[places].contiguous(), a_format), w, **how), whole, places)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", EMULATED)
def test_a_row_with_its_own_global_scale(arch):
    """The row has another magnitude than those around it; the kernels quantize and multiply."""
    x, w, backend = normal(140, K), quantize(normal(N, K, seed=1), global_scale="auto"), f"emulator:{arch}"
    x[5] *= 2.0**-9
    of_one, of_all = (rows_of(rows, "per_row", backend) for rows in (x[5:6].contiguous(), x))
    assert torch.equal(of_one.global_scale, of_all.global_scale[5:6])
    assert torch.equal(of_one.data, of_all.data[5:6])
    how = {"out_dtype": torch.float32, "backend": backend}
    assert_alike(gemm(of_one, w, **how), gemm(of_all, w, **how), [5])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", EMULATED)
@pytest.mark.parametrize("pair", ["w4a4", "per_row", "w4a16"])
def test_a_row_of_a_group(arch, pair):
    a_format, b_format = PAIRS[pair]
    x, w = normal(24, K), quantize(normal(2, N, K, seed=1), format=b_format)
    how = {"out_dtype": torch.float32, "backend": f"emulator:{arch}"}
    a = rows_of(x, a_format)
    ragged = grouped_gemm(a, w, torch.tensor([0, 24], dtype=torch.int32), **how)
    alone = grouped_gemm(
        rows_of(x[5:6].contiguous(), a_format), w, torch.tensor([0, 1], dtype=torch.int32), **how
    )
    assert_alike(alone, ragged, [5])
    (listed,) = grouped_gemm([rows_of(x[4:7].contiguous(), a_format)], [w[1]], **how)
    assert_alike(listed, ragged, [4, 5, 6])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", EMULATED)
@pytest.mark.parametrize("rows", ["nvfp4", "per_row", "16bit"])
def test_a_token_of_a_layer(rows, arch):
    experts, hidden, width, top_k = 4, 128, 128, 2
    w13, w2 = (
        quantize(normal(experts, 2 * width, hidden, seed=1)),
        quantize(normal(experts, hidden, width, seed=2)),
    )
    x, (ids, weights) = normal(9, hidden), route(normal(9, experts, seed=3).float(), top_k)
    how = {"activations": ActivationFormat("nvfp4", "per_row") if rows == "per_row" else rows}
    whole = moe(x, ids, weights, w13, w2, **how, backend=f"emulator:{arch}")
    alone = moe(x[4:5], ids[4:5], weights[4:5], w13, w2, **how, backend=f"emulator:{arch}")
    assert torch.equal(alone.view(torch.int16), whole[4:5].contiguous().view(torch.int16))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", ["list", "ragged", "masked", "batched"])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_no_chosen_config_divides_k(arch, form, gate):
    num_sms = {"sm_90a": 132, "sm_100a": 148}.get(arch, 84)
    divides = 0
    for rows in (1, 8, 40, 300):
        sizes = ((rows, 256, 4096),) * (1 if form == "list" else 3)
        for flag in (True, False):
            problem = GroupedProblem(sizes, form, activation=gate, batch_invariant=flag)
            config = config_of(problem, arch, num_sms)
            assert config.adds_parts(1) or not flag
            divides += not config.adds_parts(1)
    if gate is None and form == "list" and arch in ("sm_90a", "sm_100a"):
        assert divides, "without the flag K is divided somewhere, or this test says nothing"


@pytest.mark.parametrize("arch", WEIGHT_ONLY_ARCHS)
def test_one_weight_only_kernel_for_all_sizes(arch):
    def chosen(rows, groups):
        sizes = ((rows, 512, 4096),) * groups
        return choose_weight_only(arch, GroupedProblem(sizes, a_format=BFLOAT16, batch_invariant=True), 132)

    assert all(chosen(rows, groups).adds_parts(1) for rows in (1, 8, 40, 300) for groups in (1, 8))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", EMULATED)
@pytest.mark.parametrize("pair", ["w4a4", "w4a16", "mxfp8", "fp8"])
def test_all_configs_of_the_mode_give_the_same_bits(arch, pair):
    """Tiles and clusters change no bit: the choice for each number of rows may take any config with the mode's parts of K."""
    a_format, b_format = PAIRS[pair]
    x, w = normal(9, K), quantize(normal(N, K, seed=1), format=b_format)
    formats = (FORMATS[a_format] if a_format else BFLOAT16, FORMATS[b_format])
    tried = candidates(arch, "list", formats=formats)
    if all(config.use_warp_mma for config in tried):
        tried = warp_mma.BATCH_INVARIANT
    a, how = rows_of(x, a_format), {"out_dtype": torch.float32, "backend": f"emulator:{arch}"}
    for parts in (1, 2):
        configs = [config for config in tried if config.adds_parts(parts)]
        results = [grouped_gemm([a], [w], options=Options(config=config), **how)[0] for config in configs]
        assert (results or parts == 2) and all(torch.equal(one, results[0]) for one in results)


def test_dense_products_divide_k_by_the_weights_alone():
    def parts(rows, n):
        with set_batch_invariant():
            problem = GroupedProblem(((rows, n, 4096),), is_dense=True)
        return config_of(problem, "sm_90a", 132).split_k

    assert {parts(rows, 4096) for rows in (1, 8, 40, 300, 2000)} == {2}
    assert {parts(rows, 24576) for rows in (1, 8, 40, 300, 2000)} == {1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", EMULATED)
@pytest.mark.parametrize("pair", ["w4a4", "w4a16"])
def test_a_row_of_a_gated_product(arch, pair):
    a_format, b_format = PAIRS[pair]
    x, gate, up = normal(12, K), *(quantize(normal(N, K, seed=s), format=b_format) for s in (1, 2))
    how = {"out_dtype": torch.float32, "backend": f"emulator:{arch}"}
    whole = dual_gemm(rows_of(x, a_format), GateUp(gate, up), **how)
    assert_alike(dual_gemm(rows_of(x[7:8].contiguous(), a_format), GateUp(gate, up), **how), whole, [7])


def test_options_decide_for_a_call():
    problem = lambda: GroupedProblem(((8, 256, 4096),)).batch_invariant
    assert problem()
    with set_batch_invariant(False):
        assert not problem()
    x, w = quantize(normal(8, K)), quantize(normal(N, K))
    split = KernelConfig.from_name("t128x16x128_s0a1_swap_pre_sk")
    how = {"backend": "emulator:sm_90a", "out_dtype": torch.float32}
    with pytest.raises(ConfigError, match="batch_invariant=True"):
        gemm(x, w, options=Options(config=split), **how)
    gemm(x, w, options=Options(config=split, batch_invariant=False), **how)
    with pytest.raises(TypeError, match="not a bool"):
        set_batch_invariant("yes")


def test_scales_of_all_rows_are_refused():
    x = normal(8, 64)
    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 32), activations="nvfp4")
    with pytest.raises(UnsupportedProblem, match='input_scale="per_row"'):
        layer(x)
    scaled = QuantizedLinear.from_linear(torch.nn.Linear(64, 32), input_scale="per_row")
    assert torch.equal(scaled(x)[2:3], scaled(x[2:3]))


def test_captures_of_separate_products_are_refused():
    with pytest.raises(UnsupportedProblem, match="before the capture"):
        refuse_capture("layers")
    with set_batch_invariant(False):
        refuse_capture("layers")


def test_vllm_switches_it_on(monkeypatch):
    from nvfp4_cute.models import vllm

    monkeypatch.setattr(vllm, "faults", lambda: None)
    monkeypatch.setitem(
        sys.modules, "nvfp4_cute.models.vllm.config", SimpleNamespace(register_config=lambda name: None)
    )
    with set_batch_invariant(False):
        vllm.register()
        assert not is_batch_invariant()
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        vllm.register()
        assert is_batch_invariant()


def test_a_layer_quantizes_hidden_rows_in_one_way():
    parts = [quantize(normal(64, 64, seed=seed)) for seed in (1, 2, 3)]
    layer = GatedMLP(
        *(QuantizedLinear.from_quantized(w, activations="nvfp4", input_scale=None, backend="reference") for w in parts),
        torch.nn.functional.silu, "silu",
    )  # fmt: skip
    x = normal(QUANTIZED_HIDDEN_ROWS + 1, 64)
    assert torch.equal(layer(x[:-1]), layer(x)[:-1])


def test_a_layer_repeats_no_chain_of_the_other_mode(monkeypatch):
    x, result, ran = torch.zeros(4), torch.zeros(4), []

    class Chain:
        def try_launch(self, tensors, outs):
            return [result]

    @contextmanager
    def watching():
        yield [(Chain(), [x], result, False)]

    def run(x):
        ran.append(is_batch_invariant())
        return result

    monkeypatch.setattr(last_chains, "watching_chains", watching)
    layer = LastChains()
    for enabled in (False, False, True):
        with set_batch_invariant(enabled):
            layer.call((), [x], run, x)
    assert ran == [False, True]


def test_configs_for_mean_rows_are_not_those_of_the_other_mode():
    w13, w2 = quantize(normal(2, 256, 2048, seed=1)), quantize(normal(2, 2048, 128, seed=2))
    layer = LayerOfExperts(Experts(w13), Experts(w2), SILU, ActivationFormat("16bit"))
    experts = LocalExperts.of(normal(1, 2048), layer)
    divides = []
    for enabled in (False, True):
        with set_batch_invariant(enabled):
            configs = experts._configs(1, torch.bfloat16, "emulator:sm_90a", w2.data.device)
        divides.append(not all(config.adds_parts(1) for config in configs))
    assert divides == [True, False]


def test_a_traced_function_does_not_switch_it_on():
    def traced(x):
        with set_batch_invariant():
            return x + 1

    with pytest.raises(UnsupportedProblem, match="torch.compile"):
        torch.compile(traced, backend="eager")(torch.zeros(1))


def test_products_of_torch_are_refused():
    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, 32), activations="16bit", pre_decode=True)
    with pytest.raises(UnsupportedProblem, match="pre_decode"):
        layer(torch.zeros(1, 64))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with set_batch_invariant(False):
        layer(torch.zeros(1, 64))
        compiled(torch.zeros(1, 64))
    with pytest.raises(Exception, match="pre_decode"):
        compiled(torch.zeros(1, 64))


def test_shares_of_ranks_are_added_in_their_order(monkeypatch):
    shares = [torch.full((1, 2), value) for value in (1e8, -1e8, 1.0)]

    def all_gather(found, own, group):
        for place, share in zip(found, shares, strict=True):
            place.copy_(share)

    def all_reduce(total, group):
        total.copy_(shares[0] + (shares[1] + shares[2]))

    for name, fake in (
        ("get_world_size", lambda group: 3),
        ("all_gather", all_gather),
        ("all_reduce", all_reduce),
    ):
        monkeypatch.setattr(tensor_parallel.dist, name, fake)
    assert torch.equal(tensor_parallel._summed(shares[0], None), torch.ones(1, 2))
    with set_batch_invariant(False):
        assert torch.equal(tensor_parallel._summed(shares[0], None), torch.zeros(1, 2))
