"""Overlap of evaluated examples with a corpus. Oracle: an evaluation of the clean rows alone."""

import json
from pathlib import Path

import datasets
import pytest

from moe.data.corpus import build_corpus, save_corpus
from moe.data.documents import Document
from moe.errors import DataError
from stmoe_eval.commands.run import print_scores
from stmoe_eval.run import evaluate

pytestmark = pytest.mark.usefixtures("short_answers")
ROWS = Path(__file__).parent / "fixtures" / "boolq" / "validation.jsonl"


def make_corpus(folder: Path, texts: list[str]) -> Path:
    """Saves a corpus with all of these texts in its training part."""
    documents = []
    for number, text in enumerate([*texts, "Filler."]):
        documents.append(Document(text, str(number), "own", "MIT"))
    corpus = build_corpus(documents)
    everything = datasets.concatenate_datasets([corpus.train, corpus.held_out])
    save_corpus(corpus._replace(train=everything), folder)
    return folder


def run(folders, out, **options):
    models = {"ours": folders["moe"]}
    return evaluate(models, ["boolq"], out=out, command="stmoe eval", **options)


def test_scores_without_the_examples_of_a_corpus_are_those_of_the_other_rows(
    folders, tmp_path, capsys
):
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 3
    corpus = make_corpus(tmp_path / "corpus", [f"They say: {rows[1]['passage'].upper()}"])
    data = tmp_path / "clean/boolq"
    data.mkdir(parents=True)
    clean_rows = [json.dumps(row) for row in rows if row is not rows[1]]
    (data / "validation.jsonl").write_text("\n".join(clean_rows), encoding="utf-8")

    report = run(folders, tmp_path / "all", data=ROWS.parents[1], contamination=corpus)
    clean = run(folders, tmp_path / "some", data=data.parent)
    shared = report.tasks[0].contamination
    assert 8 <= len(rows[1]["passage"].split()) < 13
    assert [overlap.num_shared for overlap in shared.overlaps] == [1, 0]
    assert [overlap.n for overlap in shared.overlaps] == [8, 13]
    assert shared.num_clean == len(rows) - 1
    assert {scores.mode for scores in shared.clean_scores} == {"generate", "rank"}
    for scores, system in zip(shared.clean_scores, clean.tasks[0].systems, strict=False):
        assert (scores.name, scores.mode) == (system.name, system.mode)
        assert scores.scores == system.scores

    # Where all are in the corpus, nothing is scored.
    texts = [f"{row['question']} passage {row['passage']}" for row in rows]  # T5's text of boolq
    whole = make_corpus(tmp_path / "whole", texts)
    options = {"data": ROWS.parents[1], "modes": ["rank"]}
    found = run(folders, tmp_path / "none", contamination=whole, **options).tasks[0].contamination
    assert (found.num_clean, found.clean_scores) == (0, [])
    assert clean.tasks[0].contamination is None

    # It stands in every form of the report.
    sentence = f"{len(rows) - 1} examples are clean."
    saved = json.loads((tmp_path / "all/report.json").read_text(encoding="utf-8"))
    assert saved["tasks"][0]["contamination"]["overlaps"][0]["num_shared"] == 1
    assert sentence in (tmp_path / "all/report.md").read_text(encoding="utf-8")
    assert sentence in (tmp_path / "all/report.html").read_text(encoding="utf-8")
    print_scores(report)
    printed = capsys.readouterr().out
    assert sentence in printed
    assert "ours, clean" in printed


def test_what_is_no_corpus_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="mine is not a corpus"):
        run({"moe": tmp_path / "none"}, tmp_path / "out", contamination=tmp_path / "mine")
