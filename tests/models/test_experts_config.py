"""Activations and sizes that config.json gives to layers of experts, and the layers that are made with them."""

from types import SimpleNamespace

import pytest
import torch
from checkpoint_files import MODELOPT, nvfp4, write

from nvfp4_cute import Activation, LatentMoE
from nvfp4_cute.errors import CheckpointError, UnsupportedProblem
from nvfp4_cute.models.checkpoints import Checkpoint
from nvfp4_cute.models.checkpoints.experts_config import ExpertsConfig, RouterConfig
from nvfp4_cute.models.layers import experts_module
from nvfp4_cute.models.vllm.activations import activation_of as activation_of_vllm
from nvfp4_cute.nn.experts import ModelExperts

PREFIX = "model.layers.0.mlp.experts"
SITU = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
# The fields of published config.json files that matter, and what follows from them.
MODELS = {
    "DeepSeek-V4-Flash": (
        {"model_type": "deepseek_v4", "hidden_act": "silu", "swiglu_limit": 10.0, "num_experts_per_tok": 6}
        | {
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "num_hash_layers": 3,
        },
        ExpertsConfig(
            Activation("silu", 10.0), top_k=6, router=RouterConfig("sqrtsoftplus", scale=1.5), hash_layers=3
        ),
    ),
    "Kimi-K3": (
        {
            "model_type": "kimi_k3",
            "text_config": {
                "model_type": "kimi_linear",
                "routed_expert_hidden_size": 64,
                "num_experts_per_token": 16,
                "moe_router_activation_func": "sigmoid",
                "moe_renormalize": True,
                "num_expert_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 2.446,
            }
            | SITU,
        },
        ExpertsConfig(
            Activation("situ", beta=4.0, linear_beta=25.0),
            latent_size=64,
            top_k=16,
            router=RouterConfig("sigmoid", scale=2.446),
        ),
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0},
        ExpertsConfig(Activation("swiglu_oai", 7.0)),
    ),
    "MiniMax-M3": (
        {
            "model_type": "minimax_m3_vl_text",
            "hidden_act": "swigluoai",
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.5,
            "routed_scaling_factor": 2.0,
        },
        ExpertsConfig(Activation("swiglu_oai", 7.0, alpha=1.5), router=RouterConfig("sigmoid", scale=2.0)),
    ),
    "Nemotron-3": (
        {
            "model_type": "nemotron_h",
            "mlp_hidden_act": "relu2",
            "moe_latent_size": 64,
            "num_experts_per_tok": 22,
        },
        ExpertsConfig(Activation("relu2"), latent_size=64, top_k=22, router=RouterConfig("sigmoid")),
    ),
    "Llama-4": (
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_act": "silu"}},
        ExpertsConfig(Activation("silu"), weight_on_input=True, router=RouterConfig("sigmoid", False)),
    ),
    "GLM-5": (
        {
            "model_type": "glm_moe_dsa",
            "hidden_act": "silu",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
        ExpertsConfig(Activation("silu"), router=RouterConfig("sigmoid", scale=2.5)),
    ),
    "Qwen3-MoE": (
        {"model_type": "qwen3_moe", "hidden_act": "silu"},
        ExpertsConfig(Activation("silu"), router=RouterConfig(renormalize=False)),
    ),
    "Gemma": ({"hidden_activation": "gelu_pytorch_tanh"}, ExpertsConfig(Activation("gelu_tanh"))),
}


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_layers_of_models(tmp_path, model):
    """The activation is the model's, by kernels: one call of ``moe`` computes the layer."""
    config, want = MODELS[model]
    has_gate = model != "Nemotron-3"
    tensors = {}
    for e in range(2):
        for name, n, k in (("gate_proj", 128, 64), ("up_proj", 128, 64), ("down_proj", 64, 128)):
            if has_gate or name != "gate_proj":
                tensors |= nvfp4(f"{PREFIX}.{e}.{name}", n, k, seed=e)
    checkpoint = Checkpoint(write(tmp_path, tensors, MODELOPT, **config))
    found = checkpoint.experts_config
    assert found == want
    stored = checkpoint.read_experts(PREFIX)
    module = experts_module(stored, found.activation, dtype=torch.bfloat16, device="cpu")
    assert isinstance(module, ModelExperts)
    layer = module.experts
    assert layer.activation == want.activation
    assert layer.weight_layout == ("concatenated" if has_gate else "none")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert module(x, torch.tensor([[0], [1], [0]]), torch.ones(3, 1)).isfinite().all()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"hidden_act": "mish"}, "hidden_act='mish'; experts compute silu, swish, gelu"),
        ({}, "has none of mlp_hidden_act, hidden_act"),
        ({"hidden_act": "silu", "swiglu_limits": [None, 7.0]}, "swiglu_limits, a limit per layer"),
        ({"hidden_act": "silu", "swiglu_limit": -1.0}, "limit=-1.0 is not a positive number"),
        (SITU | {"activation_situ_beta": 0.0}, "beta=0.0 is not a number from 0.0001 to 10000"),
    ],
)
def test_unknown_activations_are_refused_by_name(config, text):
    with pytest.raises(CheckpointError, match=text):
        ExpertsConfig.of({"model_type": "new"} | config)


VLLM = {
    "silu": ({}, Activation("silu")),
    "silu with a limit": ({"swiglu_limit": 10.0}, Activation("silu", 10.0)),
    "situ": (
        {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
        MODELS["Kimi-K3"][1].activation,
    ),
    "gelu": ({}, Activation("gelu")),
    "relu2_no_mul": ({}, Activation("relu2")),
    "swigluoai_uninterleave": (
        {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
        Activation("swiglu_oai", 7.0),
    ),
    "swigluoai_uninterleave without its constants": ({"swiglu_limit": 10.0}, Activation("silu", 10.0)),
    "swiglustep": ({}, None),
    "swigluoai": ({}, Activation("swiglu_oai", 7.0)),
    "gelu with a limit": ({"swiglu_limit": 7.0}, None),
    "swigluoai_uninterleave by half": ({"swiglu_alpha": 1.702, "swiglu_beta": 0.5}, None),
}


@pytest.mark.parametrize("name", VLLM)
def test_activations_of_vllm(name):
    fields, want = VLLM[name]
    moe = SimpleNamespace(**fields)
    if want is not None:
        assert activation_of_vllm("layer", name.split()[0], moe) == want
        return
    with pytest.raises(UnsupportedProblem, match=f"^layer has activation '{name.split()[0]}'"):
        activation_of_vllm("layer", name.split()[0], moe)


def test_experts_of_transformers():
    """Modules of transformers become activations of kernels; those with another formula stay functions."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    from nvfp4_cute.models.transformers import activation_of

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "n_routed_experts": 2}
    fields = SimpleNamespace(
        num_local_experts=2, hidden_act="silu", mlp_hidden_act="relu2", moe_latent_size=None, swiglu_limit=10.0, swiglu_alpha=1.5,
        **sizes,
    )  # fmt: skip
    for experts, want in (
        (DeepseekV4Experts(fields), Activation("silu", 10.0)),
        (MiniMaxM3VLExperts(fields), Activation("swiglu_oai", 10.0, alpha=1.5)),
        (
            GptOssExperts(AutoConfig.for_model("gpt_oss", num_local_experts=2, hidden_size=32)),
            Activation("swiglu_oai", 7.0),
        ),
        (NemotronHExperts(fields), Activation("relu2")),
        (Step3p7Experts(fields), Activation("silu")),
    ):
        assert activation_of(experts) == want
    clamped_later = activation_of(Step3p7Experts(fields, swiglu_limit=1.0))
    assert not isinstance(clamped_later, Activation)
    assert clamped_later(torch.tensor([9.0]), torch.tensor([9.0])) == 1


@torch.no_grad()
def test_latent_experts():
    """``LatentMoE`` is the projections around the experts; router and shared experts have the model's width."""
    generator = torch.Generator().manual_seed(0)
    experts = lambda x, ids, weights: x * weights[:, :1].to(x.dtype)
    down, up = (torch.nn.Linear(n, k, bias=False).bfloat16() for n, k in ((128, 32), (32, 128)))
    norm, x = torch.nn.RMSNorm(32).bfloat16(), torch.randn(5, 128, generator=generator).bfloat16()
    ids, weights = torch.zeros(5, 2, dtype=torch.int32), torch.rand(5, 2, generator=generator)
    wrapped = torch.nn.Module()
    wrapped.forward = experts
    got = LatentMoE(down, wrapped, up, norm)(x, ids, weights, shared=x)
    assert torch.equal(got, up(norm(down(x) * weights[:, :1].bfloat16())) + x)
    wrapped.hidden_size = 64
    with pytest.raises(ValueError, match="down.out_features=32, experts.hidden_size=64, up.in_features=32"):
        LatentMoE(down, wrapped, up)
