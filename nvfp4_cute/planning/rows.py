"""Row counts for which configs are chosen. There are few, so that a server can compile all kernels before its first request."""

from collections.abc import Callable, Iterator, Sequence

EXACT_ROWS = 16
STEP_ROWS = 8
STEPS = 4
"""Row counts per power of two."""


def rounded_rows(rows: int) -> int:
    """Returns ``rows`` rounded up: exact up to 16, then a multiple of 8, then one of four values per power of two.

    Choosing for up to a quarter more rows changes the modelled time little, while every distinct row count costs milliseconds
    to choose for and possibly seconds to compile.
    """
    if rows <= EXACT_ROWS:
        return rows
    step = max(STEP_ROWS, (1 << (rows - 1).bit_length()) // (2 * STEPS))
    return -(-rows // step) * step


def representative_rows(most: int, *seen: Callable[[int], int]) -> Iterator[int]:
    """Yields the row counts from 1 to ``most`` at which another kernel may be chosen: the ends of every rounding range.

    A threshold between two ends changes the kernel at most once.

    Args:
        seen: functions from a layer's rows to the rows that an operation chooses for, such as rows per expert; the identity by
            default.
    """
    kinds: Sequence[Callable[[int], int]] = seen or (lambda n: n,)
    before: tuple[int, ...] = ()
    now = tuple(rounded_rows(kind(1)) for kind in kinds)
    for rows in range(1, most + 1):
        after = tuple(rounded_rows(kind(rows + 1)) for kind in kinds)
        if now != before or now != after or rows == most:
            yield rows
        before, now = now, after
