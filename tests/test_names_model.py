"""The model `names` in the package: its files, its card, and that its scores are those of the card.

Oracle: exact answers to the held-out names of a few languages, asked again through `moe.load`.
"""

import json
import os
import re
import unicodedata
from functools import partial
from pathlib import Path

import pytest

import moe
from moe import load
from moe.checksums import SUMS_FILE, find_damage, read_sums
from moe.data.names import read_names
from moe.serving.languages import LANGUAGES_FILE
from moe.serving.model_page import model_page
from tests.processes import run_command
from tests.serving.test_model_page import node_of

FOLDER = Path(moe.__file__).with_name("names")
ASKED = ("bg", "de", "el", "sw", "tr")
MOST_BYTES = 4_000_000


def test_the_files_are_small_and_those_that_were_written():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert not find_damage(FOLDER)
    assert (read_sums(FOLDER) or {}).keys() == files.keys() - {SUMS_FILE}
    assert files["model.safetensors"] < MOST_BYTES


@pytest.mark.slow
def test_scores_are_those_of_the_card():
    languages = json.loads((FOLDER / LANGUAGES_FILE).read_text(encoding="utf-8"))["languages"]
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    model = load("names", max_batch=64)
    for code in ASKED:
        names = read_names([code], "test")
        answers = model([name.inputs for name in names])
        num_right = sum(answer == name.name for answer, name in zip(answers, names, strict=True))

        # Sums are rounded differently on another machine, which may change one answer.
        score = languages[code]["score"]
        assert abs(num_right - score * len(names) / 100) < 1.1
        row = rf"\| *{code} *\|.*\| *{score} *\| *{len(names)} *\|"
        assert re.search(row, card), f"the card has no row {row}"


@pytest.mark.slow
def test_the_command_answers_by_the_name_of_the_model(tmp_path):
    """In an empty folder, as a person does who has installed the package."""
    words = ["generate", "--model", "names", "el: Ivory Coast"]
    done = run_command("stmoe", *words, prepare=partial(os.chdir, tmp_path))
    assert done.returncode == 0, done.stderr
    assert unicodedata.name(done.stdout[0]).startswith("GREEK") and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_page_writes_the_tokens_of_torch_for_200_names(tmp_path):
    page = tmp_path / "names.html"
    page.write_text(model_page(FOLDER), encoding="utf-8")
    assert page.stat().st_size < 6_000_000
    asked = [name.inputs for name in read_names(None, "test")][::50][:200]
    model = load("names", max_batch=64)
    answers = dict(zip(asked, model(asked), strict=True))
    with node_of(page) as run:
        for text, answer in answers.items():
            ids = run(text)["tokens"]
            assert model.tokenizer.decode(ids, skip_special_tokens=True) == answer
    assert len(answers) == 200
