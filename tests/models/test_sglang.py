"""The plug-in for SGLang: layers that SGLang's loaders fill, compared with dequantized products, and tokens of whole models."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang_tokens
import torch
from token_checks import check_tokens

from nvfp4_cute import dequantize, quantize
from nvfp4_cute.errors import CheckpointError, UnsupportedProblem
from nvfp4_cute.models import sglang as plugin

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
CONFIG = {"quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"], "packed_modules_mapping": {}}
BOTH, WEIGHT_ONLY = "NVFP4", "W4A16_NVFP4"
K, PARTS, RANK, RANKS = 64, (32, 16, 16), 1, 2


def test_without_sglang_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert "lacks what the plug-in needs" in plugin.faults()
    with caplog.at_level(logging.ERROR, "sglang"):
        plugin.register()
    assert "lacks what the plug-in needs" in caplog.text


@pytest.fixture
def methods():
    pytest.importorskip(
        "sglang.srt.layers.quantization.modelopt_quant",
        reason="SGLang is not installed; make test-sglang installs it",
    )
    from nvfp4_cute.models.sglang import methods

    plugin.register()
    return methods


@pytest.fixture(params=["modelopt", "compressed-tensors"])
def names(request, methods):
    return methods.MODELOPT if request.param == "modelopt" else methods.COMPRESSED


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def tensors(names, weight, input_scale=0.002):
    """The tensors of a quantized matrix in a checkpoint, by name. compressed-tensors stores [1] where ModelOpt stores []."""
    factor, shape = (lambda x: 1 / x, (1,)) if names.is_reciprocal else (lambda x: x, ())
    return {
        names.weight: weight.data.view(torch.uint8),
        names.scale: weight.with_scale_layout("rowmajor").scale,
        names.weight_factor: factor(weight.global_scale.float()).reshape(shape),
        names.input_factor: factor(torch.tensor(input_scale)).reshape(shape),
    }


def linear_layer(methods, names, algo, scales, input_scale=0.002, ranks=1):
    """Three merged parts on the last of ``ranks`` ranks, loaded by SGLang: their layer, method, and dequantized weights."""
    layer, method = torch.nn.Module(), methods.NVFP4LinearMethod(names, methods.SCHEMES[algo])
    sizes = [n // ranks for n in PARTS]
    method.create_weights(layer, K, sizes, K, sum(PARTS), torch.bfloat16, weight_loader=None)
    weights = [quantize(random(n, K, seed=n), global_scale=s) for n, s in zip(PARTS, scales, strict=True)]
    for i, weight in enumerate(weights):
        for name, loaded in tensors(names, weight, input_scale / (i + 1)).items():
            layer._parameters[name].load_merged_column_weight(
                loaded, shard_id=i, shard_offset=sum(sizes[:i]), shard_size=sizes[i], tp_rank=ranks - 1, tp_size=ranks,
                use_presharded_weights=False,
            )  # fmt: skip
    whole = [dequantize(weight, dtype=torch.float32).chunk(ranks)[-1] for weight in weights]
    return layer, method, torch.cat(whole)


@pytest.mark.parametrize("ranks", [1, RANKS], ids=["whole", "half"])
@pytest.mark.parametrize(
    "scales", [(0.01, 0.01, 0.01), (0.01, 0.02, 0.005)], ids=["equal scales", "scales of parts"]
)
@pytest.mark.parametrize("algo", [WEIGHT_ONLY, BOTH])
def test_merged_linear_layers(methods, names, monkeypatch, scales, algo, ranks):
    """Global scales of activations are the largest of the parts."""
    monkeypatch.setenv("NVFP4_CUTE_ACTIVATIONS", "4bit")
    layer, method, weights = linear_layer(methods, names, algo, scales, ranks=ranks)
    method.process_weights_after_loading(layer)
    assert len(layer.nvfp4) == (1 if len(set(scales)) == 1 else 3)
    x, bias = random(5, K, seed=9), random(len(weights), seed=8)
    rows = (
        x.float() if algo == WEIGHT_ONLY else dequantize(quantize(x, global_scale=0.002), dtype=torch.float32)
    )
    torch.testing.assert_close(
        method.apply(layer, x, bias).float(), rows @ weights.T + bias.float(), rtol=0.02, atol=0.1
    )


def row_layer(methods, names, pre_scale=None):
    """The last rank's half of K of a layer [16, 2 K], with factors of activations: its layer, method, and dequantized weights."""
    layer = torch.nn.Module()
    method = methods.NVFP4LinearMethod(names, methods.SCHEMES[WEIGHT_ONLY], pre_scale is not None)
    method.create_weights(layer, K, [16], K * RANKS, 16, torch.bfloat16, weight_loader=None)
    weight = quantize(random(16, K * RANKS), global_scale=0.01)
    loaded = tensors(names, weight) | ({} if pre_scale is None else {"pre_quant_scale": pre_scale})
    for name, tensor in loaded.items():
        # SGLang's layers give a dimension to numbers.
        layer._parameters[name].load_row_parallel_weight(
            tensor.reshape(tensor.shape or 1), tp_rank=RANK, use_presharded_weights=False
        )
    method.process_weights_after_loading(layer)
    return layer, method, dequantize(weight, dtype=torch.float32)[:, K:]


def test_half_of_k(methods, names):
    layer, method, weight = row_layer(methods, names)
    x = random(5, K, seed=9)
    torch.testing.assert_close(method.apply(layer, x).float(), x.float() @ weight.T, rtol=0.02, atol=0.1)
    assert layer.weight.shape == (16, K // 2)  # other code of SGLang reads it


def test_factors_of_activations(methods):
    pre_scale = random(K * RANKS, seed=4).abs() + 0.5
    layer, method, weight = row_layer(methods, methods.MODELOPT, pre_scale)
    x = random(5, K, seed=9)
    expected = (x.float() * pre_scale[K:].float()) @ weight.T
    torch.testing.assert_close(method.apply(layer, x).float(), expected, rtol=0.02, atol=0.2)


def test_output_layer_with_half_of_the_tokens(methods):
    """SGLang's loader fills the rows after the last token with zeros."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    layer, names, tokens, rows = bare(methods.ParallelLMHead), methods.MODELOPT, 40, 32
    method = methods.NVFP4LinearMethod(names, methods.SCHEMES[WEIGHT_ONLY])
    method.create_weights(layer, K, [rows], K, 2 * rows, torch.bfloat16, weight_loader=layer.weight_loader)
    shard = SimpleNamespace(org_vocab_start_index=tokens // 2, org_vocab_end_index=tokens)
    vars(layer).update(
        shard_indices=shard, org_vocab_size=tokens, tp_size=RANKS, use_presharded_weights=False
    )
    weight = quantize(random(tokens, K), global_scale=0.01)
    for name, loaded in tensors(names, weight).items():
        layer.weight_loader(layer._parameters[name], loaded)
    method.process_weights_after_loading(layer)
    assert should_apply_lm_head_quant_method(layer, method)
    x = random(5, K, seed=9)
    expected = torch.zeros(5, rows)
    expected[:, : tokens // 2] = x.float() @ dequantize(weight, dtype=torch.float32)[tokens // 2 :].T
    torch.testing.assert_close(method.apply(layer, x).float(), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("bad", [float("nan"), 0.0, float("inf")], ids=["in no file", "zero", "infinite"])
def test_a_scale_that_cannot_be(methods, names, bad):
    layer, method, _ = linear_layer(methods, names, BOTH, (0.01, 0.01, 0.01))
    layer._parameters[names.input_factor].data[1] = bad
    with pytest.raises(CheckpointError, match=names.input_factor):
        method.process_weights_after_loading(layer)


def bare(kind):
    """A layer of a class of SGLang without its attributes, which SGLang makes from its groups of ranks."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    return layer


def group(bits=4, size=16, activations=True):
    args = {
        "num_bits": bits, "type": "float", "strategy": "tensor_group" if bits == 4 else "tensor", "symmetric": True,
        "group_size": size if bits == 4 else None, "dynamic": False,
    }  # fmt: skip
    return {"weights": args, "input_activations": args if activations else None}


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head", "model.x"],
    "config_groups": {
        "a": {**group(), "targets": ["Linear"]},
        "b": {**group(activations=False), "targets": ["re:.*down_proj"]},
        "c": {**group(bits=8), "format": "float-quantized", "targets": ["re:.*o_proj"]},
    },
}
MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "ignore": [],
    "quantized_layers": {
        "model.q_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.down_proj": {"quant_algo": WEIGHT_ONLY, "group_size": 16},
        "model.o_proj": {"quant_algo": "FP8"},
        "model.experts": {"quant_algo": "NVFP4", "group_size": 16},
    },
}


@pytest.mark.parametrize(
    "config, kind, name, expected",
    [
        ("ModelOptConfig", "linear", "model.q_proj", BOTH),
        ("ModelOptConfig", "experts", "model.experts", BOTH),
        ("ModelOptConfig", "head", "model.head", BOTH),
        ("ModelOptConfig", "head", "lm_head", "UnquantizedLinearMethod"),
        ("MixedConfig", "linear", "model.q_proj", BOTH),
        ("MixedConfig", "linear", "model.down_proj", WEIGHT_ONLY),
        ("MixedConfig", "experts", "model.experts", BOTH),
        ("MixedConfig", "linear", "model.o_proj", "SGLang"),
        ("MixedConfig", "linear", "model.router", "SGLang"),
        ("CompressedConfig", "linear", "model.q_proj", BOTH),
        ("CompressedConfig", "linear", "model.down_proj", WEIGHT_ONLY),
        ("CompressedConfig", "linear", "model.o_proj", "SGLang"),
        ("CompressedConfig", "linear", "model.x", "SGLang"),
        ("CompressedConfig", "experts", "model.experts", "SGLang"),  # down_proj has another scheme
        ("CompressedConfig", "head", "lm_head", "SGLang"),
        ("alone", "experts", "model.experts", BOTH),
        ("rotated", "linear", "model.q_proj", "SGLang"),
    ],
)
def test_who_computes_a_layer(methods, monkeypatch, config, kind, name, expected):
    kinds = {"linear": methods.LinearBase, "experts": methods.FusedMoE, "head": methods.ParallelLMHead}
    for base in (methods.CompressedTensorsConfig, methods.ModelOptMixedPrecisionConfig):
        monkeypatch.setattr(base, "get_quant_method", lambda *_: "SGLang")
    alone = COMPRESSED | {"config_groups": {"a": COMPRESSED["config_groups"]["a"]}}
    given = {
        "ModelOptConfig": CONFIG,
        "MixedConfig": MIXED,
        "CompressedConfig": COMPRESSED,
        "alone": alone,
        "rotated": alone | {"transform_config": {"config_groups": {"R": {}}}},
    }[config]
    made = getattr(methods, config if config.endswith("Config") else "CompressedConfig").from_config(given)
    made.packed_modules_mapping = {}  # SGLang takes it from the model
    method = made.get_quant_method(bare(kinds[kind]), name)
    if expected not in methods.SCHEMES:
        assert expected == (method if isinstance(method, str) else type(method).__name__)
        return
    assert type(method).__name__ == ("NVFP4Experts" if kind == "experts" else "NVFP4LinearMethod")
    assert method.scheme is methods.SCHEMES[expected]
    assert method.names is (methods.MODELOPT if "quant_algo" in given else methods.COMPRESSED)


def test_config_of_both_places(methods):
    nested = {"quantization": {"quant_algo": WEIGHT_ONLY, "group_size": 16, "exclude_modules": []}}
    for config, keeps in ((CONFIG, False), (nested, True)):
        assert methods.ModelOptConfig.from_config(config).keeps_16_bits is keeps
    with pytest.raises(ValueError, match="only supports"):
        methods.ModelOptConfig.from_config({"quant_algo": "INT4", "group_size": 16, "ignore": []})


def test_other_checkpoints_stay_with_sglang(methods, monkeypatch):
    """``--quantization modelopt_fp4`` of a checkpoint that is not NVFP4."""
    monkeypatch.setattr(methods.ModelOptFp4Config, "get_quant_method", lambda *_: "SGLang")
    made = methods.ModelOptConfig(False, "auto", 16, [], {})
    assert made.get_quant_method(bare(methods.FusedMoE), "model.experts") == "SGLang"


E, H, WIDTH, TOP = 3, 64, 64, 2  # per rank: E experts, and WIDTH / RANKS of their features


def experts_layer(methods, names, is_gated, activations="SGLang", **changes):
    """Experts of the last of two ranks, each with half of the experts and half of their features, loaded by SGLang.

    Returns the layer, its method, and the dequantized weights by expert.
    """
    config = SimpleNamespace(
        activation="silu" if is_gated else "relu2", is_gated=is_gated, swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None,
        hidden_size=H, top_k=TOP, routed_scaling_factor=2.5, apply_router_weight_on_input=False,
    )  # fmt: skip
    with_bias = changes.pop("with_bias", False)
    vars(config).update(changes)
    layer = bare(methods.FusedMoE)
    method = methods.NVFP4Experts(names, methods.SCHEMES[WEIGHT_ONLY])
    vars(layer).update(
        quant_config=SimpleNamespace(get_name=lambda: "x"), quant_method=method, scheme=None, weight_load_method=None,
        moe_runner_config=config, num_experts=E * RANKS, num_local_experts=E, _num_local_routed=E,
        _num_global_routed=E * RANKS, _has_fused_shared=False, num_fused_shared_experts=0, uses_expert_location=True,
        moe_ep_size=RANKS, moe_ep_rank=RANK, _expert_storage_rank=RANK, moe_tp_size=RANKS, moe_tp_rank=RANK,
        use_triton_kernels=False, use_padded_loading=False, use_presharded_weights=False,
        use_flashinfer_trtllm_moe=True, use_flashinfer_mxfp4_moe=False,
    )  # fmt: skip
    width = WIDTH // RANKS
    method.create_weights(
        layer, E, H, width, torch.bfloat16, weight_loader=layer.weight_loader, with_bias=with_bias
    )
    method.create_moe_runner(layer, config)
    kept = []
    for e in range(E * RANKS):
        parts = {"w1": random(WIDTH, H, seed=10 * e), "w2": random(H, WIDTH, seed=10 * e + 5)}
        if is_gated:
            parts["w3"] = random(WIDTH, H, seed=10 * e + 1)
        scales = {"w1": 0.01, "w3": 0.02, "w2": 0.02}
        stored = {part: quantize(w, global_scale=scales[part]) for part, w in parts.items()}
        for part, weight in stored.items():
            side = "w2" if part == "w2" else "w13"
            for name, loaded in tensors(names, weight).items():
                parameter = layer._parameters[f"{side}_{name}"]
                parameter.weight_loader(parameter, loaded, f"experts.{side}_{name}", part, e)
        whole = {part: dequantize(w, dtype=torch.float32) for part, w in stored.items()}
        kept.append({part: w[:, width:] if part == "w2" else w[width:] for part, w in whole.items()})
    method.process_weights_after_loading(layer)
    return layer, method, kept[E:]


@pytest.mark.parametrize(
    "is_gated, changes",
    [
        (True, {}),
        (False, {}),
        (True, {"swiglu_limit": 1.0}),
        (True, {"apply_router_weight_on_input": True, "routed_scaling_factor": None}),
    ],
    ids=["gated", "relu2", "limit", "weights of inputs"],
)
def test_experts(methods, names, is_gated, changes):
    layer, method, kept = experts_layer(methods, names, is_gated, **changes)
    x, ids = random(4, H, seed=3), torch.tensor([[0, 1], [2, 0], [1, -1], [2, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.7, 0.3], [0.5, 0.5], [0.9, 0.1], [0.2, 0.8]])
    on_input, limit = "apply_router_weight_on_input" in changes, changes.get("swiglu_limit", torch.inf)
    if on_input:  # SGLang does this for one expert per row
        ids, weights = ids[:, :1], weights[:, :1]
    chosen = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    made = method.apply(layer, SimpleNamespace(hidden_states=x, topk_output=chosen)).hidden_states
    expected = torch.zeros(4, H)
    for t in range(4):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if e < 0:  # of another rank
                continue
            row = x[t].float() * (weight if on_input else 1)
            first, *up = (row @ kept[e][part].T for part in ("w1", "w3") if part in kept[e])
            hidden = first.relu() ** 2
            if is_gated:
                hidden = torch.nn.functional.silu(first.clamp(max=limit)) * up[0].clamp(-limit, limit)
            expected[t] += (1 if on_input else 2.5 * weight) * (hidden @ kept[e]["w2"].T)
    torch.testing.assert_close(made.float(), expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))


def test_sglangs_router_leaves_the_scaling_factor_to_the_method(methods):
    """Where SGLang takes a method for its own NVFP4 method, its router also multiplies by the factor."""
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    assert not issubclass(methods.NVFP4Experts, ModelOptNvFp4FusedMoEMethod)
    assert not getattr(methods.NVFP4Experts, "fuse_routed_scaling_factor_in_topk", False)


def test_experts_that_are_refused(methods, names):
    with pytest.raises(UnsupportedProblem, match="biases"):
        experts_layer(methods, names, True, with_bias=True)
    with pytest.raises(UnsupportedProblem, match="'gelu'"):
        experts_layer(methods, names, True, activation="gelu")
    with pytest.raises(UnsupportedProblem, match=r"alpha 1\.7"):
        experts_layer(methods, names, True, gemm1_alpha=1.7)


@pytest.mark.parametrize("chunk, expected", [(512, 512), (-1, 300), (None, 300)])
def test_rows_of_the_largest_call(methods, monkeypatch, chunk, expected):
    given = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=300)
    monkeypatch.setattr(methods, "get_schedule", lambda: given)
    assert methods.most_rows() == expected


@pytest.mark.parametrize(
    "value, expected", [("", "by_rows"), ("fp8", "by_rows"), ("4bit", "nvfp4"), ("16bit", "16bit")]
)
def test_activations_from_the_environment(methods, monkeypatch, value, expected):
    monkeypatch.setenv("NVFP4_CUTE_ACTIVATIONS", value)
    assert methods.activations() == expected


def test_register_replaces_the_methods_once(methods):
    from sglang.srt.layers import linear, quantization

    plugin.register()
    for name, config in plugin.METHODS.items():
        assert quantization.QUANTIZATION_METHODS[name] is getattr(methods, config)
    assert linear.WEIGHT_LOADER_V2_SUPPORTED.count("NVFP4LinearMethod") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name, options",
    [
        ("ct-qwen3-nvfp4", ()),
        ("modelopt-qwen3moe-nvfp4", ()),
        ("modelopt-qwen3moe-nvfp4", ("tp_size=2",)),
    ],
    ids=["compressed-tensors", "modelopt", "two ranks"],
)
def test_tokens_are_those_of_transformers(methods, name, options):
    """SGLang does not dispatch experts over ranks without a GPU, so no case has ``ep_size=2``."""
    command = [sys.executable, sglang_tokens.__file__, str(DATA / name), *options]
    run = subprocess.run(command, capture_output=True, text=True)
    line = next((line for line in run.stdout.splitlines() if line.startswith("tokens ")), None)
    assert line is not None, run.stderr[-2000:]
    check_tokens(DATA / name, json.loads(line.removeprefix("tokens ")), 0.1)
