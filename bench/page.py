"""Pages for a browser: one file each, with everything in it, readable on a phone and without a script."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

SHORT = 16
"""Characters of a cell whose words are never broken."""

SHELL = Path(__file__).parent / "page.html"


def page(title: str, body: str) -> str:
    """A whole page around ``body``, which is HTML."""
    return fill(SHELL, {"TITLE": html.escape(title), "BODY": body})


def fill(template: Path, parts: Mapping[str, str]) -> str:
    """The template with each part in the place of its name, ``@NAME@``."""
    text = template.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def heading(title: str, *paragraphs: str) -> str:
    """The top of a page, from plain text."""
    texts = "".join(f"<p>{html.escape(text)}</p>\n" for text in paragraphs if text)
    return f"<h1>{html.escape(title)}</h1>\n{texts}"


def cards(found: Mapping[str, Sequence[str]]) -> str:
    """Boxes side by side: a title each, and its facts, from plain text."""
    boxes = (card(title, facts) for title, facts in found.items())
    return f"<div class=cards>{''.join(boxes)}</div>\n"


def card(title: str, facts: Sequence[str]) -> str:
    """One box."""
    listed = "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)
    return f"<section class=card><h2>{html.escape(title)}</h2><ul>{listed}</ul></section>"


def section(title: str, body: str) -> str:
    """A part of a page; ``body`` is HTML. Nothing where that is empty."""
    return f"<h2>{html.escape(title)}</h2>\n{body}\n" if body else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], wrong: Sequence[int] = ()) -> str:
    """Rows of plain text; on a phone a box each, whose cells say what they are. Nothing where there are none.

    Args:
        wrong: numbers of the rows that a reader has to see.
    """
    if not rows:
        return ""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = []
    for number, row in enumerate(rows):
        style = "note wrong" if number in wrong else "note"
        cells = (
            f'<td class="{style}{" word" * (len(text) <= SHORT)}" '
            f'data-label="{html.escape(name)}" data-value="{html.escape(text)}">'
            f"<span>{html.escape(text)}</span></td>"
            for name, text in zip(header, row, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f"<table><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
