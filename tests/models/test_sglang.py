"""The plug-in for SGLang: layers whose parameters are filled as SGLang's loaders do, compared with dequantized products."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from nvfp4_cute import dequantize, quantize
from nvfp4_cute.errors import CheckpointError, UnsupportedProblem
from nvfp4_cute.models import sglang as plugin

CONFIG = {"quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
K, PARTS = 64, (32, 16, 16)


def test_without_sglang_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with caplog.at_level(logging.ERROR, "sglang"):
        plugin.register()
    assert "lacks what the plug-in needs" in caplog.text


@pytest.fixture
def methods():
    pytest.importorskip("sglang.srt.layers.quantization.modelopt_quant", reason="SGLang is not installed")
    from nvfp4_cute.models.sglang import methods

    plugin.register()
    return methods


def copied(parameter, loaded, *_, **__):
    parameter.data.copy_(loaded)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fill(layer, prefix, rows, weight, factor_at=None):
    """Copies a quantized matrix into rows of a layer's parameters, and its global scale into the entry ``factor_at``."""
    getattr(layer, f"{prefix}weight").data[rows] = weight.data.view(torch.uint8)
    getattr(layer, f"{prefix}weight_scale").data[rows] = weight.with_scale_layout("rowmajor").scale
    getattr(layer, f"{prefix}weight_scale_2").data[factor_at] = weight.global_scale


def linear_layer(methods, algo, scales, input_scale=None):
    """A layer of three merged parts, its method, and the dequantized weights."""
    layer = torch.nn.Module()
    method = methods.NVFP4LinearMethod(methods.NVFP4Config.from_config(CONFIG | {"quant_algo": algo}))
    method.create_weights(layer, K, list(PARTS), K, sum(PARTS), torch.bfloat16, weight_loader=copied)
    weights = [quantize(random(n, K, seed=n), global_scale=s) for n, s in zip(PARTS, scales, strict=True)]
    start = 0
    for i, weight in enumerate(weights):
        fill(layer, "", slice(start, start + len(weight)), weight, i)
        start += len(weight)
    if input_scale is not None:
        layer.input_scale.data.fill_(input_scale)
    return layer, method, torch.cat([dequantize(weight, dtype=torch.float32) for weight in weights])


@pytest.mark.parametrize(
    "scales", [(0.01, 0.01, 0.01), (0.01, 0.02, 0.005)], ids=["equal scales", "scales of parts"]
)
@pytest.mark.parametrize("input_scale", [None, 0.002], ids=["16-bit rows", "4-bit rows"])
def test_merged_linear_layers(methods, monkeypatch, scales, input_scale):
    monkeypatch.setenv("NVFP4_CUTE_ACTIVATIONS", "4bit")
    layer, method, weights = linear_layer(
        methods, "W4A16_NVFP4" if input_scale is None else "NVFP4", scales, input_scale
    )
    method.process_weights_after_loading(layer)
    assert len(layer.nvfp4) == (1 if len(set(scales)) == 1 else 3)
    x, bias = random(5, K, seed=9), random(sum(PARTS), seed=8)
    rows = (
        x.float()
        if input_scale is None
        else dequantize(quantize(x, global_scale=input_scale), dtype=torch.float32)
    )
    torch.testing.assert_close(
        method.apply(layer, x, bias).float(), rows @ weights.T + bias.float(), rtol=0.02, atol=0.1
    )


def test_a_scale_that_no_file_has(methods):
    layer, method, _ = linear_layer(methods, "NVFP4", (0.01, 0.01, 0.01))
    with pytest.raises(CheckpointError, match="input_scale"):
        method.process_weights_after_loading(layer)


def test_config_of_both_places(methods):
    nested = {"quantization": {"quant_algo": "W4A16_NVFP4", "group_size": 16, "exclude_modules": []}}
    for config, keeps in ((CONFIG, False), (nested, True)):
        assert methods.NVFP4Config.from_config(config).keeps_16_bits is keeps
    with pytest.raises(ValueError, match="only supports"):
        methods.NVFP4Config.from_config({"quant_algo": "INT4", "group_size": 16, "ignore": []})


E, H, WIDTH, TOP = 3, 64, 32, 2


def experts_layer(methods, is_gated, up_first=False, **more):
    """Experts with random weights, their method, and the dequantized weights."""
    config = SimpleNamespace(
        activation="silu" if is_gated else "relu2", is_gated=is_gated, swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None,
        hidden_size=H, top_k=TOP, routed_scaling_factor=2.5, apply_router_weight_on_input=False,
    )  # fmt: skip
    layer = torch.nn.Module()
    vars(layer).update(
        num_experts=E, moe_ep_rank=0, moe_runner_config=config, use_flashinfer_trtllm_moe=up_first
    )
    method = methods.ModelOptExperts(methods.NVFP4Config.from_config(CONFIG | {"quant_algo": "W4A16_NVFP4"}))
    method.create_weights(layer, E, H, WIDTH, torch.bfloat16, weight_loader=copied, **more)
    method.create_moe_runner(layer, config)
    kept = []
    for e in range(E):
        sides = [
            quantize(random(WIDTH, H, seed=10 * e + i), global_scale=0.01 * (i + 1))
            for i in range(2 if is_gated else 1)
        ]
        down = quantize(random(H, WIDTH, seed=10 * e + 5), global_scale=0.02)
        for i, side in enumerate(sides):
            place = 1 - i if up_first else i
            fill(
                layer,
                "w13_",
                (e, slice(place * WIDTH, (place + 1) * WIDTH)),
                side,
                (e, place) if is_gated else e,
            )
        fill(layer, "w2_", e, down, e)
        kept.append([dequantize(one, dtype=torch.float32) for one in (*sides, down)])
    method.process_weights_after_loading(layer)
    return layer, method, kept


@pytest.mark.parametrize(
    "is_gated, up_first", [(True, False), (True, True), (False, False)], ids=["gated", "up first", "relu2"]
)
def test_experts(methods, is_gated, up_first):
    layer, method, kept = experts_layer(methods, is_gated, up_first)
    x, ids = random(4, H, seed=3), torch.tensor([[0, 1], [2, 0], [1, -1], [2, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.7, 0.3], [0.5, 0.5], [0.9, 0.1], [0.2, 0.8]])
    chosen = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    made = method.apply(layer, SimpleNamespace(hidden_states=x, topk_output=chosen)).hidden_states
    expected = torch.zeros(4, H)
    for t in range(4):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if e < 0:  # of another rank
                continue
            *sides, down = kept[e]
            first, *up = (x[t].float() @ side.T for side in sides)
            hidden = torch.nn.functional.silu(first) * up[0] if is_gated else first.relu() ** 2
            expected[t] += 2.5 * weight * (hidden @ down.T)
    torch.testing.assert_close(made.float(), expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))


def test_experts_that_are_refused(methods):
    with pytest.raises(UnsupportedProblem, match="biases"):
        experts_layer(methods, True, with_bias=True)
    config = SimpleNamespace(
        activation="gelu", is_gated=True, swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None
    )
    with pytest.raises(UnsupportedProblem, match="'gelu'"):
        methods.activation_of(config)


def test_register_replaces_the_method_once(methods):
    from sglang.srt.layers import linear, quantization

    plugin.register()
    assert quantization.QUANTIZATION_METHODS[plugin.METHOD] is methods.NVFP4Config
    assert linear.WEIGHT_LOADER_V2_SUPPORTED.count("NVFP4LinearMethod") == 1
