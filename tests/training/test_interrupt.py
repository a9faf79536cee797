"""Ctrl-C stops between two steps, never inside one: whatever is being written is written to its
end.
"""

import json
import os
import signal

import pytest

from moe.data.pipeline import PairSource
from moe.data.tokenizer import train_tokenizer
from moe.distributed.mesh import MeshConfig
from moe.models.parallelize import model_layouts
from moe.training.build import BuiltModel
from moe.training.loop import Run, train
from moe.training.recipe import OptimRecipe, Recipe, TrainingRecipe
from tests.models.tiny import tiny_model
from tests.training.tiny_run import write_texts


class Interrupting:
    """A source that presses Ctrl-C while it makes the batch of a step."""

    batch_size, fingerprint = 4, "x"

    def __init__(self, source, step, times):
        self.source, self.step, self.times = source, step, times

    def batch(self, step, rows):
        if step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        return self.source.batch(step, rows)


@pytest.mark.parametrize(("times", "last"), [(1, 3), (2, 2)])
def test_ctrl_c_waits_for_the_end_of_the_step_and_a_second_one_does_not(tmp_path, times, last):
    texts = [file.read_text() for file in sorted(write_texts(tmp_path / "texts").iterdir())]
    tokenizer = train_tokenizer(texts, 230, tmp_path / "tokenizer")
    pairs = [(text[:20], text[20:30]) for text in texts]
    source = PairSource(pairs, tokenizer, inputs_length=13, targets_length=7, batch_size=4, seed=0)
    recipe = Recipe(
        optim=OptimRecipe(schedule="constant", lr=0.01, warmup_steps=0),
        training=TrainingRecipe(steps=9, batch_size=4, log_every=1, checkpoint_every=2),
    )
    model = tiny_model(vocab_size=230)
    built = BuiltModel(model, model_layouts(model, model.config, MeshConfig()), None)
    run = Run(tmp_path / "run", recipe, built, tokenizer, Interrupting(source, 2, times), None)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert signal.getsignal(signal.SIGINT) is handler
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == last
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_00000002"]
