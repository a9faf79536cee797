"""Seq2SeqTrainer by accelerate on two processes; the oracle is one process with the whole batch."""

import json

import pytest
import torch

from tests.models.tiny import tiny_model
from tests.processes import start_torchrun
from tests.training.tiny_trainer import HEAVY, LEARNS, train

HALF = {"per_device_train_batch_size": 4}
CUT = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "activation_checkpointing": True,
}
LOGS_THREE = {**HALF, "logging_steps": 3}
CASES = {
    "halves": ({}, HALF),
    "cut and checkpointed": ({}, CUT),
    "a router that learns": (LEARNS, HALF),
    "smoothed labels, a log of three updates": ({"label_smoothing": 0.1}, LOGS_THREE),
    "means of processes": ({}, {**HALF, "average_tokens_across_devices": False}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns what each case gave on each of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = [(name, *case) for name, case in CASES.items()]
    (folder / "cases.json").write_text(json.dumps(cases))
    ended = start_torchrun(2, "tests.training.tiny_trainer", folder).finish()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(2)] for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if name != "means of processes"])
def test_two_processes_train_log_and_count_like_one_with_the_whole_batch(runs, tmp_path, case):
    changes, settings = CASES[case]
    model = tiny_model(**{**HEAVY, "group_size": 1, "capacity_factor": None, **changes}).double()
    steps = {name: value for name, value in settings.items() if name == "logging_steps"}
    expected, expected_lines = train(tmp_path, model, **steps)
    for parameters, lines in runs[case]:
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-10, msg=name)
        assert len(lines) == 3 // steps.get("logging_steps", 1)
        for line, expected_line in zip(lines, expected_lines, strict=True):
            assert line == pytest.approx(expected_line, rel=1e-6)


@pytest.mark.slow
def test_without_an_average_over_all_tokens_the_logged_parts_are_those_of_all_tokens_nearly(runs):
    apart = [lines for _, lines in runs["means of processes"]]
    assert apart[0] == apart[1]
    line, (expected, *_) = apart[0][0], runs["halves"][0][1]
    assert line["loss"] != expected["loss"]  # a mean of means, weighted by processes
    for name in ("ce_loss", "z_loss"):
        assert line[name] == pytest.approx(expected[name], rel=0.02)
