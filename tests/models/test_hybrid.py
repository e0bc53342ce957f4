"""A hybrid of Mamba, attention and experts: quantized by type of layer, and loaded again."""

import pytest
import torch

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from nvfp4_cute.bench.vllm.hybrid import make_hybrid
from nvfp4_cute.cli import main
from nvfp4_cute.models import transformers as ours
from nvfp4_cute.models.vllm.taken import refusal


@pytest.mark.parametrize(("layout", "latent"), [("modelopt", 32), ("compressed-tensors", None)])
def test_a_mixture_for_a_hybrid_model(tmp_path, layout, latent):
    """Also with experts in a latent space, whose projections are layers of the model."""
    model = make_hybrid(
        tmp_path / "in", ("mamba", "attention", "moe", "mamba"), vocab_size=128, hidden_size=64, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, intermediate_size=96, mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16,
        n_routed_experts=4, moe_intermediate_size=64, moe_shared_expert_intermediate_size=64, chunk_size=8,
        initializer_range=0.15, moe_latent_size=latent,
    )  # fmt: skip
    command = [
        "quantize",
        str(tmp_path / "in"),
        "--out",
        str(tmp_path / "out"),
        "--recipe",
        "nemotron",
        "--layout",
        layout,
    ]
    assert main(command) == 0
    loaded = ours.load(tmp_path / "out", dtype=torch.bfloat16)
    ids = torch.randint(0, 128, (1, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got, want = loaded(ids).logits.float(), model(ids).logits.float()
    assert 0.001 < (got - want).norm() / want.norm() < 0.3
    assert (
        refusal(
            loaded.config.quantization_config
            if isinstance(loaded.config.quantization_config, dict)
            else loaded.config.quantization_config.to_dict(),
            "nemotron_h",
        )
        is None
    )
