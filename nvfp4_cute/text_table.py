"""Tables for a terminal: columns of one width, two spaces apart."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Align the first ``left`` columns to the left and the others, numbers, to the right; "" without rows.

    Raises:
        ValueError: a row has another number of cells than the header.
    """
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
