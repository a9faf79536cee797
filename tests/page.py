"""Prints how dense the Python files of the project are: the figures that a reader notices first.

python -m tests.page [PATH ...]          (files or folders; by default the library and its tools)
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

FOLDERS = ("moe", "eval", "scripts", "benchmarks")
LONG_BODY = 20  # lines from which a body needs a break

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class PageCounts:
    """Counts over files; they add up.

    Attributes:
        filled_lines: Lines that are not blank.
        code_lines: Lines with a token that is neither a comment nor part of a docstring.
        code_characters: Characters of those lines, without indentation.
        comment_lines: Lines with nothing but a comment.
        body_lines: Lines of function bodies, from the first statement after the docstring.
        blank_lines: Blank ones among them.
        long_bodies: Bodies of at least LONG_BODY lines.
        unbroken_bodies: Those of them with neither a blank line nor a comment line.
        tuple_assignments: `a, b = x, y`, other than swaps.
        comprehensions: List, set and dict comprehensions and generator expressions.
        nested_comprehensions: Those of them with several loops, or with another inside.
    """

    filled_lines: int = 0
    code_lines: int = 0
    code_characters: int = 0
    comment_lines: int = 0
    body_lines: int = 0
    blank_lines: int = 0
    long_bodies: int = 0
    unbroken_bodies: int = 0
    tuple_assignments: int = 0
    comprehensions: int = 0
    nested_comprehensions: int = 0

    @property
    def characters_per_code_line(self) -> float:
        """Mean length of a code line, without indentation."""
        return self.code_characters / max(1, self.code_lines)

    @property
    def percent_comments(self) -> float:
        """Comment lines in percent of the lines that are not blank."""
        return 100 * self.comment_lines / max(1, self.filled_lines)

    @property
    def percent_blank(self) -> float:
        """Blank lines in percent of the lines of function bodies."""
        return 100 * self.blank_lines / max(1, self.body_lines)

    @property
    def percent_unbroken(self) -> float:
        """Long bodies without a break in percent of the long bodies."""
        return 100 * self.unbroken_bodies / max(1, self.long_bodies)

    def per_thousand(self, count: int) -> float:
        """Returns how many there are in 1,000 code lines."""
        return 1000 * count / max(1, self.code_lines)


def count_page(paths: Sequence[Path]) -> PageCounts:
    """Returns the counts over Python files."""
    total = PageCounts()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        counts = _count_file(text)

        # Every field is a count: add them up one by one.
        for field in fields(PageCounts):
            added = getattr(total, field.name) + getattr(counts, field.name)
            setattr(total, field.name, added)
    return total


def _count_file(text: str) -> PageCounts:
    tree = ast.parse(text)
    lines = text.splitlines()

    # A docstring is neither code nor comment.
    docstring_lines = _docstring_lines(tree)
    code, comments = _code_and_comments(text, lines)
    code -= docstring_lines

    counts = PageCounts(
        filled_lines=sum(bool(line.strip()) for line in lines),
        code_lines=len(code),
        code_characters=sum(len(lines[number - 1].strip()) for number in code),
        comment_lines=len(comments),
    )

    # What is counted by statement rather than by line.
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            _count_body(node, lines, docstring_lines, comments, counts)
        elif isinstance(node, ast.Assign):
            counts.tuple_assignments += _is_tuple_assignment(node)
        elif isinstance(node, _COMPREHENSIONS):
            counts.comprehensions += 1
            counts.nested_comprehensions += _is_nested(node)
    return counts


def _docstring_lines(tree: ast.AST) -> set[int]:
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) or not node.body:
            continue

        first = node.body[0]
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if is_text and isinstance(first.value.value, str):
            numbers.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return numbers


def _code_and_comments(text: str, lines: list[str]) -> tuple[set[int], set[int]]:
    """Returns the numbers of the lines that hold code, and of those that hold only a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        first_line = token.start[0]
        if token.type == tokenize.COMMENT and lines[first_line - 1].lstrip().startswith("#"):
            comments.add(first_line)
        elif token.type not in _NO_CODE:
            code.update(range(first_line, token.end[0] + 1))
    return code, comments


def _count_body(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    lines: list[str],
    docstring_lines: set[int],
    comments: set[int],
    counts: PageCounts,
) -> None:
    """Adds the lines of a function's body to `counts`."""
    body = [statement for statement in function.body if statement.lineno not in docstring_lines]
    if not body:
        return

    # From the first statement after the docstring to the last, nested functions included.
    numbers = range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)
    num_blank = sum(not lines[number - 1].strip() for number in numbers)
    has_comment = any(number in comments for number in numbers)
    counts.body_lines += len(numbers)
    counts.blank_lines += num_blank

    if len(numbers) >= LONG_BODY:
        counts.long_bodies += 1
        counts.unbroken_bodies += num_blank == 0 and not has_comment


def _is_tuple_assignment(node: ast.Assign) -> bool:
    """Returns whether an assignment is `a, b = x, y` and does not swap."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False

    # `a, b = b, a` swaps.
    assigned = {ast.unparse(item) for item in target.elts}
    values = {ast.unparse(item) for item in node.value.elts}
    return assigned != values


def _is_nested(node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> bool:
    if len(node.generators) > 1:
        return True
    return any(isinstance(child, _COMPREHENSIONS) for child in ast.walk(node) if child is not node)


def python_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the Python files at and below `paths`, in order."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.page", description=__doc__)
    parser.add_argument("paths", type=Path, nargs="*", default=[Path(name) for name in FOLDERS])
    files = python_files(parser.parse_args().paths)
    counts = count_page(files)

    print(f"{len(files)} files, {counts.code_lines} lines of code")
    print(f"characters in a code line            {counts.characters_per_code_line:6.1f}")
    print(f"lines that are comments              {counts.percent_comments:6.1f} %")
    print(f"blank lines in function bodies       {counts.percent_blank:6.1f} %")
    print(f"bodies of >= {LONG_BODY} lines without a break {counts.percent_unbroken:6.1f} %")
    for name, count in (
        ("tuple assignments", counts.tuple_assignments),
        ("comprehensions", counts.comprehensions),
        ("nested comprehensions", counts.nested_comprehensions),
    ):
        print(f"{name + ' per 1,000 lines':<37}{counts.per_thousand(count):6.1f}")


if __name__ == "__main__":
    main()
