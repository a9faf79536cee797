"""The main job from end to end, at a small size."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moe import STMoEForConditionalGeneration
from moe.commands.finetune import finetune_command
from moe.data.pair_files import read_pairs
from moe.errors import ConfigError, DataError
from scripts import demo
from stmoe_eval.studies.processes import StudyError
from tests.training.tiny_run import write_inputs

_FEW_STEPS = (
    "--training.steps 2 --training.batch_size 4 --training.held_out_batches 1 "
    "--optim.warmup_steps 0 --optim.cooldown_steps 0"
)
TINY = demo.Sizes(
    names="--languages el ru it --new mk --few 50",
    train=f"{_FEW_STEPS} --training.evaluate_every 2 --mixture.dev_examples 3",
    tune=f"{_FEW_STEPS} --training.evaluate_every 2",
    limit=20,
    new=("mk",),
)


@pytest.mark.slow
def test_the_demo_makes_everything_it_says_and_continues(tmp_path, capfd):
    out = tmp_path / "demo"
    lines = demo.run_pairs(out, TINY)
    assert len(lines) <= 9
    beginnings = ["Names seen in training", "Names never seen in that language: 32 experts"]
    beginnings += ["Macedonian from 250 names", "Expert", "Mutual information"]
    beginnings += ["Try: stmoe generate", "Pages: file://"]
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(beginning)

    # The model answers, and the page opens with the languages of its experts.
    model = STMoEForConditionalGeneration.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model.generate(**tokenizer(["el: Cyprus"], return_tensors="pt"), max_new_tokens=3)
    page = (out / "report.html").read_text()
    assert page.index("Slavic") < page.index("routers-heading")
    assert "dense" in (out / "seen/report.html").read_text()

    # Finished steps are skipped, and the others give the same.
    capfd.readouterr()
    assert demo.run_pairs(out, TINY) == lines
    assert "== Tokenizer" not in (again := capfd.readouterr().out)
    assert again.count("is complete") == 2


def test_own_pairs_are_split_without_a_pair_in_two_parts(tmp_path):
    pairs = [{"inputs": f"input {n}", "targets": f"target {n}"} for n in range(100)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    demo.split_pairs([tmp_path / "mine.jsonl"], tmp_path / "names")
    parts = {path.stem: set(read_pairs(path)) for path in (tmp_path / "names").iterdir()}
    assert len(parts["test"]) == 10
    assert parts["seen"] == parts["train"]
    assert len(parts["train"] | parts["dev"] | parts["test"]) == 100
    assert sum(len(parts[name]) for name in ("train", "dev", "test")) == 100


@pytest.mark.slow
def test_own_text_is_pretrained_on(tmp_path):
    inputs = write_inputs(tmp_path)
    texts = sorted(inputs["texts"].iterdir())
    demo.run_text(tmp_path / "demo", texts, *_FEW_STEPS.split(), "--training.evaluate_every", "2")
    page = (tmp_path / "demo/report.html").read_text()
    assert "&lt;extra_id_0&gt;" in page


def test_a_job_is_continued_with_its_settings_alone(tmp_path):
    (tmp_path / "demo/tokenizer").mkdir(parents=True)
    settings = tmp_path / "demo/settings.json"
    settings.write_text('{"data": "", "quick": "True"}')
    with pytest.raises(ConfigError, match=r"holds a run already\. Give --resume"):
        demo.main(["--out", str(tmp_path / "demo"), "--quick"])
    with pytest.raises(ConfigError, match="quick 'True', not 'False'"):
        demo.main(["--out", str(tmp_path / "demo"), "--resume"])
    settings.write_text('{"quick": 3}')
    with pytest.raises(DataError, match=r"settings\.json"):
        demo.main(["--out", str(tmp_path / "demo"), "--resume"])
    assert settings.read_text() == '{"quick": 3}'
    with pytest.raises(DataError, match="does not exist"):
        demo.main(["--out", str(tmp_path / "demo"), "--data", str(tmp_path / "nothing.txt")])


def test_the_options_of_all_sizes_are_those_of_the_commands():
    for sizes in (demo.Sizes(), demo.QUICK):
        for config, options in (("names", sizes.train), ("names_new_language", sizes.tune)):
            argv = ["--config", config, "--pretrained", "model", "--out", "run", *options.split()]
            finetune_command().parse(argv)


@pytest.mark.slow
def test_a_step_beside_another_fails_with_the_end_of_its_output(tmp_path):
    argv = ["--languages", "xx", "--out", str(tmp_path / "names")]
    with (
        pytest.raises(StudyError, match=r"Names failed with exit code 2: .*'xx' is not a language"),
        demo.run_beside("Names", tmp_path / "log", "names", *argv),
    ):
        pass

    # An error in the block ends the step at once.
    with (
        pytest.raises(KeyError),
        demo.run_beside("Names", tmp_path / "log", "names", "--out", tmp_path / "names"),
    ):
        raise KeyError
    assert not Path(tmp_path / "names").exists()
