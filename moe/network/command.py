r"""stmoe network: the time of a planned run's exchanges on a network that a file describes.

    stmoe network --on recipes/networks/tpu_v3_pod.yaml --place tp=4x4,ep=8x8 --dead 260,261,292,293 \
        --preset st-moe-32b --mesh.ep 64 --mesh.tp 16 --training.batch_size 2048
    torchrun --nproc-per-node 4 -m stmoe network --on recipes/networks/this_machine.yaml --measure runs/network.json

It times every collective with its best schedule, shows the cost of dead ranks, and ranks meshes with
--suggest. All other settings are those of `stmoe plan`. See docs/guides/network.md.
"""

import json
import re
from functools import cache
from pathlib import Path

from moe.checks import check
from moe.cli import path
from moe.commands.plan import add_preset, build_plan_command, plan_mesh, suggest_meshes
from moe.errors import ConfigError
from moe.files import output_path, write_text
from moe.network.planner.measure import measure_network
from moe.network.planner.page import network_page
from moe.network.planner.placement import place_by_tiles, place_in_order
from moe.network.planner.search import show_network_suggestions, suggest_on_network
from moe.network.planner.table import show_hole, show_network_plan
from moe.network.planner.timing import NetworkTimer
from moe.network.topology_file import Network, read_content, read_network
from moe.planning.plan import Plan
from moe.planning.table import show_needs
from moe.training.command import RecipeCommand
from moe.training.recipe import PretrainRecipe


@cache
def network_command() -> RecipeCommand[PretrainRecipe]:
    """Returns the command with its settings, all of which a recipe may hold."""
    command = build_plan_command("Times the exchanges of a run on a network.", "stmoe network")
    command.add_argument(
        "--on", type=path, required=True, help="file of the network, see recipes/networks"
    )
    command.add_argument(
        "--place", type=str, help="tile of each mesh axis on the network, e.g. tp=4x4,ep=8x8"
    )
    command.add_argument(
        "--dead", type=str, help="ranks of the network that have failed, e.g. 5,6,9,10"
    )
    command.add_argument("--page", type=path, help="HTML file to write: loads of the links")
    command.add_argument(
        "--measure", type=path, help="JSON file to write: the network as its ranks measure it"
    )
    return command


def main(argv: list[str]) -> None:
    """Times a plan on a network, ranks meshes, or measures the network."""
    recipe, arguments = network_command().parse(add_preset(argv))
    network = read_network(arguments.on)

    if arguments.measure is not None:
        target = output_path(
            arguments.measure, suffix=".json", option="--measure", inputs=[arguments.on]
        )
        measure(arguments.on, target)
        return

    dead = read_dead(arguments.dead, network)
    if arguments.suggest is not None:
        for name in ("page", "place"):
            if getattr(arguments, name) is not None:
                raise ConfigError(f"--{name} applies to one mesh, but --suggest ranks all meshes.")
        plans, memory = suggest_meshes(recipe, arguments)
        suggestions = suggest_on_network(plans, network, memory, dead)
        print(show_network_suggestions(suggestions, network, memory))
        return

    page = None
    if arguments.page is not None:
        page = output_path(arguments.page, suffix=".html", option="--page", inputs=[arguments.on])
    plan, memory = plan_mesh(recipe, arguments)
    needs = show_needs(plan, arguments.preset or "the recipe's model", memory)
    print(needs, end="\n\n", flush=True)
    print_times(plan, network, arguments.place, dead, page)


def print_times(
    plan: Plan, network: Network, tiles: str | None, dead: frozenset[int], page: Path | None
) -> None:
    """Prints the times of a plan on a network, and the cost of dead ranks; writes the page.

    Args:
        plan: The plan.
        network: The network.
        tiles: Text of --place; None for ranks in order.
        dead: Ranks of the network that have failed.
        page: File of the page; None for none.
    """
    if (dead or page) and not plan.collectives:
        option = "--dead" if dead else "--page"
        raise ConfigError(
            f"{option} applies to exchanges between ranks, but a mesh of one rank exchanges nothing. "
            "Choose a larger mesh, e.g. --mesh.dp_shard 4."
        )
    if tiles is None:
        placement = place_in_order(plan.mesh, network.topology)
    else:
        placement = place_by_tiles(plan.mesh, network.topology, tiles)
    timer = NetworkTimer(network, placement)
    timed = timer.plan(plan.collectives)
    print(show_network_plan(plan, timed), flush=True)
    if dead:
        healthy = timed
        timer = NetworkTimer(network, placement, dead)
        timed = timer.plan(plan.collectives)
        print(f"\n{show_hole(healthy, timed)}", flush=True)

    if page is not None:
        write_text(page, network_page(timer, timed))
        print(f"\nPage of the longest collective: {page}")


def measure(path: Path, target: Path) -> None:
    """Measures the network of a file, writes the result, and prints it."""
    measurement = measure_network(read_content(path))
    if measurement is None:
        return  # the first rank writes and prints

    content, text = measurement
    write_text(target, json.dumps(content, indent=2) + "\n")
    print(text)
    print(f"Written to {target}: give it to --on.")


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
