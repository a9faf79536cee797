"""A run on two nodes with a link between them is that of one process, also when the link drops and a
node dies.
"""

import json
import time

import pytest

from moe.commands import pretrain
from tests.distributed.two_nodes import DEVICES, drop_link, kill, torchrun, two_nodes, why_not
from tests.training.tiny_run import pretrain_arguments, write_inputs

STEPS = 24
MESH = ("--mesh.ep", 2, "--training.checkpoint_every", 5)
BATCH = ("--training.batch_size", 8, "--model.group_size", 16, "--model.dropout_rate", 0.0)


def losses(out):
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {line["step"]: line["train/loss"] for line in records if "train/loss" in line}


def wait_for_step(out, step, running):
    """Waits until the run has done a step."""
    deadline = time.monotonic() + 120
    while max(losses(out), default=0) < step:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in running)
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"two nodes on one machine: {why_not()}")
def test_two_nodes_train_like_one_process_through_a_link_that_drops_and_a_node_that_dies(tmp_path):
    inputs = write_inputs(tmp_path)
    steps = (*BATCH, "--training.steps", STEPS, "--training.evaluate_every", STEPS)
    pretrain.main(pretrain_arguments(inputs, tmp_path / "one", *steps))

    out = tmp_path / "two"
    arguments = [
        "-m",
        "stmoe",
        "pretrain",
        *pretrain_arguments(inputs, out, *steps, *MESH),
        "--resume",
    ]
    with two_nodes() as names, (tmp_path / "log").open("wb") as log:
        running = [torchrun(names, node, arguments, log) for node in (0, 1)]
        wait_for_step(out, 6, running)
        drop_link(names[0], DEVICES[0], seconds=0.5)
        wait_for_step(out, 12, running)

        kill(names[1])
        running[1].wait()
        running[1] = torchrun(names, 1, arguments, log)
        codes = [process.wait(timeout=120) for process in running]
    assert codes == [0, 0], (tmp_path / "log").read_text()[-3000:]

    expected = losses(tmp_path / "one")
    actual = losses(out)
    assert list(actual) == list(expected) == list(range(1, STEPS + 1))
    assert list(actual.values()) == pytest.approx(list(expected.values()), rel=1e-4)
