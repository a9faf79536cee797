"""Fine-tunes a model on tasks of eval/, one or a mixture, or on your own pairs of texts, with one
seed or several.

    python -m scripts.finetune --config recipes/st_moe_base_superglue.yaml [--resume]
    python -m scripts.finetune --pretrained runs/pretrain/model --task unicode_category --out
    runs/finetune

Your own pairs: `--train pairs.jsonl`, a {"inputs": ..., "targets": ...} object a line.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

from dataclasses import asdict
from pathlib import Path

from eval.answers.data_ranks import DataRanks
from eval.dev_scores import TaskData, read_tasks
from moe.cli import RESUME, run_main
from moe.data.documents import read_pairs
from moe.data.mixture import build_source
from moe.data.pipeline import PairSource
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.launch import World, launch
from moe.files import check_kind, output_path
from moe.training import finetuning as kit
from moe.training.build import check_placement
from moe.training.command import RecipeCommand, typed_settings
from moe.training.heldout_loss import HeldOut
from moe.training.loop import CHECKPOINTS_FOLDER, Run, refuse_to_overwrite, train
from moe.training.recipe import FinetuneRecipe
from moe.training.seeds import seed_runs, write_summary
from moe.training.stages import JOB, claim_job


def build_run(
    recipe: FinetuneRecipe, pretrained: Path, data: TaskData, out: Path, world: World
) -> Run:
    """Returns the run that recipe and data describe, on the ranks that are running."""
    config, tokenizer, mixture = (
        kit.finetuning_config(pretrained, recipe),
        load_tokenizer(pretrained),
        recipe.mixture,
    )
    rows = {**asdict(recipe.data), "batch_size": recipe.training.batch_size, "seed": recipe.seed}
    source = build_source(
        data.train, tokenizer, maximum=mixture.maximum, temperature=mixture.temperature, **rows
    )
    check_placement(recipe, config, world.size, source.lengths)
    held_out = None
    if data.dev and recipe.training.held_out_batches:
        unseen = PairSource(data.dev_pairs(), tokenizer, **rows)
        held_out = HeldOut(unseen, recipe.training.held_out_batches, SpecialIds.of(tokenizer))
    placed = kit.load_for_finetuning(pretrained, recipe, config, world.device_type)
    world.say(f"{sum(map(len, data.train.values())):,} training pairs; {recipe.init} weights.")
    world.say(str(kit.select_parameters(placed.model, recipe.parameters)))
    tokenizer = kit.remember_sentinels(placed.model, tokenizer, recipe.data.sentinels)
    slots = (
        pretrained.absolute().parent / CHECKPOINTS_FOLDER
        if recipe.optimizer_slots == "keep"
        else None
    )
    dev = data.scores(mixture.dev_examples, DataRanks(world, recipe.mesh, placed.mesh))
    return Run(out, recipe, placed, tokenizer, source, held_out, slots, dev)


def finetune_command() -> RecipeCommand[FinetuneRecipe]:
    """Returns the command with its settings, all of which a recipe may hold."""
    command = RecipeCommand(FinetuneRecipe, "Fine-tunes a model on pairs of texts.")
    command.add_argument(
        "--pretrained", type=Path, required=True, help="model to start from; gives the architecture"
    )
    command.add_argument(
        "--task", type=str, help="the only task of eval/, instead of mixture.tasks"
    )
    command.add_argument(
        "--train", type=Path, help="JSONL file with inputs and targets, instead of tasks"
    )
    command.add_argument("--out", type=str, required=True, help="folder of the run")
    command.add_argument(
        "--seeds", type=int, nargs="+", help="a run in out/seed-N for each, instead of seed"
    )
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    command.add_timeout()
    return command


def main(argv: list[str]) -> None:
    """Reads the recipe, fine-tunes, and says where the models are and what they score."""
    command = finetune_command()
    with launch(command.timeout(argv)) as world:
        recipe, arguments = command.parse(argv)
        recipe = kit.choose_data(recipe, arguments.task, arguments.train, typed_settings(argv))
        out = output_path(arguments.out, inputs=[arguments.pretrained, arguments.train])
        check_kind(out, "training run" if arguments.seeds is None else JOB)
        runs = seed_runs(recipe, arguments.seeds, out)
        broadcast_from_rank_zero(
            lambda: [refuse_to_overwrite(folder, arguments.resume) for _, folder in runs]
        )
        kit.finetuning_config(arguments.pretrained, recipe)  # before any data are read
        data = read_tasks(recipe.mixture.tasks, recipe.mixture.folder)
        if not data.train:
            data.train["pairs"] = read_pairs(arguments.train)
        for of_seed, folder in runs:
            run = build_run(of_seed, arguments.pretrained, data, folder, world)
            if arguments.seeds is not None:
                broadcast_from_rank_zero(lambda: claim_job(out))
            world.say(
                f"The model is in {train(run, resume=arguments.resume, description='fine-tune')}."
            )
        if recipe.mixture.dev_examples != 0 and world.rank == 0:
            world.say(write_summary(out, runs))


if __name__ == "__main__":
    run_main(main, interrupted=RESUME)
