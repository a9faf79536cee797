"""The console command `stmoe`: its verbs need the wheel alone."""

import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import stmoe
from moe.commands import generate
from moe.data.pair_files import read_pairs
from moe.data.tokenizer import train_tokenizer
from moe.errors import CheckpointError, ConfigError, DataError
from moe.training.recipe_files import find_recipe, read_recipe_files
from tests.models.tiny import tiny_model

ROOT = Path(__file__).parents[1]

TEXTS = ["the cat sat on the mat", "a dog", "the dog sat on a cat and a mat"]
VOCAB_SIZE = 117


def answer(capsys, *words):
    """Returns what `stmoe` prints and ends with success."""
    with pytest.raises(SystemExit) as end:
        stmoe.main(list(words))
    assert end.value.code == 0
    return capsys.readouterr().out


def test_the_help_lists_every_verb_with_a_summary(capsys):
    for words, verbs in ((["--help"], stmoe.VERBS), (["inspect"], stmoe.INSPECT_VERBS)):
        text = answer(capsys, *words)
        for name, verb in verbs.items():
            assert re.search(rf"^  {name} +{re.escape(verb.summary)}$", text, re.MULTILINE)


def test_every_verb_explains_its_options(capsys):
    inspect = [f"inspect {name}" for name in stmoe.INSPECT_VERBS]
    for verb in [*stmoe.VERBS, *inspect]:
        text = answer(capsys, *verb.split(), "--help")
        assert text.startswith(f"usage: stmoe {verb}")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model with random weights and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(TEXTS, VOCAB_SIZE, folder / "tokenizer")
    model = tiny_model(vocab_size=VOCAB_SIZE, eval_capacity_factor=None)
    # Random weights may end every answer at once, or answer with unreadable bytes.
    unreadable = [n for n in range(VOCAB_SIZE) if not tokenizer.decode([n]).strip().isalpha()]
    model.generation_config.suppress_tokens = unreadable
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def answers(capsys, *arguments):
    generate.main([str(argument) for argument in arguments])
    return capsys.readouterr().out.splitlines()


def test_generate_answers_every_text_in_order_whatever_the_batch(model_folder, capsys, monkeypatch):
    options = ("--model", model_folder, "--max-new-tokens", "7")
    alone = [answers(capsys, *options, text)[0] for text in TEXTS]
    assert answers(capsys, *options, "--batch-size", "2", *TEXTS) == alone
    assert all(alone)

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode())))
    assert answers(capsys, *options) == alone


def test_answers_of_a_teacher_become_pairs_to_train_on(model_folder, capsys, tmp_path):
    options = ("--model", model_folder, "--max-new-tokens", "7", "--num-beams", "2")
    printed = answers(capsys, *options, *TEXTS)
    answers(capsys, *options, "--out", tmp_path / "pairs.jsonl", *TEXTS)
    pairs = read_pairs(tmp_path / "pairs.jsonl")
    assert [pair.inputs for pair in pairs] == TEXTS
    assert [pair.targets.replace("\n", " ") for pair in pairs] == printed
    with pytest.raises(ConfigError, match=r"pairs\.txt; expected a file that ends in \.jsonl"):
        answers(capsys, *options, "--out", tmp_path / "pairs.txt", *TEXTS)


def test_generate_refuses_what_it_cannot_answer(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(DataError, match="no text to answer"):
        generate.main(["--model", str(model_folder)])
    with pytest.raises(DataError, match=r"line 2: The text is .*not empty"):
        generate.main(["--model", str(model_folder), "a", " "])
    with pytest.raises(CheckpointError, match="missing"):
        generate.main(["--model", str(tmp_path / "missing"), "a"])
    with pytest.raises(ConfigError, match="--num-beams is 0"):
        generate.main(["--model", str(model_folder), "--num-beams", "0", "a"])


# ---------------------------------------------------------------------------
# Recipes by name


def test_recipes_are_listed_with_the_first_line_of_their_header(capsys):
    lines = answer(capsys, "recipes").splitlines()
    assert len(lines) == len(list((ROOT / "recipes").glob("*.yaml")))
    assert any(re.match("st_moe_tiny_pretrain +A tiny ST-MoE: 2 ", line) for line in lines)


def test_a_recipe_is_known_by_its_name_unless_a_file_is_called_that(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = ROOT / "recipes/st_moe_tiny_pretrain.yaml"
    assert find_recipe("st_moe_tiny_pretrain") == ours
    assert find_recipe("mine.yaml") == Path("mine.yaml")
    for path in ("st_moe_tiny_pretrain.yaml", "recipes/st_moe_tiny_pretrain.yaml"):
        with pytest.raises(ConfigError, match=f"no file {path}. Did you mean the recipe 'st_moe_t"):
            find_recipe(path)
    with pytest.raises(ConfigError, match=r"no recipe 'st_moe_tny_pretrain'.*'st_moe_tiny_p"):
        find_recipe("st_moe_tny_pretrain")

    (tmp_path / "st_moe_tiny_pretrain").touch()
    assert find_recipe("st_moe_tiny_pretrain") == Path("st_moe_tiny_pretrain")


def test_a_file_anywhere_extends_one_of_our_recipes_by_name(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: st_moe_tiny_pretrain\nseed: 3\n")
    paths = [file for file, _ in read_recipe_files(mine)]
    assert paths == [ROOT / "recipes/st_moe_tiny_pretrain.yaml", mine]

    mine.write_text("extends: st_moe_tny_pretrain\n")
    with pytest.raises(ConfigError, match=r"no file .*stmoe recipes lists the names"):
        read_recipe_files(mine)


@pytest.mark.slow
def test_the_wheel_has_the_recipes_and_the_tasks(tmp_path):
    """The real wheel, unpacked in a folder from which `stmoe` starts; as after `pip install`."""
    source = tmp_path / "source"
    for name in ("moe", "recipes", "eval"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("stmoe.py", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
        command = [sys.executable, "-P", "-m", "stmoe", *words]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        return subprocess.run(command, **options)

    listed = run("recipes").stdout.splitlines()
    recipes = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert [line.split()[0] for line in listed] == recipes
    assert "usage: stmoe VERB" in run("--help").stdout
    assert "squad" in run("eval", "list").stdout
    assert "usage: stmoe eval run" in run("eval", "run", "--help").stdout
    without = run("pretrain")
    assert "stmoe pretrain --config st_moe_tiny_pretrain --corpus" in without.stderr
    printed = run("pretrain", "--config", "st_moe_tiny_pretrain", "--print_config").stdout
    assert yaml.safe_load(printed)["model"]["num_experts"] == 8
