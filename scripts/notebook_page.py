"""A notebook that Jupyter ran, as a page of the documentation: Markdown and its figures.

Comes before `render_notebooks`, which runs it and writes the files.
"""

import re
from typing import Any, NamedTuple

_FRAME_HEIGHT = 900  # pixels


class Page(NamedTuple):
    """A notebook as a page of the documentation.

    Attributes:
        text: Markdown.
        figures: Name and text of each .svg file that it shows.
    """

    text: str
    figures: dict[str, str]


def notebook_page(name: str, content: dict[str, Any], made_from: str) -> Page:
    """Returns the page of a notebook that was run.

    Args:
        name: Of the notebook.
        content: What an .ipynb file holds.
        made_from: Stands below the heading.
    """
    blocks = []
    figures: dict[str, str] = {}
    heading = name
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            headings = re.findall(r"^#+ (.+)$", source, re.MULTILINE)
            heading = [heading, *headings][-1]
            continue

        # Code, and what came out of it.
        code = f"```python\n{source}\n```"
        blocks.append(_folded(code) if source.startswith("import ") else code)
        for output in cell["outputs"]:
            data = output.get("data", {})
            if output.get("name") == "stdout":
                printed = "".join(output["text"]).rstrip()
                blocks.append(f"```text\n{printed}\n```")
            elif "image/svg+xml" in data:
                # A figure is a file of its own.
                file = f"{name}_{len(figures) + 1}.svg"
                svg = "".join(data["image/svg+xml"])
                figures[file] = small_svg(svg)
                blocks.append(f"![{heading}]({file})")
            elif "text/html" in data:
                blocks.append(_frame(name))

    # The first block begins with the title of the page.
    title, _, rest = blocks[0].partition("\n")
    note = f"A copy of `notebooks/{name}.py` as Jupyter ran it. {made_from}"
    return Page("\n\n".join([title, note, rest.strip(), *blocks[1:]]) + "\n", figures)


def _folded(code: str) -> str:
    """Returns code that is shown on demand: imports are long, and nobody reads them first."""
    return f"<details><summary>Imports and settings</summary>\n\n{code}\n\n</details>"


def _frame(name: str) -> str:
    """Returns the frame of the interactive page, and a link to it."""
    address = f"../_static/notebooks/{name}.html"
    return (
        f'<iframe src="{address}" sandbox="allow-scripts" title="Routing view" loading="lazy" '
        f'style="width: 100%; height: {_FRAME_HEIGHT}px; border: 0"></iframe>\n\n'
        f'<p><a href="{address}">The interactive page by itself</a> (a selection of the text)</p>'
    )


def small_svg(svg: str) -> str:
    """Returns a figure without comments, indents and digits that nobody sees."""
    svg = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s+", "\n", svg)
    return re.sub(r'="[^"]*"', _short_numbers, svg)


def _short_numbers(attribute: re.Match[str]) -> str:
    return re.sub(r"(\d\.\d\d)\d+", r"\1", attribute[0])
