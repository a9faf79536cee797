"""The benchmark of evaluation at a size of milliseconds; that both say the same of every example is
its own oracle.
"""

import json

import pytest

from benchmarks.models.evaluation import (
    EvaluationBenchmark,
    EvaluationCase,
    make_task,
    run_evaluation,
)

TINY = EvaluationCase(
    307, 16, 24, 2, 2, 1, num_experts=3, num_examples=7, words=(2, 11), batches=(2, 3)
)


@pytest.mark.slow
def test_the_table_has_a_row_for_every_model_mode_and_system(tmp_path, capsys):
    path = tmp_path / "eval.json"
    run_evaluation(EvaluationBenchmark(rounds=1, json=path, case=TINY))
    assert "over lm_eval" in capsys.readouterr().out
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    pairs = [(model, mode) for model in ("t5", "ours") for mode in ("rank", "generate")]
    assert [(row["model"], row["mode"], row["system"]) for row in rows] == [
        (*pair, system) for pair in pairs for system in ("ours", "lm_eval")
    ]
    for row in rows:
        assert row["differing"] == 0
        assert row["examples_per_second"] > 0
        if row["system"] == "lm_eval":
            assert row["over_lm_eval"] == 1
            assert row["batch_size"] in TINY.batches


def test_the_task_has_inputs_of_all_lengths_and_two_to_four_answers():
    case = EvaluationCase(num_examples=64)
    examples = make_task(case).examples("test")
    assert {len(example.choices) for example in examples} == {2, 3, 4}
    lengths = sorted(len(example.inputs.split()) for example in examples)
    assert lengths[0] < 15
    assert lengths[-1] > 110
    assert len(examples) == case.num_examples
