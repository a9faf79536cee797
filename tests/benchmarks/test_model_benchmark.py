"""The benchmark of whole models at a size of milliseconds; its own comparison of tokens is the
oracle of ours.
"""

import json

import pytest

from benchmarks.models.model import PARTS, ModelBenchmark, ModelCase, build_models, run_model

TINY = ModelCase(131, 16, 24, 2, 2, 1, batch=2, input_length=11, target_length=7, new_tokens=5)


@pytest.mark.slow
def test_the_table_has_a_row_for_every_model_and_part(tmp_path, capsys):
    path = tmp_path / "model.json"
    run_model(ModelBenchmark(PARTS, [3], [1, 2], rounds=1, json=path, case=TINY))
    printed = capsys.readouterr().out
    assert "tokens differ" not in printed
    assert "decoder alone" in printed
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = {(row["part"], row["experts"], row["batch"], row["model"]) for row in rows}
    names = ("switch", "ours", "t5_eager", "t5_sdpa")
    parts = [("training", 3, 2), ("fine_tuning", 3, 2)]
    parts += [(part, 3, batch) for part in ("generation", "decoder alone") for batch in (1, 2)]
    assert found == {(*part, name) for part in parts for name in names}
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
