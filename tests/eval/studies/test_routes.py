"""Other routes of single tokens, and the testbed of routers, beside counts by hand."""

import math

import pytest
import torch

from moe import ConfigError, DataError
from moe.inspection.ablation.ablation_runs import run_unchanged, target_losses
from moe.models.inputs import IGNORED_LABEL
from moe.parsing import read_record
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.edits import choose_again
from moe.tracing.recorder import traced_batches
from scripts.counterfactual_routes import (
    RouteChanges,
    change_routes,
    draw_routes,
    group_rows,
    own_routes,
)
from scripts.routing_testbed import (
    BATCH,
    LENGTH,
    Results,
    Run,
    Texts,
    all_arms,
    draw_batches,
    kind_ids,
    main,
    shared_information,
    table_rows,
    train,
)
from tests.models.tiny import tiny_batch, tiny_model

LAST = {"num_sparse_decoder_layers": 3, "eval_capacity_factor": None}


def test_each_change_is_that_of_one_token_whose_experts_alone_are_others():
    model = tiny_model(**LAST)
    key = ("decoder", 2)
    layer = sparse_layers(model)[key]
    batch = tiny_batch()
    changes = change_routes(model, list(traced_batches([batch])), 99, seed=0)
    routes = draw_routes(layer.config.num_experts, layer.config.num_selected_experts, 99, seed=0)
    assert changes.change.shape == (math.comb(layer.config.num_experts, 2), len(changes.loss))
    own = own_routes(run_unchanged(model, batch), key)

    # One token takes one route, and all others keep theirs.
    token = 3
    row, position = (batch["labels"] != IGNORED_LABEL).nonzero()[token]
    flat = int(row) * batch["labels"].shape[1] + int(position)
    for number, route in enumerate(routes):
        if own[token].tolist() == list(route):
            assert changes.change[number, token].isnan()
            continue

        def change_one(scores, plan, route=route):
            barred = torch.zeros_like(scores.logits, dtype=torch.bool)
            others = [e for e in range(layer.config.num_experts) if e not in route]
            barred.view(-1, barred.shape[-1])[flat, others] = True
            return choose_again(layer.router, scores, plan, barred)

        with edit_routing(model, {key: change_one}), torch.no_grad():
            losses = target_losses(model(**batch), batch)
        change = losses - changes.loss
        torch.testing.assert_close(change[token], changes.change[number, token])
        assert change.count_nonzero() <= 1


def test_a_model_whose_last_block_is_dense_is_refused():
    model = tiny_model(eval_capacity_factor=None, num_sparse_decoder_layers=0)
    with pytest.raises(DataError, match="last block"):
        change_routes(model, list(traced_batches([tiny_batch()])), 9, seed=0)


def test_routes_are_all_sets_or_a_sample_of_them():
    assert draw_routes(4, 2, 99, seed=0) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    sample = draw_routes(31, 2, 19, seed=1)
    assert len(set(sample)) == 19 and sample != draw_routes(31, 2, 19, seed=2)


def test_the_table_of_routes_counts_better_ones():
    changes = RouteChanges(
        loss=torch.tensor([0.1, 5.0], dtype=torch.float64),
        change=torch.tensor([[math.nan, -1.0], [0.2, -3.0], [-0.4, 1.0]], dtype=torch.float64),
        document=torch.tensor([0, 1]),
    )
    rows = {row[0].split()[0]: row[1:] for row in group_rows(changes)}
    assert [cell.split(" ")[0] for cell in rows["confident"]] == [
        "1",
        "0.100",
        "50.0",
        "-0.100",
        "100.0",
        "-0.400",
    ]
    assert [cell.split(" ")[0] for cell in rows["all"]][1:] == [
        "2.550",
        "58.3",
        "-0.550",
        "100.0",
        "-1.700",
    ]
    assert rows["between"][0] == "0"


def test_information_is_none_all_or_half_of_the_kinds_entropy():
    assert shared_information(torch.eye(4) * 7) == pytest.approx(1)
    assert shared_information(torch.ones(4, 4)) == pytest.approx(0, abs=1e-9)
    pairs = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    assert shared_information(pairs) == pytest.approx(0.5)


def test_the_reference_sends_each_kind_to_an_expert_of_its_own():
    random = torch.Generator().manual_seed(0)
    sequences = torch.randint(1, 1_000, (4, 90, LENGTH), generator=random)
    texts = Texts(sequences[:, :60], sequences[:, 60:])
    (batch,) = draw_batches(texts.train, 1, seed=0)
    assert batch.kind.bincount().tolist() == [BATCH // 4] * 4
    assert len(kind_ids(batch).unique()) == 4

    arms = {arm.name: arm for arm in all_arms()}
    assert len(arms) == 4 + 5 * 3
    assert train(arms["reference / -"], texts, 0, 2).information == pytest.approx(1)
    for name in ("bias_balanced / -", "expert_choice / batch", "dense / -"):
        run = train(arms[name], texts, 0, 2)
        assert math.isfinite(run.loss) and run.information < 0.5


def test_a_share_is_that_of_the_references_gain(tmp_path):
    arms = all_arms()
    runs = {arm.name: [] for arm in arms}
    for shift in (0.0, 0.5):
        losses = {"reference / -": 2.0 + shift, "switch / batch": 2.25 + shift * 1.2}
        for arm in arms:
            loss = losses.get(arm.name, 3.0 + shift)
            runs[arm.name].append(Run(loss=loss, information=0.5))

    # An arm that has one more seed than others; the file is read again.
    runs["dense / -"].append(Run(loss=9.0, information=0.0))
    path = tmp_path / "results.json"
    path.write_text(Results(updates=1, runs=runs).model_dump_json())
    results = read_record(path, Results, advice="")
    rows = {tuple(row[:2]): row for row in table_rows(arms, results)}
    assert rows["switch", "batch"][2:] == [
        "2.550",
        "+0.700 (+0.065 to +1.335)",
        "70 (6 to 134)",
        "50",
    ]
    assert rows["dense", "-"][3:] == ["+0.000", "0", "50"]
    assert rows["reference", "-"][3:] == ["+1.000", "100", "50"]


def test_results_of_other_updates_are_not_continued(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(Results(updates=7).model_dump_json())
    with pytest.raises(ConfigError, match=r"7 updates, but --updates is 1000"):
        main(["--out", str(path)])
