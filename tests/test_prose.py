"""Docstrings, comments and pages keep to the house's English: `prose_lint` finds the turns of phrase that it forbids."""

from collections import Counter
from pathlib import Path

import prose_lint
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("nvfp4_cute", "kernels", "problems", "bench", "tests")
# Findings that a room may still have. A rewritten room leaves the table; no number grows.
PENDING: dict[str, int] = {}


def _room(path: Path) -> str:
    """First folder of a file, and the second one where there are several rooms in it."""
    parts = path.relative_to(ROOT).parts
    return "/".join(
        parts[:2] if parts[0] in ("nvfp4_cute", "kernels", "tests") and len(parts) > 2 else parts[:1]
    )


def _files() -> list[Path]:
    """Python files and pages whose text we wrote. Generated results and dated notes keep the words of their day."""
    pages = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        pages += [p for kind in ("*.py", "*.md") for p in (ROOT / folder).rglob(kind)]
    generated = (ROOT / "bench/results", ROOT / "bench/notes")
    return [p for p in pages if not any(p.is_relative_to(g) for g in generated)]


def test_no_page_or_docstring_or_comment_falls_back_into_the_old_manner():
    findings = [f for p in _files() for f in prose_lint.find(p, p.read_text())]
    counts = Counter(_room(f.path) for f in findings)
    over = {room for room, count in counts.items() if count > PENDING.get(room, 0)}
    assert not over, "\n".join(str(f) for f in findings if _room(f.path) in over)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Of a repeated call's tensors the addresses.", "start with"),
        ("Addresses. The same for lists.", "start with"),
        ("A layout as of torch.", '"of" or "from"'),
        ("Weights beside 16-bit rows.", '"next to"'),
        ("Arrives behind the copy.", '"after"'),
        ("Lists are taken, too.", '"also"'),
        ("Spins for so many cycles.", '"at most N"'),
        ("It is no tensor.", '"is not a"'),
        ("Needs less registers.", '"fewer"'),
    ],
)
@pytest.mark.parametrize("kind", ["docstring", "comment", "page", "table"])
def test_each_rule_finds_its_sentence(text, rule, kind):
    source = {
        "docstring": f'def f():\n    """{text}"""\n',
        "comment": f"x = 1\n# {text}\ny = 2\n",
        "page": f"# Title\n\nSome words.\n\n- {text}\n",
        "table": f"| a | b |\n|---|---|\n| x | {text} |\n",
    }[kind]
    found = prose_lint.find(Path("page.md" if kind in ("page", "table") else "module.py"), source)
    assert [rule in f.rule for f in found] == [True]


def test_code_and_quotations_are_not_judged():
    source = '"""Says ``as of`` and "behind" of `beside`."""\n'
    assert not prose_lint.find(Path("module.py"), source)
    assert not prose_lint.find(Path("page.md"), "```\nOf all files behind it, too.\n```\n")


def test_plain_sentences_pass():
    source = '"""Accumulates one tile.\n\nReturns no value; is no longer used; thatched roofs."""\n'
    assert not prose_lint.find(Path("module.py"), source)
