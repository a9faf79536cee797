"""What `stmoe pretrain` says before it trains. Oracle: tokens counted in the batches themselves."""

from moe.commands.pretrain import describe_amount
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
