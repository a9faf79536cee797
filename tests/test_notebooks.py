"""Every notebook runs from top to bottom on a small model."""

import re
from pathlib import Path

import pytest

from eval.task import TASKS
from moe.data.tokenizer import train_tokenizer
from tests.models.tiny import tiny_model
from tests.processes import run_command
from tests.training.tiny_run import write_texts

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Returns what a notebook reads, for a model with so many experts; its tokenizer knows the
    words of the task.
    """
    folder = tmp_path_factory.mktemp("notebooks")
    texts = [file.read_text() for file in sorted(write_texts(folder / "texts").iterdir())]
    texts += [
        f"{example.inputs} {example.targets}."
        for example in TASKS.get("unicode_category").examples("train")[::5]
    ]
    tokenizer = train_tokenizer(texts, 230, folder / "tokenizer")

    def for_experts(num_experts):
        model = folder / str(num_experts)
        places = min(2, num_experts)
        tiny_model(
            vocab_size=230, num_experts=num_experts, num_selected_experts=places
        ).save_pretrained(model)
        tokenizer.save_pretrained(str(model))
        return {"MOE_MODEL": str(model), "MOE_OUT": str(folder / f"{num_experts} out")}

    return for_experts


def run(path, environment):
    return run_command(str(path), environment=environment)


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [7, 1])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, num_experts, environment):
    done = run(path, environment(num_experts))
    assert done.returncode == 0, done.stderr
    assert "encoder 1" in done.stdout
    assert "<pad>" not in done.stdout  # padding goes to no expert
    if path.stem == "fine_tune":
        before, after = (
            float(share)
            for share in re.findall(r"^(?:before|after) +([\d.]+) %", done.stdout, re.MULTILINE)
        )
        assert before < 20
        assert after > 60
        assert "drop_rate:\n  encoder: " in done.stdout
        assert re.search(
            r"^asked +expected +generated\n(.+\n)*unicode category name: ",
            done.stdout,
            re.MULTILINE,
        )


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_without_a_model_the_notebook_says_how_to_get_one(path, tmp_path, environment):
    done = run(path, {"MOE_MODEL": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        ("There is no model in", "moe.errors.CheckpointError: ")
    )
