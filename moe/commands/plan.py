"""stmoe plan: the requirements of a run on a mesh, computed without any device.

    stmoe plan --preset st-moe-32b --mesh.ep 64 --mesh.tp 16 --training.batch_size 2048 --memory 80GiB
    stmoe plan --config st_moe_tiny_pretrain --suggest 8 --memory 16GiB

It prints the memory of a rank, the arithmetic, and the bytes on each axis of the mesh. The settings
are those of `stmoe pretrain`. --suggest N ranks the meshes of N ranks: those that fit into memory
first, then by their time for communication.

    stmoe plan --preset st-moe-32b --mesh.ep 64 --mesh.tp 16 --training.batch_size 2048 \
        --network recipes/networks/tpu_v3_pod.yaml --place tp=4x4,ep=8x8 --dead 260,261,292,293

    stmoe plan --preset st-moe-l --mesh.dp_replicate 8 --mesh.ep 16 --training.batch_size 2048 --mtbf 3h

With a mean time between failures it prints the goodput of each way to survive them. On a network it
times every collective with its best schedule, and shows the cost of dead ranks. See
docs/guides/network.md.
"""

import argparse
import json
import re
from functools import cache
from pathlib import Path

from moe.checks import check
from moe.data.span_corruption import Noise, corrupted_lengths, tokens_length
from moe.data.tokenizer import NUM_SENTINELS
from moe.errors import ConfigError
from moe.files import output_path, write_text
from moe.models.presets import PRESETS
from moe.network.topology_file import Network, read_content, read_network
from moe.planning.goodput import FailureCosts, parse_duration, show_survivals, survivals
from moe.planning.network import NetworkTimer
from moe.planning.network_measure import measure_network, show_measurement
from moe.planning.network_page import network_page
from moe.planning.network_placement import Placement, place_by_tiles, place_in_order
from moe.planning.network_search import show_network_suggestions, suggest_on_network
from moe.planning.network_table import show_hole, show_network_plan
from moe.planning.plan import Plan, build_model, make_plan, suggest
from moe.planning.table import parse_bytes, show_needs, show_plan, show_suggestions
from moe.planning.workload import Workload
from moe.training.build import check_run_fits
from moe.training.command import RecipeCommand
from moe.training.recipe import PretrainRecipe

_FAILURE_COSTS = {
    "restart": ("10min", "with --mtbf: time from a failure until the lost ranks are back"),
    "saves": ("30min", "with --mtbf: time from one checkpoint to the next"),
    "stall": (
        "10s",
        "with --mtbf: time from the loss of a replica group until the others continue",
    ),
    "heal": ("30s", "with --mtbf: time for which the others wait for a group that comes back"),
}
"""Default and meaning of the times around a failure."""

_NEED_NETWORK = ("place", "dead", "page", "measure")


def add_preset(argv: list[str]) -> list[str]:
    """Returns the settings of `--preset` followed by the arguments, so that arguments win."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    preset = parser.parse_known_args(argv)[0].preset
    if preset is None:
        return argv
    settings = [f"--model.{key}={value}" for key, value in PRESETS.get(preset).fields.items()]
    return settings + argv


def read_workload(recipe: PretrainRecipe) -> Workload:
    """Returns one update of the recipe as the planner counts it."""
    noise = Noise(recipe.data.noise_density, recipe.data.mean_noise_span_length)
    chunk_length = tokens_length(recipe.data.inputs_length, noise, NUM_SENTINELS)
    training = recipe.training
    return Workload(
        training.batch_size,
        *corrupted_lengths(chunk_length, noise),
        micro_batch_size=training.micro_batch_size,
        precision=training.precision,
        activation_checkpointing=training.activation_checkpointing,
        optimizer=recipe.optim.optimizer,
        optimizer_options=recipe.optim.optimizer_options,
    )


@cache
def plan_command() -> RecipeCommand[PretrainRecipe]:
    """Returns the command with its settings, all of which a recipe may hold."""
    command = RecipeCommand(
        PretrainRecipe, "Computes the needs of a run on a mesh.", prog="stmoe plan"
    )
    presets = ", ".join(PRESETS.names())
    command.add_argument("--preset", type=str, help=f"published size to start from: {presets}")
    command.add_argument("--memory", type=str, help="memory of a device, e.g. 80GiB")
    command.add_argument(
        "--suggest", type=int, help="number of ranks whose meshes are ranked; needs --memory"
    )

    # Failures.
    command.add_argument(
        "--mtbf", type=str, help="mean time between failures of all ranks, e.g. 3h: shows goodput"
    )
    for name, (default, meaning) in _FAILURE_COSTS.items():
        command.add_argument(f"--{name}", type=str, help=f"{meaning} ({default})")

    # Network.
    command.add_argument(
        "--network", type=Path, help="network file: times every collective, see recipes/networks"
    )
    command.add_argument(
        "--place", type=str, help="tile of each mesh axis on the network, e.g. tp=4x4,ep=8x8"
    )
    command.add_argument(
        "--dead", type=str, help="ranks of the network that have failed, e.g. 5,6,9,10"
    )
    command.add_argument(
        "--page",
        type=Path,
        help="HTML file to write: link loads and critical path of one collective",
    )
    command.add_argument(
        "--measure", type=Path, help="JSON file to write: the network as its ranks measure it"
    )
    return command


def main(argv: list[str]) -> None:
    """Reads the recipe and prints its plan, or ranks meshes."""
    recipe, arguments = plan_command().parse(add_preset(argv))
    check_options(arguments)
    network = None if arguments.network is None else read_network(arguments.network)
    if arguments.measure is not None:
        measure_command(arguments)
        return
    costs = read_failure_costs(arguments)
    config = recipe.build_config()
    workload = read_workload(recipe)
    memory = None if arguments.memory is None else parse_bytes(arguments.memory)

    # One mesh: its plan.
    if arguments.suggest is None:
        check_run_fits(recipe, config, recipe.mesh.launched.num_ranks, workload.lengths)
        plan = make_plan(build_model(config), workload, recipe.mesh)
        title = arguments.preset or "the recipe's model"
        if network is None:
            print(show_plan(plan, title, memory))
        else:
            print(show_needs(plan, title, memory), end="\n\n", flush=True)
            print_network_plan(plan, network, arguments)
        if costs is not None:
            ways = survivals(recipe.mesh, costs)
            print(f"\n{show_survivals(recipe.mesh, costs, ways)}")
        return

    # All meshes of a number of ranks.
    if memory is None or arguments.suggest < 1:
        raise ConfigError(
            "--suggest needs a number of ranks above 0, and --memory of a device, e.g. 80GiB."
        )
    plans = suggest(config, workload, arguments.suggest, memory)
    if network is None:
        print(show_suggestions(plans, memory))
        return
    dead = read_dead(arguments.dead, network)
    suggestions = suggest_on_network(plans, network, memory, dead)
    print(show_network_suggestions(suggestions, network, memory))


def read_failure_costs(arguments: argparse.Namespace) -> FailureCosts | None:
    """Returns the duration of failures; None without `--mtbf`.

    Raises:
        ConfigError: If a time cannot be read, or is given without `--mtbf`.
    """
    seconds: dict[str, float] = {}
    for name, (default, _) in _FAILURE_COSTS.items():
        text = getattr(arguments, name)
        if text is not None and arguments.mtbf is None:
            raise ConfigError(
                f"--{name} applies to failures. Give the mean time between failures: --mtbf 3h."
            )
        seconds[name] = parse_duration(f"--{name}", default if text is None else text)
    if arguments.mtbf is None:
        return None
    return FailureCosts(
        mtbf=parse_duration("--mtbf", arguments.mtbf),
        restart=seconds["restart"],
        checkpoint=seconds["saves"],
        stall=seconds["stall"],
        heal=seconds["heal"],
    )


def check_options(arguments: argparse.Namespace) -> None:
    """Raises for network options without a network, files that cannot be written, and options about one mesh with
    `--suggest`.
    """
    for name in _NEED_NETWORK:
        if getattr(arguments, name) is not None and arguments.network is None:
            raise ConfigError(
                f"--{name} applies to a network. Give one: --network FILE, e.g. recipes/networks/tpu_v3_pod.yaml."
            )
    inputs = [arguments.network]
    for name, suffix in (("page", ".html"), ("measure", ".json")):
        path = getattr(arguments, name)
        if path is not None:
            target = output_path(path, suffix=suffix, option=f"--{name}", inputs=inputs)
            setattr(arguments, name, target)

    for name in ("page", "place", "mtbf"):
        if getattr(arguments, name) is not None and arguments.suggest is not None:
            raise ConfigError(
                f"--{name} applies to one mesh, but --suggest ranks all meshes. Remove one of them."
            )


def print_network_plan(plan: Plan, network: Network, arguments: argparse.Namespace) -> None:
    """Prints the times of a plan on a network, and the cost of dead ranks."""
    for name in ("dead", "page"):
        if getattr(arguments, name) is not None and not plan.collectives:
            raise ConfigError(
                f"--{name} applies to exchanges between ranks, but a mesh of one rank exchanges nothing. Choose a "
                "larger mesh, e.g. --mesh.dp_shard 4."
            )
    placement = read_placement(plan, network, arguments.place)
    dead = read_dead(arguments.dead, network)
    timer = NetworkTimer(network, placement)
    timed = timer.plan(plan.collectives)
    print(show_network_plan(plan, timed), flush=True)
    if dead:
        healthy = timed
        timer = NetworkTimer(network, placement, dead)
        timed = timer.plan(plan.collectives)
        print(f"\n{show_hole(healthy, timed)}", flush=True)

    if arguments.page is not None:
        write_text(arguments.page, network_page(timer, timed))
        print(f"\nPage of the longest collective: {arguments.page}")


def measure_command(arguments: argparse.Namespace) -> None:
    """Measures the network, writes the result, and prints it."""
    measurement = measure_network(read_content(arguments.network))
    if measurement is None:
        return  # the first rank writes and prints

    write_text(arguments.measure, json.dumps(measurement.content, indent=2) + "\n")
    print(show_measurement(measurement))
    print(f"Written to {arguments.measure}: give it to --network.")


def read_placement(plan: Plan, network: Network, text: str | None) -> Placement:
    """Returns the placement that `--place` describes, else ranks in order."""
    if text is None:
        return place_in_order(plan.mesh, network.topology)
    return place_by_tiles(plan.mesh, network.topology, text)


def read_dead(text: str | None, network: Network) -> frozenset[int]:
    """Returns the ranks of `--dead`.

    Raises:
        ConfigError: If one is not a rank of the network, or fewer than two would be left.
    """
    if text is None:
        return frozenset()
    most = network.topology.num_ranks - 1
    expected = f"ranks of {network.topology.name}, 0 to {most:,}, with commas between them"
    is_list = re.fullmatch(r"\s*[0-9]{1,6}\s*(,\s*[0-9]{1,6}\s*)*", text) is not None
    check(is_list, "--dead", text, expected)
    dead = frozenset(int(number) for number in text.split(","))
    check(max(dead) <= most, "--dead", text, expected)
    check(len(dead) < most, "--dead", text, f"two ranks at least that live, of {most + 1}")
    return dead
