r"""Runs notebooks in Jupyter and writes them into the documentation: Markdown, figures, the view.

    python -m scripts.render_notebooks                       (all three)
    python -m scripts.render_notebooks routing --model runs/demo/model --made-by "make demo"

Needs the optional dependencies `notebooks`; `make notebooks` installs them.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from moe.checksums import model_fingerprint
from moe.cli import Parser, integer, path, run_main, word
from moe.errors import ConfigError, DataError
from moe.files import write_text
from scripts.notebook_page import notebook_page

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ("routing", "expert_purpose", "what_changed")
VIEW_FILE = "view.html"

_JUPYTER = ("jupytext", "nbconvert", "ipykernel")
_OPTIONS = ("--to", "ipynb", "--set-kernel", "python3", "--execute")
_ADVICE = "Install the optional dependencies: `make notebooks`, or pip install '.[notebooks]'."


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


if __name__ == "__main__":
    run_main(main)
