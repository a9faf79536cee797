"""Mixtures. Oracles: counting what a long stretch of the stream holds; asking in
another order.
"""

from collections import Counter

import numpy as np
import pytest
import torch

from moe.data.mixture import MixtureSource, choose_examples, format_choice
from moe.data.pipeline import PairSource
from moe.errors import ConfigError, DataError
from tests.data.test_pipeline import examples_of, same
from tests.models.tiny import tiny_model

SIZES = {"many": 211, "some": 53, "few": 7, "one": 1}
TASKS = {
    name: [
        (f"{name} header {'and ' * (n % 5)}{n}", f"value {'of ' * (n % 3)}{n}") for n in range(size)
    ]
    for name, size in SIZES.items()
}
CAPPED = {"many": 101, "some": 53, "few": 7, "one": 1}  # with a maximum of 101
WINDOW = 4096


def mixture(tokenizer, tasks=TASKS, **changes) -> MixtureSource:
    settings = {"inputs_length": 61, "targets_length": 29, "batch_size": 8, "seed": 3}
    return MixtureSource(tasks, tokenizer, **{**settings, "maximum": 101, **changes})


def task_of(tokenizer, example) -> str:
    return tokenizer.decode(example[0][:-1]).split()[0]


def test_subsets_of_one_seed_are_nested_in_order_and_of_another_seed_others():
    examples = [f"example {number}" for number in range(997)]
    few, more, most = (choose_examples(examples, size, seed=7) for size in (5, 113, 996))
    assert (len(few), len(more), len(most)) == (5, 113, 996)
    assert set(few) < set(more) < set(most)
    assert more == sorted(more, key=examples.index)
    assert choose_examples(examples, 113, seed=7) == more
    assert len(set(more) & set(choose_examples(examples, 113, seed=8))) < 40
    for size in (None, 997, 998):
        assert choose_examples(examples, size, seed=7) == examples


def test_a_subset_takes_from_everywhere():
    """Each of 100 examples is in half of the subsets of half the size."""
    counts = Counter()
    for seed in range(400):
        counts.update(choose_examples(range(100), 50, seed))
    assert len(counts) == 100
    assert all(150 < count < 250 for count in counts.values())  # 5 standard deviations


def test_what_was_chosen_is_said():
    assert format_choice(250, 4485, 250, 3) == "250 of 4,485 training examples (seed 3)"
    assert format_choice(4485, 4485, None, 3) == "all 4,485 training examples"
    assert format_choice(37, 37, 5000, 3) == "all 37 training examples (5,000 were asked for)"


def test_after_any_number_of_windows_every_task_is_within_one_example_of_its_share(tokenizer):
    source, drawn = mixture(tokenizer), Counter()
    assert source.shares == {name: CAPPED[name] / 162 for name in SIZES}
    for number in range(9):
        tasks, _ = source.window(number)
        assert len(tasks) == WINDOW
        assert set(tasks.tolist()) == {0, 1, 2, 3}, "no task is missing from a window"
        drawn.update(tasks.tolist())
        for task, name in enumerate(SIZES):
            assert abs(drawn[task] - (number + 1) * WINDOW * CAPPED[name] / 162) < 1


def test_the_share_of_a_task_in_batches_is_that_of_its_rate(tokenizer):
    source = mixture(tokenizer, temperature=2.0, batch_size=64)
    rows = [row for step in range(WINDOW // 64) for row in examples_of(source.batch(step))]
    found = Counter(task_of(tokenizer, example) for row in rows for example in row)
    rates = {name: number**0.5 for name, number in CAPPED.items()}
    for name, rate in rates.items():
        assert found[name] == pytest.approx(WINDOW * rate / sum(rates.values()), abs=1), name


def test_no_stretch_of_the_stream_is_without_a_large_task_and_tasks_are_not_in_blocks(tokenizer):
    tasks, _ = mixture(tokenizer).window(0)
    runs = np.diff(np.flatnonzero(np.concatenate([[True], tasks[1:] != tasks[:-1], [True]])))
    # 101 / 162 of the examples are of one task: 30 in a row have a chance of 1e-3.
    assert runs.max() < 30
    assert np.bincount(tasks[:512], minlength=4)[0] == pytest.approx(512 * 101 / 162, abs=60)


def test_a_task_goes_through_its_own_epochs_each_in_another_order(tokenizer):
    source = mixture(tokenizer, batch_size=16)
    stream: dict[str, list] = {name: [] for name in SIZES}
    step = 0
    while len(stream["many"]) < 3 * 211:
        for row in examples_of(source.batch(step)):
            for example in row:
                stream[task_of(tokenizer, example)].append(example)
        step += 1
    for name, size in SIZES.items():
        starts = range(0, len(stream[name]) - size + 1, size)
        epochs = [stream[name][start : start + size] for start in starts]
        assert all(len(set(epoch)) == size for epoch in epochs), name
        assert len(epochs) >= 3
        if size > 5:
            assert len(set(map(tuple, epochs))) == len(epochs), "every order is another"


@pytest.mark.slow
@pytest.mark.parametrize("pack", [False, True])
def test_a_batch_of_a_mixture_depends_on_the_step_alone(tokenizer, pack):
    last = 2 * WINDOW // 8 if not pack else WINDOW // 16  # beyond the first window
    steps = [0, 1, 5, last - 1, last]
    straight = mixture(tokenizer, pack=pack)
    batches = {step: straight.batch(step) for step in steps}
    resumed = mixture(tokenizer, pack=pack)
    assert all(same(resumed.batch(step), batches[step]) for step in (last, 0, last - 1, 5))
    assert not same(batches[0], batches[1])
    assert not same(batches[0], mixture(tokenizer, pack=pack, seed=4).batch(0))


@pytest.mark.parametrize("pack", [False, True])
def test_ranks_that_make_their_own_rows_make_those_of_one_process(tokenizer, pack):
    whole = mixture(tokenizer, pack=pack)
    for step in (0, 3):
        parts = []
        for rank in range(2):
            ours = mixture(tokenizer, pack=pack)
            parts.append(ours.batch(step, slice(rank * 4, (rank + 1) * 4)))
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        assert same(joined, whole.batch(step))


def test_rows_are_the_same_however_they_are_cut_into_batches(tokenizer):
    small, large = (mixture(tokenizer, pack=True, batch_size=size) for size in (4, 8))
    for step in range(3):
        halves = [small.batch(2 * step), small.batch(2 * step + 1)]
        joined = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
        assert same(joined, large.batch(step))


def test_packed_rows_hold_several_tasks_at_the_rates_of_the_examples_in_them(tokenizer):
    source, rows = mixture(tokenizer, pack=True), []
    tasks, _ = source.window(0)
    while sum(map(len, rows)) < WINDOW:
        rows += examples_of(source.batch(len(rows) // 8))
    stream = [task_of(tokenizer, example) for row in rows for example in row][:WINDOW]
    assert stream == [list(SIZES)[task] for task in tasks], "packed as mixed, nothing left out"
    mixed = sum(len({task_of(tokenizer, example) for example in row}) > 1 for row in rows)
    assert mixed > len(rows) / 2
    assert source.lengths == (61, 29)


def test_a_token_of_a_packed_mixture_has_the_loss_that_it_has_unpacked(tokenizer):
    # 7 experts: a capacity factor of 7 is room for all.
    model = tiny_model(eval_capacity_factor=7.0, vocab_size=len(tokenizer))
    packed = mixture(tokenizer, pack=True, batch_size=3).batch(0)
    rows = examples_of(packed)
    assert max(map(len, rows)) > 2
    losses = token_losses(model, packed)
    for row, examples in enumerate(rows):
        for number, (inputs, targets) in enumerate(examples, start=1):
            alone = {"input_ids": torch.tensor([inputs]), "labels": torch.tensor([targets])}
            ours = losses[row][packed["decoder_segment_ids"][row] == number]
            torch.testing.assert_close(ours, token_losses(model, alone)[0], rtol=0, atol=1e-5)


@torch.no_grad()
def token_losses(model, batch) -> torch.Tensor:
    """Returns <float32>[B, T] the cross-entropy of each target token."""
    logits = model(**batch).logits.transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def test_one_task_is_a_mixture_too_and_has_every_pair_in_every_epoch(tokenizer):
    source = mixture(tokenizer, {"some": TASKS["some"]}, batch_size=53)
    settings = {"inputs_length": 61, "targets_length": 29, "batch_size": 53, "seed": 3}
    theirs = PairSource(TASKS["some"], tokenizer, **settings)
    for step in range(3):
        assert sorted(examples_of(source.batch(step))) == sorted(examples_of(theirs.batch(step)))


def test_the_fingerprint_of_a_mixture_tells_data_rates_and_settings_apart(tokenizer):
    fingerprint = mixture(tokenizer).fingerprint
    assert fingerprint == mixture(tokenizer).fingerprint
    others = [{"tasks": {**TASKS, "few": TASKS["few"][1:]}}, {"maximum": 97}]
    others += [{"temperature": 2.0}, {"seed": 4}, {"pack": True}]
    others += [{"batch_size": 4}, {"sentinels": "one"}, {"inputs_length": 59}]
    assert len({fingerprint, *(mixture(tokenizer, **other).fingerprint for other in others)}) == 9


def test_mixtures_that_cannot_be_drawn_are_refused(tokenizer):
    with pytest.raises(DataError, match="Task 'none' has no training examples"):
        mixture(tokenizer, {**TASKS, "none": []})
    with pytest.raises(ConfigError, match=r"'one' would be .* hardly ever drawn"):
        mixture(tokenizer, temperature=0.1)
