"""A model of names: found by its name, asked in three lines, and what it refuses.

Oracles: the model's own `generate`, and the message that a person needs for each mistake.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import moe
from moe import CheckpointError, ConfigError, DataError, STMoEForConditionalGeneration, load
from moe.commands import generate
from moe.data.tokenizer import load_tokenizer
from moe.files import find_model
from moe.serving.languages import LANGUAGES_FILE, read_languages
from tests.processes import Command
from tests.serving.test_server import complete, refusal, serving
from tests.serving.tiny_names import LANGUAGES, LONGEST, write_names_model

REFUSED = {
    "xx: Ivory Coast": "'xx' is not a language of this model; did you mean 'xh' (Xhosa)?",
    "greek: Ivory Coast": "'greek' is not a language of this model; did you mean 'el' (Greek)?",
    "EL: Ivory Coast": "'EL' is not a language of this model; did you mean 'el' (Greek)?",
    "sr: Ivory Coast": "did you mean 'sr_Latn' (Serbian (Latin))?",
    "12345: Ivory Coast": "'12345' is not a language of this model.",
    "Ivory Coast": "'Ivory Coast' names no language; expected CODE: NAME, e.g. 'xh: Ivory Coast'",
    ": Ivory Coast": "'' is not a language",
    "el:  ": "'el:  ' has no name after the language",
    "el: " + "q" * 40: f"tokens, and this model was trained on at most {LONGEST}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_names_model(tmp_path_factory.mktemp("names"))


def answer_in_the_usual_way(folder, text):
    model = STMoEForConditionalGeneration.from_pretrained(folder, eval_capacity_factor=None).eval()
    tokenizer = load_tokenizer(folder)
    with torch.no_grad():
        tokens = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=9)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def test_three_lines_of_python_answer_as_generate_of_transformers(folder):
    expected = answer_in_the_usual_way(folder, "el: Ivory Coast")
    names = load(folder, max_new_tokens=9)
    assert names(["el: Ivory Coast", "xh: Coast"])[0] == expected
    assert names([" el :Ivory  Coast "]) == [expected]
    for text, message in REFUSED.items():
        with pytest.raises(DataError) as caught:
            names([text])
        assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("beams", [[], ["--num-beams", "2"]], ids=["greedy", "beams"])
def test_the_command_answers_what_it_can_and_ends_with_the_first_refusal(folder, capsys, beams):
    texts = ["el: Ivory Coast", *REFUSED]
    with pytest.raises(DataError) as caught:
        generate.main(["--model", str(folder), "--max-new-tokens", "9", *beams, *texts])
    first = next(iter(REFUSED.values()))
    assert f"{len(REFUSED)} texts have no answer" in str(caught.value) and first in str(
        caught.value
    )
    answer, *empty, _ = capsys.readouterr().out.split("\n")
    assert empty == [""] * len(REFUSED)
    if not beams:
        assert answer == answer_in_the_usual_way(folder, "el: Ivory Coast").replace("\n", " ")


def test_the_server_refuses_the_same_with_400(folder):
    names = load(folder)
    languages = read_languages(folder)
    model, tokenizer = names.engine.model, names.tokenizer
    with serving(model, tokenizer, languages=languages) as address:
        (choice,) = complete(address, prompt="el: Ivory Coast", max_tokens=9)["choices"]
        assert choice["text"] == answer_in_the_usual_way(folder, "el: Ivory Coast")
        for text, refused in REFUSED.items():
            status, message = refusal(address, {"prompt": ["el: Coast", text]})
            assert status == 400 and refused in message


def test_a_model_without_languages_answers_any_text_and_damaged_ones_are_refused(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    file = other / LANGUAGES_FILE
    file.write_text(json.dumps({"languages": {code: {"name": "x"} for code in LANGUAGES}}))
    assert len(load(other, max_new_tokens=2)(["el: " + "q" * 40])) == 1
    damaged = ("{", "[]", "{}", '{"languages": {"el": {}}}', '{"languages": {"el": 3}}')
    for text in (*damaged, '{"languages": {}}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"languages\.json"):
            load(other)
    file.write_text('{"languages": {"el": {"name": "Greek"}}, "longest_name": 0}')
    with pytest.raises(ConfigError, match="longest_name"):
        load(other)
    file.unlink()
    assert len(load(other, max_new_tokens=2)(["any text"])) == 1


def test_the_name_of_a_shipped_model_is_its_folder_unless_there_is_one_here(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shipped = Path(moe.__file__).with_name("names")
    assert find_model("names") == str(shipped) and find_model(Path("names")) == shipped
    assert find_model("name") == "name" and find_model(Path("runs/names")) == Path("runs/names")
    shutil.copytree(folder, tmp_path / "names")
    assert find_model("names") == "names"
    assert load("names", max_new_tokens=2)(["el: Coast"])


@pytest.mark.slow
def test_two_processes_answer_from_a_folder_that_nobody_may_write(folder, tmp_path):
    locked = shutil.copytree(folder, tmp_path / "locked")
    for path in (*locked.iterdir(), locked):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(path.name for path in locked.iterdir())
    words = ["generate", "--model", locked, "el: Ivory Coast"]
    ended = [command.finish() for command in [Command("stmoe", words), Command("stmoe", words)]]
    assert len(set(ended)) == 1 and ended[0].returncode == 0 and ended[0].stdout
    assert sorted(path.name for path in locked.iterdir()) == before
