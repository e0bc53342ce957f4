"""Models of transformers that are small enough to quantize in a test."""

import torch

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "vocab_size": 128,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


def config_of(kind, **fields):
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **(SIZES | fields), initializer_range=0.2)


def model_of(kind="llama", dtype=torch.float32, **fields):
    """Returns a model with random weights, the same in every call."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind, **fields), dtype=dtype).eval()
