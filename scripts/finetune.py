"""Fine-tunes a model on a task of eval/ or on your own pairs of texts.

    python -m scripts.finetune --config recipes/st_moe_tiny_finetune.yaml \
        --pretrained runs/pretrain/model --task unicode_category --out runs/finetune [--resume] [--init scratch]

Your own pairs: `--train pairs.jsonl`, a {"inputs": ..., "targets": ...} object a line.
"""

import dataclasses
from argparse import Namespace
from pathlib import Path

from eval.task import TASKS
from moe.data.documents import read_pairs
from moe.data.pipeline import PairSource
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.distributed.launch import World, launch
from moe.errors import ConfigError, run_main
from moe.training.command import RecipeCommand
from moe.training.finetuning import finetuning_config, load_for_finetuning, remember_sentinels, select_parameters
from moe.training.heldout import HeldOut
from moe.training.loop import CHECKPOINTS_FOLDER, Run, train
from moe.training.placement import check_placement
from moe.training.recipe import FinetuneRecipe


def build_run(recipe: FinetuneRecipe, arguments: Namespace, world: World) -> Run:
    """Returns the run that recipe and arguments describe, on the ranks that are running."""
    if (arguments.task is None) == (arguments.train is None):
        raise ConfigError("Give either --task NAME or --train FILE.")
    config, tokenizer = finetuning_config(arguments.pretrained, recipe), load_tokenizer(arguments.pretrained)
    settings = {**dataclasses.asdict(recipe.data), "batch_size": recipe.training.batch_size}
    held_out = None
    if arguments.task:
        splits = {name: TASKS.get(arguments.task).examples(name) for name in ("train", "validation")}
        pairs, unseen = ([(e.inputs, e.targets) for e in examples] for examples in splits.values())
        source = PairSource(unseen, tokenizer, seed=recipe.seed, **settings)
        held_out = HeldOut(source, recipe.training.held_out_batches, SpecialIds.of(tokenizer))
    else:
        pairs = read_pairs(arguments.train)
    source = PairSource(pairs, tokenizer, seed=recipe.seed, **settings)
    check_placement(recipe, config, world.size, source.lengths)
    placed = load_for_finetuning(arguments.pretrained, recipe, config, world.device_type)
    world.say(f"{len(pairs):,} training pairs; {recipe.init} weights.")
    world.say(str(select_parameters(placed.model, recipe.parameters)))
    tokenizer = remember_sentinels(placed.model, tokenizer, recipe.data.sentinels)
    slots = arguments.pretrained.absolute().parent / CHECKPOINTS_FOLDER if recipe.optimizer_slots == "keep" else None
    return Run(arguments.out, recipe, placed, tokenizer, source, held_out, slots)


def main(argv: list[str]) -> None:
    """Reads the recipe, fine-tunes, and says where the model is."""
    command = RecipeCommand(FinetuneRecipe, "Fine-tunes a model on pairs of texts.")
    command.add_argument("--pretrained", type=Path, required=True, help="model to start from; gives the architecture")
    command.add_argument("--task", type=str, help="task of eval/; its training split is used")
    command.add_argument("--train", type=Path, help="JSONL file with inputs and targets, instead of --task")
    command.add_argument("--out", type=Path, required=True, help="folder of the run")
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    with launch() as world:
        recipe, arguments = command.parse(argv)
        run = build_run(recipe, arguments, world)
        world.say(f"The model is in {train(run, resume=arguments.resume, description='fine-tune')}.")


if __name__ == "__main__":
    run_main(main)
