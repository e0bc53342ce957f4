"""nvfp4-cute models inspect: what it counts and refuses, and with which names."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import MODELOPT, experts, nvfp4, write

from nvfp4_cute.cli import main
from nvfp4_cute.models.checkpoints import Checkpoint, Scheme
from nvfp4_cute.models.inspect import Kind, inspect, what_runs, where_it_runs
from nvfp4_cute.planning.arch import simt

DATA = Path(__file__).parents[1] / "data" / "checkpoints"


def test_counts_of_a_tools_folder(capsys):
    assert main(["models", "inspect", str(DATA / "modelopt-qwen3moe-nvfp4"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = {kind["name"]: kind for kind in found["kinds"]}
    of_experts = kinds["model.layers.*.mlp.experts"]
    assert (of_experts["count"], of_experts["shape"], of_experts["computed_by"]) == (
        2,
        "8 x [128, 128]",
        "MoE",
    )
    # 8 experts: 4.5 bits per weight, and one float32 each for weights and activations of three projections.
    assert of_experts["nbytes"] == 2 * 8 * (3 * 64 * 128 * 4.5 / 8 + 3 * 8)
    assert kinds["model.layers.*.self_attn.q_proj"]["scheme"] == "W nvfp4, A nvfp4"
    assert kinds["lm_head.weight"]["dtype"] == "BF16" and kinds["lm_head.weight"]["scheme"] is None
    assert sum(kind["nbytes"] for kind in found["kinds"]) == found["nbytes"] and not found["refusals"]
    low, high = of_experts["scale_range"]
    assert 0 < low < high < 1e-4


def test_table(capsys):
    assert main(["models", "inspect", str(DATA / "modelopt-gptoss-nvfp4")]) == 0
    text = capsys.readouterr().out
    assert "gpt_oss" in text and "quantization by modelopt" in text and "4 x [256, 128]" in text
    assert "on sm_90a: dequantized" in text and "sm_100a" in text


def test_refusals_are_named_and_the_rest_is_counted(tmp_path, capsys):
    tensors = nvfp4("model.layers.0.mlp.up_proj") | nvfp4("model.layers.1.mlp.up_proj")
    tensors["model.layers.1.mlp.up_proj.weight_scale_2"].zero_()
    folder = write(tmp_path, tensors, MODELOPT)
    assert main(["models", "inspect", str(folder)]) == 1
    text = capsys.readouterr().out
    assert (
        "refused: model.layers.1.mlp.up_proj.weight_scale_2 is 0" in text
        and "model.layers.*.mlp.up_proj" in text
    )


def test_unequal_scales_and_ways(tmp_path):
    tensors = experts("model.layers.0.mlp.experts")
    found = inspect(Checkpoint(write(tmp_path, tensors, MODELOPT)))
    assert found.kinds[0].unequal == 1 and "K is not a multiple of 32" in what_runs(found.kinds[0])


def test_folders_that_are_none(tmp_path, capsys):
    assert main(["models", "inspect", str(tmp_path)]) == 1
    assert "no config.json" in capsys.readouterr().err
    write(tmp_path, {"x": torch.zeros(2)}, None)
    assert main(["models", "inspect", str(tmp_path)]) == 0
    assert "quantization by none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "activations", "expected"),
    [
        ("[128, 256]", None, "QuantizedLinear, weight-only"),
        ("[128, 256]", "fp8", "QuantizedLinear, weight-only; activations rounded to fp8 before"),
        ("8 x [256, 128]", None, "MoE, weight-only"),
        (
            "8 x [256, 128]",
            "int8",
            "dequantized to 16 bits, torch multiplies; activations rounded to int8 before",
        ),
    ],
)
def test_int4_beside_8_bit_activations(shape, activations, expected):
    """Weights are rounded as in ``linear_module`` and ``experts_module``, because no kernel multiplies them."""
    assert what_runs(Kind("layer", Scheme("W4A8", "int4", activations), shape, k_sizes={256})) == expected


def test_fp8_in_blocks_is_multiplied_where_blocks_are_whole():
    scheme = Scheme("fp8", "fp8_128x128", "fp8_1x128")
    kind = lambda shape, k: Kind("layer", scheme, shape, k_sizes={k})
    assert what_runs(kind("[128, 256]", 256)).startswith("QuantizedLinear on sm_90a")
    assert what_runs(kind("8 x [256, 128]", 128)).startswith("MoE on sm_90a")
    assert what_runs(kind("[128, 192]", 192)).startswith("dequantized to 16 bits")


def test_where_it_runs_names_every_architecture_with_kernels():
    named = [arch for archs, _ in where_it_runs() for arch in archs.split()]
    assert sorted(named) == sorted(simt.ARCHS)
    assert dict(where_it_runs())["sm_80 sm_86 sm_89"].startswith("weight-only")
