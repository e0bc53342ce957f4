"""Rotated models: the same function, without outlying channels."""

import json

import pytest
import torch
from tiny_models import EXPERTS, model_of

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from transformers import AutoModelForCausalLM  # noqa: E402

from nvfp4_cute.models.quantizing.rotate import Rotation, rotate_checkpoint  # noqa: E402

IDS = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(3))


def saved(folder, kind="llama", **fields):
    """Saves a model whose norms and biases have random values, and returns it."""
    model = model_of(kind, **fields)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=g) + 0.5)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3_moe", EXPERTS),
        ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
        ("mixtral", {"num_local_experts": 4}),
        ("mistral", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value)[:24],
)
@pytest.mark.parametrize("block", [16, 128])
def test_the_function_is_the_same(tmp_path, kind, fields, block):
    """In float32: logits differ by rounding, and every matrix except those of q and k norms differs from the given one."""
    model = saved(tmp_path / "in", kind, **fields)
    rotate_checkpoint(tmp_path / "in", tmp_path / "out", block=block)
    rotated = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(rotated), logits(model), rtol=1e-4, atol=1e-4)
    own = dict(model.named_parameters())
    for name, value in rotated.named_parameters():
        assert value.ndim == 1 or name == "lm_head.weight" or not torch.allclose(value, own[name])
    assert torch.equal(rotated.model.norm.weight, torch.ones(model.config.hidden_size))
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


def test_outlying_channels_spread(tmp_path):
    """A channel of the residual stream with large values becomes as large as the others of its block."""
    model = saved(tmp_path / "in")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= 50
    model.save_pretrained(tmp_path / "in")
    rotate_checkpoint(tmp_path / "in", tmp_path / "out", block=16)
    rotated = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, after = (m.model.embed_tokens.weight.square().mean(0) for m in (model, rotated))
    assert before.max() > 500 * before.median()
    assert after[:16].max() < 2 * after[:16].min() and after[16:].max() < 10 * before.median()


def test_a_rotation_is_orthogonal():
    for size, block in ((64, 16), (64, 128), (576, 128), (48, 32), (7, 16)):
        rotation = Rotation.of(size, block, torch.Generator().manual_seed(0))
        matrix = rotation(torch.eye(size))
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
        assert len(rotation.matrix) == min(block, size & -size)


@pytest.mark.parametrize("block", [0, 1, 24])
def test_blocks_are_powers_of_two(tmp_path, block):
    with pytest.raises(ValueError, match=f"block={block} is not a power of two"):
        rotate_checkpoint(tmp_path, tmp_path / "out", block=block)


def test_other_models_are_refused(tmp_path):
    """A type whose norms are elsewhere, and a tensor that is not known."""
    saved(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    for wrong, message in (({"model_type": "gemma3"}, "of type 'gemma3'"), ({}, r"layers.0.self_attn.sinks")):
        path.write_text(json.dumps(config | wrong))
        if not wrong:
            from safetensors.torch import load_file, save_file

            tensors = load_file(tmp_path / "in" / "model.safetensors")
            save_file(
                tensors | {"model.layers.0.self_attn.sinks": torch.ones(2)}, path.parent / "model.safetensors"
            )
        with pytest.raises(ValueError, match=message):
            rotate_checkpoint(tmp_path / "in", tmp_path / "out")
        assert not (tmp_path / "out").exists()
