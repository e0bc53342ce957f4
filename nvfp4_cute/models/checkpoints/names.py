"""Names of modules: how tools and transformers spell the same layer, and the expert's projection that a name means."""

import re
from collections.abc import Iterator
from functools import lru_cache

from nvfp4_cute.errors import CheckpointError

# Equivalent parts of names: in checkpoints, and in transformers' modules. Lists of layers may use either.
SPELLINGS = (
    ("backbone.", "model."),  # NemotronH
    (".block_sparse_moe.", ".mlp."),  # Mixtral
    ("language_model.model.", "model.language_model."),  # text models inside others, older and newer
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
INNER = tuple(
    part for pair in SPELLINGS for part in pair if part.startswith(".")
)  # parts that may occur inside a name
# Last parts of the names of output layers, and of token embeddings.
OUTPUT = ("lm_head",)
EMBEDDINGS = ("embed_tokens", "embeddings", "word_embeddings", "wte")
# An expert's projection by its name in a checkpoint.
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
NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")  # number of an expert
FUSED = re.compile(rf"^(.*\bexperts)\.({_NAMES})$")
FUSED_PART = re.compile(rf"^(.*\bexperts\.(?:{_NAMES}))_\w+$")
# Models whose fused gate and up alternate: gate 0, up 0, gate 1 and so on.
INTERLEAVED_MODELS = ("gpt_oss",)
# Models whose fused experts are [E, K, N] in transformers, and in tools that keep them fused.
K_FIRST_MODELS = ("gpt_oss", "llama4", "llama4_text")


def is_embedding(prefix: str) -> bool:
    """Returns whether a module has the name of a token embedding."""
    return prefix.rpartition(".")[2] in EMBEDDINGS


def spellings(name: str) -> Iterator[str]:
    """Iterates over ``name`` and its other spellings, each once."""
    head, experts, tail = name.partition(".experts.")
    if not experts or any(part in tail for part in INNER):
        yield from _spellings(name)
        return
    for one in _spellings(f"{head}."):  # the part that all experts of a layer share
        yield f"{one}experts.{tail}"


@lru_cache(maxsize=4096)
def _spellings(name: str) -> tuple[str, ...]:
    found = [name]
    for one in found:
        for pair in SPELLINGS:
            for old, new in (pair, pair[::-1]):
                at = one.find(old)
                # A part that starts a name is replaced only at its start.
                if at == 0 or (at > 0 and old.startswith(".")):
                    other = one[:at] + new + one[at + len(old) :]
                    if other not in found and len(found) < 16:
                        found.append(other)
    return tuple(found)


def expert_of(prefix: str) -> tuple[str, str, int | None] | None:
    """Returns the experts' prefix, the projection ("gate", "up", "down", "gate_up") and the number of an expert's module.

    The number is None where one tensor holds all experts. Returns None for other modules.

    Raises:
        CheckpointError: the expert's number has a leading zero, non-ASCII digits, or more than six digits.
    """
    if "experts" not in prefix:
        return None
    if match := BY_EXPERT.match(prefix):
        return match[1], PROJECTIONS[match[3]], _number(prefix, match[2])
    if match := BY_PROJECTION.match(prefix):
        return match[1], PROJECTIONS[match[2]], _number(prefix, match[3])
    if match := FUSED.match(prefix):
        return match[1], PROJECTIONS[match[2]], None
    return None


def _number(prefix: str, digits: str) -> int:
    if not NUMBER.fullmatch(digits):
        raise CheckpointError(
            f"{prefix[:200]} has expert number {digits[:20]!r}; it is 0 to 999999 without leading zeros: the file is damaged; "
            "fetch it again"
        )
    return int(digits)
