"""Pre-training on texts that are streamed, as a user would do it."""

import json
import shutil
import signal

import pytest

from moe import ConfigError
from moe.commands import pretrain
from moe.files import cache_folder
from tests.data.test_rows import write
from tests.processes import Command
from tests.training.tiny_checkpoints import content_of
from tests.training.tiny_run import pretrain_arguments, write_inputs

pytestmark = pytest.mark.slow  # all train


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    paths = write_inputs(tmp_path_factory.mktemp("inputs"))
    texts = sorted(paths["texts"].glob("*.txt"))
    rows = [{"body": text.read_text(), "number": 1} for text in texts]
    paths["rows"] = write(paths["texts"].with_name("rows.parquet"), rows)
    return paths


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def arguments(inputs, out, *more):
    stream = {**inputs, "corpus": inputs["rows"]}
    steps = ("--training.steps", 21, "--optim.cooldown_steps", 3)
    return pretrain_arguments(stream, out, "--column", "body", *steps, *more)


def losses(out):
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {line["step"]: line["train/loss"] for line in records if "train/loss" in line}


def test_a_killed_run_goes_on_at_the_exact_example_without_its_tokens(inputs, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    pretrain.main(arguments(inputs, whole))
    run = Command("stmoe", ["pretrain", *arguments(inputs, out)])
    run.wait_for(lambda: len(losses(out)) >= 9)
    run.send_signal(signal.SIGKILL)
    run.finish()
    assert len(losses(out)) < 21
    shutil.rmtree(cache_folder())
    pretrain.main(arguments(inputs, out, "--resume"))
    assert losses(out) == losses(whole)
    assert content_of(out / "model") == content_of(whole / "model")


def test_a_stream_and_a_corpus_are_mixed_by_rates(inputs, tmp_path):
    several = ("--corpus", inputs["rows"], inputs["corpus"])
    pretrain.main(arguments(inputs, tmp_path / "run", *several, "--data.rates", "[1, 3]"))
    assert len(losses(tmp_path / "run")) == 21
    for rates in ([], ["--data.rates", "[1]"], ["--data.rates", "[1, 0]"]):
        with pytest.raises(ConfigError, match=r"data\.rates"):
            pretrain.main(arguments(inputs, tmp_path / "other", *several, *rates))
