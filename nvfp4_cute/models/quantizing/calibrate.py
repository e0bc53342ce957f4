"""Finds the largest activations of a 16-bit model's layers, from which scales of 4-bit activations are computed."""

from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.names import expert_of, spellings
from nvfp4_cute.models.quantizing.observe import Site, observed
from nvfp4_cute.terminal import Progress

SAMPLE_TOKENS = 512
RANDOM_SAMPLES = 8
# Texts that the model writes together, and texts per calibration batch.
WRITTEN_AT_ONCE, TEXTS_PER_BATCH = 64, 16
RANDOM_TOKENS = 128
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass
class Seen:
    """Largest magnitudes of inputs, how many rows there were, and the sum of their squares.

    Attributes:
        linears: module -> float.
        experts: module -> [2, E], for the rows of the first and of the second product; 0 for experts that got no token.
        rows: (module, expert or None) -> tokens that reached it.
        squares: (module, expert or None, whether it is the second product) -> float32 [K], sum of squares per column.
    """

    linears: dict[str, float] = field(default_factory=dict)
    experts: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[tuple[str, int | None], int] = field(default_factory=dict)
    squares: dict[tuple[str, int | None, bool], torch.Tensor] = field(default_factory=dict)

    def note(self, name: str, site: Site, rows: torch.Tensor) -> None:
        """Count the rows of a place."""
        flat = rows.flatten(0, -2).float()
        if not site.second:
            key = (name, site.expert)
            self.rows[key] = self.rows.get(key, 0) + len(flat)
        place, squares = (name, site.expert, site.second), flat.square().sum(0).cpu()
        self.squares[place] = self.squares[place] + squares if place in self.squares else squares

    def tokens(self, name: str) -> tuple[int | None, torch.Tensor | None]:
        """Tokens that reached a layer of a checkpoint, 0 of an expert without one, and mean squares of its input's columns.

        None of what the model did not run.
        """
        expert = expert_of(name)
        number, prefix = (None, name) if expert is None else (expert[2], expert[0])
        is_second = expert is not None and expert[1] == "down"
        for one in spellings(prefix):
            if count := self.rows.get((one, number), 0):
                found = self.squares.get((one, number, is_second))
                return count, None if found is None else found / count
            if number is not None and one in self.experts:
                return None if self.experts[one][int(is_second)][number] > 0 else 0, None
        return None, None


def check_text(text: str) -> None:
    """Raises FileNotFoundError unless ``text`` is a file or "random"."""
    if text != "random" and not Path(text).is_file():
        raise FileNotFoundError(f'there is no file {text}; pass a text file, or "random" for random tokens')


def samples(folder: Path, text: str, vocabulary: int) -> list[torch.Tensor]:
    """Returns token ids to run, [1, n] each.

    Args:
        folder: folder of the model, with its tokenizer.
        text: a file of plain text, which the model's tokenizer tokenizes; or "random".
        vocabulary: number of tokens.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the tokenizer is missing or damaged, or the file is not text in UTF-8.
    """
    check_text(text)
    if text == "random":
        g = torch.Generator().manual_seed(0)
        return [torch.randint(0, vocabulary, (1, RANDOM_TOKENS), generator=g) for _ in range(RANDOM_SAMPLES)]
    from transformers import AutoTokenizer

    try:
        content = Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f'{text} is not UTF-8 text ({error}); pass a text file, or "random"') from None
    # Without these files transformers makes a tokenizer without a vocabulary.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f'{folder} has no tokenizer; pass "random" for random tokens, not {text}')
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of any kind, if the tokenizer's files are damaged
        raise CheckpointError(
            f"{folder} has a tokenizer that cannot be loaded ({type(error).__name__}: {error}): fetch its files again"
        ) from error
    ids = tokenizer(content, return_tensors="pt").input_ids
    if not ids.numel():
        raise ValueError(f'{text} has no text; pass a longer one, or "random"')
    return list(ids.split(SAMPLE_TOKENS, dim=1))


@torch.no_grad()
def generated(model: Any, windows: int, tokens: int = SAMPLE_TOKENS, seed: int = 0) -> list[torch.Tensor]:
    """Returns texts that a model writes, token ids [texts, tokens]: samples of its own predictions after its first token.

    Such texts resemble the model's training data, which is rarely at hand. (Liu et al., "LLM-QAT", arXiv 2305.17888, section
    2.1.)

    Args:
        model: a causal model of transformers in 16 bits, in eval mode.
        windows: number of texts.
        tokens: length of each.
        seed: seed of torch's generators, whose states are restored afterwards.
    """
    first = model.config.get_text_config().bos_token_id or 0
    texts: list[torch.Tensor] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, windows, WRITTEN_AT_ONCE):
            begin = torch.full((min(WRITTEN_AT_ONCE, windows - start), 1), first, device=model.device)
            ids = model.generate(
                begin, attention_mask=torch.ones_like(begin), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                min_new_tokens=tokens - 1, max_new_tokens=tokens - 1,
            )  # fmt: skip
            texts.extend(ids.cpu().split(TEXTS_PER_BATCH))
    return texts


@torch.no_grad()
def largest_inputs(model: Any, batches: list[torch.Tensor]) -> Seen:
    """Runs a causal model of transformers on every batch, and records the largest inputs of its layers.

    Args:
        model: in 16 bits, in eval mode.
        batches: token ids, [1, n] each.
    """
    seen = Seen()
    names = {module: name for name, module in model.named_modules()}

    def note(site: Site, rows: torch.Tensor) -> torch.Tensor:
        name, amax = names[site.module], float(rows.abs().amax())
        if not isfinite(amax):
            raise CheckpointError(
                f"inputs of {name} are not finite on the calibration text: no scale covers them; run the model in bfloat16 or "
                "float32, or calibrate on another text"
            )
        seen.note(name, site, rows)
        if site.expert is None:
            seen.linears[name] = max(seen.linears.get(name, 0.0), amax)
        else:
            count = len(cast(Any, site.module).down_proj)
            row = seen.experts.setdefault(name, torch.zeros(2, count))[int(site.second)]
            row[site.expert] = max(float(row[site.expert]), amax)
        return rows

    with observed(model, note):
        for ids in Progress(batches, desc="calibration", unit="text"):
            model(ids.to(model.device))
    return seen
