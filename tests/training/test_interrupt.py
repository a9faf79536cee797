"""Ctrl-C and SIGTERM stop between two steps, never inside one, and lose no step that is done."""

import json
import os
import signal
import sys
import time
from typing import NamedTuple

import pytest

from moe.checkpoint.integrity import visible_damage
from moe.distributed.mesh import MeshConfig
from moe.errors import Interrupted
from moe.models.parallelize import model_layouts
from moe.training.build import BuiltModel
from moe.training.interruption import SIGNALS, stop_requests
from moe.training.loop import Run, train
from moe.training.recipe import OptimRecipe, Recipe, TrainingRecipe
from tests.models.tiny import tiny_batch, tiny_model


class Interrupting(NamedTuple):
    """A source that gets signals while it makes the third batch."""

    numbers: tuple[int, ...]
    batch_size: int = 4
    fingerprint: str = "x"

    def batch(self, step, rows):
        for number in self.numbers if step == 2 else ():
            os.kill(os.getpid(), number)
            time.sleep(0.1)  # two at once would be one
        return tiny_batch(seed=step)


@pytest.fixture
def interrupted(tmp_path):
    """Trains a run that gets signals in its third step, and returns its folder and how it ended."""

    def train_and_send(*numbers):
        recipe = Recipe(
            optim=OptimRecipe(schedule="constant", lr=0.01, warmup_steps=0),
            training=TrainingRecipe(steps=9, batch_size=4, log_every=1, checkpoint_every=2),
        )
        model = tiny_model()
        built = BuiltModel(model, model_layouts(model, model.config, MeshConfig()), None)
        run = Run(tmp_path / "run", recipe, built, None, Interrupting(numbers), None)
        with pytest.raises(KeyboardInterrupt) as ended:
            train(run)
        return run.folder, ended.value

    return train_and_send


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def last_logged_step(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["step"]


def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(interrupted, capfd):
    handlers = [signal.getsignal(number) for number in SIGNALS]

    folder, ended = interrupted(signal.SIGTERM)

    assert isinstance(ended, Interrupted)
    assert ended.exit_code == 128 + signal.SIGTERM
    assert str(ended).startswith("Stopped after step 3; ")
    assert "ends after this step, with a checkpoint" in capfd.readouterr().err
    assert last_logged_step(folder) == 3
    assert checkpoints(folder) == ["step_00000002", "step_00000003"]
    assert visible_damage(folder / "checkpoints" / "step_00000003") is None
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


def test_a_second_ctrl_c_at_a_prompt_stops_in_the_middle_of_a_step(interrupted, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)

    folder, ended = interrupted(signal.SIGINT, signal.SIGINT)

    assert not isinstance(ended, Interrupted)
    assert last_logged_step(folder) == 2
    assert checkpoints(folder) == ["step_00000002"]


def test_what_the_starter_ignores_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_requests() as stop_requested:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop_requested() is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop_requested() == signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, previous)
