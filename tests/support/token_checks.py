"""Prompts for engines that serve a checkpoint, and a comparison of their tokens with transformers' logits."""

import json

import torch

PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [9, 8, 7], [100, 50, 25, 12, 6, 3, 1, 200, 201])
TOKENS = 12
"""Number of tokens after each prompt."""


def check_tokens(folder, got, tolerance, model=None):
    """Checks that each token has transformers' highest logit after the same tokens, or one within ``tolerance`` of it."""
    model = model or transformers_model(folder)
    for prompt, answer in zip(PROMPTS, got, strict=True):
        assert len(answer) == TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1))[:, 0]
        assert (logits.amax(1) - chosen).max() <= tolerance


def transformers_model(folder):
    """Returns the model of a checkpoint in float32, with quantized layers of this package."""
    from nvfp4_cute.models import transformers as ours

    # Some loaders of transformers keep the file's dtype for tensors that they rename.
    # Engines keep rows of MXFP4 layers in 16 bits, whatever the checkpoint says.
    config = json.loads((folder / "config.json").read_text())
    is_mxfp4 = "mxfp4" in json.dumps(config["quantization_config"]).lower()
    activations = "16bit" if is_mxfp4 else "auto"
    return torch.nn.Module.float(ours.load(folder, dtype=torch.float32, activations=activations))
