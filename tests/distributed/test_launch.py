"""Ranks that torchrun starts meet, and whatever goes wrong with one of them ends all in time, with
a message.

The ranks of the tests are processes that get torchrun's environment variables, and a store for
every start as its agent keeps one.
"""

import json
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe.distributed.launch import World, launch
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.errors import ConfigError, DataError, DistributedError
from moe.models.parallelize import shard_model
from tests.models.tiny import tiny_batch, tiny_model
from tests.processes import fork_context
from tests.progress import Progress

RANKS, SECONDS = 4, 6
PATIENCE = 300  # seconds; the machine may be busy
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def torchrun(monkeypatch):
    """Sets torchrun's variables."""

    def set_variables(rank, size, port):
        for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    return set_variables


@pytest.fixture
def busy_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def test_without_torchrun_there_is_one_rank_and_a_mesh_whose_group_ends_with_launch(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    whole, sharded = tiny_model(), tiny_model()
    with launch() as world:
        assert world == World(0, 1, 0, DEVICE)
        assert not dist.is_initialized()
        shard_model(sharded, build_mesh(MeshConfig(), "cpu"))
        assert torch.equal(sharded(**tiny_batch()).loss, whole(**tiny_batch()).loss)
    assert not dist.is_initialized()


def test_a_mesh_before_the_ranks_of_torchrun_have_met_is_refused(torchrun, free_port):
    torchrun(0, 2, free_port)
    with pytest.raises(ConfigError, match="Call build_mesh inside `with launch"):
        build_mesh(MeshConfig(), "cpu")


def refuse(error, message, **options):
    """Launches, which must fail with a message."""
    with pytest.raises(error, match=message), launch(**options):
        pass


def test_groups_made_later_have_the_timeout_and_the_end_leaves_nothing(torchrun, free_port):
    torchrun(0, 1, free_port)
    before = distributed_c10d.default_pg_timeout
    with launch(timeout=17) as world:
        assert world == World(0, 1, 0, DEVICE, timeout=17)
        group = dist.new_group([0])
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=17)
    assert not dist.is_initialized()
    assert distributed_c10d.default_pg_timeout == before


def test_an_error_of_the_program_is_not_mistaken_for_a_lost_rank(torchrun, free_port):
    torchrun(0, 1, free_port)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2") as caught, launch():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(caught.value, DistributedError)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("rank", "port", "reason"),
    [
        # On a busy machine our own limit, half a second later, ends the attempt before torch's does.
        (0, "free_port", "within 1 seconds.*--timeout.*(1/2 clients joined|no rank answered)"),
        (1, "free_port", "within 1 seconds.*--timeout.*Reason: (.*[0-9]ms|no rank answered)"),
        (0, "busy_port", "the port is in use"),
        (1, "busy_port", "within 1 seconds.*a free port.*no rank answered there"),
    ],
)
def test_a_rank_that_meets_no_other_gives_up_in_time(torchrun, request, rank, port, reason):
    port = request.getfixturevalue(port)
    torchrun(rank, 2, port)
    start = time.monotonic()
    refuse(DistributedError, rf"127\.0\.0\.1:{port}.*{reason}", timeout=1)
    assert time.monotonic() - start < 5


def test_variables_of_torchrun_that_are_missing_or_name_no_host_are_refused(torchrun, monkeypatch):
    torchrun(1, 2, 29500)
    refuse(ConfigError, "^timeout is 0; expected a finite number above 0", timeout=0)
    monkeypatch.setenv("MASTER_ADDR", "x" * 100)
    refuse(DistributedError, r"could not connect to the others at x{100}:29500", timeout=0.2)
    monkeypatch.delenv("WORLD_SIZE")
    refuse(ConfigError, "but not WORLD_SIZE")


@pytest.mark.slow
def test_errors_and_lost_ranks_end_every_rank_in_time_with_its_message(tmp_path):
    ends, codes = run_cases(tmp_path)
    lost = "DistributedError: Rank {} of 4 lost another rank during an exchange"

    for texts in (ends["the same error"], ends["the same missing file"]):
        assert sorted(text.split(":")[0] for text in texts)[1:] == ["SystemExit"] * 3
    assert all("too late" not in text for texts in ends.values() for text in texts)
    assert "ConfigError: 7 experts" in ends["the same error"]
    assert ends["errors of their own"] == [f"DataError: row {rank}" for rank in range(RANKS)]

    assert ends["an error of one"][1] == "DataError: row 1"
    for rank in (0, 2, 3):
        assert ends["an error of one"][rank].startswith(lost.format(rank))
    assert ends["a node that returned"] == ["fine"] * RANKS
    assert ends["a late rank of a mesh"][0].startswith(lost.format(0))
    assert f"within {SECONDS} seconds" in ends["a late rank of a mesh"][0]
    assert ends["a late rank of a mesh"][2:] == ["fine", "fine"]
    for rank in (0, 2, 3):
        assert ends["a killed rank"][rank].startswith(lost.format(rank))
    assert codes == [0, -signal.SIGKILL, 0, 0]


def run_cases(folder):
    """Returns how each rank ended each case, and the exit codes; every rank goes through all cases."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in CASES]
    ports = [store.port for store in stores]
    with socket.socket() as listener:
        listener.bind(("", 0))
        ports[list(CASES).index("a node that returned")] = listener.getsockname()[1]
    context = fork_context()
    arguments = (ports, str(folder), context.Barrier(RANKS))
    processes = [
        context.Process(target=on_a_rank, args=(rank, *arguments)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    progress = Progress([process.pid for process in processes])
    try:
        for process in processes:
            while process.exitcode is None:
                process.join(1)
                assert not progress.has_stopped(), "a rank hangs"
    finally:
        for process in processes:
            process.kill()
    texts = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    ends = {case: [text.get(case, "") for text in texts] for case in CASES}
    return ends, [process.exitcode for process in processes]


def on_a_rank(rank, ports, folder, barrier):
    torch.set_num_threads(1)
    ends = {}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1")
    for (name, case), port in zip(CASES.items(), ports, strict=True):
        # A node that came back counts its starts from 0, and meets the others at the first rank.
        returns = case is a_node_that_returned
        starts = str(rank) if returns else "0"
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE=str(not returns), MASTER_PORT=str(port))
        os.environ.update(TORCHELASTIC_RESTART_COUNT=starts)
        barrier.wait(PATIENCE)
        start = time.monotonic()
        try:
            with launch(timeout=SECONDS if "late" in name else PATIENCE) as world:
                barrier.wait(PATIENCE)
                case(world)
            ends[name] = "fine"
        except BaseException as error:
            ends[name] = f"{type(error).__name__}: {error}"
        if time.monotonic() - start > PATIENCE / 3:
            ends[name] += " too late"
        Path(folder, f"{rank}.json").write_text(json.dumps(ends))


def the_same_error(world):
    raise ConfigError("7 experts")


def the_same_missing_file(world):
    Path("/nowhere/config.json").read_text()


def errors_of_their_own(world):
    raise DataError(f"row {world.rank}")


def an_error_of_one(world):
    if world.rank == 1:
        raise DataError("row 1")
    dist.all_reduce(torch.ones(3))


def a_node_that_returned(world):
    dist.all_reduce(torch.ones(3))


def a_late_rank_of_a_mesh(world):
    mesh = build_mesh(MeshConfig(ep=2, tp=2), "cpu")
    if world.rank == 1:
        time.sleep(SECONDS + 1)
        return
    dist.all_reduce(torch.ones(3), group=mesh.tp)


def a_killed_rank(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_gather_object([None] * RANKS, world.rank)


CASES = {
    "the same error": the_same_error,
    "the same missing file": the_same_missing_file,
    "errors of their own": errors_of_their_own,
    "an error of one": an_error_of_one,
    "a node that returned": a_node_that_returned,
    "a late rank of a mesh": a_late_rank_of_a_mesh,
    "a killed rank": a_killed_rank,
}
