"""Replica groups that are killed in the middle of a step: the oracle is one process left alone."""

import itertools
import os
import signal
import socket
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from moe import CheckpointError, ConfigError
from moe.checkpoint.run_state import RunState
from moe.distributed.launch import World
from moe.distributed.live_replica_groups import deal_all_shares, keep_one_share
from moe.distributed.mesh import MeshConfig
from moe.distributed.replica_groups import (
    GROUP_ID,
    LIGHTHOUSE,
    LiveGroups,
    LostStepError,
    find_replica_groups,
)
from moe.errors import DistributedError
from moe.models.parallelize import model_layouts
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import parameter_groups
from moe.training.build import BuiltModel
from moe.training.planned_steps import LiveState, ShareSource, live_steps
from moe.training.recipe import OptimRecipe, Recipe, TrainingRecipe
from moe.training.step import StepRanks, take_step
from tests.models.tiny import tiny_batch, tiny_model
from tests.processes import fork_context
from tests.training.one_step import train_step

ROWS = 6
STEPS = 9
LATE_STEP = 7  # before which all deaths lie
TIMEOUT = 600  # seconds, on a busy machine

CONSTANT = MeshConfig(dp_replicate=3, on_lost_replica="constant_work")


# ---------------------------------------------------------------------------
# Who takes what


def test_live_groups_take_all_shares_or_leave_those_of_lost_ones_out():
    for num_groups in (2, 3, 5, 7):
        for num_live in range(1, num_groups + 3):
            live = [LiveGroups(0, number, num_live) for number in range(num_live)]
            all_shares = [deal_all_shares(group, num_groups) for group in live]
            kept = [keep_one_share(group, num_groups) for group in live]
            assert sorted(itertools.chain(*all_shares)) == list(range(num_groups))
            assert list(itertools.chain(*kept)) == list(range(min(num_live, num_groups)))
            if num_live == num_groups:
                assert all_shares == kept


# ---------------------------------------------------------------------------
# What is refused


def test_a_lighthouse_that_does_not_shine_or_that_nobody_knows_is_named_in_time(monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    unknown = "no.such.machine.invalid:29510"
    for address, text in (
        (
            f"localhost:{port}",
            f"others at http://localhost:{port} .* within 1 seconds. Start torchft",
        ),
        (unknown, f"{unknown}, which this machine cannot resolve"),
    ):
        monkeypatch.setenv(LIGHTHOUSE, f"http://{address}")
        groups = find_replica_groups(CONSTANT, World(0, 1, 0, "cpu", timeout=1.0))
        joined = groups.joined(0, dict, lambda state: None)
        with pytest.raises(DistributedError, match=text), joined:
            pass


def test_what_the_run_says_of_another_groups_state_is_not_taken_for_a_lost_lighthouse(monkeypatch):
    def start_quorum():
        raise CheckpointError("optim.lr was 0.01 and is 0.02")

    monkeypatch.setenv(LIGHTHOUSE, "http://localhost:1")
    groups = find_replica_groups(CONSTANT, World(0, 1, 0, "cpu"))
    groups._manager = SimpleNamespace(start_quorum=start_quorum)
    with pytest.raises(CheckpointError, match=r"^optim\.lr was 0\.01"):
        groups.begin_step()


def test_a_policy_is_one_of_two_and_sums_by_torchft_alone():
    with pytest.raises(
        ConfigError, match=r"mesh\.on_lost_replica is 'wait'.*constant_work, shrink"
    ):
        MeshConfig(dp_replicate=2, on_lost_replica="wait")
    with pytest.raises(ConfigError, match=r"mesh\.on_lost_replica is 'shrink'.*null with mesh"):
        MeshConfig(dp_replicate=2, on_lost_replica="shrink", gradient_reduction="ring")


def test_without_torchft_or_a_lighthouse_the_message_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv(LIGHTHOUSE, "somewhere")
    with pytest.raises(ConfigError, match=r"TORCHFT_LIGHTHOUSE is 'somewhere'.*torchft_lighthouse"):
        find_replica_groups(CONSTANT, World(0, 1, 0, "cpu"))
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ConfigError, match=r"pip install 'stmoe\[ft\]'"):
        find_replica_groups(CONSTANT, World(0, 1, 0, "cpu"))


# ---------------------------------------------------------------------------
# Groups that die


class Batches:
    batch_size = ROWS
    lengths = (13, 11)
    fingerprint = "drawn"

    def batch(self, step, rows=slice(None)):
        whole = tiny_batch(seed=step, batch=ROWS)
        return {name: value[rows] for name, value in whole.items()}


def recipe(config):
    return Recipe(
        optim=OptimRecipe(schedule="constant", lr=0.01, warmup_steps=0, max_grad_norm=0.5),
        training=TrainingRecipe(steps=STEPS, batch_size=ROWS, micro_batch_size=1),
        mesh=config,
    )


def build():
    model = tiny_model(group_size=13, balance_scope="global", load_balance_loss_weight=0.3)
    model.double().train()
    return model, Adafactor(parameter_groups(model))


def die_at(replicas, step, num_sums):
    """Has this process kill itself in the sum with this number of a step."""
    begin_step, sum_in_place = replicas.begin_step, replicas.sum_in_place
    now = {"step": -1, "sums": 0}

    def begin():
        live = begin_step()
        now.update(step=live.step, sums=0)
        return live

    def sum_or_die(tensors):
        now["sums"] += 1
        if (now["step"], now["sums"]) == (step, num_sums):
            os.kill(os.getpid(), signal.SIGKILL)
        sum_in_place(tensors)

    replicas.begin_step, replicas.sum_in_place = begin, sum_or_die


def wait_for_all(replicas, folder, group, groups):
    """Has a group that is before a late step wait until these groups were there before theirs.

    Else one that starts slowly, on a busy machine, finds nobody left and trains alone.
    """
    begin_step = replicas.begin_step
    now = {"step": -1}

    def begin():
        (folder / f"{group}.there").touch()
        missing = {folder / f"{other}.there" for other in groups}
        while now["step"] + 1 >= LATE_STEP and not all(path.exists() for path in missing):
            time.sleep(0.05)
        live = begin_step()
        now["step"] = live.step
        return live

    replicas.begin_step = begin


def meet_before_the_first_step(folder, group, num_groups):
    """Waits until all groups have started; one that starts again waits for nobody.

    Else one that starts slowly, on a busy machine, finds the step behind it in which it is to die.
    """
    (folder / f"{group}.started").touch()
    while not all((folder / f"{other}.started").exists() for other in range(num_groups)):
        time.sleep(0.05)


def train_group(folder, group, num_groups, config, lighthouse, death, awaited):
    torch.set_num_threads(1)
    os.environ.update({LIGHTHOUSE: lighthouse, GROUP_ID: str(group)})
    model, optimizer = build()
    replicas = find_replica_groups(config, World(0, 1, 0, "cpu", timeout=60.0))
    assert replicas is not None
    meet_before_the_first_step(folder, group, num_groups)
    if death is not None:
        die_at(replicas, *death)
    else:
        wait_for_all(replicas, folder, group, awaited)

    built = BuiltModel(model, model_layouts(model, model.config, config.launched), None)
    state = LiveState(built, optimizer, RunState(0, "drawn", {}), lambda others: None)
    source = ShareSource(Batches(), config, 0, torch.device("cpu"))
    losses, live = {}, {}
    for step, shares, _ in live_steps(replicas, source, state, range(STEPS)):
        try:
            ranks = StepRanks(None, replicas)
            metrics = take_step(model, optimizer, recipe(config), shares, step, ranks)
        except LostStepError:
            continue
        losses[step] = float(metrics.loss)
        live[step] = replicas.take_seconds().live
        torch.save((losses, live, model.state_dict()), folder / f"{group}.partial")
    torch.save((losses, live, model.state_dict()), folder / f"{group}.pt")


def run_groups(folder, config, deaths, *, restart):
    """Returns losses, groups that were there, and last weights of each group that came to the end.

    Args:
        deaths: Step and sum at which each group dies, or None.
        restart: Whether a group that died starts again.
    """
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=1000
    )
    address = lighthouse.address()
    awaited = {group for group, death in enumerate(deaths) if death is not None and restart}
    processes = {}

    def start(group, death):
        arguments = (folder, group, len(deaths), config, address, death, awaited)
        processes[group] = fork_context().Process(target=train_group, args=arguments)
        processes[group].start()

    for group, death in enumerate(deaths):
        start(group, death)
    try:
        end = time.monotonic() + TIMEOUT
        died = set()
        while any(process.is_alive() for process in processes.values()):
            assert time.monotonic() < end, f"the groups did not end within {TIMEOUT} seconds"
            time.sleep(0.05)
            for group, process in processes.items():
                if process.exitcode == -signal.SIGKILL and group not in died:
                    died.add(group)
                    if restart:
                        time.sleep(2)  # others go on meanwhile
                        start(group, None)
                        break
    finally:
        for process in processes.values():
            process.kill()
            process.join()
        lighthouse.shutdown()
    assert died == {group for group, death in enumerate(deaths) if death is not None}
    files = {group: folder / f"{group}.pt" for group in processes}
    return {group: torch.load(file) for group, file in files.items() if file.exists()}


def alone(rows_of):
    """Returns losses and last weights of one process, which takes `rows_of(step)` of every batch."""
    model, optimizer = build()
    losses = {}
    for step in range(STEPS):
        batch = Batches().batch(step, rows_of(step))
        losses[step] = float(train_step(model, optimizer, recipe(MeshConfig()), batch, step).loss)
    return losses, model.state_dict()


@pytest.mark.slow
def test_groups_that_die_in_a_step_come_back_with_the_weights_and_losses_of_a_run_left_alone(
    tmp_path,
):
    # In the sum of counts, of choices, and of gradients.
    deaths = [(1, 1), (5, 2), (3, 3)]
    groups = run_groups(tmp_path, CONSTANT, deaths, restart=True)
    assert groups.keys() == {0, 1, 2}

    expected, weights = alone(lambda step: slice(None))
    for losses, _, state in groups.values():
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], abs=1e-10)
        for name, value in state.items():
            assert torch.equal(value, groups[0][2][name]), name
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-10)

    # Some steps were taken by two.
    counts = [count for _, live, _ in groups.values() for count in live.values()]
    assert min(counts) < 3


@pytest.mark.slow
def test_a_step_that_shrinks_is_that_of_the_rows_that_are_left(tmp_path):
    config = MeshConfig(dp_replicate=2, on_lost_replica="shrink")
    groups = run_groups(tmp_path, config, [None, (4, 2)], restart=False)
    assert groups.keys() == {0}
    losses, live, _ = groups[0]
    assert live[STEPS - 1] == 1

    # The one that died may have been there first.
    early_losses, early_live, _ = torch.load(tmp_path / "1.partial")
    losses = {**early_losses, **losses}
    live = {**early_live, **live}

    # Before both were there, and after one had died, only one half of a batch was taken.
    expected, _ = alone(lambda step: slice(0, ROWS * live[step] // 2))
    assert losses == pytest.approx(expected, abs=1e-10)
