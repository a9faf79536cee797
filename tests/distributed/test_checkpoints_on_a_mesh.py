"""A run that moves from mesh to mesh by its checkpoints, against the same run in one process that
never stops.

After each move every parameter and every tensor of the optimizer must be the one that was saved, to
the last bit, and the next loss that of the undisturbed run.
"""

import functools
import os
import resource
import signal
import time
from collections import Counter

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from moe import CheckpointError
from moe.checkpoint.integrity import latest_checkpoint
from moe.checkpoint.writer import CheckpointWriter, load_checkpoint
from moe.distributed.collectives import gather_or_raise
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models.parallelize import model_layouts
from tests.distributed.ranks import run_ranks, whole
from tests.distributed.stages import Stage, adafactor, build, differing

EP, DP_SHARD, DP_SHARD_TP, DP_REPLICATE_EP = (1, 1, 2), (1, 4), (1, 2, 1, 2), (2, 1, 2)
JOURNEY = {
    2: [("lamb", EP)],
    4: [("adafactor", DP_SHARD), ("adafactor", DP_SHARD_TP), ("adamw", DP_REPLICATE_EP)],
}
"""Optimizer and mesh of each stop, by the number of ranks; every stop takes a step."""

OPTIMIZERS = Counter(name for stops in JOURNEY.values() for name, _ in stops)
"""How many stops each optimizer has."""


@pytest.fixture(autouse=True)
def one_thread():
    """As the ranks have it: many threads for so small a model cost a hundred times its work on a
    busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def travel(rank, num_ranks, folder, stops):
    """Returns by stop which tensors came otherwise than they were saved, the step, and its loss."""
    found = {}
    for name, sizes in stops:
        stage = Stage(name, build_mesh(MeshConfig(*sizes), "cpu"))
        step = stage.load(latest_checkpoint(folder / name))
        wrong = differing(stage.content(), torch.load(folder / f"{name}.pt"))
        loss = stage.step(step)
        with CheckpointWriter(folder / name, keep=1) as writer:
            stage.save(writer, step + 1)
        content = stage.content()
        if rank == 0:
            torch.save(content, folder / f"{name}.pt")
        gather_or_raise(lambda: None)
        found[name, sizes] = wrong, step, loss
    return found


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_on_every_other_mesh(tmp_path):
    losses = {}
    for name, num_stops in OPTIMIZERS.items():
        undisturbed = Stage(name)
        losses[name] = [undisturbed.step(number) for number in range(num_stops + 2)]
        first = Stage(name)
        first.step(0)
        with CheckpointWriter(tmp_path / name, keep=1) as writer:
            first.save(writer, 1)
        torch.save(first.content(), tmp_path / f"{name}.pt")
    for num_ranks, stops in JOURNEY.items():
        ranks = tmp_path / f"{num_ranks} ranks"
        ranks.mkdir()
        for found in run_ranks(travel, num_ranks, ranks, tmp_path, stops):
            for (name, sizes), (wrong, step, loss) in found.items():
                assert wrong == [], (name, sizes)
                assert loss == pytest.approx(losses[name][step], rel=1e-10), (name, sizes)
    for name, num_stops in OPTIMIZERS.items():
        last = Stage(name)
        step = last.load(latest_checkpoint(tmp_path / name))
        assert step == num_stops + 1
        assert differing(last.content(), torch.load(tmp_path / f"{name}.pt")) == []
        assert last.step(step) == pytest.approx(losses[name][step], rel=1e-10)


# ---- what goes wrong ----


def say(function):
    """Returns the text of the error that a function raises."""
    try:
        function()
    except (OSError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def on_two_ranks(rank, num_ranks, folder):
    """Returns what each rank heard: of errors of one rank, of what does not fit, and which
    checkpoints stayed.
    """
    mesh, said = build_mesh(MeshConfig(1, 1, 2, 1), "cpu"), {}
    stage = Stage("adafactor", mesh)
    with CheckpointWriter(folder, keep=2) as writer:
        stage.step(0)
        saved = stage.content()
        stage.save(writer, 1)
        stage.step(1)  # while the first is being written
        for number in (2, 3):
            stage.save(writer, number)
            said[f"while {number} is written"] = names_in(folder)
        writer.wait()
        said["kept"] = names_in(folder)
        gather_or_raise(lambda: None)
        before = stage.content()

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        stage.save(writer, 4)
        said["disk"] = say(writer.wait)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        gather_or_raise(lambda: None)
        said["after the disk"] = names_in(folder)
    with CheckpointWriter(folder.with_name("early"), keep=2) as writer:
        stage.save(writer, 1)
        stage.step(5)  # the copy is what was, not what will be
    again = Stage("adafactor", mesh)
    again.load(folder.with_name("early") / "step_00000001")
    said["copy"] = differing(again.content(), before)
    said["moved on"] = bool(differing(before, saved))

    other = Stage("adamw", mesh)
    weights = [whole(parameter) for parameter in other.model.parameters()]
    said["other optimizer"] = say(lambda: other.load(folder / "step_00000003"))
    after = [whole(parameter) for parameter in other.model.parameters()]
    said["kept as it was"] = all(map(torch.equal, weights, after))
    said["one rank fails"] = say(lambda: gather_or_raise(functools.partial(fail_on, 1, rank)))
    said["all answer"] = gather_or_raise(lambda: rank * 10)
    return said


def fail_on(failing, rank):
    if rank == failing:
        raise ValueError("no luck")


@pytest.mark.slow
def test_errors_of_one_rank_are_heard_on_all_and_cost_nothing(tmp_path):
    folder = tmp_path / "checkpoints"
    first, second = run_ranks(on_two_ranks, 2, tmp_path, folder)
    # A save waits for the one before.
    assert "step_00000001" in first["while 2 is written"]
    assert {"step_00000001", "step_00000002"} <= set(first["while 3 is written"])
    for said in (first, second):
        assert said["kept"] == said["after the disk"] == ["step_00000002", "step_00000003"]
        assert said["disk"].startswith("OSError: [Errno 27] File too large")
        assert "step_00000004" in said["disk"]
        assert said["copy"] == []
        assert said["moved on"]
        assert "step_00000003 is a checkpoint of another optimizer" in said["other optimizer"]
        assert "missing: optimizer/model.decoder.blocks.0." in said["other optimizer"]
        assert said["kept as it was"]
        assert said["all answer"] == [0, 10]
    assert first["one rank fails"] == "RuntimeError: ValueError: no luck"
    with pytest.raises(CheckpointError, match="of another shape: "):
        model = build(d_ff=26)
        layouts = model_layouts(model, model.config, MeshConfig())
        load_checkpoint(folder / "step_00000003", model, adafactor(model), layouts)


def killed_while_saving(rank, num_ranks, folder, victim):
    """Saves once, and once more with a rank that is killed in the background, its shards half-way
    on the disk.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by the parent when the victim is gone
    stage = Stage("adafactor", build_mesh(MeshConfig(1, 1, 2, 1), "cpu"))
    writer = CheckpointWriter(folder, keep=1)
    writer.__enter__()
    stage.step(0)
    stage.save(writer, 1)
    writer.wait()
    torch.save(stage.content(), folder.with_name(f"content {rank}.pt"))
    stage.step(1)
    if rank == victim:
        write = FileSystemWriter.write_data

        def die(self, plan, planner):
            write(self, plan, planner)
            os.kill(os.getpid(), signal.SIGKILL)

        FileSystemWriter.write_data = die
    stage.save(writer, 2)
    folder.with_name(f"said {rank}").write_text(say(writer.wait))


@pytest.mark.slow
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path):
    folder = tmp_path / "checkpoints"
    with pytest.raises(Exception, match="terminated with signal SIGKILL"):
        run_ranks(killed_while_saving, 2, tmp_path, folder, 0)
    said, end = tmp_path / "said 1", time.monotonic() + 20
    while not said.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert "CheckpointError" in said.read_text()
    assert "step_00000002 could not be written: " in said.read_text()

    newest = latest_checkpoint(folder)
    assert newest is not None
    assert newest.name == "step_00000001"
    stage = Stage("adafactor")
    stage.load(newest)
    assert differing(stage.content(), torch.load(tmp_path / "content 0.pt")) == []
    with CheckpointWriter(folder, keep=2) as writer:
        stage.save(writer, 2)
    assert names_in(folder) == ["step_00000001", "step_00000002"]
