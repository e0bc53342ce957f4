"""Folders that vLLM loads: a real config with a quantization config, and no weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_cute.bench import models
from nvfp4_cute.bench.vllm.plan import Scheme

CONFIGS = Path(models.__file__).parent / "configs"
BLOCK = {"num_bits": 4, "type": "float", "group_size": 16}
# Layers that published checkpoints leave in 16 bits.
PLAIN = ("lm_head", "model.embed_tokens")
ATTENTION = "*"  # in the pattern of a hybrid's layers


def make_folder(folder: Path, model: str, scheme: Scheme, changes: Mapping[str, Any] | None = None) -> Path:
    """Write config.json of a model; return ``folder``.

    Args:
        model: name of a file of ``bench/models/configs``. changes: entries to replace.
    """
    config = json.loads((CONFIGS / f"{model}.json").read_text()) | dict(changes or {})
    if scheme != "bf16":
        config["quantization_config"] = quantization(config, scheme)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def quantization(config: dict[str, Any], scheme: Scheme) -> dict[str, Any]:
    """``quantization_config`` as ModelOpt writes it, W4A4, or compressed-tensors, W4A16."""
    ignored = [*PLAIN, *_routers(config), *_attention_of_hybrids(config)]
    if scheme == "w4a4":
        weights = {"dynamic": False, **BLOCK}
        group: dict[str, Any] = {"weights": weights, "input_activations": weights, "targets": ["Linear"]}
        return {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored, "config_groups": {"group_0": group},
            "producer": {"name": "modelopt", "version": "0.47.0"},
        }  # fmt: skip
    weights = {
        "dynamic": False, **BLOCK, "scale_dtype": "torch.float8_e4m3fn", "strategy": "tensor_group", "symmetric": True
    }  # fmt: skip
    group = {
        "format": "nvfp4-pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": weights,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "nvfp4-pack-quantized",
        "ignore": ignored, "config_groups": {"group_0": group}, "version": "0.20.0",
    }  # fmt: skip


def _routers(config: dict[str, Any]) -> list[str]:
    is_moe = "num_experts" in config or "num_local_experts" in config
    return [f"model.layers.{i}.mlp.gate" for i in range(config["num_hidden_layers"])] if is_moe else []


def _attention_of_hybrids(config: dict[str, Any]) -> list[str]:
    """Attention of Nemotron-H, which NVIDIA's NVFP4 checkpoints keep in 16 bits."""
    pattern = config.get("hybrid_override_pattern", "")
    return [
        f"backbone.layers.{i}.mixer.{part}_proj"
        for i, kind in enumerate(pattern)
        if kind == ATTENTION
        for part in "qkvo"
    ]


def add_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of words ``t0`` to ``t{size - 1}``, so that a server takes and gives text."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    vocabulary = {f"t{i}": i for i in range(size)}
    tokenizer = Tokenizer(kinds.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "t2",
        "pad_token": "t0",
        "unk_token": "t0",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
