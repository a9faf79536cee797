"""New languages for a translator: the commands of docs/guides/translate.md, word for word, on a small random M2M100.

Oracles: the pairs themselves, which the model learns by heart; a run that was never stopped; the whole batch.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import stmoe
from moe.errors import ConfigError
from moe.hosts.answering import load
from tests.hosts.tiny_translator import ENGLISH, NEW, PAIRS, save_m2m100, write_pairs
from tests.processes import start_torchrun

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).parents[2] / "docs/guides/translate.md"
STEPS = ("--training.steps", 60, "--optim.cooldown_steps", 30, "--training.batch_size", 16)
STEPS += ("--training.evaluate_every", 60, "--training.checkpoint_every", 55, "--optim.lr", 0.02)
STEPS += ("--model.dropout_rate", 0, "--model.expert_dropout_rate", 0.1)


def run(*arguments):
    stmoe.main([str(argument) for argument in arguments])


def metric(folder, name):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line][-1]


@pytest.fixture(scope="module")
def made(tmp_path_factory, one_thread):
    """Runs the commands of the page in a folder, and returns it."""
    folder = tmp_path_factory.mktemp("translate")
    save_m2m100(folder / "facebook" / "m2m100_418M")
    write_pairs(folder / "pairs.jsonl")
    block = re.search(r"```sh\n(stmoe upcycle .*?)```", PAGE.read_text(), re.DOTALL).group(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in block.replace("\\\n", "").splitlines():
            _, *words = shlex.split(line)
            run(*words, *(STEPS if words[0] == "finetune" else ()))
    return folder


def test_experts_answer_as_the_dense_model_did(made):
    effects = json.loads((made / "runs/sparse/surgery.json").read_text())["effects"]
    assert effects["changed_answers"] == [0, len(PAIRS)]
    assert effects["loss_change"]["value"] == pytest.approx(0, abs=1e-5)


def test_both_new_languages_are_learnt_and_chosen_by_their_codes(made, capsys):
    model = made / "runs/translator/model"
    for code, words in NEW.items():
        for beams in (1, 3):
            run(
                "generate",
                "--model",
                model,
                "--target-language",
                code,
                "--num-beams",
                beams,
                *ENGLISH,
            )
            assert capsys.readouterr().out.split() == words
    generator = load(model, target_language="zu", max_new_tokens=9)
    assert generator(ENGLISH[:3]) == NEW["zu"][:3]
    run("inspect", "record", "--model", model, "--pairs", made / "pairs.jsonl", "--out", made / "t")


def test_a_language_that_is_missing_or_unknown_is_one_line_and_writes_nothing(made, tmp_path):
    sparse = made / "runs/sparse"
    tune = ["finetune", "--pretrained", sparse, "--out", tmp_path / "run", *STEPS, "--train"]
    alone = write_pairs(tmp_path / "alone.jsonl", [{"inputs": "sun", "targets": "izuba"}])
    other = write_pairs(tmp_path / "other.jsonl", [PAIRS[0] | {"target_language": "swa"}])
    refused = {
        "Add --target-language": [["generate", "--model", sparse, "sun"], [*tune, alone]],
        "'swa'; expected one of the tokenizer's 100, such as sw, ": [
            ["generate", "--model", sparse, "--target-language", "swa", "sun"],
            [*tune, alone, "--target-language", "swa"],
            [*tune, other],
        ],
        "The number of processes is 1; expected 2": [[*tune, made / "pairs.jsonl", "--mesh.ep", 2]],
        "parameters is 'moe'; expected all": [[*tune, alone, "--parameters", "moe"]],
        "model.label_smoothing is 0.1": [[*tune, alone, "--model.label_smoothing", 0.1]],
    }
    for message, commands in refused.items():
        for command in commands:
            with pytest.raises(ConfigError, match=message):
                run(*command)
    assert not (tmp_path / "run").exists()


def test_a_killed_run_resumes_bit_for_bit(made, tmp_path):
    straight, resumed = made / "runs/translator", tmp_path / "run"
    shutil.copytree(straight, resumed)
    for folder in ("model", "checkpoints/step_00000060"):
        shutil.rmtree(resumed / folder)
    paths = (
        "--pretrained",
        made / "runs/sparse",
        "--train",
        made / "pairs.jsonl",
        "--out",
        resumed,
    )
    run("finetune", *paths, "--source-language", "en", *STEPS, "--resume")
    weights = [folder / "model/model.safetensors" for folder in (straight, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert metric(straight, "train/loss") == metric(resumed, "train/loss")


SAME = ("--model.expert_dropout_rate", 0, "--model.group_size", 16, "--training.steps", 2)
SAME += ("--optim.cooldown_steps", 0)


def losses(folder):
    return [metric(folder, f"train/{name}") for name in ("loss", "ce_loss", "grad_norm")]


def test_a_step_of_micro_batches_is_that_of_the_whole_batch(made, tmp_path):
    same = (*SAME, "--mixture.dev_examples", 0)
    for model in ("facebook/m2m100_418M", "runs/sparse"):
        found = []
        for rows in (4, 16):
            out = tmp_path / f"{model}{rows}".replace("/", "_")
            options = (
                "--train",
                made / "pairs.jsonl",
                "--out",
                out,
                "--training.micro_batch_size",
                rows,
            )
            run("finetune", "--pretrained", made / model, *options, *STEPS, *same)
            found.append(losses(out))
        assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.slow
def test_ranks_that_share_experts_train_and_score_what_one_process_does(made, tmp_path):
    paths = ("--pretrained", made / "runs/sparse", "--train", made / "pairs.jsonl", "--dev")
    options = (
        *paths,
        made / "pairs.jsonl",
        *STEPS,
        *SAME,
        "--training.micro_batch_size",
        4,
        "--out",
    )
    run("finetune", *options, tmp_path / "one")
    ended = start_torchrun(
        2, "stmoe", "finetune", *options, tmp_path / "two", "--mesh.ep", 2
    ).finish()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    answers = [tmp_path / name / "dev/step_00000002/answers.jsonl" for name in ("one", "two")]
    assert answers[0].read_text() == answers[1].read_text()
