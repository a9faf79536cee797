"""Whole commands under torchrun: a killed rank, another mesh on resuming, and messages of runs that
cannot start.

The oracle of a disturbed run is the same run left alone: its losses to the last bit.
"""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe.commands import pretrain
from tests.processes import start_torchrun
from tests.training.tiny_run import pretrain_arguments, write_inputs

NUM_STEPS = 21
MESH = ["--mesh.ep", "2", "--model.group_size", "16", "--training.micro_batch_size", "2"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def arguments(inputs, out, *more):
    return pretrain_arguments(inputs, out, "--training.steps", NUM_STEPS, *more)


def start(inputs, out, *more, ranks=2, options=()):
    """Starts a pre-training run of several ranks and returns the process of torchrun."""
    words = arguments(inputs, out, *more)
    return start_torchrun(ranks, "stmoe", "pretrain", *words, options=options)


def finish(process):
    """Returns what a run printed, and its exit code; kills it when it hangs."""
    ended = process.finish()
    return ended.stdout + ended.stderr, ended.returncode


def losses(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def kill_a_rank(torchrun, checkpoint):
    """Kills one rank when a checkpoint is there; torchrun itself lives on."""
    wait_for(checkpoint, torchrun)
    os.kill(ranks_of(torchrun)[-1], signal.SIGKILL)


def ranks_of(torchrun):
    """Returns the numbers of the processes that torchrun has started."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    return [int(child) for child in children]


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory):
    """A run of two ranks that nothing disturbs."""
    out = tmp_path_factory.mktemp("alone") / "run"
    text, code = finish(start(inputs, out, *MESH))
    assert code == 0, text
    assert [step for step, _ in losses(out)] == list(range(1, NUM_STEPS + 1))
    return out


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_starts_again_by_itself_and_ends_like_one_left_alone(
    inputs, alone, tmp_path
):
    disturbed = tmp_path / "disturbed"
    process = start(inputs, disturbed, *MESH, "--resume", options=["--max-restarts", "1"])
    kill_a_rank(process, disturbed / "checkpoints" / "step_00000007")
    text, code = finish(process)
    assert code == 0, text
    assert losses(disturbed) == losses(alone)


@pytest.mark.slow
def test_ranks_of_which_one_is_asked_to_end_end_after_the_same_step(inputs, alone, tmp_path):
    out = tmp_path / "run"
    seldom = ["--training.checkpoint_every", "1000"]
    process = start(inputs, out, *MESH, *seldom)
    process.wait_for(lambda: (out / "metrics.jsonl").exists() and len(losses(out)) >= 3)
    os.kill(ranks_of(process)[-1], signal.SIGTERM)
    text, code = finish(process)
    assert code != 0
    assert "Stopped after step" in text

    text, code = finish(start(inputs, out, *MESH, "--resume"))
    assert code == 0, text
    assert losses(out) == losses(alone)


def wait_for(path, process):
    process.wait_for(path.exists)
    assert process.poll() is None, f"no {path}: {process.finish()}"


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_ranks(inputs, tmp_path):
    settings = {
        "model.group_size": 9,
        "model.dropout_rate": 0,
        "model.router_options.second_expert_policy": "all",
        "optim.lr": 0.01,
        "optim.cooldown_steps": 0,
        "training.micro_batch_size": 1,
    }
    settings = [f"--{name}={value}" for name, value in settings.items()]
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    pretrain.main(arguments(inputs, alone, *settings))

    for ranks, mesh, step in ((4, ["--mesh.ep", "4"], 7), (2, ["--mesh.tp", "2"], 14)):
        process = start(inputs, moved, *settings, *mesh, "--resume", ranks=ranks)
        wait_for(moved / "checkpoints" / f"step_{step:08d}", process)
        process.send_signal(signal.SIGTERM)
        finish(process)
        assert 0 < len(losses(moved)) < NUM_STEPS
    pretrain.main(arguments(inputs, moved, *settings, "--resume"))
    assert [step for step, _ in losses(moved)] == list(range(1, NUM_STEPS + 1))
    for (_, ours), (_, theirs) in zip(losses(moved), losses(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    ours, theirs = (load_file(out / "model" / "model.safetensors") for out in (moved, alone))
    for name, expected in theirs.items():
        atol = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=atol, msg=name)


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_is_refused_once_with_what_would_fit(inputs, tmp_path):
    mesh = ["--mesh.ep", "2", "--training.micro_batch_size", "2"]
    text, code = finish(start(inputs, tmp_path / "run", *mesh))
    assert code == 1 and text.count("error: ") == 1, text
    assert "groups of tokens cannot be spread evenly over 2 data ranks" in text
    assert "Meshes that would fit: " in text and "tp 2" in text
    assert not (tmp_path / "run").exists()
