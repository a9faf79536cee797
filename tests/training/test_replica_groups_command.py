"""Replica groups of two ranks each, launched apart: one is killed and comes back.

The oracle is the other group: the same losses, and in the end the same files of weights.
"""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from moe.distributed.replica_groups import GROUP_ID, LIGHTHOUSE
from moe.training import loop
from tests.processes import TIMEOUT, Command, _fork_ranks
from tests.training.tiny_run import write_inputs

STEPS = 24


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def lighthouse():
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=2000
    )
    yield server.address()
    server.shutdown()


def hold_steps(ready, awaited):
    """Forks the ranks; a group creates the file `ready` before its first quorum, and step s waits
    for the files awaited[t] of all t <= s. How soon a process starts then decides nothing.
    """
    _fork_ranks()
    live_steps, take_step = loop.live_steps, loop.take_step

    def announce(*arguments):
        ready.touch()
        return live_steps(*arguments)

    def hold(model, optimizer, recipe, shares, step, *more):
        while not all(path.exists() for first, path in awaited.items() if first <= step):
            time.sleep(0.01)
        return take_step(model, optimizer, recipe, shares, step, *more)

    loop.live_steps, loop.take_step = announce, hold


def start(inputs, out, lighthouse, group, ready, awaited):
    words = ["--standalone", "--nproc-per-node", 2, "-m", "stmoe", "pretrain", "--resume"]
    settings = {
        "config": inputs["pretrain.yaml"],
        "corpus": inputs["corpus"],
        "tokenizer": inputs["tokenizer"],
        "out": out / str(group),
        "training.steps": STEPS,
        "training.batch_size": 8,
        "training.micro_batch_size": 2,
        "model.group_size": 8,
        "mesh.ep": 2,
        "mesh.dp_replicate": 2,
        "mesh.on_lost_replica": "constant_work",
        "timeout": 100,
    }
    for name, value in settings.items():
        words += [f"--{name}", value]
    environment = {LIGHTHOUSE: lighthouse, GROUP_ID: str(group)}
    prepare = partial(hold_steps, out / ready, {at: out / name for at, name in awaited.items()})
    return Command("torch.distributed.run", words, environment=environment, prepare=prepare)


def losses(out, group):
    path = out / str(group) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    values = [json.loads(line) for line in lines if line.endswith("}")]
    return {value["step"]: value["train/loss"] for value in values if "train/loss" in value}


@pytest.mark.slow
def test_a_group_of_two_ranks_that_is_killed_comes_back_equal_to_the_other(
    inputs, lighthouse, tmp_path
):
    awaited = {0: "second", STEPS // 2: "second again"}
    until_killed = {0: "first", STEPS // 2: "a file that never comes"}
    groups = [start(inputs, tmp_path, lighthouse, 0, "first", awaited)]
    groups.append(start(inputs, tmp_path, lighthouse, 1, "second", until_killed))
    groups[1].wait_for(lambda: max(losses(tmp_path, 1), default=0) >= 5, TIMEOUT)
    children = Path(f"/proc/{groups[1].pid}/task/{groups[1].pid}/children").read_text().split()
    for child in children:  # a rank that waits for a lost one would end after torchrun's 30 seconds
        os.kill(int(child), signal.SIGKILL)
    assert groups[1].finish().returncode != 0

    groups[1] = start(inputs, tmp_path, lighthouse, 1, "second again", {})
    for group in groups:
        ended = group.finish()
        assert ended.returncode == 0, ended.stderr
    assert "Healed: took over the state of another group" in ended.stderr

    # The other group took every step from its first on, and both had the same losses. The one that
    # started first may have taken steps alone.
    lived_on = losses(tmp_path, 0)
    assert list(lived_on) == list(range(min(lived_on), STEPS + 1))
    came_back = losses(tmp_path, 1)
    shared = lived_on.keys() & came_back.keys()
    assert STEPS in shared
    assert {step: came_back[step] for step in shared} == {step: lived_on[step] for step in shared}
    files = [file.name for file in (tmp_path / "0/model").glob("*.safetensors")]
    for name in files:
        first = (tmp_path / "0/model" / name).read_bytes()
        assert first == (tmp_path / "1/model" / name).read_bytes()
    assert files
