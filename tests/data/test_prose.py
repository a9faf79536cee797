"""Prose out of docstrings. Oracle: a reader's eye, written down as the paragraphs expected of
hand-made docstrings.
"""

import inspect
import warnings

from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.docstrings import docstrings, language_topics, package_folder, python_files
from moe.data.prose import is_prose, prose_paragraphs

NUMPYDOC = inspect.cleandoc(
    """
    Return the sum of an array
    over one axis.

    Parameters
    ----------
    a : array_like
        The numbers that are added.

    Examples
    --------
    The sum of two numbers is a number again:

    >>> total(1, 2)
    Only the output of a doctest looks like this sentence here.

    ==== ====
    name size
    ==== ====

    .. note:: This is slow for large arrays of objects.

    .. math:: all this is a formula and not a sentence

        and so is all of this block below it

    See `the manual <http://example.org>`_ and :func:`~a.b.other` for **more** on ``this``.

    It works like this::

        if this is code then it has to go away

    The text after the code stays.
    """
)


def test_sentences_stay_and_code_headings_tables_and_doctests_go():
    assert prose_paragraphs(NUMPYDOC) == [
        "Return the sum of an array over one axis.",
        "a : array_like The numbers that are added.",
        "The sum of two numbers is a number again:",
        "This is slow for large arrays of objects.",
        "See the manual and a.b.other for more on this.",
        "It works like this:",
        "The text after the code stays.",
    ]


def test_fenced_code_goes():
    text = (
        "The first sentence stands here.\n```python\nthis is code as you can see\n```\n"
        "The second sentence stands here."
    )
    expected = ["The first sentence stands here.", "The second sentence stands here."]
    assert prose_paragraphs(text) == expected


def test_few_words_or_many_symbols_are_not_prose():
    assert not is_prose("See also")
    assert not is_prose("x[0] = f(y) + {a: b} for the key and value")
    assert is_prose("Return True if the path is absolute.")


@settings(max_examples=50)
@given(st.text(alphabet="ab .:`*<>_=-|\n\t", max_size=200))
def test_any_text_gives_lines_that_are_prose(text):
    for paragraph in prose_paragraphs(text):
        assert is_prose(paragraph)
        assert paragraph == " ".join(paragraph.split())


NESTED = '''"""Module."""
raise SystemExit("executed")
class A:
    """Class."""
    if True:
        def f(self):
            """Method."""
            try: pass
            except OSError:
                async def g():
                    """Inner

                    flush
                      indented."""
x = """not a docstring"""
'''


def test_docstrings_are_read_in_order_without_running_the_file(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(NESTED, encoding="utf-8")
    assert docstrings(path) == ["Module.", "Class.", "Method.", "Inner\n\nflush\n  indented."]


def test_a_file_for_another_python_is_named_in_a_warning_and_skipped(tmp_path, caplog):
    path = tmp_path / "old.py"
    path.write_text('"""Doc."""\nprint "hello"\n', encoding="utf-8")
    assert docstrings(path) == []
    assert "old.py" in caplog.text


def test_invalid_escapes_in_foreign_code_do_not_warn(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""A \\d digit."""\n', encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert docstrings(path) == ["A \\d digit."]


def test_tests_and_installed_packages_are_not_part_of_the_standard_library():
    folder = package_folder("stdlib")
    files = [path.relative_to(folder).parts for path in python_files(folder)]
    assert ("email", "message.py") in files
    assert not any({"site-packages", "test"} & set(parts) for parts in files)


def test_the_language_reference_is_found_by_topic():
    assert 'The "if" statement' in language_topics()["if"]
