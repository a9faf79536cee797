"""stmoe plan: says what a run needs on a mesh, without any device.

    stmoe plan --preset st-moe-32b --mesh.ep 64 --mesh.tp 16 --training.batch_size 2048 --memory 80GiB
    stmoe plan --config recipes/st_moe_tiny_pretrain.yaml --suggest 8 --memory 16GiB

It prints the memory of a rank, the arithmetic, and the bytes on each axis of the mesh. The settings
are those of `stmoe pretrain`. --suggest ranks the meshes of so many ranks: those that fit first,
then those that send for the shortest time.
"""

import argparse

from moe.data.span_corruption import Noise, corrupted_lengths, tokens_length
from moe.data.tokenizer import NUM_SENTINELS
from moe.errors import ConfigError
from moe.models.presets import PRESETS
from moe.planning.plan import build_model, make_plan, suggest
from moe.planning.table import parse_bytes, show_plan, show_suggestions
from moe.planning.workload import Workload
from moe.training.build import check_run_fits
from moe.training.command import RecipeCommand
from moe.training.recipe import PretrainRecipe


def add_preset(argv: list[str]) -> list[str]:
    """Returns the arguments behind the settings of `--preset`, so that those given win."""
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


def plan_command() -> RecipeCommand[PretrainRecipe]:
    """Returns the command with its settings, all of which a recipe may hold."""
    command = RecipeCommand(PretrainRecipe, "Says what a run needs on a mesh.")
    explanation = f"published size to start from: {', '.join(PRESETS.names())}"
    command.add_argument("--preset", type=str, help=explanation)
    command.add_argument("--memory", type=str, help="of a device, e.g. 80GiB")
    explanation = "rank the meshes of so many ranks; needs --memory"
    command.add_argument("--suggest", type=int, help=explanation)
    return command


def main(argv: list[str]) -> None:
    """Reads the recipe and prints its plan, or ranks meshes."""
    recipe, arguments = plan_command().parse(add_preset(argv))
    config = recipe.build_config()
    workload = read_workload(recipe)
    memory = None if arguments.memory is None else parse_bytes(arguments.memory)

    # One mesh: its plan.
    if arguments.suggest is None:
        check_run_fits(recipe, config, recipe.mesh.num_ranks, workload.lengths)
        plan = make_plan(build_model(config), workload, recipe.mesh)
        print(show_plan(plan, arguments.preset or "the recipe's model", memory))
        return

    # All meshes of so many ranks.
    if memory is None or arguments.suggest < 1:
        raise ConfigError(
            "--suggest needs a number of ranks above 0, and --memory of a device, e.g. 80GiB."
        )
    plans = suggest(config, workload, arguments.suggest, memory)
    print(show_suggestions(plans, memory))
