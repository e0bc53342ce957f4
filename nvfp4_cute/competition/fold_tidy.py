"""What a folded file still looks like after its edits, made shorter: brackets that fit one line, docstrings of what is gone."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from nvfp4_cute.competition.fold_text import Cut, Edit, Put, Text

WIDTH = 130
JOINED = "on one line, now that it fits"
PARTS = re.compile(r"\s+(?:Args|Attributes):$")
ENTRY = re.compile(r"(\s+)((?:\w+, )*\w+): ")
OPENING, CLOSING = "([{", ")]}"


def tidy(text: Text, heading: str) -> None:
    """Make a folded file's lines as few as they need to be."""
    while text.apply(_undescribed(text.tree(), [line.text for line in text.lines])):
        pass
    while text.apply(_about_what_is_gone([line.text for line in text.lines], heading)):
        pass
    text.apply(_plain_texts([line.text for line in text.lines]))
    while text.apply(_joined([line.text for line in text.lines])):
        pass
    text.drop_orphans()
    text.drop_empty_sections(heading)
    text.shorten_headings(heading)
    text.tidy()


def _about_what_is_gone(lines: list[str], heading: str) -> Iterator[list[Edit]]:
    """Paragraphs of headings and docstrings that name nothing that the file has, but something that it had."""
    prose = {number for number, _, _ in _paragraphs(lines, heading)}
    code = "\n".join(line for number, line in enumerate(lines) if number not in prose)
    words = set(re.findall(r"\w+", code))
    done = -1
    for first, last, is_first in _paragraphs(lines, heading):
        names = re.findall(r"``(?:[\w.]*\.)?(\w+)(?:\(\))?``", "\n".join(lines[first:last]))
        if names and not is_first and words.isdisjoint(names) and first > done:
            done = last
            yield [Cut(first, last)]  # with the blank line before it


def _paragraphs(lines: list[str], heading: str) -> Iterator[tuple[int, int, bool]]:
    """First and last line, from 0 and to what is behind, of paragraphs of prose; whether it is the first of its text."""
    tree = ast.parse("\n".join(lines))
    spans = [(n, "#") for n, line in enumerate(lines, start=1) if line.startswith(heading)]
    ends = {}
    for start, _ in spans:
        end = start
        while end < len(lines) and lines[end].startswith("#"):
            end += 1
        ends[start] = end
    texts = [(start, end, "#") for start, end in ends.items()]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            texts.append((text.lineno - 1, (text.end_lineno or text.lineno) - 1, ""))
    for start, end, blank in texts:
        begin, is_first = start, True
        for number in range(start, end + 1):
            if number == end or lines[number].strip() == blank:
                if number > begin and not PARTS.match(lines[begin]):
                    yield begin, number, is_first
                begin, is_first = number + 1, False


def _plain_texts(lines: list[str]) -> Iterator[list[Edit]]:
    """Names in the braces of formatted strings, which constants have become."""
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        if token.type != tokenize.STRING or token.start[0] != token.end[0] or token.string[0] not in "fF":
            continue
        shorter = re.sub(r"(?<!\{)\{'([\w.:]*)'\}(?!\})", r"\1", token.string)
        if shorter != token.string:
            start, stop = (
                len(lines[token.start[0] - 1][:c].encode()) for c in (token.start[1], token.end[1])
            )
            yield [Put(token.start[0], start, token.end[0], stop, shorter, "a constant of this file")]


def _joined(lines: list[str]) -> Iterator[list[Edit]]:
    """Brackets over several lines, the outermost first: on one line, or their contents on one."""
    opened: list[tokenize.TokenInfo] = []
    pairs: list[tuple[int, int, int]] = []
    tokens = list(tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline))
    for token in tokens:
        if token.type == tokenize.OP and token.string in OPENING:
            opened.append(token)
        elif token.type == tokenize.OP and token.string in CLOSING:
            start = opened.pop()
            pairs.append((start.start[0], -token.end[0], start.start[1]))
    fixed = {t.start[0] for t in tokens if t.type == tokenize.COMMENT}
    fixed |= {
        n
        for t in tokens
        if t.type == tokenize.STRING
        for n in range(t.start[0], t.end[0] + 1)
        if t.start[0] != t.end[0]
    }
    for first, minus_last, _ in sorted(pairs):
        last = -minus_last
        if first == last or any(n in fixed for n in range(first, last + 1)):
            continue
        whole = _one_line(lines[first - 1 : last])
        if len(whole) <= WIDTH:
            yield [Put(first, 0, last, len(lines[last - 1].encode()), whole, JOINED)]
        elif (
            last - first > 2
            and lines[first - 1].rstrip()[-1] in OPENING
            and lines[last - 1].strip()[0] in CLOSING
        ):
            inner = _one_line(lines[first : last - 1])
            parts = lines[first : last - 1]
            indent = len(parts[0]) - len(parts[0].lstrip())
            if len(inner) > WIDTH and all(_is_item(part, indent) for part in parts):
                packed = _packed(parts)
                if len(packed) < len(parts):
                    end = len(parts[-1].encode())
                    yield [Put(first + 1, 0, last - 1, end, "\n".join(packed), JOINED)]
            elif len(inner) <= WIDTH:
                yield [Put(first + 1, 0, last - 1, len(lines[last - 2].encode()), inner.rstrip(","), JOINED)]


def _one_line(lines: list[str]) -> str:
    result = lines[0].rstrip()
    for line in lines[1:]:
        part = line.strip()
        if result[-1] in OPENING:
            result += part
        elif part[:1] and part[0] in CLOSING:
            result = result if _is_single(result) else result.rstrip(",")
            result += part
        else:
            result += f" {part}"
    return result


def _is_item(line: str, indent: int) -> bool:
    """Whether a line is one argument with its comma."""
    text = line.strip()
    return (
        len(line) - len(line.lstrip()) == indent
        and text.endswith(",")
        and text[0] not in CLOSING
        and text[-2] not in OPENING
    )


def _packed(lines: list[str]) -> list[str]:
    """Arguments, as many on a line as fit."""
    packed = [lines[0].rstrip()]
    for line in lines[1:]:
        longer = f"{packed[-1]} {line.strip()}"
        packed = [*packed[:-1], longer] if len(longer) <= WIDTH else [*packed, line.rstrip()]
    return packed


def _is_single(text: str) -> bool:
    """Whether the last comma makes a tuple of one value."""
    depth = 0
    for place in range(len(text) - 2, -1, -1):
        if text[place] in CLOSING:
            depth += 1
        elif text[place] in OPENING:
            if depth == 0:
                return text[place] == "(" and not re.search(r"[\w\])]$", text[:place])
            depth -= 1
        elif text[place] == "," and depth == 0:
            return False
    return False


def _undescribed(tree: ast.Module, lines: list[str]) -> Iterator[list[Edit]]:
    """Lines of docstrings about parameters and fields that are gone, and headings over nothing."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None:
            continue
        text = node.body[0]
        names = _names(node)
        last = text.end_lineno or text.lineno
        for number in range(text.lineno, last + 1):
            if not PARTS.fullmatch(lines[number - 1]):
                continue
            cut: list[Edit] = []
            left, place = False, number + 1
            while place <= last and (match := ENTRY.match(lines[place - 1])):
                end = place
                while end < last and re.match(match[1] + r"\s+\S", lines[end]):
                    end += 1
                if names.isdisjoint(match[2].split(", ")):
                    cut.append(Cut(place, end))
                else:
                    left = True
                place = end + 1
            is_last = not lines[place - 1].strip() or lines[place - 1].strip() == '"""'
            if not left and is_last:
                before = number - 1 if not lines[number - 2].strip() else number
                cut = [Cut(before, place - 1)]
            if cut:
                yield cut
                break
        if (
            last > text.lineno
            and lines[last - 1].strip() == '"""'
            and not any(lines[n - 1].strip() for n in range(text.lineno + 1, last))
        ):
            first = lines[text.lineno - 1]
            yield [Put(text.lineno, 0, last, len(lines[last - 1].encode()), f'{first}"""', "nothing uses it")]


def _names(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            found.add(part.arg)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
    return found
