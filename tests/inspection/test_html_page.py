"""The page that all HTML reports share: texts are escaped, and nothing is left out in silence."""

import pytest
from jinja2 import UndefinedError

from moe.inspection.html_page import render_page


def test_a_text_is_escaped_wherever_it_stands(tmp_path):
    (tmp_path / "a.html").write_text(
        '{% extends "page.html" %}{% from "macros.html" import sentences, table %}'
        "{% block content %}{{ table([text], [[text]]) }}{{ sentences([text]) }}{% endblock %}"
    )
    page = render_page("a.html", tmp_path, title="<b>", text="<i> & `x`")
    assert page.startswith("<!doctype html>")
    assert "<title>&lt;b&gt;</title>" in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert page.count("&lt;i&gt; &amp; `x`") == 2  # head and body of the table
    assert "<li>&lt;i&gt; &amp; <code>x</code></li>" in page


def test_a_value_that_a_template_lacks_is_an_error(tmp_path):
    (tmp_path / "a.html").write_text('{% extends "page.html" %}')
    with pytest.raises(UndefinedError, match="title"):
        render_page("a.html", tmp_path)
