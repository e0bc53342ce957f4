"""Rows that configs are chosen for: few of them, so that a server meets all kernels of a layer before its first request."""

from collections.abc import Callable, Iterator, Sequence

EXACT_ROWS = 16
STEP_ROWS = 8
STEPS = 4
"""Numbers of rows between one power of two and the next."""


def rounded_rows(rows: int) -> int:
    """``rows`` rounded up: exact up to 16, then to a multiple of 8, and to one of four numbers between powers of two.

    Choosing for up to a quarter more rows changes the modelled time little. A config costs a compilation of seconds and a choice
    costs milliseconds, for every number of rows that is told apart.
    """
    if rows <= EXACT_ROWS:
        return rows
    step = max(STEP_ROWS, (1 << (rows - 1).bit_length()) // (2 * STEPS))
    return -(-rows // step) * step


def representative_rows(most: int, *seen: Callable[[int], int]) -> Iterator[int]:
    """Row counts from 1 to ``most`` at which another kernel may be taken: the ends of every range that is rounded alike.

    A threshold between two ends changes the kernel at most once.

    Args:
        seen: rows that an operation chooses for when a layer gets ``n``, such as rows per expert; by default ``n`` itself.
    """
    kinds: Sequence[Callable[[int], int]] = seen or (lambda n: n,)
    before: tuple[int, ...] = ()
    now = tuple(rounded_rows(kind(1)) for kind in kinds)
    for rows in range(1, most + 1):
        after = tuple(rounded_rows(kind(rows + 1)) for kind in kinds)
        if now != before or now != after or rows == most:
            yield rows
        before, now = now, after
