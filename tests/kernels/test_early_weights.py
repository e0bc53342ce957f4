"""Loads of weights before the previous launch has ended, on the emulator."""

import cases
import pytest
import torch
from device_groups_check import operands, run
from flat_parts import dual_gemm, gemm, grouped_dual_gemm, grouped_gemm
from oracle import bits
from torch.utils.flop_counter import FlopCounterMode

from nvfp4_cute import KernelConfig, QuantizedLinear, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import EmulatorError
from nvfp4_cute.experts.gather import gather
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.nn.gated_mlp import GatedMLP
from nvfp4_cute.planning.arch import family_of

MODES = ("eager", "lazy", "random:1")
ROWS = (0, 40, 130, 1, 0, 70)
# Rings with less than a tile's K, all of it, and more than one tile.
CONFIGS = (
    "t128x64x256_s3a2_swap_p3",
    "t128x64x256_s2a2_2cta_swap_p2",
    "t128x64x256_s7a2_2cta_swap_p4",
    "t128x128x256_s5a2_p2",
    "t128x64x256_s2a2_2cta_swap_m2_p8",
    "t128x64x256_s2a2_swap_m2_p8",
    "t128x64x256_s2a2_m2_p8",
    "t128x64x256_s4a2_swap_k2_p4",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("form", ["ragged", "masked"])
def test_same_bits(form, config, mode):
    arguments = operands(form, ROWS, n=300, k=736, slack=9) | {"early_weights": True}
    expected = run(arguments, "reference")
    with observe(mode=mode, check=True) as observer:
        actual = run(arguments, "emulator:sm_100a", config=KernelConfig.from_name(config))
    kernel = observer.plans[0].kernel
    assert kernel.key.early_weights and kernel.resources.stack_bytes == 0
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS)
def test_same_bits_of_lists(config, mode):
    sizes = tuple(zip(ROWS, (300,) * len(ROWS), (736, 64, 1024, 736, 512, 2048), strict=True))
    a, b, a_scale, b_scale, _ = cases.make_operands(cases.Case("early", sizes))
    multiply = lambda **how: grouped_gemm(a, b, a_scale, b_scale, early_weights=True, **how)
    expected = multiply(backend="reference")
    with observe(mode=mode, check=True) as observer:
        actual = multiply(backend="emulator:sm_100a", config=KernelConfig.from_name(config))
    kernel = observer.plans[0].kernel
    assert kernel.key.early_weights and kernel.resources.stack_bytes == 0
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(actual, expected, strict=True))


def quantized(*shape):
    return quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16())


# Operands for 40 tokens.
X, BATCHES, W, V = quantized(40, 736), quantized(2, 40, 736), quantized(2, 200, 736), quantized(200, 736)
CALLS = {
    "gemm": lambda **how: gemm(X, V, **how),
    "batches": lambda **how: gemm(BATCHES, W, **how),
    "dual": lambda **how: dual_gemm(X, V, quantized(200, 736), **how),
    "batched dual": lambda **how: dual_gemm(BATCHES, W, W, **how),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_same_bits_of_single_products(name, mode):
    expected = CALLS[name](backend="emulator:sm_100a")
    with observe(mode=mode, check=True) as observer:
        actual = CALLS[name](early_weights=True, backend="emulator:sm_100a")
    assert observer.plans[0].kernel.key.early_weights
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
def test_layers_promise_it(mode):
    """The previous launch quantizes rows and also finds their scale, or computes the products of gate and up."""
    generator = torch.Generator().manual_seed(2)
    make = lambda n, k, scale: QuantizedLinear.from_linear(
        torch.nn.Linear(k, n, bias=False), input_scale=scale
    )
    layers = make(96, 64, "auto"), make(96, 64, "auto"), make(64, 96, 1.0)
    x = torch.randn(3, 64, generator=generator).bfloat16()
    alone = layers[0](x)
    for layer in layers:
        layer.backend = "emulator:sm_100a"
    with observe(mode=mode, check=True) as observer:
        assert torch.equal(bits(layers[0](x)), bits(alone))
        GatedMLP(*layers, torch.nn.SiLU(), "silu")(x)
    assert [plan.kernel.key.early_weights for plan in observer.plans] == [True] * 3
    assert not observer.hazards


def test_converted_scales_are_written_right_before():
    plain = quantize(torch.ones(40, 64), scale_layout="rowmajor")
    with observe() as observer:
        gemm(plain, plain, scale_layout="rowmajor", early_weights=True, backend="emulator:sm_100a")
    assert not observer.plans[0].kernel.key.early_weights


# Operands for 40 tokens with another K.
ROWMAJOR = quantize(torch.ones(40, 64), scale_layout="rowmajor")
ROWMAJOR_BATCHES = quantize(torch.ones(2, 40, 64), scale_layout="rowmajor")
BLOCKED, BLOCKED_BATCHES = (
    ROWMAJOR.with_scale_layout("blocked"),
    ROWMAJOR_BATCHES.with_scale_layout("blocked"),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("call", "tokens", "weights", "blocked"), [
    (gemm, ROWMAJOR, (ROWMAJOR,), (BLOCKED,)),
    (gemm, ROWMAJOR_BATCHES, (ROWMAJOR_BATCHES,), (BLOCKED_BATCHES,)),
    (grouped_gemm, [ROWMAJOR], ([ROWMAJOR],), ([BLOCKED],)),
    (dual_gemm, ROWMAJOR, (BLOCKED, ROWMAJOR), (BLOCKED, BLOCKED)),
    (grouped_dual_gemm, [ROWMAJOR], ([BLOCKED], [ROWMAJOR]), ([BLOCKED], [BLOCKED])),
])  # fmt: skip
def test_scales_of_whole_weights_are_converted_right_before(call, tokens, weights, blocked):
    """Scales of ``a`` do not matter, because they are not loaded early."""
    with observe() as observer:
        call(tokens, *weights, early_weights=True, backend="emulator:sm_100a")
        call(tokens, *blocked, early_weights=True, backend="emulator:sm_100a")
    assert [plan.kernel.key.early_weights for plan in observer.plans] == [False, True]


@pytest.mark.parametrize("call", [
    lambda **how: gemm(X, V, **how), lambda **how: dual_gemm(X, V, V, **how), lambda **how: grouped_gemm([X], [V], **how),
    lambda **how: gemm(X.data, V.data, X.scale, V.scale, **how),
    lambda **how: grouped_gemm([X.data], [V.data], [X.scale], [V.scale], **how),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_a_promise_is_a_bool(call, backend):
    with pytest.raises(TypeError, match="early_weights='yes' is not a bool; pass True if"):
        call(early_weights="yes", backend=backend)
    with FlopCounterMode(display=False), pytest.raises(TypeError, match="early_weights='yes' is not a bool"):
        call(early_weights="yes", backend=backend)


@pytest.mark.parametrize(("tokens", "is_kept"), [(33, True), (8, False)])
def test_the_launch_before_may_not_write_sizes(tokens, is_kept):
    """For few choices, the launch that gathers rows also sorts them."""
    ids = torch.arange(tokens * 2, dtype=torch.int32).view(tokens, 2) % 3
    w, w_scale = torch.zeros(3, 128, 32, dtype=torch.uint8), torch.zeros(3, 1, 1, 32, 4, 4, dtype=torch.uint8)
    with observe(check=True):
        x = torch.zeros(tokens, 64).bfloat16()
        (data, scale, _), order = gather(x, ids, 3, format=NVFP4, backend="emulator")
        assert order.is_older == is_kept
        multiply = lambda: grouped_gemm(
            data, w, scale, w_scale, order.offs, early_weights=True, backend="emulator"
        )
        if is_kept:
            assert not multiply().any()
        else:
            with pytest.raises(EmulatorError, match="pdl-order"):
                multiply()


@pytest.mark.parametrize(("arch", "is_chain"), [("sm_90a", False), ("sm_120a", False), ("sm_100a", True)])
def test_other_kernels_have_none(arch, is_chain):
    config = family_of(arch, (NVFP4, NVFP4)).DEFAULT_CONFIG
    key = KernelKey(arch, config, 1, torch.bfloat16, False, is_chain=is_chain, early_weights=True)
    assert not key.validated().early_weights
