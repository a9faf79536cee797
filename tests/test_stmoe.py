"""The console command `stmoe`: its verbs need the wheel alone."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import stmoe
from moe.errors import ConfigError
from moe.training.recipe_files import find_recipe, read_recipe_files

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
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
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
    assert "squad" in run("eval", "list").stdout
