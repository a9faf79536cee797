"""stmoe plan: the requirements of a run on a mesh, computed without any device.

    stmoe plan --preset st-moe-32b --mesh.ep 64 --mesh.tp 16 --training.batch_size 2048 --memory 80GiB
    stmoe plan --config st_moe_tiny_pretrain --suggest 8 --memory 16GiB

It prints the memory of a rank, the arithmetic, and the bytes on each axis of the mesh. The settings
are those of `stmoe pretrain`. --suggest N ranks the meshes of N ranks: those that fit into memory
first, then by their time for communication.

    stmoe plan --preset st-moe-l --mesh.dp_replicate 8 --mesh.ep 16 --training.batch_size 2048 --mtbf 3h

With a mean time between failures it prints the goodput of each way to survive them.

    stmoe plan --from facebook/nllb-moe-54b

With a saved model it prints what its weights need on a disk, in memory and for a token, from its
config.json.
"""

import argparse
from functools import cache

import torch

from moe.checkpoint.loading import find_class
from moe.checks import check
from moe.cli import Parser, model_name
from moe.data.span_corruption import Noise, corrupted_lengths, tokens_length
from moe.data.tokenizer import NUM_SENTINELS
from moe.errors import ConfigError
from moe.hosts.all_hosts import count_parameters
from moe.inspection.tables import format_table
from moe.models.presets import PRESETS
from moe.planning.checkpoint import checkpoint_needs
from moe.planning.goodput import FailureCosts, parse_duration, show_survivals, survivals
from moe.planning.plan import Plan, build_model, make_plan, suggest
from moe.planning.table import parse_bytes, show_bytes, show_plan, show_suggestions
from moe.planning.workload import Workload
from moe.training.build import check_run_fits
from moe.training.command import RecipeCommand
from moe.training.recipe import PretrainRecipe


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


def build_plan_command(purpose: str, prog: str) -> RecipeCommand[PretrainRecipe]:
    """Returns a command about a mesh, or about all meshes of a number of ranks.

    Args:
        purpose: Line of its help.
        prog: How it is started.
    """
    command = RecipeCommand(PretrainRecipe, purpose, prog=prog)
    presets = ", ".join(PRESETS.names())
    command.add_argument("--preset", type=str, help=f"published size to start from: {presets}")
    command.add_argument("--memory", type=str, help="memory of a device, e.g. 80GiB")
    command.add_argument(
        "--suggest", type=int, help="number of ranks whose meshes are ranked; needs --memory"
    )
    return command


@cache
def plan_command() -> RecipeCommand[PretrainRecipe]:
    """Returns the command with its settings, all of which a recipe may hold."""
    command = build_plan_command("Computes the needs of a run on a mesh.", "stmoe plan")
    help_of_from = "saved model, a folder or hub name, whose needs are printed instead"
    command.add_argument("--from", type=str, help=help_of_from)
    command.add_argument(
        "--mtbf",
        type=str,
        help="mean time between failures of all ranks, e.g. 3h: shows the goodput with restarts of "
        "10 minutes and a checkpoint every 30",
    )
    return command


def main(argv: list[str]) -> None:
    """Reads the recipe and prints its plan, or ranks meshes; or prints the needs of a saved model."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--from", dest="source", type=model_name)
    saved, others = parser.parse_known_args(argv)
    if saved.source is not None:
        check(not others, "Settings beside --from", " ".join(others), "none")
        print(show_checkpoint(saved.source))
        return

    recipe, arguments = plan_command().parse(add_preset(argv))
    mtbf = None if arguments.mtbf is None else parse_duration("--mtbf", arguments.mtbf)
    if arguments.suggest is not None:
        plans, memory = suggest_meshes(recipe, arguments)
        print(show_suggestions(plans, memory))
        return

    plan, memory = plan_mesh(recipe, arguments)
    print(show_plan(plan, arguments.preset or "the recipe's model", memory))
    if mtbf is not None:
        costs = FailureCosts(mtbf)
        ways = survivals(recipe.mesh, costs)
        print(f"\n{show_survivals(recipe.mesh, costs, ways)}")


def show_checkpoint(source: str) -> str:
    """Returns what the weights of a saved model need, as text.

    Args:
        source: A folder or a name of the hub.
    """
    config = find_class(source).config_class.from_pretrained(source)
    total, of_token = count_parameters(source)

    # Quantized experts leave everything else, and have their scales, in the dtype of the files.
    dtype = getattr(torch, str(config.dtype or torch.float32).removeprefix("torch."))
    needs = {
        "float32": checkpoint_needs(config),
        "bfloat16": checkpoint_needs(config, torch.bfloat16),
        "8 bits": checkpoint_needs(config, dtype, bits=8),
        "4 bits": checkpoint_needs(config, dtype, bits=4),
    }
    rows = [["on a disk, and in memory"], ["a token reads"], ["all but experts"]]
    for experts, experts_of_token, rest in needs.values():
        for row, num_bytes in zip(rows, (experts, experts_of_token, 0), strict=True):
            row.append(show_bytes(rest + num_bytes))
    return (
        f"{source}: {total:,} parameters, of which a token uses {of_token:,}\n\n"
        f"{format_table(['', *needs], rows)}\n\n"
        "With --mmap memory needs all but experts, and the experts that are in use."
    )


def plan_mesh(recipe: PretrainRecipe, arguments: argparse.Namespace) -> tuple[Plan, int | None]:
    """Returns the plan of the recipe's mesh, and the bytes of a device, if given.

    Raises:
        ConfigError: If the run does not fit the mesh.
    """
    memory = None if arguments.memory is None else parse_bytes(arguments.memory)
    config = recipe.build_config()
    workload = read_workload(recipe)
    check_run_fits(recipe, config, recipe.mesh.launched.num_ranks, workload.lengths)
    return make_plan(build_model(config), workload, recipe.mesh), memory


def suggest_meshes(recipe: PretrainRecipe, arguments: argparse.Namespace) -> tuple[list[Plan], int]:
    """Returns the plans of all meshes of --suggest ranks, the best first, and the bytes of a device.

    Raises:
        ConfigError: If the number or the memory is missing, or no mesh fits.
    """
    if arguments.memory is None or arguments.suggest < 1:
        raise ConfigError(
            "--suggest needs a number of ranks above 0, and --memory of a device, e.g. 80GiB."
        )
    memory = parse_bytes(arguments.memory)
    config = recipe.build_config()
    return suggest(config, read_workload(recipe), arguments.suggest, memory), memory
