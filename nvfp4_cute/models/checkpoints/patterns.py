"""Matches regular expressions from a checkpoint's config in bounded time.

Python's engine backtracks: ``(a+)+$`` takes longer than the age of the universe for a name of 100 letters. It runs only
patterns with a bounded cost. Other patterns are matched with sets of positions, whose cost is polynomial and limited by a
number of steps.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from math import comb
from typing import Any

from nvfp4_cute.errors import CheckpointError

try:
    from re import _constants as c  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10 has them elsewhere
    import sre_constants as c
    import sre_parse as parser

MAX_LENGTH = 2000  # characters of a pattern
MAX_NAME = 10_000  # characters of a tensor's name
MAX_COST = 10**8  # ways to match a name that Python's engine may try: about a second
MAX_STEPS = 10**6  # positions that one match by sets may visit
UNBOUNDED = "may take for ever to match"
REPEATS = [getattr(c, name) for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") if hasattr(c, name)]
GROUPS = [getattr(c, name) for name in ("ATOMIC_GROUP",) if hasattr(c, name)]
CATEGORIES = {
    c.CATEGORY_DIGIT: str.isdecimal,
    c.CATEGORY_SPACE: str.isspace,
    c.CATEGORY_WORD: lambda one: one.isalnum() or one == "_",
    c.CATEGORY_NOT_DIGIT: lambda one: not one.isdecimal(),
    c.CATEGORY_NOT_SPACE: lambda one: not one.isspace(),
    c.CATEGORY_NOT_WORD: lambda one: not (one.isalnum() or one == "_"),
}


def matcher(pattern: str) -> Callable[[str], object]:
    """Returns a function like ``re.match`` that tells whether a name begins with a match of ``pattern``.

    Names have at most ``MAX_NAME`` characters.

    Raises:
        CheckpointError: ``pattern`` is not a regular expression or is too long. The returned function raises it if a match
            takes too many steps.
    """
    if len(pattern) > MAX_LENGTH:
        raise CheckpointError(
            f"re:{pattern[:100]}... has {len(pattern)} characters; at most {MAX_LENGTH} are read"
        )
    try:
        tree, compiled = parser.parse(pattern), re.compile(pattern)
        choices = _choices(tree)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"re:{pattern} is not a regular expression: {error}") from None
    flags = tree.state.flags & (re.IGNORECASE | re.MULTILINE | re.DOTALL | re.ASCII | re.LOCALE)
    if _is_cheap(choices, MAX_NAME):
        return compiled.match

    def match(name: str) -> bool:
        if _is_cheap(choices, len(name)):
            return compiled.match(name) is not None
        sets = _Sets(pattern, name)
        if flags:
            raise sets.refusal(UNBOUNDED)
        return bool(sets.ends(tree, {0}))

    return match


def _is_cheap(choices: tuple[int, int] | None, length: int) -> bool:
    """Returns whether Python's engine has at most ``MAX_COST`` ways to match ``length`` characters."""
    if choices is None:
        return False
    repeats, alternatives = choices
    return alternatives * comb(length + repeats, repeats) <= MAX_COST


def _choices(tree: Iterable[Any]) -> tuple[int, int] | None:
    """Returns the number of variable repeats, and the product of the numbers of alternatives.

    Returns None where these do not bound the cost: for nested repeats, and for references to groups.
    """
    repeats, alternatives = 0, 1
    for op, given in tree:
        parts: list[Any] = []
        if op in REPEATS:
            low, high, body = given
            parts = [body]
            repeats += low != high
            if high > 1 and _choices(body) != (0, 1):
                return None
        elif op is c.BRANCH:
            parts = given[1]
            alternatives *= len(parts)
        elif op is c.SUBPATTERN:
            parts = [given[-1]]
        elif op in (c.ASSERT, c.ASSERT_NOT):
            parts = [given[1]]
        elif op in GROUPS:
            parts = [given]
        elif op in (c.GROUPREF, c.GROUPREF_EXISTS):
            return None
        for part in parts:
            inner = _choices(part)
            if inner is None:
                return None
            repeats += inner[0]
            alternatives *= inner[1]
    return repeats, alternatives


class _Sets:
    """One match with sets: maps positions where a part may begin to positions where it may end."""

    def __init__(self, pattern: str, text: str):
        self.pattern, self.text, self.steps = pattern, text, 0

    def ends(self, tree: Iterable[Any], starts: set[int]) -> set[int]:
        """Returns the positions where a sequence of parts may end."""
        for op, given in tree:
            if not starts:
                break
            starts = self._one(op, given, starts)
        return starts

    def _one(self, op: Any, given: Any, starts: set[int]) -> set[int]:
        self.steps += len(starts)
        if self.steps > MAX_STEPS:
            raise self.refusal("takes too long to match")
        if op in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN):
            return {at + 1 for at in starts if at < len(self.text) and _is_one(op, given, self.text[at])}
        if op is c.AT:
            return {at for at in starts if self._is_at(given, at)}
        if op is c.BRANCH:
            return set().union(*(self.ends(one, starts) for one in given[1]))
        if op is c.SUBPATTERN and not given[1] and not given[2]:
            return self.ends(given[3], starts)
        if op in (c.ASSERT, c.ASSERT_NOT) and given[0] > 0:
            return {at for at in starts if bool(self.ends(given[1], {at})) == (op is c.ASSERT)}
        if op in REPEATS[:2]:
            return self._repeated(given[0], given[1], given[2], starts)
        raise self.refusal(UNBOUNDED)

    def _repeated(self, low: int, high: int, body: Sequence[Any], starts: set[int]) -> set[int]:
        found, count = starts, 0
        while count < low and found:
            found, count = self.ends(body, found), count + 1
        reached = set(found)
        while found and count < high:
            found, count = self.ends(body, found) - reached, count + 1
            reached |= found
        return reached

    def _is_at(self, place: Any, at: int) -> bool:
        size = len(self.text)
        if place in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
            return at == 0
        if place is c.AT_END:
            return at == size or (at == size - 1 and self.text[at] == "\n")
        if place is c.AT_END_STRING:
            return at == size
        if place in (c.AT_BOUNDARY, c.AT_NON_BOUNDARY):
            is_word = CATEGORIES[c.CATEGORY_WORD]
            sides = [0 <= i < size and is_word(self.text[i]) for i in (at - 1, at)]
            return (sides[0] != sides[1]) == (place is c.AT_BOUNDARY)
        raise self.refusal(UNBOUNDED)

    def refusal(self, what: str) -> CheckpointError:
        """Returns the error for a pattern that cannot be matched in bounded time."""
        return CheckpointError(
            f"re:{self.pattern} {what}; write it without repeats in repeats, or list the names"
        )


def _is_one(op: Any, given: Any, one: str) -> bool:
    if op is c.ANY:
        return one != "\n"
    if op is c.IN:
        is_negated = given[0][0] is c.NEGATE
        return any(_is_in(kind, value, one) for kind, value in given[is_negated:]) != is_negated
    return (ord(one) == given) == (op is c.LITERAL)


def _is_in(kind: Any, value: Any, one: str) -> bool:
    if kind is c.LITERAL:
        return ord(one) == value
    if kind is c.RANGE:
        return value[0] <= ord(one) <= value[1]
    return bool(CATEGORIES[value](one))
