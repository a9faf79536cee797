"""stmoe pretrain: pre-trains a model by span corruption.

    stmoe pretrain --config st_moe_tiny_pretrain \
        --corpus runs/corpus --tokenizer runs/tokenizer --out runs/pretrain [--resume] [--optim.lr 0.5]

`--corpus` is a folder made by `stmoe corpus`, or any text larger than memory that is read as a stream:
Parquet, JSONL, CSV or text files, folders of them, a dataset that `datasets` saved, or one of the hub
(`NAME:CONFIG:SPLIT`). Several are mixed by `data.rates`.

With `--pretrained MODEL` it continues training a model, with other text or other settings; a recipe
without an architecture, such as upcycled_pretrain, keeps the model's own.

On several devices:

    torchrun --nproc-per-node 4 -m stmoe pretrain ... --mesh.ep 2 --mesh.dp_shard 2
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from moe.checkpoint.loading import check_model_folder
from moe.checks import check
from moe.cli import path
from moe.data.batches_ahead import default_workers
from moe.data.blocks import open_blocks
from moe.data.chunks import MixedText, Text, WholeText
from moe.data.corpus import is_corpus, load_corpus
from moe.data.documents import TEXT_COLUMN
from moe.data.ngrams import ngram_losses
from moe.data.pipeline import BatchSource, ShortExamplesFirst, SpanCorruptionSource
from moe.data.span_corruption import Noise
from moe.data.token_stream import TokenStream
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.data.tokens import tokenize_corpus
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.launch import World
from moe.distributed.replica_groups import find_replica_groups
from moe.errors import ConfigError
from moe.files import cache_folder, check_kind, find_model, output_path
from moe.models.configuration import STMoEConfig
from moe.training.build import MAY_CHANGE, build_model, check_continues, check_run_fits
from moe.training.command import RecipeCommand, typed_settings
from moe.training.heldout_loss import HeldOut
from moe.training.loop import Run, train
from moe.training.recipe import PretrainRecipe

R = TypeVar("R", bound=PretrainRecipe)

_SIZE = ("model.d_model", "model.num_layers", "model.num_experts")


def build_run(
    recipe: PretrainRecipe,
    corpora: Sequence[Path],
    tokenizer_folder: Path,
    out: Path,
    world: World,
    pretrained: Path | None = None,
    column: str = TEXT_COLUMN,
) -> Run:
    """Builds the run of a recipe on the running ranks.

    Args:
        recipe: All settings.
        corpora: Texts to train on.
        tokenizer_folder: Tokenizer.
        out: Folder of the run.
        world: The ranks.
        pretrained: Model to continue training; None for fresh weights.
        column: Column of the texts in tables that are streamed.
    """
    config = recipe.build_config()
    tokenizer = load_tokenizer(tokenizer_folder)
    if len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.vocab_size}, but the tokenizer in {tokenizer_folder} has "
            f"{len(tokenizer)} tokens. Set model.vocab_size to at least {len(tokenizer)}."
        )

    if pretrained is not None:
        check_continues(pretrained, config, tokenizer)

    # Training text, and held-out text in the same kind of batches.
    ids = SpecialIds.of(tokenizer)
    text, held_out_tokens = open_text(recipe, corpora, tokenizer, column)
    source = build_source(recipe, text, ids)
    batches: BatchSource = source
    short_length = recipe.data.short_inputs_length
    if short_length is not None:
        batches = ShortExamplesFirst(source, short_length, recipe.data.short_steps)
    unseen = build_source(recipe, held_out_tokens, ids)
    check_run_fits(recipe, config, world.size, source.lengths)
    world.print_on_rank_zero(describe_amount(source, recipe.training.steps))
    built = build_model(recipe, config, world.device_type, pretrained)

    num_batches = recipe.training.held_out_batches

    def count_ngrams() -> dict[str, float]:
        if not isinstance(text, WholeText):  # a stream cannot be counted before it is read
            return {}
        return ngram_losses(text.tokens, unseen, num_batches, len(tokenizer))

    losses = broadcast_from_rank_zero(count_ngrams)  # a table of a long text takes 1.3 GB
    held_out = HeldOut(unseen, num_batches, ids, losses)
    return Run(
        folder=out,
        recipe=recipe,
        built=built,
        tokenizer=tokenizer,
        source=batches,
        held_out=held_out,
        workers=default_workers(),
        replicas=find_replica_groups(recipe.mesh, world),
    )


def open_text(
    recipe: PretrainRecipe,
    corpora: Sequence[Path],
    tokenizer: PreTrainedTokenizerFast,
    column: str = TEXT_COLUMN,
) -> tuple[Text, NDArray[np.int32]]:
    """Returns the text to train on, and held-out tokens <int32>[N] of all corpora.

    Args:
        recipe: Says how the corpora are mixed, and how streams are read.
        corpora: Folders made by `stmoe corpus`, and sources of `open_blocks`.
        tokenizer: Tokenizer.
        column: Column of the texts in tables that are streamed.

    Raises:
        ConfigError: When the corpora cannot be mixed as the recipe says.
    """
    data = recipe.data
    streamed = [source for source in corpora if not is_corpus(source)]
    num_rates = len(data.rates) if data.rates is not None else 1
    expected = f"a number for each of the {len(corpora)} corpora, or null for one"
    check(num_rates == len(corpora), "data.rates", data.rates, expected)

    texts: list[Text] = []
    held_out: list[NDArray[np.int32]] = []
    for source in corpora:
        if source in streamed:
            blocks = open_blocks(source, column)
            stream = TokenStream(blocks, tokenizer, cache_folder(), column=column)
            texts.append(stream)
            held_out.append(stream.held_out())
        else:
            corpus = load_corpus(source)
            texts.append(WholeText(tokenize_corpus(corpus.train, tokenizer)))
            held_out.append(tokenize_corpus(corpus.held_out, tokenizer))

    text = texts[0] if data.rates is None else MixedText(texts, data.rates)
    return text, np.concatenate(held_out)


def build_source(
    recipe: PretrainRecipe, text: NDArray[np.int32] | Text, ids: SpecialIds
) -> SpanCorruptionSource:
    """Returns the source of batches for a text, <int32>[N] or a stream."""
    data = recipe.data
    return SpanCorruptionSource(
        text,
        ids,
        seed=recipe.seed,
        inputs_length=data.inputs_length,
        batch_size=recipe.training.batch_size,
        noise=Noise(data.noise_density, data.mean_noise_span_length),
    )


def describe_amount(source: SpanCorruptionSource, steps: int) -> str:
    """Returns the number of tokens and of epochs that a run trains on, as a sentence."""
    num_drawn = steps * source.batch_size
    num_tokens = num_drawn * source.tokens_per_example
    trained = f"{steps:,} steps train on {num_tokens:,} tokens of text"
    if source.num_examples is None:
        return f"{trained}."
    corpus_tokens = source.num_examples * source.tokens_per_example
    epochs = num_drawn / source.num_examples
    digits = 2 if epochs < 10 else 0
    return f"{trained}: {epochs:,.{digits}f} epochs of the {corpus_tokens:,} in the corpus."


def check_size(argv: list[str]) -> None:
    """Raises instead of training the defaults, a dense model of 12 + 12 blocks, unless requested.

    Raises:
        ConfigError: When neither a recipe, a model nor its size is given.
    """
    typed = typed_settings(argv)
    missing = [name for name in _SIZE if name not in typed]
    trains = "-h" not in argv and not typed & {"help", "help-all", "print_config"}
    if trains and missing and not typed & {"config", "pretrained"}:
        raise ConfigError(
            "No recipe is given. Start with a small one: stmoe pretrain --config "
            "st_moe_tiny_pretrain --corpus CORPUS --tokenizer TOKENIZER --out RUN; stmoe recipes "
            "lists all. Without a recipe, the size of the model must be given: "
            f"{', '.join(f'--{name}' for name in missing)}."
        )


def with_architecture(recipe: R, pretrained: Path, argv: list[str]) -> R:
    """Returns a recipe that takes from a model what it does not set itself.

    A recipe of an architecture of its own is returned as it is. A setting in a file that equals the
    default is taken for one that is not set.

    Args:
        recipe: The recipe.
        pretrained: Folder of the model.
        argv: The command line; the settings on it are set whatever their value.
    """
    typed = typed_settings(argv)
    settings = {}
    for name, value in recipe.model.items():
        if f"model.{name}" in typed or value != recipe.model_defaults[name]:
            settings[name] = value
    if settings.keys() - MAY_CHANGE:
        return recipe

    check_model_folder(pretrained)
    config = STMoEConfig.from_pretrained(pretrained)
    model = {name: getattr(config, name) for name in recipe.model_fields}
    return dataclasses.replace(recipe, model={**model, **settings})


@cache
def pretrain_command() -> RecipeCommand[PretrainRecipe]:
    """Returns the command with its options, all of which a recipe may set."""
    command = RecipeCommand(
        PretrainRecipe,
        "Pre-trains a sparse encoder-decoder by span corruption.",
        prog="stmoe pretrain",
    )
    command.add_argument(
        "--corpus",
        type=path,
        nargs="+",
        required=True,
        help="folder made by stmoe corpus, or text to stream: Parquet, JSONL, ...; several need data.rates",
    )
    command.add_argument(
        "--column",
        type=str,
        default=TEXT_COLUMN,
        help=f"column of the texts in tables that are streamed ({TEXT_COLUMN})",
    )
    command.add_argument(
        "--tokenizer", type=path, required=True, help="folder made by stmoe tokenizer"
    )
    command.add_argument(
        "--pretrained",
        type=path,
        help="model to continue training; it keeps its architecture unless the recipe has one (fresh weights)",
    )
    command.add_run_options()
    return command


def main(argv: list[str], *, process_start: float | None = None) -> None:
    """Reads the recipe, trains, and prints where the model is.

    Args:
        argv: The command line, without the program.
        process_start: When this process started, in seconds since 1970, if it serves only this
            command.
    """
    with pretrain_command().launch(argv, check_size) as (world, recipe, arguments):
        # Reject invalid options before reading any data.
        corpora, tokenizer = arguments.corpus, arguments.tokenizer
        pretrained = arguments.pretrained and find_model(arguments.pretrained)
        out = output_path(arguments.out, inputs=[*corpora, tokenizer, pretrained])
        check_kind(out, "training run")
        find_replica_groups(recipe.mesh, world)
        if pretrained is not None:
            recipe = with_architecture(recipe, pretrained, argv)

        run = build_run(recipe, corpora, tokenizer, out, world, pretrained, arguments.column)
        config = run.built.model.config
        num_total = config.num_parameters()
        num_active = config.num_active_parameters()
        world.print_on_rank_zero(f"{num_total:,} parameters, {num_active:,} used by a token.")

        model = train(
            run, resume=arguments.resume, description="pre-train", process_start=process_start
        )
        world.print_on_rank_zero(f"The model is in {model}.")
