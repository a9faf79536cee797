"""Two processes that write to one --out: one does, the other waits or is told, and what lies there
is whole.
"""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM

from moe.checkpoint import load_model
from moe.data.corpus import load_corpus
from moe.data.tokenizer import load_tokenizer
from stmoe_eval.reports.run_folder import read_report
from tests.doors.racer import ROUNDS
from tests.processes import Command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def race(workspace, tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("race")
    racers = [Command("tests.doors.racer", [workspace, folder, number]) for number in range(2)]
    for racer in racers:
        ended = racer.finish()
        assert ended.returncode == 0, ended.stderr
    return folder, [
        json.loads((folder / f"results-{number}.json").read_text()) for number in range(2)
    ]


@pytest.mark.parametrize("name", ROUNDS)
def test_one_writes_and_the_other_is_told_or_waits(race, name):
    folder, results = race
    ends = [result[name] for result in results]
    assert "done" in ends, ends
    for end in ends:
        assert end == "done" or str(folder / name) in end, end


def test_what_both_wrote_is_whole(race):
    folder, _ = race
    corpus = load_corpus(folder / "corpus")
    assert len(corpus.train) + len(corpus.held_out) == 60

    tokenizer = load_tokenizer(folder / "tokenizer")
    assert len(tokenizer) in (230, 240)

    for model in ("run/model", "model"):
        load_model(folder / model)
    assert AutoModelForSeq2SeqLM.from_pretrained(folder / "model")

    report = read_report(folder / "evaluation")
    assert json.loads((folder / "evaluation/report.json").read_text())["settings"]["limit"] in (
        5,
        2,
    )
    assert report
    assert json.loads((folder / "comparison/compare.json").read_text())["tasks"]
    assert (folder / "report.html").read_text().rstrip().endswith("</html>")


def test_nothing_half_written_is_left(race):
    folder, _ = race
    assert not list(folder.rglob(".*.partial*"))
