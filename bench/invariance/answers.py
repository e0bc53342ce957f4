"""Greedy answers to prompts, and what differs between two sets of them."""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

NUM_PROMPTS, TOKENS = 64, 16
BATCHES = (1, 7, 32)
LONGEST = 160  # tokens of a prompt
CHUNK = 48  # rows of a step when prompts are computed in chunks


@dataclass(frozen=True)
class Answer:
    """Tokens that follow a prompt, and the log-probability of each, as Python floats (exact)."""

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """What differs between two sets of answers.

    Attributes:
        prompts: answers with at least one different token or log-probability.
        tokens: different tokens.
        log_probabilities: log-probabilities with different bits.
        compared: number of tokens.
        largest: largest difference of two log-probabilities of the first tokens of answers, whose prompts are equal.
    """

    prompts: int
    tokens: int
    log_probabilities: int
    compared: int
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens and {self.log_probabilities} log-probabilities of {self.compared} differ, "
            f"in {self.prompts} answers; first tokens by at most {self.largest:.2g}"
        )


def difference(one: Sequence[Answer], other: Sequence[Answer]) -> Difference:
    """Compares two sets of answers to the same prompts, bit for bit.

    Raises:
        ValueError: there are more answers, or longer ones, in one of the sets.
    """
    pairs = list(zip(one, other, strict=True))
    if any(len(a.tokens) != len(b.tokens) for a, b in pairs):
        raise ValueError("answers to a prompt have different lengths; ignore the end-of-text token")
    count = lambda name: sum(
        x != y for a, b in pairs for x, y in zip(getattr(a, name), getattr(b, name), strict=True)
    )
    return Difference(
        prompts=sum(a != b for a, b in pairs),
        tokens=count("tokens"),
        log_probabilities=count("log_probabilities"),
        compared=sum(len(a.tokens) for a, _ in pairs),
        largest=max((abs(a.log_probabilities[0] - b.log_probabilities[0]) for a, b in pairs), default=0.0),
    )


def random_prompts(vocabulary: int, count: int = NUM_PROMPTS, longest: int = LONGEST) -> list[list[int]]:
    """Returns prompts of 1 to ``longest`` random tokens."""
    rng = random.Random(0)
    return [[rng.randrange(3, vocabulary) for _ in range(int(longest ** rng.random()))] for _ in range(count)]


@dataclass
class Runs:
    """Runs of one model in one mode, by batch size and by whether prompts are computed in chunks.

    Attributes:
        name: names the model and the mode.
        prompts: prompts that every run answers.
        first: answers of the first run.
        differences: (batch, is chunked) -> what differs from the first run.
    """

    name: str
    prompts: list[list[int]]
    first: list[Answer] = field(default_factory=list)
    differences: dict[tuple[int, bool], Difference] = field(default_factory=dict)

    def run(
        self,
        cases: Iterable[tuple[int, bool]],
        answer: Callable[[list[list[int]], bool], list[Answer]],
        end: float = math.inf,
    ) -> None:
        """Answers all prompts in groups of every batch size, and prints what differs from the first run.

        Args:
            cases: (batch, is chunked).
            answer: answers a batch of prompts, in chunks or not.
            end: no case begins after this time of the monotonic clock.
        """
        for batch, is_chunked in cases:
            how = f"batch {batch}{', in chunks' if is_chunked else ''}"
            begun = time.monotonic()
            if begun > end:
                print(f"{self.name}: no time for {how}", flush=True)
                continue
            groups = [self.prompts[i : i + batch] for i in range(0, len(self.prompts), batch)]
            found = [one for group in groups for one in answer(group, is_chunked)]
            self.first = self.first or found
            self.differences[batch, is_chunked] = difference(self.first, found)
            if found is not self.first:
                print(f"{self.name}, {how}: {self.differences[batch, is_chunked]}", flush=True)
            print(f"    {how}: {time.monotonic() - begun:.1f} s", flush=True)

    @property
    def differs(self) -> bool:
        """Whether an answer differs from that of the first run."""
        return any(one.prompts for one in self.differences.values())

    def as_dict(self) -> dict[str, Any]:
        """Returns the differences from the first run for JSON."""
        return {
            "name": self.name,
            "prompts": len(self.prompts),
            "runs": {
                f"{batch}{' in chunks' if is_chunked else ''}": vars(one)
                for (batch, is_chunked), one in self.differences.items()
            },
            "tokens": [answer.tokens for answer in self.first],
            "log_probabilities": [answer.log_probabilities for answer in self.first],
        }
