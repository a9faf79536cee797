"""HTML pages from Jinja2 templates.

A template extends templates/page.html, which holds the head and the style that all reports share.
Templates escape all text; only our own SVG figures are inserted unescaped.
"""

import re
from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

_CODE_SPAN = re.compile("`([^`]+)`")


def render_page(template: str, folder: Path | None = None, **values: object) -> str:
    """Returns a page.

    Args:
        template: File name of the template.
        folder: Folder of additional templates; this package's templates are always found.
        values: Values for the template; `title` is one of them.
    """
    return _environment(folder).get_template(template).render(**values)


@cache
def _environment(folder: Path | None) -> Environment:
    """Returns the templates, each of which is compiled once."""
    loaders: list[PackageLoader | FileSystemLoader] = [PackageLoader("moe.inspection")]
    if folder is not None:
        loaders.append(FileSystemLoader(folder))
    environment = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code_spans"] = code_spans
    return environment


def code_spans(text: str) -> Markup:
    """Returns a text as HTML, in which `names` in backquotes are set as code."""
    return Markup(_CODE_SPAN.sub(r"<code>\1</code>", str(escape(text))))
