"""Configuration of the documentation site; `make docs` builds it into build/docs.

Pages are Markdown (MyST). The API reference is made of the docstrings, whose template
(Args, Returns, Raises, Attributes, Example, Source) is prepared here for Sphinx. Nothing is
fetched from the network.
"""

import ast
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.domains.python._object import PyObject

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # scripts/ and benchmarks/ are not installed

# ---------------------------------------------------------------------------
# The project

project = "stmoe"
author = "The authors of moe"
project_copyright = "the authors of moe, Apache-2.0"
release = installed_version("stmoe")
version = release

# ---------------------------------------------------------------------------
# The build

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "py:obj"  # `name` in a docstring is a link where the name is documented
add_module_names = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

autosummary_generate = True
autosummary_generate_overwrite = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # a list of attributes, not an index entry for each
napoleon_attr_annotations = False  # types stand in the signature
napoleon_use_rtype = False

# ---------------------------------------------------------------------------
# The list of files


def write_file_list():
    """Writes files.md: every folder, and a table of its files that links to their reference."""
    lines = ["# Every file", "", "`make docs` makes this page and its links from the docstrings."]
    for top in ("moe", "eval/stmoe_eval", "scripts", "benchmarks"):
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py")}):
            lines += ["", f"## {folder.relative_to(ROOT)}/", ""]
            files = sorted(folder.glob("*.py"))
            package = folder / "__init__.py"
            if package in files:
                files.remove(package)
                lines += [first_paragraph(package), ""]

            if top in ("moe", "eval/stmoe_eval"):
                lines += ["```{eval-rst}", ".. autosummary::", "   :toctree: api/modules"]
                lines += ["   :template: module.rst", ""]
                prefix = ".".join(folder.relative_to(ROOT / top).parts)
                prefix = ".".join(filter(None, [Path(top).name, prefix]))
                lines += [f"   {prefix}.{path.stem}" for path in files] + ["```"]
            else:
                lines += [f"- `{path.name}`: {first_paragraph(path)}" for path in files]
    (ROOT / "docs/files.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def first_paragraph(path):
    """Returns the first paragraph of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return docstring.split("\n\n")[0].replace("\n", " ")


write_file_list()


def write_names_page(app, config):
    """Writes names.html, which runs the model of the package in a browser."""
    from moe.serving.model_page import model_page

    (ROOT / "docs/names.html").write_text(model_page(ROOT / "moe/names"), encoding="utf-8")


# ---------------------------------------------------------------------------
# The look

html_theme = "furo"
html_title = f"moe {release}"
html_static_path = ["_static"]
html_extra_path = ["names.html"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

# ---------------------------------------------------------------------------
# Docstrings

_SECTION = re.compile(r"(Returns|Yields|Source|Example):\s*$")
_FIELD = {"Returns": ":returns:", "Yields": ":yields:", "Source": ":Source:"}
_COMMAND = ("stmoe ", "python -m ", "torchrun ")
_SHAPE = re.compile(r"<[\w ]+>\[[^\]]*\]")
_LIST_ITEM = re.compile(r"\s*(-|\d+\.) ")


def prepare_docstring(app, what, name, obj, options, lines):
    """Rewrites what Sphinx would misread in our docstrings; runs before napoleon.

    Returns and Yields are prose (napoleon would take all before the first colon for a type), Source
    is a field of its own, examples and commands are code, and a list needs no blank line before it.
    """
    prepared = []
    for title, body in _parts(lines):
        if title == "Example":
            prepared += ["", ".. code-block:: python", "", *body, ""]
        elif title == "code":
            prepared += ["", ".. code-block:: text", "", *(f"    {line}" for line in body), ""]
        elif title:
            text = [line.strip() for line in _mark_up(body) if line.strip()]
            rest = [f"    {line}" for line in text[1:]]
            prepared += ["", f"{_FIELD[title]} {text[0]}", *rest, ""]
        else:
            prepared += _separate_lists(_mark_up(body))
    lines[:] = prepared


def _parts(lines):
    """Returns pairs of a title and lines: a section's, `code`, or empty for all other text."""
    parts = [("", [])]
    for before, line in zip(["the start", *lines], lines, strict=False):  # a summary is no code
        title, body = parts[-1]
        section = _SECTION.match(line)
        if section:
            parts.append((section[1], []))
        elif title == "code" and line.strip():
            body.append(line)
        elif not before.strip() and _begins_code(line, title, body):
            parts.append(("code", [line]))
        elif title == "code" or (title and line.strip() and not line.startswith(" ")):
            parts.append(("", [line]))
        else:
            body.append(line)
    return parts


def _begins_code(line, title, body):
    """Returns whether a line after a blank one begins a block of code: a command, or indented."""
    if title:
        return False
    last_text = next((text for text in reversed(body) if text.strip()), "")
    indented = line.startswith("    ") and not last_text.startswith(" ")
    return line.startswith(_COMMAND) or (indented and not _LIST_ITEM.match(last_text))


def _separate_lists(lines):
    """Returns lines of text with a blank one in front of each list."""
    separated = []
    for line in lines:
        before = separated[-1] if separated else ""
        in_list = before.startswith(" ") or _LIST_ITEM.match(before)
        if _LIST_ITEM.match(line) and before.strip() and not in_list:
            separated.append("")
        separated.append(line)
    return separated


def _mark_up(lines):
    """Returns lines of text with shapes as code, and without accidental markup."""
    parts = re.split(r"(`+[^`]*`+)", "\n".join(lines))
    for index, part in enumerate(parts):
        if part.startswith("` "):
            parts[index] = f"``{part[1:-1]!r}``"  # code may not begin with a blank

    for index in range(0, len(parts), 2):  # outside of backticks
        part = re.sub(r"(\w)_(?!\w)", r"\1\\_", parts[index])  # `name_` would be a reference
        part = re.sub(r"(?m)^(\s*\w+: )(\w\.)", r"\1\\\2", part)  # "E." would begin a list
        part = part.replace("|", r"\|")  # |x| would be a substitution
        parts[index] = _SHAPE.sub(r"``\g<0>``", part)
    return "".join(parts).split("\n")


def skip_member(app, what, name, obj, skip, options):
    """Leaves out the fields of a NamedTuple, which its docstring lists under Attributes."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


# ---------------------------------------------------------------------------
# References


_NOT_DOCUMENTED = re.compile(r"\.(_\w+|[A-Z])$")  # private names, and type variables


def resolve_missing(app, env, node, contnode):
    """Returns the plain text of a reference to what is not documented here.

    Names of torch and of Python have no page here, and other projects' indexes are not fetched. A
    full name of ours that is not found stays a warning.
    """
    if node.get("refdomain") != "py":
        return None
    target = node.get("reftarget", "")
    ours = target.startswith("moe.") and not _NOT_DOCUMENTED.search(target)
    return None if ours and node.get("reftype") != "obj" else contnode


def setup(app):
    """Connects the hooks; the docstring's runs before napoleon's."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"

    app.connect("config-inited", write_names_page)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("missing-reference", resolve_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
