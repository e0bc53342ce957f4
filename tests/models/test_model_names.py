"""Models with unusual names of tensors, from a saved folder to logits."""

import json

import gpt_oss_files
import pytest
import torch
from checkpoint_files import write

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from nvfp4_cute.models import transformers as ours  # noqa: E402
from nvfp4_cute.models.checkpoints import Checkpoint  # noqa: E402
from nvfp4_cute.models.checkpoints.tensors import TensorFiles  # noqa: E402
from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint  # noqa: E402
from nvfp4_cute.models.quantizing.weights import quantized  # noqa: E402
from nvfp4_cute.nn.experts import EqualGroups  # noqa: E402
from nvfp4_cute.nn.linear import QuantizedLinear  # noqa: E402
from nvfp4_cute.nn.moe import (
    MoE,  # noqa: E402
)

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "vocab_size": 128, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "nemotron_h": {
        "hybrid_override_pattern": "M-*E", "num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2,
        "moe_shared_expert_intermediate_size": 64,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "moe_layers": [1],
        "layer_types": ["full_attention"] * 2, "attention_chunk_size": 64,
    },
}  # fmt: skip


def ids():
    return torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(0))


def saved(tmp_path, kind, extra=None):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **(SMALL | {"model_type": kind} | (MODELS.get(kind, {}) if extra is None else extra))
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "in")
    return model, tmp_path / "in"


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@torch.no_grad()
def logits(model):
    return model(ids()).logits


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", MODELS)
def test_saved_quantized_and_loaded(tmp_path, kind, layout):
    """Every quantized layer of the files finds its module; the logits differ from the 16-bit model's only by 4-bit weights."""
    model, folder = saved(tmp_path, kind)
    done = quantize_checkpoint(folder, tmp_path / "out", format="nvfp4a16", layout=layout)
    loaded = ours.load(tmp_path / "out", dtype=torch.bfloat16)
    quantizer = loaded.hf_quantizer
    assert set(quantizer.linears.values()) == set(quantizer.checkpoint.linears)
    assert set(quantizer.experts.values()) == set(quantizer.checkpoint.experts)
    assert done.layers >= 8 and 0.001 < relative(logits(loaded), logits(model)) < 0.3


def test_gpt_oss_as_released(tmp_path):
    """Experts with alternating rows of gate and up and 16-bit activations keep their MXFP4 weights."""
    model, folder = saved(tmp_path, "gpt_oss", gpt_oss_files.SIZES)
    loaded = ours.load(gpt_oss_files.write_gpt_oss(folder, tmp_path / "out", model), dtype=torch.bfloat16)
    layers = [m for m in loaded.modules() if isinstance(m, MoE)]
    assert [(m.activations, str(m.formats[0])) for m in layers] == 2 * [("16bit", "mxfp4")]
    assert relative(logits(loaded), logits(model)) < 0.02
    assert relative(logits(torch.nn.Module.float(loaded)), logits(model)) < 0.02


def test_llama4_experts_in_one_tensor(tmp_path):
    """ModelOpt packs them along K, which comes first; gate precedes up. Rows of all experts are in one tensor."""
    model, folder = saved(tmp_path, "llama4_text")
    files, tensors = TensorFiles(folder), {}
    for name in files:
        tensors[name] = files[name]
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weight = files[name].transpose(1, 2).contiguous()
            stored = [quantized(w, "nvfp4", weight.abs().amax()) for w in weight]
            tensors[name] = torch.stack([s.data for s in stored]).transpose(1, 2).contiguous()
            scales = torch.stack([s.scale.view(torch.uint8) for s in stored]).transpose(1, 2).contiguous()
            tensors[f"{name}_weight_scale"] = scales.view(torch.float8_e4m3fn)
            tensors[f"{name}_weight_scale_2"] = stored[0].global_scale
            own = dict(model.named_parameters())[name]
            own.data.copy_(torch.stack([s.dequantize() for s in stored]).transpose(1, 2))
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}
    write(tmp_path / "out", tensors, quantization, **config)
    loaded = ours.load(tmp_path / "out", dtype=torch.bfloat16)
    assert sum(isinstance(m, EqualGroups) for m in loaded.modules()) == 1
    assert relative(logits(loaded), logits(model)) < 0.02


def test_llama4_experts_of_llm_compressor(tmp_path):
    """The file has one layer per projection of an expert; transformers' class has one tensor."""
    model, folder = saved(tmp_path, "llama4_text")
    files, tensors = TensorFiles(folder), {}
    for name in files:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = files[name]
            continue
        own = dict(model.named_parameters())[name].data
        kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for e in range(len(own)):
            rounded = []
            for kind, weight in zip(kinds, own[e].T.chunk(len(kinds)), strict=True):
                stored = quantized(weight.contiguous(), "nvfp4", weight.abs().amax())
                prefix = f"{name.rpartition('.')[0]}.{e}.{kind}"
                tensors |= {f"{prefix}.weight_packed": stored.data, f"{prefix}.weight_scale": stored.scale,
                            f"{prefix}.weight_global_scale": (1 / stored.global_scale).reshape(1)}  # fmt: skip
                rounded.append(stored.dequantize())
            own[e].copy_(torch.cat(rounded).T)
    spec = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    group = {"targets": ["re:.*experts.*"], "weights": spec, "format": "nvfp4-pack-quantized"}
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    config = json.loads((folder / "config.json").read_text())
    write(tmp_path / "out", tensors, quantization, **config)
    loaded = ours.load(tmp_path / "out", dtype=torch.bfloat16)
    assert sum(isinstance(m, EqualGroups) for m in loaded.modules()) == 1
    assert relative(logits(loaded), logits(model)) < 0.02


def test_fp8_blocks(tmp_path):
    """DeepSeek's blocks of 128 x 128 in linear layers and experts, with e4m3 activations in blocks of 128."""
    extra = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 128,
    }
    model, folder = saved(tmp_path, "mixtral", extra)
    files, tensors = TensorFiles(folder), {}
    for name in files:
        weight = files[name]
        if weight.ndim != 2 or name.startswith(("lm_head", "model.embed")) or ".gate." in name:
            tensors[name] = weight
            continue
        n, k = weight.shape
        blocks = weight.float().view(n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scale[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    write(tmp_path / "out", tensors, quantization, **config)
    loaded = ours.load(tmp_path / "out", dtype=torch.bfloat16)
    assert sum(isinstance(m, MoE) and m.activations == "fp8_1x128" for m in loaded.modules()) == 2
    assert sum(isinstance(m, QuantizedLinear) for m in loaded.modules()) == 8
    assert len(Checkpoint(tmp_path / "out").linears) == 8
    assert 0.001 < relative(logits(loaded), logits(model)) < 0.08
