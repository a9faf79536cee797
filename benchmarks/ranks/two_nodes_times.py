"""The time of a training step on two nodes with two ranks each, and what the planner predicts for it.

    python -m scripts.benchmark two_nodes [--bandwidth 25] [--latency 2] [--json two_nodes.json]

The prediction knows the link as it was described, and for messages inside a node what two ranks
measured on this machine. No constant is fitted.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import Columns, print_report, report_table, save_report
from benchmarks.ranks.processes import Job, measure_together
from benchmarks.ranks.scaling import ScalingCase, build_model, build_step
from benchmarks.ranks.two_nodes import NUM_NODES, TwoNodes
from moe.distributed.launch import launch
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.errors import DistributedError
from moe.network.planner.measure import measure_network
from moe.network.planner.placement import place_in_order
from moe.network.planner.timing import NetworkTimer
from moe.network.topology_file import Network, parse_network
from moe.planning.plan import make_plan
from moe.planning.workload import Workload

RANKS_OF_NODE = 2
NUM_RANKS = NUM_NODES * RANKS_OF_NODE

MESHES = {
    "dp_replicate 4": MeshConfig(dp_replicate=4),
    "dp_replicate 4, torus 2x2": MeshConfig(dp_replicate=4, gradient_reduction="torus 2x2"),
    "dp_shard 4": MeshConfig(dp_shard=4),
    "ep 4": MeshConfig(ep=4),
    "dp_shard 2, ep 2": MeshConfig(dp_shard=2, ep=2),
    "dp_replicate 2, ep 2": MeshConfig(dp_replicate=2, ep=2),
}
"""Ranks are numbered node by node, so that a group of 2 of the last axis is inside a node."""

CASE = ScalingCase(
    rows=4,
    length=128,
    targets=32,
    d_model=128,
    d_ff=256,
    num_layers=2,
    num_experts=8,
    vocab_size=1024,
)


@dataclass(frozen=True)
class TwoNodesBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        bandwidth: Megabytes per second of the link, in each direction.
        latency: Milliseconds of the link.
        rounds: How often everything is measured; results are medians.
        json: File to save to; None for none.
        case: Sizes of the model.
    """

    bandwidth: float
    latency: float
    rounds: int
    json: Path | None
    case: ScalingCase = CASE


def run_two_nodes(benchmark: TwoNodesBenchmark) -> None:
    """Measures and predicts every mesh, prints the table and saves it."""
    network = describe_network(benchmark)
    with (
        TwoNodes(benchmark.bandwidth * 1e6, benchmark.latency * 1e-3) as nodes,
        tempfile.TemporaryDirectory() as folder,
    ):
        measured = measure_on_nodes(nodes, benchmark, Path(folder))

    alone = measured["apart"]
    rows: list[dict[str, Any]] = []
    for name, mesh in MESHES.items():
        seconds = predict_seconds(benchmark.case, mesh, parse_network(network))
        ms = 1000 * seconds
        rows.append(
            {
                "mesh": name,
                "ms": measured[name],
                "exchange_ms": measured[name] - alone,
                "predicted_ms": ms,
                "ratio": ms / (measured[name] - alone),
            }
        )
    report = {
        "bandwidth": benchmark.bandwidth,
        "latency": benchmark.latency,
        "rounds": benchmark.rounds,
        "apart_ms": alone,
        "network": network,
        "rows": rows,
    }
    save_report(report, benchmark.json)
    print_report(format_two_nodes(report), benchmark.json)


def describe_network(benchmark: TwoNodesBenchmark) -> dict[str, Any]:
    """Returns the network of both nodes as a network file describes it."""
    here = {
        "name": "one node",
        "switch": {"ranks": RANKS_OF_NODE, "bandwidth": "1 GB/s", "latency": "1 us"},
    }
    measured = measure_network(here)
    assert measured is not None, "ranks on this machine answer the process that starts them"
    inside = measured.content["switch"]
    return {
        "name": "two nodes",
        "two_level": {
            "nodes": NUM_NODES,
            "per_node": RANKS_OF_NODE,
            "inside": {name: inside[name] for name in ("bandwidth", "latency")},
            "across": {
                "bandwidth": f"{benchmark.bandwidth / 1000} GB/s",
                "latency": f"{1000 * benchmark.latency} us",
            },
            "shared_card": True,
        },
    }


def predict_seconds(case: ScalingCase, mesh: MeshConfig, network: Network) -> float:
    """Returns the seconds of all exchanges of an update, one after the other."""
    model = build_model(case, torch.device("meta"))
    workload = Workload(
        case.rows * mesh.num_data_ranks, case.length, case.targets, optimizer="adafactor"
    )
    plan = make_plan(model, workload, mesh)
    timer = NetworkTimer(network, place_in_order(mesh, network.topology))
    return timer.plan(plan.collectives).seconds


def measure_on_nodes(
    nodes: TwoNodes, benchmark: TwoNodesBenchmark, folder: Path
) -> Mapping[str, float]:
    """Returns the milliseconds of a step on every mesh, and of `apart`: every rank without exchanges."""
    answer = folder / "answer.json"
    arguments = ["-m", "benchmarks.ranks.two_nodes_times", str(answer), str(benchmark.rounds)]
    logs = [folder / f"node-{node}.log" for node in range(NUM_NODES)]
    with logs[0].open("wb") as first, logs[1].open("wb") as second:
        running = [nodes.torchrun(node, arguments, log) for node, log in enumerate((first, second))]
        codes = [process.wait() for process in running]
    if any(codes):
        raise DistributedError(
            f"The ranks of the nodes ended with the exit codes {codes}:\n{logs[0].read_text()[-2000:]}"
        )
    return json.loads(answer.read_text())


def measure_steps(answer: Path, rounds: int) -> None:
    """Measures every mesh; runs on every rank, and the first one writes the medians."""
    torch.set_num_threads(1)
    with launch() as world:
        device = torch.device("cpu")
        jobs = [Job("apart", build_step(CASE, device, None))]
        for name, mesh in MESHES.items():
            jobs.append(Job(name, build_step(CASE, device, build_mesh(mesh, device.type))))
        times = measure_together(jobs, rounds, device).wall
        if world.rank == 0:
            medians = {
                job.name: statistics.median(round_[job.name] for round_ in times) for job in jobs
            }
            answer.write_text(json.dumps(medians))


COLUMNS: Columns = (
    ("mesh", "mesh", ""),
    ("step, ms", "ms", ".0f"),
    ("exchanges, ms", "exchange_ms", ".0f"),
    ("predicted, ms", "predicted_ms", ".0f"),
    ("predicted / measured", "ratio", ".2f"),
)


def format_two_nodes(report: Mapping[str, Any]) -> str:
    """Returns the table as text."""
    title = (
        f"{RANKS_OF_NODE} ranks on each of {NUM_NODES} nodes, {report['bandwidth']:g} MB/s and {report['latency']:g} "
        f"ms between them; a step without exchanges takes {report['apart_ms']:.0f} ms"
    )
    return f"{title}\n{report_table(COLUMNS, report['rows'])}"


if __name__ == "__main__":
    import sys

    measure_steps(Path(sys.argv[1]), int(sys.argv[2]))
