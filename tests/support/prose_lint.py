"""Finds the turns of phrase that the house style forbids, in docstrings, comments and Markdown pages.

Rules are regular expressions over one sentence each, so they catch a manner of writing, not its quality.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Finding(NamedTuple):
    """One sentence that breaks a rule."""

    path: Path
    line: int  # line of the text block that holds the sentence, from 1
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.sentence}"


# Openings are matched at the start of a sentence, words anywhere in it.
OPENINGS = {
    "start with the noun that acts or with a verb": r"(?:Of|The same|As of|Those|That)\b(?! is,| is:)",
}
WORDS = {
    'write "of" or "from", not "as of"': r"\bas of\b(?! (?:version|\d|\w+ \d))",
    'write "next to", "with" or "besides", not "beside"': r"\bbeside\b",
    'write "after", not "behind"': r"\bbehind\b",
    'write "also", not a final ", too"': r", too\b(?=[\s.,;:)]|$)",
    'write "at most N" or name the number, not "so many"': r"\b(?:so|as) many\b(?! as)",
    'write "is not a", not "is no"': r"(?<![Tt]here )\b(?:is|are|was|were|be) no (?!longer\b|more\b|later\b|fewer\b|less\b|larger\b|other\b)",
    'use the field\'s term, not "{}"': r"\b(?:owes|owed|handover|turned through)\b",
    'write "fewer" for things that you can count': r"\bless (?:bits|bytes|rows|registers|words|tiles|launches|lines|stages)\b",
}
_COMPILED = [(rule, re.compile(r"^\W*" + text)) for rule, text in OPENINGS.items()]
_COMPILED += [(rule, re.compile(text)) for rule, text in WORDS.items()]
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`*\"(])")
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
# Finds comments faster than tokenize does.
_STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'{3}(?:\\.|[^\\])*?\'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(#[^\n]*)''',
    re.S,
)
_CODE = re.compile(r"``.*?``|`[^`]*`|\"[^\"]*\"")


def sentences(text: str) -> list[str]:
    """Sentences of a paragraph. Code and quotations become a placeholder, because they must not be rephrased."""
    flat = " ".join(_CODE.sub("X", text).split())
    return [s for s in _SENTENCE_END.split(flat) if s]


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comment blocks of a module, each with its first line number. Joins consecutive comment lines."""
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:  # grows; expressions hold no docstrings
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS)]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield from _paragraphs(first.value.value, first.lineno)
    block: list[str] = []
    start = last = 0
    row, at = 1, 0
    for token in _STRING_OR_COMMENT.finditer(source):
        if token[1] is None:
            continue
        row, at = row + source.count("\n", at, token.start()), token.start()
        alone = not source[source.rfind("\n", 0, at) + 1 : at].strip()
        if block and alone and row == last + 1:
            block.append(token[1].lstrip("#: "))
        else:
            if block:
                yield start, " ".join(block)
            block, start = [token[1].lstrip("#: ")], row
        last = row if alone else -1
    if block:
        yield start, " ".join(block)


def markdown_texts(source: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and table cells of a page, each with its line number, without code blocks."""
    block: list[str] = []
    start, code = 0, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        text = line.strip()
        fence = text.startswith("```")
        code ^= fence
        text = "" if fence or code else text
        begins = not text or re.match(r"(?:[-*|>]|\d+\.|#+) ?", text)
        if begins and block:
            yield start, " ".join(block)
            block = []
        if text.startswith("|"):
            yield from ((number, cell.strip()) for cell in text.strip("|").split(" | "))
        elif text:
            start = start if block else number
            block.append(re.sub(r"^(?:[-*>]|\d+\.|#+)\s+", "", text))


def _paragraphs(text: str, line: int) -> Iterator[tuple[int, str]]:
    at = line
    for part in re.split(r"(\n\s*\n)", text):
        if part.strip():
            yield at, part
        at += part.count("\n")


def find(path: Path, source: str) -> list[Finding]:
    """Findings in one Python file or Markdown page."""
    texts = markdown_texts(source) if path.suffix == ".md" else python_texts(source)
    return [
        Finding(path, line, rule, sentence)
        for line, text in texts
        for sentence in sentences(text)
        for rule, pattern in _COMPILED
        if pattern.search(sentence)
    ]
