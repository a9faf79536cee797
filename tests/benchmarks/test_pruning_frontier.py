"""The pruning frontier at a tiny size: its rows, and that it continues where it stopped."""

import json

import pytest
import torch

from benchmarks.surgery import pruning_frontier
from benchmarks.surgery.pruning_frontier import Frontier, document_losses
from moe.sparse.editing import sparse_layers
from moe.surgery.expert_scores import SCORES
from moe.tracing.recorder import traced_batches
from tests.models.tiny import tiny_batch, tiny_model

DROPLESS = {"capacity_factor": None, "eval_capacity_factor": None}


@pytest.fixture
def frontier():
    model = tiny_model(num_experts=3, **DROPLESS)
    batches = list(traced_batches([tiny_batch(seed=seed) for seed in range(2)]))
    calibration = [traced.batch for traced in batches]
    return Frontier(model, calibration, batches, document_losses(model, batches))


def test_losses_of_documents_add_up_to_that_of_the_model(frontier):
    losses = document_losses(frontier.model, frontier.held_out[:1])
    loss = frontier.model(**tiny_batch(seed=0)).ce_loss.item()
    assert (losses.sums.sum() / losses.counts.sum()).item() == pytest.approx(loss, rel=1e-5)
    assert losses.counts.tolist() == [11, 10, 9, 8]


def test_keeping_all_experts_changes_no_loss(frontier):
    scores = dict.fromkeys(sparse_layers(frontier.model), torch.arange(3))
    losses = frontier.pruned(scores, "both", 3)
    torch.testing.assert_close(losses.sums, frontier.whole.sums)


def test_the_file_has_every_score_and_is_continued(frontier, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pruning_frontier, "measure_whole", lambda *_: frontier)
    path = tmp_path / "frontier.json"
    arguments = ["--model", "m", "--corpus", "c", "--json", str(path)]
    pruning_frontier.main(arguments)
    report = json.loads(path.read_text())
    assert len(report["rows"]) == 2 * 3 * len(SCORES.names())
    for row in report["rows"]:
        value, low, high = row["change"]
        assert low <= value <= high
        assert row["loss"] - report["loss"] == pytest.approx(value, abs=1e-9)
    assert pruning_frontier.EXPECTED in capsys.readouterr().out

    # One number of experts is missing: only that is measured again.
    report["rows"] = [{**row, "loss": -1.0} for row in report["rows"] if row["kept"] == 2]
    path.write_text(json.dumps(report))
    pruning_frontier.main(arguments)
    losses = {(row["kept"], row["loss"] < 0) for row in json.loads(path.read_text())["rows"]}
    assert losses == {(2, True), (1, False)}
