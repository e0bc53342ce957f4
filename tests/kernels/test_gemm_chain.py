"""Layers chained in one launch on the emulator return the bits of one gemm per layer, in every mode."""

import re
from dataclasses import replace

import pytest
import torch
from flat_parts import gemm
from oracle import assert_bitwise_equal

from nvfp4_cute import KernelConfig, NVFP4Tensor, PersistentMLP, UnsupportedProblem, quantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.emulator.check.ledger import HazardError
from nvfp4_cute.emulator.fronts.driver import Emulator
from nvfp4_cute.formats.scale_layout import from_blocked
from nvfp4_cute.launch import plan


def make_layers(num_layers, m, n, seed=0):
    """Returns input, weights, and global scales of the input and of every result."""
    generator = torch.Generator().manual_seed(seed)
    scales = [0.002] + [0.002 * 1.1**g for g in range(num_layers)]
    x = quantize(torch.randn(m, n, generator=generator), global_scale=scales[0])
    weights = [
        quantize(torch.randn(n, n, generator=generator) / n**0.5, global_scale=0.001)
        for _ in range(num_layers)
    ]
    return x, weights, scales


def one_by_one(x, weights, scales, **options):
    """Computes one gemm per layer."""
    for g, w in enumerate(weights):
        alpha = torch.tensor(scales[g]) * w.global_scale
        x = gemm(
            x.data,
            w.data,
            x.scale,
            w.scale,
            alpha,
            out_dtype="nvfp4",
            out_global_scale=scales[g + 1],
            **options,
        )
    return x


def assert_same(actual: NVFP4Tensor, expected: NVFP4Tensor):
    rows, k_blocks = actual.shape[0], actual.shape[1] // 16
    assert_bitwise_equal(actual.data, expected.data)
    assert_bitwise_equal(*(from_blocked(t.scale, rows, k_blocks) for t in (actual, expected)))


CONFIGS = ("t128x64x256_s0a4_swap_p3", "t128x64x256_s2a2_2cta_swap_p4", "t128x128x256_s0a2_p4")


def test_a_launch_whose_ctas_cannot_all_run_is_refused_not_hung(monkeypatch):
    """This happens with MPS or in a green context, which have fewer SMs than the plan assumes."""
    monkeypatch.setattr(plan, "clusters_at_once", lambda arch, config, num_sms, formats: 2 * num_sms)
    x, weights, scales = make_layers(2, 1280, 1024)
    mlp = PersistentMLP(weights, scales, backend="emulator", config=KernelConfig.from_name(CONFIGS[0]))
    mlp.config = replace(mlp.config, num_cta=160)
    with pytest.raises(UnsupportedProblem, match="all have to run at once.*smaller num_cta"):
        mlp(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *zip(CONFIGS, ("eager", "lazy", "random:1"), strict=True),
        *(
            pytest.param(name, mode, marks=pytest.mark.slow)
            for name in CONFIGS
            for mode in ("eager", "lazy", "random:2")
        ),
    ],
)
def test_equals_a_gemm_a_layer(name, mode):
    """One launch without hazards, for layers with more tiles than CTAs and with fewer."""
    layers, config = make_layers(3, 40, 288), KernelConfig.from_name(name)
    mlp = PersistentMLP(*layers[1:], backend="emulator", config=config)
    with observe(mode=mode, check=True) as observer:
        first, second = mlp(layers[0]), mlp(layers[0])
    assert len(observer.stats) == 2
    expected = one_by_one(*layers, backend="emulator", config=config)
    assert_same(first, expected)
    assert_same(second, expected)  # the counters are zero again
    assert not any(workspace.counters.any() for workspace in mlp._workspaces.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t128x128x256_s2a2_ultra_swap_p3", "t128x128x256_s0a3_2cta_ultra_p2"])
def test_mmas_of_96_elements_of_k(name):
    """The MMAs read one K tile past K, from a result that the launch itself writes.

    Sums are rounded; those of the chain equal those of single gemms.
    """
    layers, options = make_layers(3, 150, 544), {"backend": "emulator:sm_103a"}
    options["config"] = KernelConfig.from_name(name)
    mlp = PersistentMLP(*layers[1:], **options)
    expected = one_by_one(*layers, **options)
    with observe(mode="lazy", check=True):
        for _ in range(2):
            assert_same(mlp(layers[0]), expected)


@pytest.mark.slow
def test_eighteen_layers():
    layers = make_layers(18, 16, 256)
    with observe(check=True) as observer:
        actual = PersistentMLP(*layers[1:], backend="emulator")(layers[0])
    assert len(observer.stats) == 1
    assert_same(actual, one_by_one(*layers, backend="emulator"))


ACQUIRE = r"ld\.acquire\.gpu\.global\.b32 (\S+), \[[^\]]+\];"


@pytest.mark.parametrize(
    ("pattern", "text", "hazard"),
    [
        (ACQUIRE, r"mov.b32 \1, 0x7fffffff;", "race"),
        (r"fence\.proxy\.async\.global;", "", "proxy-fence"),
    ],
    ids=["no wait", "no proxy fence"],
)
def test_planted_faults_are_found(monkeypatch, pattern, text, hazard):
    """Planted faults between one layer's stores and the next layer's loads: the checker reports a lost wait or fence."""
    register = Emulator.register

    def register_mutant(self, ptx, *cubin):
        mutant, count = re.subn(pattern, text, ptx)
        assert count >= 1, f"{pattern} is not in the kernel any more"
        return register(self, mutant, *cubin)

    monkeypatch.setattr(Emulator, "register", register_mutant)
    layers = make_layers(3, 16, 256)
    mlp = PersistentMLP(*layers[1:], backend="emulator", config=KernelConfig.from_name(CONFIGS[0]))
    with observe(check=True), pytest.raises(HazardError, match=hazard):
        mlp(layers[0])


def test_reference_and_moves():
    """The reference calls one gemm per layer. ``.half()`` of a model does not change the chain, and its state dict loads."""
    layers = make_layers(3, 5, 64)
    mlp = PersistentMLP(*layers[1:])
    expected = one_by_one(*layers)
    assert_same(mlp(layers[0]), expected)
    other = PersistentMLP(*make_layers(3, 5, 64, seed=1)[1:])
    other.load_state_dict(mlp.half().state_dict())
    assert_same(other(layers[0]), expected)


def test_refusals():
    x, weights, scales = make_layers(2, 5, 64)
    with pytest.raises(UnsupportedProblem, match="sm_90a: no kernel (writes NVFP4|for chains)"):
        PersistentMLP(weights, scales, backend="emulator:sm_90a")(x)
    with pytest.raises(ValueError, match="pass one for the input and one for each result: 3"):
        PersistentMLP(weights, scales[:2])
    with pytest.raises(ValueError, match="a chain of equal layers takes"):
        PersistentMLP([weights[0], quantize(torch.ones(32, 32))], scales)
    with pytest.raises(ValueError, match="K=32 and b has K=64"):
        PersistentMLP(weights, scales, backend="emulator")(quantize(torch.ones(5, 32)))
