"""Mixtures of tasks: how often each is drawn, and batches that are a pure function of the step.

The examples of a mixture form one endless stream, divided into windows of a few thousand. A window
has a fixed number of examples of each task: the task's rounded share up to the end of the window
minus the one up to its start. After any number of windows every task is within one example of its
share, and no window lacks a task. The order inside a window is drawn from (seed, window). A task's
own examples come epoch by epoch, each epoch in an order drawn from (seed, task, epoch). So the
examples of window w follow from (seed, w) alone, without those before it.

A row is one example or, packed, as many examples of a window as fit, in the order of the stream.
As in seqio, a packed row holds several tasks, and every example is used exactly once. Only the
last row of a window may be emptier than it could be. How many packed rows a window gives is known
once it is packed: a run that resumes at a late row packs the windows before it again, some
5 seconds for a million examples. The position is one integer either way.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from moe.checks import check_integer, check_number
from moe.data.chunks import Interleaving, Windows
from moe.data.packing import Example, example_rows
from moe.data.pairs import Sentinels, encode_pairs
from moe.data.pipeline import PairSource, RowSource, examples_fingerprint, fingerprint
from moe.errors import DataError

T = TypeVar("T")


def mixing_rate(
    num_examples: int, *, maximum: int | None = None, temperature: float = 1.0, scale: float = 1.0
) -> float:
    """Returns the rate of a task in a mixture; its share is its rate over the sum of all.

    Args:
        num_examples: Training examples of the task; one example of ReCoRD is a query with one
            answer.
        maximum: Cap of the scaled number, so that large tasks do not dominate small ones; None for
            no cap.
        temperature: The capped number is raised to 1 / temperature; more than 1 makes the rates
            more even.
        scale: Factor of the number before the cap.

    Source:
        seqio `mixing_rate_num_examples` at b898b9f: scale, then cap, then power. Differs: no.
        ST-MoE (arXiv:2202.08906) §6.1 caps at 65,536.
    """
    # Scale, then cap, then temperature.
    rate = num_examples * scale
    if maximum is not None:
        rate = min(rate, maximum)
    return rate ** (1.0 / temperature)


def check_rates(maximum: int | None, temperature: float) -> None:
    """Raises a ConfigError when no rates follow from these numbers; see `mixing_rate`."""
    check_integer("mixture.maximum", maximum, least=1, optional="null for no cap")
    check_number("mixture.temperature", temperature, above=0, reason="1 leaves the rates alone")


def choose_examples(examples: Sequence[T], size: int | None, seed: int) -> list[T]:
    """Returns a random subset of a task's training examples, in their order.

    With the same seed a smaller subset is part of every larger one, so that comparing sizes does
    not also compare other labels.

    Args:
        examples: N examples.
        size: Maximum size of the subset; None for all.
        seed: Different seeds give different subsets.
    """
    if size is None or size >= len(examples):
        return list(examples)
    order = np.random.default_rng([seed, 4]).permutation(len(examples))  # [N]
    return [examples[index] for index in np.sort(order[:size])]


def format_choice(num_chosen: int, num_examples: int, size: int | None, seed: int) -> str:
    """Returns a description of the work of `choose_examples`, e.g. "250 of 4,485 training examples
    (seed 0)".

    Args:
        num_chosen: Examples of the subset.
        num_examples: Total number of examples.
        size: Requested number; None for all.
        seed: Seed of the choice.
    """
    if num_chosen < num_examples:
        return f"{num_chosen:,} of {num_examples:,} training examples (seed {seed})"
    if size is None:
        return f"all {num_examples:,} training examples"
    return f"all {num_examples:,} training examples ({size:,} were asked for)"


class MixtureSource(RowSource):
    """Fine-tuning batches of several tasks, drawn by their rates."""

    def __init__(
        self,
        tasks: Mapping[str, Sequence[tuple[str, str]]],
        tokenizer: PreTrainedTokenizerFast,
        *,
        sentinels: Sentinels = "none",
        maximum: int | None = None,
        temperature: float = 1.0,
        keep_in: Path | None = None,
        **settings: Any,
    ) -> None:
        """Tokenizes the pairs once.

        Args:
            tasks: Input and target texts of each task, by its name.
            tokenizer: Tokenizer with an end token.
            sentinels: Which sentinels the pairs get; see `PairSource`.
            maximum: See `mixing_rate`.
            temperature: See `mixing_rate`.
            keep_in: See `PairSource`.
            settings: See `RowSource`.

        Raises:
            DataError: When a task has no pairs.
            ConfigError: When a task is so rare that it would hardly ever be drawn.
        """
        super().__init__(tokenizer, **settings)
        rates = {}
        for name, pairs in tasks.items():
            if not pairs:
                raise DataError(
                    f"Task {name!r} has no training examples. Leave it out, or give its training rows."
                )
            rates[name] = mixing_rate(len(pairs), maximum=maximum, temperature=temperature)
        total = sum(rates.values())
        self.shares = {name: rate / total for name, rate in rates.items()}
        self._interleaving = Interleaving(self.shares, self.seed)

        # The examples, tokenized once.
        self._examples: list[list[Example]] = []
        for pairs in tasks.values():
            examples = encode_pairs(pairs, tokenizer, self.row_lengths, sentinels, keep_in)
            self._examples.append(examples)

        # Rows of the windows that were read last. How many rows a packed window has is known once it
        # is packed.
        self._window_rows = lru_cache(maxsize=2)(self._build_rows)
        self._windows = Windows((number, self._num_rows(number)) for number in count())

        hashes = map(examples_fingerprint, self._examples)  # sentinels show in the examples
        facts = (list(tasks), self._interleaving.bounds, *self.settings)
        self.fingerprint = fingerprint(*hashes, repr(facts).encode())

    def row(self, position: int) -> list[Example]:
        """Returns the examples of the row at a position of the endless stream."""
        window, index = self._windows.locate(position)
        return self._window_rows(window)[index]

    def _num_rows(self, window: int) -> int:
        return (
            self._interleaving.window_size
            if self.lengths is None
            else len(self._window_rows(window))
        )

    def window(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the examples of a window, in order.

        Args:
            number: Number of the window, from 0.

        Returns:
            <int64>[W] the task of each example, and <int64>[W] its index in that task.
        """
        starts = self._interleaving.num_before(number)
        ends = self._interleaving.num_before(number + 1)
        tasks = self._interleaving.sources(number)  # [W]

        # Each task continues its own stream where the window before it ended.
        indices = np.empty_like(tasks)  # [W]
        for task, (start, end) in enumerate(zip(starts, ends, strict=True)):
            indices[tasks == task] = self._task_stream(task, start, end)
        return tasks, indices

    def _task_stream(self, task: int, start: int, end: int) -> NDArray[np.int64]:
        """Returns <int64>[end - start] a part of a task's examples, counted over all its epochs."""
        size = len(self._examples[task])
        first_epoch = start // size
        last_epoch = (end - 1) // size

        orders = []
        for epoch in range(first_epoch, last_epoch + 1):
            rng = np.random.default_rng([self.seed, 3, task, epoch])
            orders.append(rng.permutation(size))

        offset = first_epoch * size
        return np.concatenate(orders)[start - offset : end - offset]

    def _build_rows(self, window: int) -> list[list[Example]]:
        tasks, indices = self.window(window)
        examples = []
        for task, index in zip(tasks.tolist(), indices.tolist(), strict=True):
            examples.append(self._examples[task][index])
        return example_rows(examples, self.lengths)


def build_source(
    tasks: Mapping[str, Sequence[tuple[str, str]]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    maximum: int | None,
    temperature: float,
    **settings: Any,
) -> PairSource | MixtureSource:
    """Returns training batches of one task (`PairSource`) or several (`MixtureSource`)."""
    if len(tasks) == 1:
        return PairSource(next(iter(tasks.values())), tokenizer, **settings)
    return MixtureSource(tasks, tokenizer, maximum=maximum, temperature=temperature, **settings)
