"""The largest activations that layers of a 16-bit model see: what scales of 4-bit activations are made of."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

SAMPLE_TOKENS = 512
RANDOM_SAMPLES = 8
RANDOM_TOKENS = 128
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
IMPLEMENTATION = "nvfp4_cute_calibrate"


@dataclass
class Seen:
    """Largest magnitudes of inputs.

    Attributes:
        linears: module -> float. experts: module -> [2, E]: of the first and of the second product's rows; 0 where an expert got
            no token.
    """

    linears: dict[str, float] = field(default_factory=dict)
    experts: dict[str, torch.Tensor] = field(default_factory=dict)


def samples(folder: Path, text: str, vocabulary: int) -> list[torch.Tensor]:
    """Token ids to run, [1, n] each.

    Args:
        text: a file of plain text, tokenized as the model does; or "random".

    Raises:
        FileNotFoundError: no such file. ValueError: the model has no tokenizer, or the file no text.
    """
    if text == "random":
        g = torch.Generator().manual_seed(0)
        return [torch.randint(0, vocabulary, (1, RANDOM_TOKENS), generator=g) for _ in range(RANDOM_SAMPLES)]
    from transformers import AutoTokenizer

    content = Path(text).read_text()
    # Without such files transformers makes a tokenizer that knows no words.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer; pass --calibrate random for random tokens")
    ids = AutoTokenizer.from_pretrained(folder)(content, return_tensors="pt").input_ids
    if not ids.numel():
        raise ValueError(f"{text} has no text")
    return list(ids.split(SAMPLE_TOKENS, dim=1))


@torch.no_grad()
def largest_inputs(model: Any, batches: list[torch.Tensor]) -> Seen:
    """Run a causal model of transformers on every batch, and note what its layers get.

    Args:
        model: in 16 bits, in eval mode. batches: token ids, [1, n] each.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    seen = Seen()
    handles = []
    names = {}
    for name, module in model.named_modules():
        names[module] = name
        if isinstance(module, torch.nn.Linear):
            handles.append(module.register_forward_pre_hook(_noting(seen.linears, name)))
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, lambda *args: _noted_experts(seen, names[args[0]], *args))
    before = model.config._experts_implementation
    if any(hasattr(module, "down_proj") and hasattr(module, "num_experts") for module in model.modules()):
        model.set_experts_implementation(IMPLEMENTATION)
    try:
        for ids in tqdm(batches, desc="calibration", leave=False, disable=None):
            model(ids.to(model.device))
    finally:
        for handle in handles:
            handle.remove()
        if before is not None:
            model.config._experts_implementation = before
    return seen


def _noting(linears: dict[str, float], name: str):
    def note(module: torch.nn.Module, args: tuple) -> None:
        if args and args[0].numel():
            linears[name] = max(linears.get(name, 0.0), float(args[0].abs().amax()))

    return note


def _noted_experts(
    seen: Seen, name: str, module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
):
    """The experts' result, expert by expert."""
    turned = getattr(module, "is_transposed", False)
    has_gate, has_bias = getattr(module, "has_gate", True), getattr(module, "has_bias", False)
    first = module.gate_up_proj if has_gate else module.up_proj
    count = len(first)
    amax = seen.experts.setdefault(name, torch.zeros(2, count))
    y = torch.zeros_like(x, dtype=torch.float32)

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = rows @ (weight if turned else weight.T)
        return out if bias is None else out + bias

    for e in index.unique().tolist():
        if not 0 <= e < count:
            continue
        token, place = torch.where(index == e)
        rows = x[token]
        h = product(rows, first[e], module.gate_up_proj_bias[e] if has_bias else None)
        h = module._apply_gate(h) if has_gate else module.act_fn(h)
        amax[0, e] = max(float(amax[0, e]), float(rows.abs().amax()))
        amax[1, e] = max(float(amax[1, e]), float(h.abs().amax()))
        out = product(h, module.down_proj[e], module.down_proj_bias[e] if has_bias else None)
        y.index_add_(0, token, out.float() * weights[token, place, None].float())
    return y.to(x.dtype)
