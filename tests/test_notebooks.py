"""Every notebook runs from top to bottom on a small model."""

import ast
import json
import os
import re
import shutil
import unicodedata
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from moe.data.tokenizer import load_tokenizer, train_tokenizer
from tests.models.tiny import tiny_model
from tests.processes import run_command
from tests.training.tiny_run import write_texts

ROOT = Path(__file__).parents[1]


class Places(NamedTuple):
    """What a notebook reads and writes."""

    texts: Path
    model: Path
    out: Path

    @property
    def variables(self):
        return {"MOE_MODEL": str(self.model), "MOE_TEXT": str(self.texts), "MOE_OUT": str(self.out)}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Returns what a notebook reads and writes, for a model with so many experts; its tokenizer
    knows the words of the task of fine_tune.
    """
    folder = tmp_path_factory.mktemp("notebooks")
    written = write_texts(folder / "texts", 7)
    texts = [file.read_text() for file in sorted(written.iterdir())]
    for character in map(chr, range(0, 0x10000, 30)):
        texts.append(f"{unicodedata.name(character, '').lower()} lowercase uppercase letter.")
    tokenizer = train_tokenizer(texts, 230, folder / "tokenizer")

    def for_experts(num_experts, seed=0):
        model = folder / f"{num_experts} {seed}"
        fields = {"num_experts": num_experts, "num_selected_experts": min(2, num_experts)}
        tiny_model(seed, vocab_size=230, **fields).save_pretrained(model)
        tokenizer.save_pretrained(str(model))
        return Places(written, model, folder / f"{num_experts} out")

    return for_experts


def run(name, variables, prepare=None):
    path = str(ROOT / "notebooks" / f"{name}.py")
    return run_command(path, environment=variables, prepare=prepare)


def figures(out):
    """Returns the names of the figures and pages, none of which is empty."""
    files = list(out.iterdir())
    assert all("</" in file.read_text(encoding="utf-8") for file in files)
    return {file.name for file in files}


@pytest.mark.slow
def test_fine_tune_learns_its_task(places, tmp_path):
    text = (ROOT / "notebooks/fine_tune.py").read_text(encoding="utf-8")
    assert "max_steps=150" in text and "pairs[:120]" in text
    text = text.replace("max_steps=150", "max_steps=70").replace("pairs[:120]", "pairs[:40]")
    (tmp_path / "short.py").write_text(text, encoding="utf-8")
    done = run_command(str(tmp_path / "short.py"), environment=places(7).variables)
    assert done.returncode == 0, done.stderr
    assert "encoder 1" in done.stdout
    assert "<pad>" not in done.stdout  # padding goes to no expert
    before, after = re.findall(r"^(?:before|after): ([\d.]+) %", done.stdout, re.MULTILINE)
    assert float(before) < 20
    assert float(after) > 40
    assert re.search(r"^input +target +generated\n(.+\n){6}", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_routing_finds_the_model_from_its_own_folder_and_draws_every_figure(places, tmp_path):
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(places(7).model, tmp_path / "runs/demo/pretrain/model")
    change_folder = partial(os.chdir, tmp_path / "notebooks")
    done = run("routing", {"MOE_TEXT": str(places(7).texts)}, change_folder)
    assert done.returncode == 0, done.stderr
    assert "11 documents, " in done.stdout  # 7 files and 4 sentences
    assert re.search(r"^encoder 1 +0 of 7 ", done.stdout, re.MULTILINE)

    out = tmp_path / "runs/notebooks/routing"
    names = "load classes entropy vocabulary coactivation margins noise"
    assert figures(out) == {f"{name}.svg" for name in names.split()} | {"view.html"}
    assert "*" in (out / "classes.svg").read_text()
    page = (out / "view.html").read_text()
    assert "Where the tokens go in runs/demo/pretrain/model" in page


@pytest.mark.slow
def test_routing_says_what_one_document_and_one_expert_cannot_show(places, tmp_path):
    read = places(1)._replace(out=tmp_path)
    text = read.texts / "0.txt"
    done = run("routing", read.variables | {"MOE_TEXT": f"mine={text}"})
    assert done.returncode == 0, done.stderr
    assert "so the p-values are too small" in done.stdout
    for name in ("coactivation", "margins"):
        assert f"{name}: this model has nothing to show" in done.stdout
    names = "load classes entropy vocabulary noise"
    assert figures(read.out) == {f"{name}.svg" for name in names.split()} | {"view.html"}


@pytest.mark.slow
def test_expert_purpose_answers_for_every_expert_and_class(places, tmp_path):
    read = places(7)._replace(out=tmp_path / "out")
    lines = [f"Returning the number {n}, reading it and raising others." for n in range(40)]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    done = run("expert_purpose", read.variables | {"MOE_TEXT": str(texts)})
    assert done.returncode == 0, done.stderr
    counts = re.search(r"(\d+) questions: (\d+) yes, (\d+) no, (\d+) not", done.stdout)
    total, *answers = map(int, counts.groups())
    assert total == sum(answers) == 7 * (12 + 6)  # of the encoder's sequences, too
    names = "relation effects verdicts edits"
    assert figures(read.out) == {f"{name}.svg" for name in names.split()}
    assert re.search(r"^ing form +[1-9]", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_expert_purpose_needs_two_experts(places):
    done = run("expert_purpose", places(1).variables)
    assert done.returncode == 1
    assert "has one expert per layer, so there is no expert to compare" in done.stderr


@pytest.mark.slow
def test_what_changed_rounds_a_copy_where_there_is_no_other_model(places, tmp_path):
    read = places(7)._replace(out=tmp_path)
    done = run("what_changed", read.variables)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^after: .*, rounded to 4 bits$", done.stdout, re.MULTILINE)
    assert "The replay in the same model is bit-identical: True" in done.stdout
    names = "matching loss_split copies"
    assert figures(read.out) == {f"{name}.svg" for name in names.split()} | {"view.html"}


@pytest.mark.slow
def test_what_changed_compares_models_of_one_tokenizer_only(places, tmp_path):
    first = places(7)
    second = places(7, seed=1)
    variables = first._replace(out=tmp_path).variables | {"MOE_OTHER": str(second.model)}
    done = run("what_changed", variables)
    assert done.returncode == 0, done.stderr
    assert f"after:  {second.model}\n" in done.stdout

    tokenizer = load_tokenizer(second.model)
    tokenizer.add_tokens(["entirely"])
    tokenizer.save_pretrained(str(second.model))
    tiny_model(vocab_size=231).save_pretrained(second.model)
    done = run("what_changed", variables)
    assert done.returncode == 1
    assert "have different tokenizers, so no token is comparable" in done.stderr


@pytest.mark.slow
def test_without_a_model_a_notebook_says_how_to_get_one(tmp_path):
    for path in (ROOT / "notebooks").glob("*.py"):
        done = run(path.stem, {"MOE_MODEL": str(tmp_path)})
        assert done.returncode == 1
        (*_, last) = done.stderr.splitlines()
        assert last.startswith("moe.errors.CheckpointError: "), path


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda path: path.stem
)
def test_a_notebook_has_ten_imports_and_a_page_of_code_besides_plots(path):
    text = path.read_text(encoding="utf-8")
    imports = []
    code = []
    for statement in ast.parse(text).body:
        source = ast.get_source_segment(text, statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports.append(source)
        elif not source.startswith(("plot(", "def plot")):
            code += source.splitlines()
    assert len(imports) <= 10
    assert len([line for line in code if line.strip()]) <= 75
