"""What `stmoe pretrain` says before it trains. Oracle: tokens counted in the batches themselves."""

import pytest

from moe import ConfigError
from moe.commands.pretrain import check_size, describe_amount
from tests.data.test_pipeline import NUM_CHUNKS, restored, source


def test_the_tokens_and_epochs_of_a_run_are_those_of_its_batches():
    batches = source()
    num_tokens = 0
    for step in range(7):
        num_tokens += sum(map(len, restored(batches.batch(step))))

    epochs = 7 * 5 / NUM_CHUNKS
    text_of_epoch = sum(map(len, restored(source(batch_size=NUM_CHUNKS).batch(0))))
    assert describe_amount(batches, 7) == (
        f"7 steps train on {num_tokens:,} tokens of text: {epochs:.2f} epochs of the "
        f"{text_of_epoch:,} in the corpus."
    )
    assert "1,400 epochs of" in describe_amount(source(batch_size=NUM_CHUNKS), 1400)


def test_a_run_needs_a_recipe_or_the_size_of_its_model():
    size = ["--model.d_model=64", "--model.num_layers", "2", "--model.num_experts", "0"]
    for argv in (
        ["--config", "mine.yaml"],
        ["--config=mine.yaml"],
        size,
        ["-h"],
        ["--print_config"],
    ):
        check_size(argv)
    for argv, missing in (
        (["--out", "x"], "--model.d_model, "),
        (size[:-2], "--model.num_experts."),
    ):
        with pytest.raises(ConfigError, match=f"No recipe.*st_moe_tiny_pretrain.*: {missing}"):
            check_size(argv)
