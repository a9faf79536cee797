"""Extracts English paragraphs from docstrings, without markup, code and tables.

Comes before `documents` and `docstrings`. Docstrings mix reStructuredText, numpydoc, Google style
and Markdown, so each rule below is about what a reader sees (a fence, an indented block, an
underlined heading), not about one syntax.
"""

import re
from collections.abc import Iterable, Iterator

MIN_WORDS = 4
# Chosen by eye: below are sentences that name some code, above is code that names some words.
MAX_SYMBOL_SHARE = 0.12

_RULE = re.compile(r"[-=~^*#_+|.\"'`\s]{3,}$")
_DIRECTIVE = re.compile(r"\.\. ?([\w-]+)::\s*")
_PROSE_DIRECTIVES = re.compile(
    "note|warning|tip|hint|important|caution|attention|danger|seealso|admonition"
    "|deprecated|versionadded|versionchanged"
    "|describe|function|class|method|data|attribute|exception"
)
_COMMENT = re.compile(r"\.\.(\s|$)")
_ROLE = re.compile(r":[\w:+-]+:`([^`]*)`")
_LITERAL = re.compile(r"``([^`]+)``|`([^`]+)`_{0,2}")
_LINK_TARGET = re.compile(r"\s*<[^<>]*>$")
_EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}([^\s*](?:[^*]*[^\s*])?)\*{1,2}(?![\w*])")
_WORD = re.compile(r"[A-Za-z]{2,}")
_SYMBOL = re.compile(r"[^A-Za-z ,.;:!?'()\-\"]")


def prose_paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of English prose in `text`, one line each, in order.

    Left out: doctests, literal and fenced code, headings, rules, comments, and text with too few
    words or too many symbols for a sentence. Inline markup is taken off the words that it marks.

    Args:
        text: A dedented docstring or page.
    """
    # Lines that are not prose become blank.
    lines: Iterable[str] = text.expandtabs().splitlines()
    for drop in (_drop_fences, _drop_doctests, _drop_indented_code, _drop_headings):
        lines = drop(lines)

    paragraphs = []
    for block in _blocks(lines):
        paragraph = _without_markup(block)
        if is_prose(paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def letters(text: str) -> str:
    """Returns a text without case, spaces and punctuation, to find repetitions."""
    return "".join(filter(str.isalnum, text.casefold()))


def is_prose(paragraph: str) -> bool:
    """Returns whether a one-line paragraph reads as English: enough words, few symbols."""
    if len(_WORD.findall(paragraph)) < MIN_WORDS:
        return False
    return len(_SYMBOL.findall(paragraph)) <= MAX_SYMBOL_SHARE * len(paragraph)


def _drop_fences(lines: Iterable[str]) -> Iterator[str]:
    """Drops Markdown code between lines of three backticks."""
    inside = False
    for line in lines:
        if line.lstrip().startswith("```"):
            inside = not inside
            yield ""
        elif not inside:
            yield line


def _drop_doctests(lines: Iterable[str]) -> Iterator[str]:
    """Drops each `>>>` line with the lines after it up to a blank line: continuation and output."""
    inside = False
    for line in lines:
        stripped = line.strip()
        inside = stripped.startswith(">>>") or (inside and bool(stripped))
        yield "" if inside else line


def _drop_indented_code(lines: Iterable[str]) -> Iterator[str]:
    """Drops what `::`, a directive for code or a comment introduces; keeps notes and warnings."""
    code_below: int | None = None  # lines indented deeper than this belong to the block
    for line in lines:
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())

        # Inside a block, up to the first line that is indented no deeper than what opened it.
        if code_below is not None and (not stripped or indent > code_below):
            yield ""
            continue
        code_below = None

        # Outside: does this line open one?
        directive = _DIRECTIVE.match(stripped)
        if directive and _PROSE_DIRECTIVES.fullmatch(directive[1]):
            yield stripped[directive.end() :]
        elif directive or _COMMENT.match(stripped):
            code_below = indent
            yield ""
        elif stripped.endswith("::"):
            code_below = indent
            yield stripped[:-1]
        else:
            yield line


def _drop_headings(lines: Iterable[str]) -> Iterator[str]:
    """Drops lines of punctuation and the line above each: underlined headings, heads of tables."""
    previous = ""
    for line in lines:
        is_rule = _RULE.match(line) is not None and bool(line.strip())
        yield "" if is_rule else previous
        previous = "" if is_rule else line
    yield previous


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yields the runs of lines between blank lines."""
    block: list[str] = []
    for line in lines:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _without_markup(block: list[str]) -> str:
    """Returns the lines as one, with single spaces and without inline markup."""
    text = " ".join(" ".join(block).split())
    text = _ROLE.sub(_role_text, text)
    text = _LITERAL.sub(_literal_text, text)
    return _EMPHASIS.sub(r"\1", text)


def _role_text(match: re.Match[str]) -> str:
    return f"`{match[1].lstrip('~!')}`"


def _literal_text(match: re.Match[str]) -> str:
    return _LINK_TARGET.sub("", match[1] or match[2])
