r"""Runs notebooks in Jupyter and writes them into the documentation: Markdown, figures, the view.

    python -m scripts.render_notebooks                       (all three)
    python -m scripts.render_notebooks routing --model runs/demo/model --made-by "make demo"

Needs the optional dependencies `notebooks`; `make notebooks` installs them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from moe.checksums import model_fingerprint
from moe.cli import Parser, integer, path, run_main, word
from moe.errors import ConfigError, DataError
from moe.files import write_text

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ("routing", "expert_purpose", "what_changed")
VIEW_FILE = "view.html"

_JUPYTER = ("jupytext", "nbconvert", "ipykernel")
_OPTIONS = ("--to", "ipynb", "--set-kernel", "python3", "--execute")
_FRAME_HEIGHT = 900  # pixels
_ADVICE = "Install the optional dependencies: `make notebooks`, or pip install '.[notebooks]'."


class Page(NamedTuple):
    """A notebook as a page of the documentation.

    Attributes:
        text: Markdown.
        figures: Name and text of each .svg file that it shows.
    """

    text: str
    figures: dict[str, str]


def main(argv: list[str]) -> None:
    """Renders notebooks."""
    parser = Parser(prog="python -m scripts.render_notebooks", description="Renders notebooks.")
    explanation = f"which ({' '.join(NOTEBOOKS)})"
    parser.add_argument("notebooks", nargs="*", choices=[[], *NOTEBOOKS], help=explanation)
    default = Path("runs/demo/pretrain/model")
    explanation = f"folder of the model ({default})"
    parser.add_argument("--model", type=path, default=default, help=explanation)
    explanation = "the model to compare it with, in what_changed (runs/demo/model, if it is there)"
    parser.add_argument("--other", type=path, help=explanation)
    explanation = "command that made the models, for the pages (make demo)"
    parser.add_argument("--made-by", type=word, default="make demo", help=explanation)
    explanation = "folder of the documentation (docs)"
    parser.add_argument("--docs", type=path, default=ROOT / "docs", help=explanation)
    explanation = "largest size of the interactive page in bytes (300000)"
    parser.add_argument("--most-bytes", type=integer(least=1), default=300_000, help=explanation)
    options = parser.parse_args(argv)

    # What all notebooks read.
    variables = {"MOE_MODEL": str(options.model), "MOE_VIEW_BYTES": str(options.most_bytes)}
    other = options.other or Path("runs/demo/model")
    if options.other or other.exists():
        variables["MOE_OTHER"] = str(other)

    made_from = provenance(options.model, options.made_by)
    for name in options.notebooks or NOTEBOOKS:
        render(name, variables, options.docs, made_from)


def provenance(model: Path, made_by: str) -> str:
    """Returns what a page says of where its numbers come from."""
    return (
        f"`make notebooks` computed every number on it. The model is `{model}`, fingerprint "
        f"`{model_fingerprint(model)}`, made by:\n\n```bash\n{made_by}\n```"
    )


def render(name: str, variables: dict[str, str], docs: Path, made_from: str) -> None:
    """Runs a notebook, and writes its page, its figures and its view.

    Args:
        name: Of the notebook.
        variables: Of its environment.
        docs: Folder of the documentation.
        made_from: What the page says of the model.

    Raises:
        ConfigError: When Jupyter is not installed.
        DataError: When the notebook fails.
    """
    with tempfile.TemporaryDirectory(prefix="notebook-") as scratch:
        out = Path("runs/notebooks", name)
        notebook = Path(scratch, f"{name}.ipynb")
        source = ROOT / "notebooks" / f"{name}.py"
        run_notebook(source, notebook, variables | {"MOE_OUT": str(out)})
        content = json.loads(notebook.read_text(encoding="utf-8"))

    # Files of an earlier rendering go first, so that none is left over.
    folder = docs / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob(f"{name}_*.svg"):
        earlier.unlink()

    # The page, its figures, and the view beside it.
    page = notebook_page(name, content, made_from)
    write_text(folder / f"{name}.md", page.text)
    for file, svg in page.figures.items():
        write_text(folder / file, svg)
    view = docs / "_static/notebooks" / f"{name}.html"
    view.parent.mkdir(parents=True, exist_ok=True)
    write_text(view, (out / VIEW_FILE).read_text(encoding="utf-8"))
    print(f"The page is {os.path.relpath(folder / name)}.md.")


def run_notebook(source: Path, target: Path, variables: dict[str, str]) -> None:
    """Runs a py:percent script in Jupyter, from the root of the repository; writes it with outputs.

    Raises:
        ConfigError: When Jupyter is not installed.
        DataError: When a cell fails.
    """
    missing = [name for name in _JUPYTER if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise ConfigError(f"{names}: not installed for {sys.executable}. {_ADVICE}")

    # The modules that it imports are those of this repository.
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **variables, "PYTHONPATH": search}
    words = [sys.executable, "-m", "jupytext", *_OPTIONS]
    words += ["--run-path", str(ROOT)]
    words += ["--output", str(target), str(source)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(f"The notebook {source.name} failed:\n{done.stderr[-2000:]}")


# ---------------------------------------------------------------------------
# From a notebook to a page


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


if __name__ == "__main__":
    run_main(main)
