"""Replay and edits where experts lie on other ranks. Oracle: one process with the whole batch.

With a capacity each rank would drop other tokens than one process does; a replay drops the same.
"""

import pytest
import torch

from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models.parallelize import shard_model
from moe.sparse.editing import edit_routing
from moe.sparse.edits import DropExperts, RerouteExperts
from moe.tracing.recorder import record_routing, traced_batches
from moe.tracing.replay import replay_routing
from tests.distributed.ranks import run_ranks
from tests.tracing.models import build_batch, build_model, rows_of

EDITS = {("encoder", 0): DropExperts(1), ("encoder", 1): RerouteExperts(0, 3)}
BATCH = build_batch()


def build(capacity, dispatch):
    settings = {"eval_capacity_factor": capacity, "min_expert_capacity": 1, "dispatch": dispatch}
    model = build_model(**settings).double()
    return model.eval()


def real(logits, rows):
    return logits[BATCH["labels"][rows] >= 0].detach()


def on_a_rank(rank, num_ranks, traces):
    """Returns what this rank's half of the batch gives: replayed, by itself, and edited."""
    mesh = build_mesh(MeshConfig(ep=2), "cpu")
    rows = list(range(3 * rank, 3 * rank + 3))
    batch = rows_of(BATCH, rows)
    answers = {}
    for dispatch, trace in traces.items():
        tight, roomy = build(0.5, dispatch), build(None, dispatch)
        for model in (tight, roomy):
            shard_model(model, mesh)

        own = real(tight(**batch).logits, rows)
        with replay_routing(tight, trace):
            replayed = real(tight(**batch).logits, rows)
        with edit_routing(roomy, EDITS):
            edited = real(roomy(**batch).logits, rows)
        answers[dispatch] = own, replayed, edited
    return answers


@pytest.mark.slow
def test_replay_and_edits_over_two_ranks_equal_one_process(tmp_path):
    traces = {
        dispatch: record_routing(build(0.5, dispatch), traced_batches([BATCH]))
        for dispatch in ("ragged", "static")
    }
    answers = run_ranks(on_a_rank, 2, tmp_path, traces)
    for dispatch in traces:
        first, second = (answer[dispatch] for answer in answers)
        own, replayed, edited = map(torch.cat, zip(first, second, strict=True))
        tight, roomy = build(0.5, dispatch), build(None, dispatch)

        everything = list(range(6))
        expected = real(tight(**BATCH).logits, everything)
        torch.testing.assert_close(replayed, expected, rtol=0, atol=1e-10)
        assert not torch.allclose(own, expected)
        with edit_routing(roomy, EDITS):
            expected = real(roomy(**BATCH).logits, everything)
        torch.testing.assert_close(edited, expected, rtol=0, atol=1e-10)
