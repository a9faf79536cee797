"""The benchmark of whole models at a size of milliseconds."""

import json

import pytest

from benchmarks.models.model import PARTS, build_models, run_model
from tests.benchmarks.tiny_case import TINY


@pytest.mark.slow
def test_the_table_has_a_row_for_every_model_and_part(tmp_path, capsys):
    path = tmp_path / "model.json"
    run_model(PARTS, [3], rounds=1, json=path, case=TINY)
    assert "time / switch" in capsys.readouterr().out
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = [(row["part"], row["experts"], row["batch"], row["model"]) for row in rows]
    names = ("switch", "ours", "t5_sdpa")
    assert sorted(found) == sorted((part, 3, 2, name) for part in PARTS for name in names)
    for row in rows:
        assert row["over"][row["model"]] == 1


def test_ours_has_the_weights_of_switch_and_drops_nothing():
    models = build_models(TINY, 3)
    ours, switch = models["ours"], models["switch"]
    assert ours.num_parameters() == switch.num_parameters()
    assert ours.config.expert_capacity is ours.config.eval_capacity_factor is None
    assert switch.config.expert_capacity == TINY.input_length
    assert not any(parameter.is_meta for parameter in switch.parameters())
    gate = ours.sparse_layers()[0].router.gate
    assert any(parameter.data_ptr() == gate.data_ptr() for parameter in switch.parameters())
