"""The blocks in MoE's docstring, replacing transformers' own experts: quantized Qwen3-MoE, and released gpt-oss weights."""

import re
import textwrap

import pytest
import torch
from oracle import assert_error_within

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from transformers import GptOssConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402

from nvfp4_cute import MXFP4, Activation, BlockScaledTensor, MoE, quantize, route  # noqa: E402

E, H, I, T = 4, 128, 96, 6  # experts, hidden, intermediate, tokens
NAMES = {one.__name__: one for one in (torch, MoE, route, BlockScaledTensor, Activation)} | {"MXFP4": MXFP4}


def block(containing):
    """Returns the code of the literal block that contains a text."""
    doc = textwrap.dedent("    " + MoE.__doc__)
    found = [textwrap.dedent(text) for text in re.findall(r"::\n\n((?:(?:    )+.*\n|\n)+)", doc)]
    (code,) = (text for text in found if containing in text)
    return code


def test_in_place_of_qwen3s_block():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=H, intermediate_size=I, moe_intermediate_size=I, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_experts=E, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    model, ids = Qwen3MoeForCausalLM(config).bfloat16().eval(), torch.arange(12)[None]
    with torch.no_grad():
        want = model(ids).logits.float()
        exec(block("class Block"), {**NAMES, "model": model})
        got = model(ids).logits.float()
    assert all(isinstance(layer.mlp.experts, MoE) for layer in model.model.layers)
    assert 0 < (got - want).norm() < 0.1 * want.norm()


def test_gpt_oss_as_it_is_stored():
    """The dequantized weights are transformers'; the layer differs only by the order of sums and by roundings to bf16."""
    generator = torch.Generator().manual_seed(0)
    some = lambda *shape: torch.randn(*shape, generator=generator)
    stored = [quantize(some(E, n, k) / 8, format=MXFP4) for n, k in ((2 * I, H), (H, I))]
    biases = [some(E, 2 * I), some(E, H)]
    names = dict(NAMES)
    for name, tensor, bias in zip(("gate_up", "down"), stored, biases, strict=True):
        *_, k = tensor.shape
        names[f"{name}_blocks"] = tensor.data.unflatten(-1, (k // 32, 16))
        names[f"{name}_scales"] = tensor.with_scale_layout("rowmajor").scale
        names[f"{name}_bias"] = bias.bfloat16()
    exec(block("gate_up_blocks"), names)
    theirs = GptOssExperts(
        GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=2)
    )
    x, (ids, weights) = some(T, H).bfloat16(), route(some(T, E), 2)
    with torch.no_grad():
        for name, tensor, bias in zip(("gate_up_proj", "down_proj"), stored, biases, strict=True):
            getattr(theirs, name).copy_(tensor.dequantize(torch.float32).transpose(1, 2))
            getattr(theirs, f"{name}_bias").copy_(bias.bfloat16())
        want = theirs(x.float(), ids.long(), weights)
    assert_error_within(
        names["experts"](x, ids, weights).float(), want.view(T, H), max_tol=0.05, rms_tol=0.01
    )
