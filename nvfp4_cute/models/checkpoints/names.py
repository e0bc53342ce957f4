"""Names of modules: how tools and transformers spell the same layer, and which projection of an expert a name means."""

import re
from collections.abc import Iterator

# Equal parts of names: in checkpoints, and in transformers' modules. Either may stand in a list of layers.
SPELLINGS = (
    ("backbone.", "model."),  # NemotronH
    (".block_sparse_moe.", ".mlp."),  # Mixtral
    ("language_model.model.", "model.language_model."),  # text models inside others, older and newer
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
# Last parts of the names of output layers, and of embeddings of tokens.
OUTPUT = ("lm_head",)
EMBEDDINGS = ("embed_tokens", "embeddings", "word_embeddings", "wte")
# A projection of an expert by its name in a checkpoint.
PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "gate_up_proj": "gate_up",
}
_NAMES = "|".join(PROJECTIONS)
BY_EXPERT = re.compile(rf"^(.*\bexperts)\.(\d+)\.({_NAMES})$")
BY_PROJECTION = re.compile(rf"^(.*\bexperts)\.({_NAMES})\.(\d+)$")
FUSED = re.compile(rf"^(.*\bexperts)\.({_NAMES})$")
FUSED_PART = re.compile(rf"^(.*\bexperts\.(?:{_NAMES}))_\w+$")
# Of these, fused gate and up lie row by row: gate 0, up 0, gate 1 and so on.
INTERLEAVED_MODELS = ("gpt_oss",)
# Of these, transformers' fused experts are [E, K, N], and so are those of tools that keep them fused.
K_FIRST_MODELS = ("gpt_oss", "llama4", "llama4_text")


def is_embedding(prefix: str) -> bool:
    """Whether a module's name is that of an embedding of tokens."""
    return prefix.rpartition(".")[2] in EMBEDDINGS


def spellings(name: str) -> Iterator[str]:
    """``name``, then the other ways to write it, each once."""
    found = [name]
    for one in found:
        for pair in SPELLINGS:
            for old, new in (pair, pair[::-1]):
                at = one.find(old)
                # A part that begins a name does so only at its begin.
                if at == 0 or (at > 0 and old.startswith(".")):
                    other = one[:at] + new + one[at + len(old) :]
                    if other not in found and len(found) < 16:
                        found.append(other)
    yield from found


def expert_of(prefix: str) -> tuple[str, str, int | None] | None:
    """Experts' prefix, projection ("gate", "up", "down", "gate_up") and expert of a module; None for another module.

    The expert is None where one tensor holds all experts.
    """
    if match := BY_EXPERT.match(prefix):
        return match[1], PROJECTIONS[match[3]], int(match[2])
    if match := BY_PROJECTION.match(prefix):
        return match[1], PROJECTIONS[match[2]], int(match[3])
    if match := FUSED.match(prefix):
        return match[1], PROJECTIONS[match[2]], None
    return None
