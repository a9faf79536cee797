"""Every notebook prints and draws what is stored in it, and fits on a screen or two."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
NUMBER = r"\d+(?:\.\d+)?"


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def stored_text(cell):
    texts = ["".join(output["text"]) for output in cell["outputs"] if "text" in output]
    return "".join(texts)


def stored_figures(cell):
    return [output for output in cell["outputs"] if "image/png" in output.get("data", {})]


def sentences(text):
    """Returns the lines that are no rows of a table, without their numbers, and the numbers.

    Other processors round differently. This turns a choice between two nearly equal tokens, and
    training amplifies it: so tables of answers may differ, and measured numbers differ a little.
    """
    text = "\n".join(line for line in text.splitlines() if " | " not in line)
    return re.sub(NUMBER, "#", text), [float(number) for number in re.findall(NUMBER, text)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_code_prints_and_draws(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    names = {}
    for number, cell in enumerate(code_cells(path), start=1):
        assert cell["execution_count"] == number
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
        words, numbers = sentences(capsys.readouterr().out)
        stored_words, stored_numbers = sentences(stored_text(cell))
        assert words == stored_words
        assert numbers == pytest.approx(stored_numbers, rel=0.15, abs=0.15)
        assert len(plt.get_fignums()) == len(stored_figures(cell))
        plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_its_outputs_name_no_folder(path):
    cells = code_cells(path)
    lines = "\n".join("".join(cell["source"]) for cell in cells).splitlines()
    assert len([line for line in lines if line.strip()]) <= 60
    assert path.stat().st_size <= 300_000
    for cell in cells:
        kinds = {output.get("name", output["output_type"]) for output in cell["outputs"]}
        assert kinds <= {"stdout", "display_data"}  # neither warnings nor errors
        assert not re.search(r"(?<![\w/])/\w+/", stored_text(cell))
