"""Every notebook runs from top to bottom on a small model."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from eval.task import TASKS
from moe.data.tokenizer import load_tokenizer, train_tokenizer
from tests.models.tiny import tiny_model
from tests.processes import run_command
from tests.training.tiny_run import write_texts

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


class Places(NamedTuple):
    """What a notebook reads and writes."""

    texts: Path
    model: Path
    out: Path

    @property
    def variables(self):
        return {
            "MOE_MODEL": str(self.model),
            "MOE_CORPUS": str(self.texts / "no corpus"),
            "MOE_TEXT": str(self.texts),
            "MOE_OUT": str(self.out),
        }


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Returns what a notebook reads and writes, for a model with so many experts; its tokenizer
    knows the words of the task of fine_tune.
    """
    folder = tmp_path_factory.mktemp("notebooks")
    written = write_texts(folder / "texts", 7)
    texts = [file.read_text() for file in sorted(written.iterdir())]
    texts += [
        f"{example.inputs} {example.targets}."
        for example in TASKS.get("unicode_category").examples("train")[::5]
    ]
    tokenizer = train_tokenizer(texts, 230, folder / "tokenizer")

    def for_experts(num_experts, seed=0):
        model = folder / f"{num_experts} {seed}"
        num_choices = min(2, num_experts)
        tiny_model(
            seed, vocab_size=230, num_experts=num_experts, num_selected_experts=num_choices
        ).save_pretrained(model)
        tokenizer.save_pretrained(str(model))
        return Places(written, model, folder / f"{num_experts} out")

    return for_experts


def run(name, variables, prepare=None):
    path = str(ROOT / "notebooks" / f"{name}.py")
    return run_command(path, environment=variables, prepare=prepare)


def figures(places):
    """Returns the names of the figures and pages, none of which is empty."""
    files = list(places.out.iterdir())
    assert all("</" in file.read_text(encoding="utf-8") for file in files)
    return {file.name for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [7, 1])
def test_fine_tune_learns_its_task(num_experts, places):
    done = run("fine_tune", places(num_experts).variables)
    assert done.returncode == 0, done.stderr
    assert "encoder 1" in done.stdout
    assert "<pad>" not in done.stdout  # padding goes to no expert
    before, after = (
        float(share)
        for share in re.findall(r"^(?:before|after) +([\d.]+) %", done.stdout, re.MULTILINE)
    )
    assert before < 20
    assert after > 60
    assert "drop_rate:\n  encoder: " in done.stdout
    assert re.search(
        r"^asked +expected +generated\n(.+\n)*unicode category name: ", done.stdout, re.MULTILINE
    )


@pytest.mark.slow
def test_routing_draws_every_figure(places, tmp_path):
    read = places(7)._replace(out=tmp_path)
    done = run("routing", read.variables)
    assert done.returncode == 0, done.stderr
    assert "11 documents, of which 11 are traced" in done.stdout  # 7 files and 4 sentences
    assert re.search(r"^encoder 1 +0 of 7 ", done.stdout, re.MULTILINE)
    names = "load classes entropy vocabulary coactivation margins noise"
    assert figures(read) == {f"{name}.svg" for name in names.split()} | {"view.html"}
    assert "*" in (tmp_path / "classes.svg").read_text()
    assert f"Where the tokens go in {read.model}" in (tmp_path / "view.html").read_text()


@pytest.mark.slow
def test_a_notebook_that_starts_in_its_own_folder_finds_the_model_of_the_repository(
    places, tmp_path
):
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(places(7).model, tmp_path / "runs/demo/pretrain/model")
    change_folder = partial(os.chdir, tmp_path / "notebooks")
    done = run("routing", {"MOE_TEXT": str(places(7).texts)}, change_folder)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/notebooks/routing/view.html").is_file()


@pytest.mark.slow
def test_routing_says_what_one_document_and_one_expert_cannot_show(places, tmp_path):
    read = places(1)._replace(out=tmp_path)
    text = read.texts / "0.txt"
    done = run("routing", read.variables | {"MOE_TEXT": f"mine={text}"})
    assert done.returncode == 0, done.stderr
    assert "No stars: 5 documents are too few" in done.stdout
    assert "these p-values are too small" in done.stdout
    assert "there are no pairs" in done.stdout
    assert "there is no next one" in done.stdout
    names = "load classes entropy vocabulary noise"
    assert figures(read) == {f"{name}.svg" for name in names.split()} | {"view.html"}


@pytest.mark.slow
def test_expert_purpose_answers_for_every_expert_and_class(places, tmp_path):
    read = places(7)._replace(out=tmp_path / "out")
    lines = [f"Returning the number {n}, reading it and raising others." for n in range(40)]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    done = run("expert_purpose", read.variables | {"MOE_TEXT": str(texts)})
    assert done.returncode == 0, done.stderr
    total, *answers = map(
        int, re.search(r"(\d+) questions: (\d+) yes, (\d+) no, (\d+) not", done.stdout).groups()
    )
    assert total == sum(answers) == 7 * (12 + 6)  # of the encoder's sequences, too
    names = "relation effects verdicts own_class edits"
    assert figures(read) == {f"{name}.svg" for name in names.split()} | {"view.html"}
    assert re.search(r"^ing form +[1-9]", done.stdout, re.MULTILINE)
    assert re.search(r"^as it is ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_expert_purpose_needs_two_experts(places):
    done = run("expert_purpose", places(1).variables)
    assert done.returncode == 1
    assert "has one expert a layer: there is nothing to compare it with" in done.stderr


@pytest.mark.slow
def test_what_changed_rounds_a_copy_where_there_is_no_other_model(places, tmp_path):
    read = places(7)._replace(out=tmp_path)
    done = run("what_changed", read.variables)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^after: .*, rounded to 4 bits$", done.stdout, re.MULTILINE)
    assert "The replay in the same model is bit-identical: True" in done.stdout
    assert "There are no probes in" in done.stdout
    names = "agreement matching loss_split copies replay"
    assert figures(read) == {f"{name}.svg" for name in names.split()} | {"view.html"}


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
    assert "have different tokenizers: no token is comparable" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_without_a_model_the_notebook_says_how_to_get_one(path, tmp_path):
    done = run(path.stem, {"MOE_MODEL": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        ("There is no model in", "moe.errors.CheckpointError: ")
    )
