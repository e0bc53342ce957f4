"""Readers: values of the tools' own files, every convention, and refusals by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_files import MODELOPT, experts, nvfp4, write

from nvfp4_cute.errors import CheckpointError, UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.formats.block_format import MXFP4, MXFP4_FP8
from nvfp4_cute.formats.block_scaled import NVFP4Tensor, dequantize, quantize
from nvfp4_cute.formats.codecs import decode_e2m1, decode_e4m3, decode_ue8m0, unpack_e2m1
from nvfp4_cute.models.checkpoints import Checkpoint
from nvfp4_cute.models.checkpoints.checkpoint import quantization_of
from nvfp4_cute.models.checkpoints.names import spellings
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredLinear, as_nvfp4, stored_weight
from nvfp4_cute.models.checkpoints.tensors import TensorFiles, TensorWriter
from nvfp4_cute.models.layers import experts_module, linear_module

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
L = "model.layers.0.mlp"
FP4_GROUP = {
    "format": "nvfp4-pack-quantized",
    "weights": {"num_bits": 4, "type": "float", "group_size": 16},
}


def by_hand(codes, scale, block):
    """Dequantizes [..., K] codes with scales of blocks in the plainest way."""
    return codes.unflatten(-1, (-1, block)) * scale.unsqueeze(-1)


def test_files_of_the_tools():
    """Random weights had standard deviation 0.02, so nibbles, scales and the direction of global scales are right."""
    for name, linears, count in (
        ("modelopt-qwen3moe-nvfp4", 8, 2),
        ("modelopt-gptoss-nvfp4", 8, 2),
        ("ct-qwen3-nvfp4", 14, 0),
    ):
        checkpoint = Checkpoint(DATA / name)
        assert (len(checkpoint.linears), len(checkpoint.experts)) == (linears, count)
        for layer in checkpoint.each_linear():
            assert 0.019 < layer.weight.dequantize().std() < 0.021
            assert layer.input_scale is not None and 1e-4 < layer.input_scale < 1e-2
        for prefix in checkpoint.experts:
            one = checkpoint.read_experts(prefix)
            halves = one.w13.dequantize().unflatten(1, (2, -1)) * one.w13_global[..., None, None]
            assert 0.019 < halves.std() < 0.021
            assert 0.019 < (one.w2.dequantize() * one.w2_global[:, None, None]).std() < 0.021


def test_every_tensor_is_plain_or_of_a_layer():
    checkpoint = Checkpoint(DATA / "modelopt-gptoss-nvfp4")
    owned = [
        name for one in (*checkpoint.linears, *checkpoint.experts) for name in checkpoint.tensors_of(one)
    ]
    assert sorted(owned + checkpoint.plain) == sorted(checkpoint.files)
    assert "model.layers.0.self_attn.q_proj.bias" in checkpoint.plain


def test_interleaved_gate_and_up_are_told_apart():
    """gpt-oss: row 2 i of the file is row i of the gate, row 2 i + 1 is row i of up."""
    checkpoint = Checkpoint(DATA / "modelopt-gptoss-nvfp4")
    files, name = checkpoint.files, f"{L}.experts.gate_up_proj"
    one = checkpoint.read_experts(f"{L}.experts")
    codes = unpack_e2m1(files[name].transpose(1, 2).contiguous())
    scale = decode_e4m3(files[f"{name}_weight_scale"]).transpose(1, 2)
    values = by_hand(decode_e2m1(codes), scale, 16).flatten(-2)
    got, width = one.w13.dequantize(), values.shape[1] // 2
    assert torch.equal(got[:, :width], values[:, 0::2]) and torch.equal(got[:, width:], values[:, 1::2])
    assert torch.equal(one.w13_bias[:, width:], files[f"{name}_bias"][:, 1::2])


def test_modelopt_experts_keep_two_factors(tmp_path):
    checkpoint = Checkpoint(write(tmp_path, experts(f"{L}.experts"), MODELOPT))
    one = checkpoint.read_experts(f"{L}.experts")
    gate, up, down = (
        nvfp4("x", *sizes, seed) for sizes, seed in (((16, 32), 4), ((16, 32), 5), ((32, 16), 6))
    )
    assert one.w13_global[1].tolist() == [gate["x.weight_scale_2"], up["x.weight_scale_2"]]
    assert one.w13_global[1, 0] != one.w13_global[1, 1]
    assert one.w13_input[1] == up["x.input_scale"], "both read the same rows: the larger scale"
    assert torch.equal(one.w13.data[1], torch.cat([gate["x.weight"], up["x.weight"]]))
    assert torch.equal(one.w2.data[1], down["x.weight"]) and one.w2_global[1] == down["x.weight_scale_2"]


def test_compressed_tensors_scales_are_reciprocal():
    checkpoint = Checkpoint(DATA / "ct-qwen3-nvfp4")
    layer = checkpoint.linear("model.layers.0.self_attn.q_proj")
    stored = checkpoint.files["model.layers.0.self_attn.q_proj.weight_global_scale"]
    assert torch.equal(layer.weight.global_scale, (1 / stored).reshape(())) and layer.weight.global_scale < 1


def test_gpt_oss_as_released(tmp_path):
    """Blocks of 32 have a separate dimension, exponents are stored plus 127, and rows of gate and up alternate."""
    g = torch.Generator().manual_seed(0)
    prefix = f"{L}.experts"
    blocks = torch.randint(0, 256, (2, 8, 3, 16), dtype=torch.uint8, generator=g)
    scales = torch.randint(118, 130, (2, 8, 3), dtype=torch.uint8, generator=g)
    tensors = {
        f"{prefix}.gate_up_proj_blocks": blocks, f"{prefix}.gate_up_proj_scales": scales,
        f"{prefix}.gate_up_proj_bias": torch.randn(2, 8, generator=g).bfloat16(),
        f"{prefix}.down_proj_blocks": torch.zeros(2, 96, 1, 16, dtype=torch.uint8),
        f"{prefix}.down_proj_scales": torch.full((2, 96, 1), 127, dtype=torch.uint8),
        f"{prefix}.down_proj_bias": torch.zeros(2, 96).bfloat16(),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4).bfloat16(),
    }  # fmt: skip
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    checkpoint = Checkpoint(write(tmp_path, tensors, quantization, model_type="gpt_oss"))
    one = checkpoint.read_experts(prefix)
    assert not checkpoint.linears and one.w13_global is None and one.scheme.activations is None
    values = by_hand(decode_e2m1(unpack_e2m1(blocks)).flatten(-2), decode_ue8m0(scales), 32).flatten(-2)
    assert torch.equal(one.w13.dequantize(), torch.cat([values[:, 0::2], values[:, 1::2]], 1))


def test_fp8_blocks_multiply(tmp_path):
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=g).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=g) + 0.5
    tensors = {"model.layers.0.self_attn.q_proj.weight": weight}
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = scale
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    layer = Checkpoint(write(tmp_path, tensors, quantization)).linear("model.layers.0.self_attn.q_proj")
    got = layer.weight.dequantize()
    assert got[199, 299] == weight[199, 299].float() * scale[1, 2]
    assert got[127, 128] == weight[127, 128].float() * scale[0, 1]


def test_mixed_precision_by_layer(tmp_path):
    """The exact name comes first, then the module around it; transformers' spelling finds the tool's."""
    fp8 = {"x.weight": torch.ones(16, 64).to(torch.float8_e4m3fn), "x.weight_scale": torch.tensor(0.5)}
    tensors = nvfp4("backbone.layers.0.mixer.q_proj") | nvfp4("backbone.layers.1.mixer.up_proj")
    del tensors["backbone.layers.1.mixer.up_proj.input_scale"]
    tensors |= {f"backbone.layers.2.mixer.in_proj.{n[2:]}": t for n, t in fp8.items()}
    quantization = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"],
        "quantized_layers": {
            "backbone.layers.0": {"quant_algo": "W4A16_NVFP4"}, "backbone.layers.0.mixer.q_proj": {"quant_algo": "NVFP4"},
            "model.layers.1.mixer": {"quant_algo": "W4A16_NVFP4"}, "backbone.layers.2.*": {"quant_algo": "FP8"},
        },
    }  # fmt: skip
    checkpoint = Checkpoint(write(tmp_path, tensors, quantization))
    assert [scheme.name for scheme in checkpoint.linears.values()] == ["NVFP4", "W4A16_NVFP4", "FP8"]
    assert checkpoint.linear_named("model.layers.2.mixer.in_proj") == "backbone.layers.2.mixer.in_proj"
    assert checkpoint.linear("backbone.layers.2.mixer.in_proj").weight.dequantize().unique() == 0.5


@pytest.mark.parametrize(("activations", "scheme"), [(None, "W4A16_NVFP4"), ({"num_bits": 4}, "NVFP4")])
def test_groups_without_activations_are_weights_alone(tmp_path, activations, scheme):
    """Some weight-only exports call themselves NVFP4; their layers have no scale of activations."""
    quantization = MODELOPT | {
        "config_groups": {"group_0": {"input_activations": activations, "targets": ["Linear"]}}
    }
    checkpoint = Checkpoint(write(tmp_path, nvfp4(Q), quantization))
    assert checkpoint.linears[Q].name == scheme


@pytest.mark.parametrize(
    ("pattern", "excluded"),
    [
        ("model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.self_attn*", True),
        ("model.layers.0.self_attn", True),
        ("*.q_proj", True),
        ("model.layers.0.self_attn.q_proj\0backbone.pt_name_sentinel", True),
        ("model.layers.0.self_attn.q", False),
        ("model.layers.1*", False),
        ("\0", False),
    ],
)
def test_excluded_modules(tmp_path, pattern, excluded):
    """An excluded layer that is quantized anyway comes from another export."""
    folder = write(tmp_path, nvfp4("model.layers.0.self_attn.q_proj"), MODELOPT | {"ignore": [pattern]})
    if excluded:
        with pytest.raises(CheckpointError, match="leaves out"):
            Checkpoint(folder)
    else:
        assert list(Checkpoint(folder).linears) == ["model.layers.0.self_attn.q_proj"]


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("shape", [(2, 1, 3, 1), (2, 3)], ids=str)
def test_blocks_of_modelopt(tmp_path, shape):
    """FP8_PB_WO has an extra dimension for the inside of each block of scales."""
    g = torch.Generator().manual_seed(0)
    weight, scale = (
        torch.randn(256, 384, generator=g).to(torch.float8_e4m3fn),
        torch.rand(2, 3, generator=g) + 0.5,
    )
    quantization = {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
    scale = scale.bfloat16()
    tensors = {f"{Q}.weight": weight, f"{Q}.weight_scale": scale.reshape(shape)}
    got = Checkpoint(write(tmp_path, tensors, quantization)).linear(Q).weight.dequantize()
    rows, columns = torch.arange(256) // 128, torch.arange(384) // 128
    assert torch.equal(got, weight.float() * scale.float()[rows][:, columns])


def test_one_block_has_a_scale_without_dimensions(tmp_path):
    tensors = {
        f"{Q}.weight": torch.ones(128, 128).to(torch.float8_e4m3fn),
        f"{Q}.weight_scale": torch.tensor(0.5),
    }
    quantization = {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
    got = Checkpoint(write(tmp_path, tensors, quantization)).linear(Q).weight.dequantize()
    assert bool((got == 0.5).all())


def test_blocks_of_32_with_8_bit_activations(tmp_path):
    """ModelOpt's W4A8_NVFP4_FP8: each scale belongs to two blocks of 16."""
    one = nvfp4(Q)
    scale = one[f"{Q}.weight_scale"][:, :2].clone()
    quantization = {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}
    layer = Checkpoint(write(tmp_path, one | {f"{Q}.weight_scale": scale}, quantization)).linear(Q)
    assert (layer.scheme.weights, layer.scheme.activations) == ("nvfp4", "fp8")
    codes = decode_e2m1(unpack_e2m1(one[f"{Q}.weight"]))
    wanted = by_hand(codes, decode_e4m3(scale), 32).flatten(-2) * one[f"{Q}.weight_scale_2"]
    assert torch.equal(layer.weight.dequantize(), wanted)


@pytest.mark.parametrize("scales", ["one", "experts"])
def test_fused_experts_that_lie_k_first(tmp_path, scales):
    """Llama-4 in FP8 has [E, K, N] and one scale for all, or one per expert. Blocks along N are refused."""
    g = torch.Generator().manual_seed(0)
    first, down = (torch.randn(2, *s, generator=g).to(torch.float8_e4m3fn) for s in ((64, 96), (48, 64)))
    scale = torch.tensor(0.25) if scales == "one" else torch.tensor([0.25, 0.5])
    prefix = "model.layers.0.feed_forward.experts"
    tensors = {f"{prefix}.gate_up_proj": first, f"{prefix}.gate_up_proj_weight_scale": scale,
               f"{prefix}.down_proj": down, f"{prefix}.down_proj_weight_scale": scale}  # fmt: skip
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8"}
    read = Checkpoint(write(tmp_path / "a", tensors, quantization, model_type="llama4_text")).read_experts(
        prefix
    )
    factor = scale.expand(2)[:, None, None]
    assert torch.equal(read.w13.dequantize(), first.float().transpose(1, 2) * factor)
    assert torch.equal(read.w2.dequantize(), down.float().transpose(1, 2) * factor)
    tensors[f"{prefix}.gate_up_proj"] = torch.zeros(2, 64, 48, dtype=torch.uint8)
    tensors[f"{prefix}.gate_up_proj_weight_scale"] = torch.full((2, 64, 3), 127, dtype=torch.uint8)
    folder = write(
        tmp_path / "b", tensors, {"quant_method": "modelopt", "quant_algo": "mxfp4"}, model_type="gpt_oss"
    )
    with pytest.raises(
        CheckpointError, match="gate_up_proj of .* lies K first, and scales .* not for blocks along K"
    ):
        Checkpoint(folder).read_experts(prefix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale_2"), "has no weight_scale_2"),
        (lambda t: t.pop(f"{Q}.weight_scale"), "has no weight_scale;"),
        (lambda t: t.pop(f"{Q}.input_scale"), "has no input_scale.*missing_input_scale"),
        (lambda t: t[f"{Q}.input_scale"].zero_(), r"input_scale is 0, and a scale is finite and positive"),
        (lambda t: t[f"{Q}.weight_scale_2"].fill_(torch.nan), "weight_scale_2 is nan"),
        (lambda t: t.update({f"{Q}.weight_scale_2": torch.ones(2)}), r"weight_scale_2 has shape \[2\]; a layer has one"),
        (lambda t: t[f"{Q}.weight_scale"][3].fill_(torch.nan), r"weight_scale\[3, 0\] is nan, one of 4 scales"),
        (lambda t: t[f"{Q}.weight_scale"][3].fill_(-1), r"weight_scale\[3, 0\] is -1"),
        (lambda t: t[f"{Q}.weight_scale"].zero_(), "weight_scale is zero throughout"),
        (lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :2].clone()}), r"has shape \[16, 2\]"),
        (lambda t: t.update({f"{Q}.svdquant_lora_a": torch.ones(64)}), "svdquant_lora_a.*nothing that this reader"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].view(torch.float8_e4m3fn)}), "weights are torch.uint8"),
        (lambda t: t.update({f"{Q}.weight_scale_2": torch.ones((), dtype=torch.bfloat16)}), "global scale is float32"),
    ],
)  # fmt: skip
def test_refused_by_name(tmp_path, change, message):
    tensors = nvfp4(Q)
    change(tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint(write(tmp_path, tensors, MODELOPT)).linear(Q)
    assert Q in str(error.value)


@pytest.mark.parametrize("value", [None, 0.0, torch.inf])
def test_experts_that_no_token_reached(tmp_path, value):
    """On request, their scale of activations is the largest of the layer."""
    tensors, name = experts(f"{L}.experts"), f"{L}.experts.1.down_proj.input_scale"
    if value is None:
        del tensors[name]
    else:
        tensors[name] = torch.tensor(value)
    folder = write(tmp_path, tensors, MODELOPT)
    with pytest.raises(CheckpointError, match="experts.1.down_proj"):
        Checkpoint(folder).read_experts(f"{L}.experts")
    one = Checkpoint(folder, missing_input_scale="fill").read_experts(f"{L}.experts")
    assert one.w2_input[1] == max(one.w2_input[0], one.w2_input[2])


def test_experts_are_complete(tmp_path):
    tensors = {n: t for n, t in experts(f"{L}.experts").items() if ".1.up_proj" not in n}
    with pytest.raises(CheckpointError, match="no up projection of expert 1"):
        Checkpoint(write(tmp_path, tensors, MODELOPT)).read_experts(f"{L}.experts")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "eetq"}, "'eetq'; readers are"),
        ({"bits": 4, "group_size": 64}, "as MLX writes it"),
        (MODELOPT | {"ignore": "lm_head"}, "'lm_head' is not a list of module names"),
        (MODELOPT | {"ignore": [None]}, r"\[None\] is not a list of module names"),
        (MODELOPT | {"ignore": ["re:(("]}, r"re:\(\( is not a regular expression"),
        (MODELOPT | {"quant_algo": "INT4_AWQ"}, "quant_algo is 'INT4_AWQ'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"format": "marlin-24"}}}, "marlin-24"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}},
            "sparsity_config.format is 'sparse-24-bitmask', structure '2:4'",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "transform_config rotates"),
        (MODELOPT | {"config_groups": ["g"]}, r"config_groups is \['g'\]; it is an object"),
        (MODELOPT | {"config_groups": {"g": None}}, "config_groups.g is None; it is an object"),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"q": "FP8"}}, "quantized_layers.q is 'FP8'; it is"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": [4]}}}, r"config_groups.g.weights is \[4\]"),
        ({"quant_method": "compressed-tensors", "sparsity_config": "2:4"}, "sparsity_config is '2:4'; it is an object"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": FP4_GROUP | {"targets": "re:.*q_proj"}}},
            "'re:.\\*q_proj' is not a list of module names",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128"),
    ],
)  # fmt: skip
def test_unknown_schemes(tmp_path, quantization, message):
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(write(tmp_path, nvfp4(Q), quantization))


def with_biases(tensors, count=3):
    """Adds a bias for each projection of experts to ``tensors``."""
    g, biases = torch.Generator().manual_seed(1), {}
    for e in range(count):
        for name, n in (("gate_proj", 16), ("up_proj", 16), ("down_proj", 32)):
            biases[f"{L}.experts.{e}.{name}.bias"] = torch.randn(n, generator=g).bfloat16()
    return tensors | biases, biases


def test_biases_of_single_experts(tmp_path):
    """gpt-oss with one tensor per expert: biases are stacked, gate first."""
    tensors, biases = with_biases(experts(f"{L}.experts"))
    one = Checkpoint(write(tmp_path, tensors, MODELOPT)).read_experts(f"{L}.experts")
    assert one.w13_bias.shape == (3, 32) and one.w2_bias.shape == (3, 32)
    for e in range(3):
        gate, up, down = (biases[f"{L}.experts.{e}.{name}_proj.bias"] for name in ("gate", "up", "down"))
        assert torch.equal(one.w13_bias[e], torch.cat([gate, up])) and torch.equal(one.w2_bias[e], down)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b, up: b.pop(up), "experts.1.up_proj.bias is in no file, and other experts of the layer have a bias"),
        (lambda b, up: b.update({up: b[up][:8]}), r"1.up_proj.bias is torch.bfloat16 \[8\], and .*0.up_proj.bias .* \[16\]"),
        (lambda b, up: [b.pop(n) for n in list(b) if "up_proj" in n], "of gate and up projections of experts one has biases"),
        (lambda b, up: b.update({n: t.repeat(2) for n, t in b.items()}), r"\[3, 32\], and weights .* one per row, \[3, 16\]"),
    ],
)  # fmt: skip
def test_biases_of_experts_are_complete(tmp_path, change, message):
    _, biases = with_biases({})
    change(biases, f"{L}.experts.1.up_proj.bias")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(write(tmp_path, experts(f"{L}.experts") | biases, MODELOPT)).read_experts(f"{L}.experts")


def test_fused_experts_have_nothing_unknown(tmp_path):
    """Names of tensors for all experts of a layer are the weights' name plus an underscore and a suffix."""
    tensors = {}
    for name, n, k in (("gate_up_proj", 64, 32), ("down_proj", 32, 32)):
        key = f"{L}.experts.{name}"
        tensors |= {
            key: torch.zeros(2, n, k // 2, dtype=torch.uint8),
            f"{key}_weight_scale": torch.ones(2, n, k // 16).to(torch.float8_e4m3fn),
            f"{key}_weight_scale_2": torch.tensor(0.1), f"{key}_input_scale": torch.tensor(0.1),
        }  # fmt: skip
    Checkpoint(write(tmp_path / "a", tensors, MODELOPT)).read_experts(f"{L}.experts")
    tensors[f"{L}.experts.gate_up_proj_pre_quant_scale"] = torch.full((32,), 3.0)
    with pytest.raises(
        CheckpointError, match="gate_up_proj_pre_quant_scale belongs to .* nothing that this reader knows"
    ):
        Checkpoint(write(tmp_path / "b", tensors, MODELOPT)).read_experts(f"{L}.experts")


@pytest.mark.parametrize("name", ["qweight", "weight_packed", "weight"])
def test_packed_tensors_without_a_config(tmp_path, name):
    dtype = torch.float8_e4m3fn if name == "weight" else torch.int32
    folder = write(tmp_path, {f"{Q}.{name}": torch.zeros(8, 64).to(dtype)}, None)
    with pytest.raises(
        CheckpointError, match=f"{name} is .*, and neither config.json has a quantization_config"
    ):
        quantization_of(folder)
    with pytest.raises(CheckpointError, match=f"{name} is .*, so nothing says what it means"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weight", {"data_offsets": [-8, 504]}, "sizes are whole and not negative"),
        ("weight", {"shape": [16.0, 32]}, "sizes are whole and not negative"),
        ("weight_scale", {"data_offsets": [0, 64]}, "in the same bytes"),
        ("weight", {"data_offsets": [512, 0]}, "damaged or cut"),
    ],
)
def test_damaged_headers(tmp_path, part, change, message):
    """Nothing is read if a header places a tensor in another tensor's bytes."""
    folder = write(tmp_path, nvfp4(Q), MODELOPT)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first = next(entry for name, entry in header.items() if name != "__metadata__")
    assert first["data_offsets"] == [0, 512], "the weight is the first tensor"
    header[f"{Q}.{part}"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_damaged_configs(tmp_path, name):
    folder = write(tmp_path, nvfp4(Q), None)
    for text, message in (('{"quantization":', "is not JSON"), ("[]", "is not an object")):
        (folder / name).write_text(text)
        with pytest.raises(CheckpointError, match=f"{name} .*{message}"):
            Checkpoint(folder)


def test_damaged_files(tmp_path):
    folder = write(tmp_path, nvfp4(Q), MODELOPT)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged or cut"):
        Checkpoint(folder)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="no header"):
        Checkpoint(folder)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n")
    with pytest.raises(ValueError, match="of text in the place of tensors.*git lfs pull"):
        Checkpoint(folder)
    for header, message in (
        (b"{no JSON", "is not JSON .* damaged or cut"),
        (b'{"a": 1} ', "does not say what 'a' is"),
        (b"[1]", "not an object"),
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ValueError, match=message):
            Checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        Checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is not JSON"):
        Checkpoint(folder)


def test_files_that_are_not_there(tmp_path):
    """Covers a dangling link, as caches of hubs leave it, and tensors in another file format."""
    folder = write(tmp_path, nvfp4(Q), MODELOPT)
    path = folder / "model.safetensors"
    path.unlink()
    path.symlink_to(folder / "blobs" / "0")
    with pytest.raises(FileNotFoundError, match="model.safetensors is not a file, or is a dangling link"):
        Checkpoint(folder)
    path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin is not read here: save the model as safe"):
        Checkpoint(folder)


def test_shards(tmp_path):
    """Files of a limited size with an index return the same tensors."""
    tensors = {f"t{i}": torch.full((100,), i, dtype=torch.float32) for i in range(5)}
    with TensorWriter(
        tmp_path, [(n, t.dtype, (100,)) for n, t in tensors.items()], shard_bytes=900
    ) as writer:
        for name, tensor in reversed(tensors.items()):
            writer.write(name, tensor)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    files = TensorFiles(tmp_path)
    assert files.nbytes == 2000 and all(torch.equal(files[n], t) for n, t in tensors.items())
    next(tmp_path.glob("*3.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="index"):
        TensorFiles(tmp_path)


def test_reading_does_not_write(tmp_path):
    folder = write(tmp_path, nvfp4(Q), MODELOPT)
    before = (folder / "model.safetensors").read_bytes()
    Checkpoint(folder).files[f"{Q}.weight"].zero_()
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("span", [0, 17, 18])
def test_mxfp4_as_nvfp4(span):
    """Values are bit-equal if the exponents span at most 17."""
    g = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (8, 64), dtype=torch.uint8, generator=g)
    scale = torch.randint(100, 101 + span, (8, 4), dtype=torch.uint8, generator=g)
    scale[0, 0], scale[1, 1] = 100, 100 + span
    data[2, :16] = 0x80  # zeros, one of them negative, whose exponent does not count
    scale[2, 0] = 250
    weight = stored_weight("mxfp4", data, scale)
    converted = as_nvfp4(weight)
    if span > 17:
        assert converted is None
    else:
        assert isinstance(converted, NVFP4Tensor) and torch.equal(dequantize(converted), weight.dequantize())


def stored_mxfp4(*shape):
    g = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=g)
    return stored_weight("mxfp4", data, torch.full((*shape[:-1], shape[-1] // 32), 120, dtype=torch.uint8))


@pytest.mark.parametrize("rows, mode", [(None, "16bit"), ("mxfp4", "mxfp4")])
def test_mxfp4_that_nvfp4_cannot_represent_stays_mxfp4(rows, mode):
    weight, options = stored_mxfp4(64, 128), {"dtype": torch.bfloat16, "device": "cpu"}
    weight.scale[0] = 90
    layer = linear_module(StoredLinear("a", Scheme("MXFP4", "mxfp4", rows), weight, None), None, **options)
    assert (layer.format, layer.mode) == (MXFP4, mode)
    assert torch.equal(layer.weight, weight.dequantize(torch.bfloat16))


def test_fp8_rows_go_with_mxfp4_on_hopper():
    """Other weights and other GPUs raise by name. Weights that do not convert exactly keep 16-bit rows, with a warning."""
    options = {"dtype": torch.bfloat16, "device": "cpu", "activations": "fp8"}
    weight, scheme = stored_mxfp4(64, 128), Scheme("MXFP4", "mxfp4", None)
    layer = StoredLinear("a", scheme, weight, None)
    assert linear_module(layer, None, **options).format == MXFP4_FP8
    with pytest.raises(
        UnsupportedTarget, match="'fp8' for a: .* have a kernel on sm_90a, and not on this GPU"
    ):
        linear_module(layer, None, **options, backend="emulator:sm_100a")
    stored = StoredExperts(
        "e", scheme, stored_mxfp4(2, 256, 128), None, stored_mxfp4(2, 128, 128), *5 * [None], True
    )
    assert experts_module(stored, "silu", **options).experts.formats == (MXFP4_FP8, MXFP4_FP8)
    weight.scale[0, 0] = 90
    with pytest.warns(UserWarning, match="a keeps 16-bit rows instead of FP8 ones: MXFP4 weights: row 0"):
        assert linear_module(layer, None, **options).mode == "16bit"
    other = quantize(torch.zeros(64, 128), scale_layout="rowmajor")
    with pytest.raises(UnsupportedProblem, match="'fp8' for b, whose weights are nvfp4"):
        linear_module(StoredLinear("b", scheme, other, None), None, **options)


def test_peak_memory_is_that_of_a_layer(tmp_path):
    """Going through all layers of a file of 36 MB takes the file's pages, plus the memory of one layer."""
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for i in range(16):
        one = nvfp4(f"model.layers.{i}.mlp.up_proj", 16, 64)
        one[f"model.layers.{i}.mlp.up_proj.weight"] = torch.randint(
            0, 256, (2048, 1024), dtype=torch.uint8, generator=g
        )
        one[f"model.layers.{i}.mlp.up_proj.weight_scale"] = torch.ones(2048, 128).to(torch.float8_e4m3fn)
        tensors |= one
    write(tmp_path, tensors, MODELOPT)
    code = (
        "import resource, sys\nfrom nvfp4_cute.models.checkpoints import Checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "c = Checkpoint(sys.argv[1]); c.linear(next(iter(c.linears))).weight.dequantize(); before = peak()\n"
        "for layer in c.each_linear(): layer.weight\n"
        "print(peak() - before, c.files.nbytes // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    grown, size = map(int, done.stdout.split())
    assert grown < size * (1 + 2 / 16)


def test_experts_named_by_projection_first(tmp_path):
    """Covers ``experts.<projection>.<number>``, and all experts in one tensor with K last."""
    plain = experts(f"{L}.experts")
    turned = {}
    for name, tensor in plain.items():
        head, rest = name.split(".experts.")
        number, projection, suffix = rest.split(".")
        turned[f"{head}.experts.{projection}.{number}.{suffix}"] = tensor
    fused = {}
    for one, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for suffix in ("weight", "weight_scale"):
            parts = [
                torch.cat([plain[f"{L}.experts.{e}.{n}.{suffix}"].view(torch.uint8) for n in names])
                for e in range(3)
            ]
            stacked = torch.stack(parts)
            key = f"{L}.experts.{one}" + ("" if suffix == "weight" else "_weight_scale")
            fused[key] = stacked if suffix == "weight" else stacked.view(torch.float8_e4m3fn)
        fused[f"{L}.experts.{one}_weight_scale_2"] = torch.tensor(0.01)
        fused[f"{L}.experts.{one}_input_scale"] = torch.tensor(0.002)
    expected = Checkpoint(write(tmp_path / "a", plain, MODELOPT)).read_experts(f"{L}.experts")
    for folder, tensors in (("b", turned), ("c", fused)):
        one = Checkpoint(write(tmp_path / folder, tensors, MODELOPT)).read_experts(f"{L}.experts")
        assert torch.equal(one.w13.data, expected.w13.data) and torch.equal(
            one.w2.dequantize(), expected.w2.dequantize()
        )
    assert one.w13_global.tolist() == [[pytest.approx(0.01)] * 2] * 3 and one.w2_input.shape == (3,)


def test_groups_and_patterns_of_compressed_tensors(tmp_path):
    """A group that names layers comes before one for every Linear; ``re:`` starts a regular expression."""
    spec = {"num_bits": 4, "type": "float", "group_size": 16}
    groups = {
        "all": {"targets": ["Linear"], "weights": spec, "input_activations": spec, "format": "nvfp4-pack-quantized"},
        "few": {"targets": ["re:.*o_proj$"], "weights": spec, "input_activations": None, "format": "nvfp4-pack-quantized"},
    }  # fmt: skip
    tensors = {"model.layers.0.mlp.router.weight": torch.zeros(4, 64).bfloat16()}
    for name in ("q_proj", "o_proj"):
        one = nvfp4(f"model.layers.0.self_attn.{name}")
        names = {
            "weight": "weight_packed",
            "weight_scale": "weight_scale",
            "weight_scale_2": "weight_global_scale",
        }
        if name == "q_proj":
            names["input_scale"] = "input_global_scale"
        tensors |= {
            f"model.layers.0.self_attn.{name}.{new}": one[f"model.layers.0.self_attn.{name}.{old}"]
            for old, new in names.items()
        }
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "ignore": ["re:.*router", "lm_head"],
    }
    checkpoint = Checkpoint(write(tmp_path, tensors, quantization))
    schemes = {name.rpartition(".")[2]: scheme.activations for name, scheme in checkpoint.linears.items()}
    assert schemes == {"q_proj": "nvfp4", "o_proj": None}
    assert checkpoint.linear("model.layers.0.self_attn.o_proj").input_scale is None


def test_scales_of_a_kv_cache(tmp_path):
    tensors = nvfp4(Q) | {
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5),
        f"{Q}.v_scale": torch.tensor(2.0),
    }
    checkpoint = Checkpoint(write(tmp_path, tensors, MODELOPT))
    assert checkpoint.kv_scales() == {"model.layers.0.self_attn.k_proj.k_scale": 0.5, f"{Q}.v_scale": 2.0}
    assert list(checkpoint.linears) == [Q] and checkpoint.linear(Q).weight.shape == (16, 64)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("model.layers.3.mixer.in_proj", "backbone.layers.3.mixer.in_proj"),
        ("model.layers.3.mlp.experts.0.w1", "model.layers.3.block_sparse_moe.experts.0.w1"),
        ("model.language_model.layers.3.mlp.up_proj", "language_model.model.layers.3.mlp.up_proj"),
        ("model.layers.3.mlp.up_proj", "model.language_model.layers.3.mlp.up_proj"),
        ("lm_head", "language_model.lm_head"),
    ],
)
def test_spellings(name, stored):
    assert stored in spellings(name) and name in spellings(stored)
    assert len(set(spellings(name))) == len(list(spellings(name)))
