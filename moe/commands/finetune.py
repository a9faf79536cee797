"""stmoe finetune: fine-tunes a model on your own pairs of texts, or on tasks of the repository.

    stmoe finetune --pretrained runs/pretrain/model --train pairs.jsonl --out runs/finetune
    stmoe finetune --config st_moe_base_superglue [--resume]
    stmoe finetune --config finetune_lora --pretrained runs/pretrain/model --train pairs.jsonl --out runs/lora

Each line of `pairs.jsonl` is an object {"inputs": ..., "targets": ...}; `read_rows` has the other
kinds of tables. A tenth of the pairs, or the pairs of `--dev`, are held out and scored during
training; the best model is kept. With several seeds (`--seeds 0 1 2`) there is one run for each, and
a summary of their scores.

With `--parameters lora` low-rank adapters of attention and experts train, and the model, which may be
quantized, stays as it is; the run keeps the adapters alone.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from moe.checkpoint.best_model import BEST_FOLDER, DevEvaluation, best_and_last, format_scores
from moe.checks import check_number
from moe.cli import path
from moe.commands.served_model import add_language_options
from moe.data.batches_ahead import default_workers
from moe.data.language_codes import with_languages
from moe.data.mixture import build_source, choose_examples, format_choice
from moe.data.pair_files import COLUMNS, LEAST_PAIRS, Pair, hold_out, read_pairs
from moe.data.pipeline import BatchSource, PairSource
from moe.data.rows import parse_columns
from moe.data.tokenizer import SpecialIds, has_sentinels, load_tokenizer, pad_and_eos
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.launch import World
from moe.distributed.mesh import Mesh, MeshConfig
from moe.distributed.replica_groups import find_replica_groups
from moe.errors import ConfigError
from moe.files import cache_folder, check_kind, find_model, output_path
from moe.hosts import all_hosts  # noqa: F401  registers the hosts, which `load_model` then reads
from moe.hosts.parallelize import shard_host
from moe.models.configuration import STMoEConfig
from moe.models.trainable_parameters import select_parameters
from moe.registry import load_entry_point
from moe.training.build import build_model, check_run_fits
from moe.training.command import RecipeCommand, typed_settings
from moe.training.finetuning import choose_data, finetuning_config, remember_sentinels
from moe.training.heldout_loss import HeldOut
from moe.training.loop import CHECKPOINTS_FOLDER, Run, refuse_to_overwrite, train
from moe.training.pair_scores import check_dev_pairs, dev_scorer, scorers_for
from moe.training.recipe import FinetuneRecipe
from moe.training.reporter import warn_on_rank_zero
from moe.training.seeds import JOB, claim_job, seed_runs, write_summary
from moe.training.step import forward_pass, host_forward_pass

PAIRS_RECIPE = "finetune_pairs"
"""Recipe for `--train` without `--config`."""

DEV_SHARE = 0.1
"""Share of `--train` that is held out and scored."""


class FinetuningData(NamedTuple):
    """Examples to fine-tune on.

    Attributes:
        train: Input and target texts of the training split, by task; see `encode_pairs`.
        dev_pairs: Input and target texts of all validation splits, for the held-out loss.
        build_dev_scorer: Returns the function that scores a model on the validation splits, given
            the ranks of a run, the sizes of its mesh and the mesh. None where nothing is scored.
        own_dev: The user's own pairs that are scored; None for tasks.
        languages: Source and target language of pairs without their own, as the model keeps them;
            None for the tokenizer's.
    """

    train: Mapping[str, Sequence[tuple[Any, ...]]]
    dev_pairs: Sequence[tuple[Any, ...]] = ()
    build_dev_scorer: Callable[[World, MeshConfig, Mesh | None], DevEvaluation | None] | None = None
    own_dev: Sequence[Pair] | None = None
    languages: tuple[str | None, str | None] = (None, None)


def build_run(
    recipe: FinetuneRecipe, pretrained: Path, data: FinetuningData, out: Path, world: World
) -> Run:
    """Builds the run of a recipe and its data on the running ranks."""
    config = finetuning_config(pretrained, recipe)
    is_host = not isinstance(config, STMoEConfig)
    tokenizer = with_languages(load_tokenizer(pretrained), *data.languages)
    training = recipe.training

    # Batches of training pairs, and of dev pairs for the held-out loss.
    size = recipe.mixture.train_examples
    for name, pairs in data.train.items():
        num_chosen = min(size or len(pairs), len(pairs))
        choice = format_choice(num_chosen, len(pairs), size, recipe.seed)
        world.print_on_rank_zero(f"{name}: {choice}.")
    source = build_training_source(recipe, data, tokenizer)
    check_run_fits(recipe, config, world.size, source.lengths)
    held_out = None
    if data.dev_pairs and training.held_out_batches:
        unseen = PairSource(data.dev_pairs, tokenizer, **_row_settings(recipe))
        without = SpecialIds(*pad_and_eos(tokenizer), len(tokenizer), num_sentinels=0)
        ids = SpecialIds.of(tokenizer) if has_sentinels(tokenizer) else without
        held_out = HeldOut(unseen, training.held_out_batches, ids)

    # The model and its trainable parameters.
    weights = None if recipe.init == "scratch" else pretrained
    built = build_model(recipe, config, world.device_type, weights, shard_host)
    trained = "all train" if is_host else select_parameters(built.model, recipe.parameters)
    world.print_on_rank_zero(f"{recipe.init.capitalize()} weights; {trained}")
    tokenizer = remember_sentinels(built.model, tokenizer, recipe.data.sentinels)

    dev = None
    if data.build_dev_scorer is not None:
        # Each rank loads a host whole.
        dev = data.build_dev_scorer(world, recipe.mesh.launched, None if is_host else built.mesh)
    earlier_checkpoints = None
    if recipe.optimizer_state == "keep":
        earlier_checkpoints = pretrained.absolute().parent / CHECKPOINTS_FOLDER
    return Run(
        folder=out,
        recipe=recipe,
        built=built,
        tokenizer=tokenizer,
        source=source,
        held_out=held_out,
        earlier_checkpoints=earlier_checkpoints,
        dev=dev,
        workers=default_workers(),
        replicas=find_replica_groups(recipe.mesh, world),
        forward=host_forward_pass if is_host else forward_pass,
    )


def build_training_source(
    recipe: FinetuneRecipe, data: FinetuningData, tokenizer: PreTrainedTokenizerFast
) -> BatchSource:
    """Returns the batches of training pairs."""
    mixture = recipe.mixture
    train_pairs = {}
    for name, pairs in data.train.items():
        train_pairs[name] = choose_examples(pairs, mixture.train_examples, recipe.seed)
    rates = {"maximum": mixture.maximum, "temperature": mixture.temperature}
    return build_source(train_pairs, tokenizer, **rates, **_row_settings(recipe))


def _row_settings(recipe: FinetuneRecipe) -> dict[str, Any]:
    """Returns how rows of pairs are made and kept, as arguments of `PairSource`."""
    data = recipe.data
    return {
        "inputs_length": data.inputs_length,
        "targets_length": data.targets_length,
        "pack": data.pack,
        "sentinels": data.sentinels,
        "batch_size": recipe.training.batch_size,
        "seed": recipe.seed,
        "keep_in": cache_folder(),
    }


@cache
def finetune_command() -> RecipeCommand[FinetuneRecipe]:
    """Returns the command with its options, all of which a recipe may set."""
    command = RecipeCommand(
        FinetuneRecipe, "Fine-tunes a model on pairs of texts.", prog="stmoe finetune"
    )
    command.add_argument(
        "--pretrained",
        type=path,
        required=True,
        help="model to start from, which also gives the architecture; with --init scratch a tokenizer is enough",
    )
    command.add_argument("--task", type=str, help="single task, instead of mixture.tasks")
    add_pair_options(command, instead="tasks")
    command.add_argument(
        "--seeds", type=int, nargs="+", help="one run in out/seed-N for each, instead of seed"
    )
    command.add_run_options()
    return command


def add_pair_options(command: RecipeCommand[Any], *, instead: str) -> None:
    """Adds the options of the user's own pairs, which `split_pairs` reads."""
    command.add_argument(
        "--train",
        type=path,
        help=f"table of pairs, instead of {instead}: .jsonl, .csv, .tsv, .parquet, a saved dataset, or NAME:SPLIT of "
        "the hub",
    )
    command.add_argument(
        "--dev", type=path, help="table of pairs to score, instead of a share of --train"
    )
    command.add_argument(
        "--columns",
        type=str,
        nargs="+",
        help="names of the columns, e.g. inputs=question targets=answer",
    )
    command.add_argument(
        "--dev_share",
        type=float,
        help=f"share of --train that is held out and scored ({DEV_SHARE}, 0 below {LEAST_PAIRS} pairs)",
    )
    add_language_options(command)


def read_data(recipe: FinetuneRecipe, arguments: Namespace, world: World) -> FinetuningData:
    """Returns the examples of a mixture of tasks, or the user's own pairs.

    Raises:
        ConfigError: When an option has no effect.
        DataError: When a file of pairs cannot be read, or the share leaves no pairs to train on.
    """
    mixture = recipe.mixture
    if not mixture.tasks:
        return read_own_pairs(recipe, arguments, world)
    for name in ("dev", "dev_share", "columns", "source-language", "target-language"):
        if getattr(arguments, name.replace("-", "_")) is not None:
            raise ConfigError(
                f"--{name} cannot be combined with tasks, which have dev splits and a language of "
                "their own. Give --train, or leave it out."
            )
    return load_entry_point("stmoe.tasks", "read_mixture")(mixture)


def read_own_pairs(recipe: FinetuneRecipe, arguments: Namespace, world: World) -> FinetuningData:
    """Returns the user's own pairs, and prints how many are scored and by which metrics.

    Args:
        recipe: Says how the pairs are read.
        arguments: Values of the options of `add_pair_options`.
        world: The ranks.
    """
    train, dev = split_pairs(arguments)
    source = arguments.dev or f"held out of {arguments.train}"
    if not recipe.data.pack:
        training = recipe.training
        num_epochs = training.steps * training.batch_size / len(train)
        world.print_on_rank_zero(
            f"{training.steps:,} steps of {training.batch_size} pairs: {num_epochs:.1f} epochs."
        )
    if not dev:
        world.print_on_rank_zero(f"{len(train):,} pairs, none held out: the run has no dev scores.")

    # Pairs that the model could answer from memory.
    trained = {pair.inputs for pair in train}
    num_shared = sum(pair.inputs in trained for pair in dev)
    if num_shared:
        warn_on_rank_zero(
            f"{num_shared:,} of {len(dev):,} dev pairs have an input that is also in "
            f"{arguments.train}: their scores show memory. Remove these pairs from one of the files."
        )
    num_empty = sum(not pair.targets.strip() for pair in train)
    if num_empty:
        warn_on_rank_zero(
            f"{num_empty:,} of {len(train):,} targets are empty: the model learns to answer nothing."
        )

    # Dev pairs that are answered at every evaluation.
    texts = {"pairs": [(*pair.texts, *pair.languages) for pair in train]}
    dev_texts = [(*pair.texts, *pair.languages) for pair in dev]
    languages = (arguments.source_language, arguments.target_language)
    data = FinetuningData(texts, dev_texts, languages=languages)
    scored = choose_examples(dev, recipe.mixture.dev_examples, seed=0)
    if not scored:
        return data
    metrics = scorers_for([pair.targets for pair in scored])[1]
    world.print_on_rank_zero(
        f"Dev scores: {len(scored):,} of {len(dev):,} pairs {source}, by {metrics}."
    )

    def build_dev_scorer(
        world: World, mesh_config: MeshConfig, mesh: Mesh | None
    ) -> DevEvaluation | None:
        return dev_scorer(scored, recipe.data.inputs_length, mesh, world.device_type)

    return data._replace(build_dev_scorer=build_dev_scorer, own_dev=scored)


def split_pairs(arguments: Namespace) -> tuple[list[Pair], list[Pair]]:
    """Returns the pairs to train on, and those to score: of --dev, or a share of --train."""
    columns = parse_columns(arguments.columns or [], COLUMNS)
    pairs = read_pairs(arguments.train, columns)
    share = arguments.dev_share
    if arguments.dev is not None:
        if share is not None:
            raise ConfigError(
                f"--dev_share {share:g} cannot be combined with --dev {arguments.dev}. Give one of "
                "them."
            )
        return pairs, read_pairs(arguments.dev, columns)

    if share is None:
        share = DEV_SHARE if len(pairs) >= LEAST_PAIRS else 0.0
    check_number("--dev_share", share, least=0, below=1)
    return hold_out(pairs, share)


def best_sentence(folder: Path) -> str:
    """Returns the path of a run's best model, its dev scores, and the dev scores of the last model."""
    best, last = best_and_last(folder)
    return (
        f"Best on dev: step {best['step']:,} with {format_scores(best)}, in "
        f"{folder / BEST_FOLDER / 'model'}. Last: {format_scores(last)}."
    )


def with_recipe_for_pairs(argv: list[str]) -> list[str]:
    """Returns the command line with the recipe for own pairs, where it names no recipe."""
    typed = typed_settings(argv)
    if "train" in typed and "config" not in typed:
        return ["--config", PAIRS_RECIPE, *argv]
    return argv


def main(argv: list[str], *, process_start: float | None = None) -> None:
    """Reads the recipe, fine-tunes, and prints where the models are and their scores.

    Args:
        argv: The command line, without the program.
        process_start: When this process started, in seconds since 1970, if it serves only this
            command.
    """
    logging.disable_progress_bar()  # of models that are loaded
    words = with_recipe_for_pairs(argv)
    with finetune_command().launch(words) as (world, recipe, arguments):
        if argv != words:
            world.print_on_rank_zero(
                f"Settings: recipe {PAIRS_RECIPE}, since there is no --config."
            )
        recipe = choose_data(recipe, arguments.task, arguments.train, typed_settings(argv))

        # Reject invalid options before reading any data.
        pretrained = arguments.pretrained = find_model(arguments.pretrained)
        out = output_path(arguments.out, inputs=[pretrained, arguments.train])
        check_kind(out, "training run" if arguments.seeds is None else JOB)
        runs = seed_runs(recipe, arguments.seeds, out)
        find_replica_groups(recipe.mesh, world)

        for _, folder in runs:
            broadcast_from_rank_zero(partial(refuse_to_overwrite, folder, arguments.resume))
        finetuning_config(pretrained, recipe)

        data = read_data(recipe, arguments, world)
        for _, folder in runs:
            broadcast_from_rank_zero(partial(check_dev_pairs, folder, data.own_dev or ()))
        for recipe_of_seed, folder in runs:
            run = build_run(recipe_of_seed, pretrained, data, folder, world)
            if arguments.seeds is not None:
                broadcast_from_rank_zero(lambda: claim_job(out))
            model = train(
                run, resume=arguments.resume, description="fine-tune", process_start=process_start
            )
            process_start = None  # the next run starts loading now
            world.print_on_rank_zero(f"The model is in {model}.")
            if run.dev is not None and world.rank == 0:
                print(best_sentence(folder))

        is_scored = data.build_dev_scorer is not None and recipe.mixture.dev_examples != 0
        if is_scored and world.rank == 0:
            summary = write_summary(out, runs)
            if arguments.seeds is not None:
                print(summary)
