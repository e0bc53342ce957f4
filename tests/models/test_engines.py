"""doctor's report on engines and on a checkpoint."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvfp4_cute import cli, set_batch_invariant
from nvfp4_cute.batch_invariance import is_batch_invariant
from nvfp4_cute.models import engines
from nvfp4_cute.models.checkpoints import Checkpoint, Scheme
from nvfp4_cute.models.inspect import Kind, inspect

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
MOE = DATA / "modelopt-qwen3moe-nvfp4"


@pytest.fixture
def has_entry_point(monkeypatch):
    point = SimpleNamespace(name="nvfp4_cute")
    monkeypatch.setattr(engines.metadata, "entry_points", lambda group: [point])


@pytest.mark.parametrize(
    "engine, value, expected",
    [
        ("vLLM", None, "active: vLLM loads it"),
        ("vLLM", "a, nvfp4_cute", "active"),
        ("vLLM", "", "not active: VLLM_PLUGINS= leaves it out"),
        ("SGLang", None, "active: SGLang loads it"),
        ("SGLang", "", "active"),  # SGLang loads all
        ("SGLang", "none", "not active: SGLANG_PLUGINS=none leaves it out"),
    ],
)
def test_the_plug_in_is_active_unless_the_environment_leaves_it_out(
    monkeypatch, has_entry_point, engine, value, expected
):
    variable = engines.PLUGINS[engine].variable
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    assert engines.plugin_state([engine.lower()], engine=engine).startswith(expected)


@pytest.mark.parametrize("engine", engines.PLUGINS)
def test_without_an_install_there_is_no_plug_in(monkeypatch, engine):
    assert engines.plugin_state([], engine=engine).startswith(f"{engine} is not installed")
    monkeypatch.setattr(engines.metadata, "entry_points", lambda group: [])
    assert "finds no entry point" in engines.plugin_state([engine.lower()], engine=engine)


@pytest.mark.parametrize("engine", engines.PLUGINS)
def test_an_engine_that_lacks_something_is_named(monkeypatch, has_entry_point, engine):
    monkeypatch.delenv(engines.PLUGINS[engine].variable, raising=False)
    monkeypatch.setattr(engines, "import_module", lambda name: SimpleNamespace(faults=lambda: "it lacks x"))
    assert engines.plugin_state([engine.lower()], True, engine) == "not active: it lacks x"


@pytest.mark.parametrize(
    "quantization, expected",
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "this package"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "SGLang's own methods: the plug-in of SGLang computes only NVFP4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}, "methods: the plug-in of SGLang computes"),
        ({"quant_method": "mxfp4"}, "methods: the plug-in of SGLang computes"),
        ({"quant_method": "unknown"}, "methods: quant_method is 'unknown'; readers are"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "sparsity_config": {"x": 1}}, "methods: it has a sparsity_config"),
    ],
)  # fmt: skip
def test_who_serves_in_sglang(quantization, expected):
    config = {"quantization_config": quantization, "model_type": "qwen3"}
    assert expected in engines.who_serves(config, "active: x", "SGLang")


def test_gpt_oss_in_nvfp4_stays_with_sglang():
    config = {
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "model_type": "gpt_oss",
    }
    assert "methods: models of type gpt_oss have biases" in engines.who_serves(config, "active: x", "SGLang")


@pytest.mark.parametrize(
    "config, state, expected",
    [
        ({}, "active", "vLLM's own layers"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}}, "active: x", "this package"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "not active: y", "this package, if vLLM loads its plug-in (not active: y)"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "active", "own methods: layers are"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "model_type": "gpt_oss"}, "active", "gate and up in turns"),
        ({"quantization_config": {"quant_method": "mxfp4"}, "model_type": "gpt_oss"}, "active", "own methods: for MXFP4 weights"),
        ({"quantization_config": {"quant_method": "mxfp4", "activations": "fp8"}, "model_type": "gpt_oss"}, "active", "this package"),
    ],
)  # fmt: skip
def test_who_serves(config, state, expected):
    assert expected in engines.who_serves(config, state)


def test_kernels_by_rows_on_two_gpus():
    kinds = {kind.name: kind for kind in inspect(Checkpoint(MOE)).kinds if kind.scheme}
    found = engines.kernels_by_rows(kinds["model.layers.*.self_attn.q_proj"], "H200", (1, 8, 512))
    assert list(found) == ["1, 8", "512"]
    assert "w4a16_sm_90a_m8" in found["1, 8"][0] and "w4a16_sm_90a_m32" in found["512"][0]
    (names,) = engines.kernels_by_rows(kinds["model.layers.*.self_attn.q_proj"], "B200", (1,)).values()
    assert "quantize" in names[0]
    (experts,) = engines.kernels_by_rows(kinds["model.layers.*.mlp.experts"], "H200", (1,)).values()
    assert any("gather" in name for name in experts) and any("finalize" in name for name in experts)


def test_kernels_of_mxfp4_layers():
    """FP8 rows on a GPU with a kernel for them, otherwise 16-bit rows, with the biases of gpt-oss."""
    scheme = Scheme("mxfp4", "mxfp4", "mxfp4")
    linear = Kind("x", scheme, "[256, 256]", k_sizes={256})
    experts = Kind("e", scheme, "4 x [512, 256]", k_sizes={256}, has_bias=True)
    for kind, target, is_fp8 in ((linear, "H200", True), (experts, "H200", True), (experts, "B200", False)):
        (names,) = engines.kernels_by_rows(kind, target, (8,), activations="fp8").values()
        assert any("fp8_1xk_x_mxfp4_fp8" in name for name in names) == is_fp8
        (names,) = engines.kernels_by_rows(kind, target, (8,)).values()
        assert any("w4a16" in name or "bfloat16_x_mxfp4" in name for name in names)
        assert kind is linear or "_bias" in names[-1]


def test_sizes_of_a_kind():
    assert (
        Kind("x", None, "8 x [128, 64]").sizes == (8, 128, 64) and Kind("x", None, "8 x [128, 64]").is_experts
    )
    assert not Kind("x", None, "[128, 64]").is_experts


def test_doctor_of_a_checkpoint(capsys):
    assert cli.main(["doctor", str(MOE), "--target", "H200"]) == 0
    text = capsys.readouterr().out
    assert "\nengines\n" in text and "vLLM plug-in:" in text
    assert "kernels on H200 (sm_90a)" in text and "q_proj, 2 of [128, 128]" in text


def test_all_kernels_of_a_checkpoint():
    """Covers separate and merged layers; the kernels that vLLM needs are among them."""
    kinds = inspect(Checkpoint(MOE)).kinds
    assert [kind.shape for kind in engines.joined(k for k in kinds if k.scheme)] == ["[256, 128]"]
    names = {key.to_name() for key in engines.checkpoint_kernels(kinds, "sm_90a", 2, 40)}
    assert {"nvfp4_w4a16_sm_90a_m8_bfloat16_bfloat16_alpha", "moe_finalize_sm_90a_bfloat16_2"} <= names


def test_kernels_of_scales_per_row():
    """Listed where they are asked for, and in batch-invariant mode where the checkpoint has no scale of activations."""
    kinds = [kind for kind in inspect(Checkpoint(MOE)).kinds if kind.scheme]
    assert not any(kind.finds_scale for kind in kinds)
    without = [replace(kind, finds_scale=True) for kind in kinds]

    def names(kinds, activations="by_rows", invariant=False):
        with set_batch_invariant(invariant):
            found = engines.checkpoint_kernels(kinds, "sm_90a", 2, 4, activations=activations)
        return {key.to_name() for key in found}

    of_rows = {
        "nvfp4_quantize_scaled_rows_sm_90a_bfloat16_blocked",
        "moe_gather_quantize_sm_90a_bfloat16_rows_orders",
    }
    assert of_rows <= names(kinds, "nvfp4_per_row") and of_rows <= names(without, invariant=True)
    for others in (names(kinds), names(kinds, invariant=True), names(without)):
        assert not of_rows & others
    assert any("_k2_" in name for name in names(kinds, invariant=True))


def test_compile_verb_takes_a_checkpoint(tmp_path, monkeypatch):
    from nvfp4_cute.cli import compile as ahead

    folder, asked = shutil.copytree(MOE, tmp_path / "situ"), []
    config = json.loads((folder / "config.json").read_text()) | {
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(engines, "MAX_ROWS", 4)
    monkeypatch.setattr(ahead, "compile_all", lambda keys, *_: asked.extend(keys) or 0)
    assert cli.main(["compile", "--model", str(folder), "--arch", "sm_90a", "--out", str(tmp_path)]) == 0
    assert len(asked) > 4 and {key.arch for key in asked} == {"sm_90a"}
    assert {getattr(key, "activation", None) for key in asked} >= {"situ(beta=4.0)"}
    asked.clear()
    options = ["--arch", "sm_90a", "--out", str(tmp_path), "--activations", "per_row", "--batch-invariant"]
    assert cli.main(["compile", "--model", str(folder), *options]) == 0
    assert any("quantize_scaled_rows" in key.to_name() for key in asked) and not is_batch_invariant()
