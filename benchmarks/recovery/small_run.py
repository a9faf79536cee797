"""A training run that takes seconds, to be disturbed: the real loop over drawn tokens.

    python -m benchmarks.recovery.small_run --out runs/small [--resume] [--training.steps 40]

`faults.py` starts it. The settings are those of `stmoe pretrain`.
"""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from moe.cli import run_main
from moe.data.pipeline import SpanCorruptionSource
from moe.data.tokenizer import EOS, PAD, SpecialIds, sentinel
from moe.distributed.launch import World
from moe.training.build import build_model, check_run_fits
from moe.training.command import RecipeCommand
from moe.training.loop import Run, train
from moe.training.recipe import PretrainRecipe

_NUM_SENTINELS = 4
_NUM_WORDS = 60
_NUM_TOKENS = 20_000

SETTINGS = {
    "model.vocab_size": 2 + _NUM_WORDS + _NUM_SENTINELS,
    "model.d_model": 16,
    "model.d_kv": 4,
    "model.num_heads": 4,
    "model.d_ff": 24,
    "model.num_layers": 2,
    "model.num_experts": 4,
    "model.num_sparse_encoder_layers": 1,
    "model.num_sparse_decoder_layers": 1,
    "model.dropout_rate": 0,
    "model.group_size": 8,
    "data.inputs_length": 16,
    "optim.lr": 0.01,
    "optim.schedule": "constant",
    "optim.warmup_steps": 5,
    "training.steps": 40,
    "training.batch_size": 12,
    "training.micro_batch_size": 2,
    "training.log_every": 1,
    "training.held_out_batches": 0,
    "training.checkpoint_every": 10,
}
"""Settings from the command line."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of made-up words."""
    words = [PAD, EOS, *(f"word{number}" for number in range(_NUM_WORDS))]

    # Sentinels descend from the first, which has the highest id.
    sentinels = [sentinel(number) for number in range(_NUM_SENTINELS)]
    vocabulary = {text: number for number, text in enumerate([*words, *reversed(sentinels)])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token=PAD)),
        pad_token=PAD,
        eos_token=EOS,
    )


def build_run(recipe: PretrainRecipe, out: Path, world: World) -> Run:
    """Returns the run over drawn tokens, each of which depends on the one before."""
    tokenizer = build_tokenizer()
    generator = np.random.default_rng(0)
    steps = generator.integers(0, 3, _NUM_TOKENS)
    tokens = (2 + np.cumsum(steps) % _NUM_WORDS).astype(np.int32)

    config = recipe.build_config()
    source = SpanCorruptionSource(
        tokens,
        SpecialIds.of(tokenizer),
        inputs_length=recipe.data.inputs_length,
        batch_size=recipe.training.batch_size,
        seed=recipe.seed,
    )
    check_run_fits(recipe, config, world.size, source.lengths)
    built = build_model(recipe, config, world.device_type)
    return Run(
        folder=out, recipe=recipe, built=built, tokenizer=tokenizer, source=source, held_out=None
    )


def main(argv: list[str]) -> None:
    """Trains the small run."""
    command = RecipeCommand(PretrainRecipe, "Trains a small model on drawn tokens.")
    command.add_run_options()

    argv = [f"--{name}={value}" for name, value in SETTINGS.items()] + argv
    with command.launch(argv) as (world, recipe, arguments):
        run = build_run(recipe, Path(arguments.out), world)
        train(run, resume=arguments.resume, description="small")


if __name__ == "__main__":
    run_main(main)
