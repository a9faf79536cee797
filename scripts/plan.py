"""Says what a run needs on a mesh, without any device: memory of a rank, arithmetic, bytes on each
axis.

python -m scripts.plan --preset st-moe-32b --mesh.ep 64 --mesh.tp 16 --training.batch_size 2048
--memory 80GiB python -m scripts.plan --config recipes/st_moe_tiny_pretrain.yaml --suggest 8
--memory 16GiB

Settings are those of scripts.pretrain. --suggest ranks the meshes of so many ranks: those that fit
first, then those that send for the shortest time.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

import argparse

from moe.cli import run_main
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
    """Returns the arguments with the settings of `--preset` in front, so that whatever else is
    given wins.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    preset = parser.parse_known_args(argv)[0].preset
    fields = {} if preset is None else PRESETS.get(preset).fields
    return [f"--model.{key}={value}" for key, value in fields.items()] + argv


def read_workload(recipe: PretrainRecipe) -> Workload:
    """Returns an update of the recipe."""
    noise = Noise(recipe.data.noise_density, recipe.data.mean_noise_span_length)
    length = tokens_length(recipe.data.inputs_length, noise, NUM_SENTINELS)
    training = recipe.training
    return Workload(
        training.batch_size,
        *corrupted_lengths(length, noise),
        micro_batch_size=training.micro_batch_size,
        precision=training.precision,
        activation_checkpointing=training.activation_checkpointing,
        optimizer=recipe.optim.optimizer,
    )


def main(argv: list[str]) -> None:
    """Reads the recipe and prints its plan, or ranks meshes."""
    command = RecipeCommand(PretrainRecipe, "Says what a run needs on a mesh.")
    command.add_argument(
        "--preset", type=str, help=f"published size to start from: {', '.join(PRESETS.names())}"
    )
    command.add_argument("--memory", type=str, help="of a device, e.g. 80GiB")
    command.add_argument(
        "--suggest", type=int, help="rank the meshes of so many ranks; needs --memory"
    )
    recipe, arguments = command.parse(add_preset(argv))
    config, workload = recipe.build_config(), read_workload(recipe)
    memory = None if arguments.memory is None else parse_bytes(arguments.memory)
    if arguments.suggest is None:
        check_run_fits(recipe, config, recipe.mesh.num_ranks, workload.lengths)
        plan = make_plan(build_model(config), workload, recipe.mesh)
        print(show_plan(plan, arguments.preset or "the recipe's model", memory))
    elif memory is None or arguments.suggest < 1:
        raise ConfigError(
            "--suggest needs a number of ranks above 0, and --memory of a device, e.g. 80GiB."
        )
    else:
        print(show_suggestions(suggest(config, workload, arguments.suggest, memory), memory))


if __name__ == "__main__":
    run_main(main)
