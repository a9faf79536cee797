"""Mixtures of tasks: how often each is drawn, and batches that are a pure function of the step.

The examples of a mixture form one endless stream, cut into windows of a few thousand. A window has
a fixed number of examples of each task, the rounded share of the task up to the window's end less
that up to its start: after any number of windows every task is within one example of its share, and
none is ever missing from a window. Their order in the window is drawn from (seed, window), and a
task's own examples come epoch by epoch, each in an order drawn from (seed, task, epoch). So the
examples of window w follow from (seed, w) alone, without those before it.

Rows are examples, or, packed, the examples of a window side by side in the order of the stream, as
seqio packs what it
has mixed: a row holds several tasks, and no example is left out or seen twice. Only the last row of
a window may be emptier than it could be. How many packed rows a window gives is known once it is
packed; a run that resumes at a late row packs the windows before it anew, some 5 seconds for a
million examples. The position is one integer either way.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from moe.checks import check_integer, check_number
from moe.data.packing import Example, pack_rows
from moe.data.pipeline import (
    ALL_ROWS,
    Batch,
    PairSource,
    Sentinels,
    check_source_numbers,
    encode_pairs,
    examples_fingerprint,
    fingerprint,
    stack_rows,
)
from moe.data.tokenizer import SpecialIds
from moe.errors import ConfigError, DataError

_WINDOW = 4096
_LARGEST_WINDOW = 1 << 22
_WHOLE = 1 << 48  # shares are integers of this: rounding is exact however far a run goes


def mixing_rate(
    num_examples: int, *, maximum: int | None = None, temperature: float = 1.0, scale: float = 1.0
) -> float:
    """Returns the rate of a task in a mixture; its share is its rate over the sum of all.

    Args:
        num_examples: Training examples of the task, as it gives them: one of ReCoRD is a query with
            one answer.
        maximum: Cap of the scaled number, so that large tasks do not drown small ones; None for no
            cap.
        temperature: The capped number is raised to 1 / temperature: more than 1 evens the tasks
            out.
        scale: Factor of the number before the cap.

    Raises:
        ConfigError: When a number is out of range.

    Source:
        seqio `mixing_rate_num_examples` at b898b9f: scale, then cap, then power. Differs: no.
        ST-MoE (arXiv:2202.08906) §6.1 caps at 65,536.
    """
    check_integer("num_examples", num_examples, least=0)
    check_rates(maximum, temperature)
    check_number("scale", scale, above=0)
    rate = num_examples * scale
    if maximum is not None:
        rate = min(rate, maximum)
    try:
        return float(rate) if temperature == 1.0 else rate ** (1.0 / temperature)
    except OverflowError:
        raise ConfigError(
            f"{rate:g} to the power 1 / {temperature} is no number. Raise mixture.temperature."
        ) from None


def check_rates(maximum: int | None, temperature: float) -> None:
    """Raises a ConfigError when no rates follow from these numbers; see `mixing_rate`."""
    check_integer("mixture.maximum", maximum, least=1, optional="null for no cap")
    check_number("mixture.temperature", temperature, above=0, reason="1 leaves the rates alone")


class MixtureSource:
    """Fine-tuning batches of several tasks, drawn by their rates; padded or packed as those of
    `PairSource`.
    """

    def __init__(
        self,
        tasks: Mapping[str, Sequence[tuple[str, str]]],
        tokenizer: PreTrainedTokenizerFast,
        *,
        inputs_length: int,
        targets_length: int,
        batch_size: int,
        seed: int,
        pack: bool = False,
        sentinels: Sentinels = "none",
        maximum: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        """Tokenizes the pairs once.

        Args:
            tasks: Input and target texts of each task, by its name.
            tokenizer: See `PairSource`, as for the five that follow.
            inputs_length: Most encoder tokens of a row.
            targets_length: Most decoder tokens of a row.
            batch_size: Rows in a batch.
            seed: Another seed gives another order.
            pack: Whether rows hold as many examples as fit, of whatever tasks.
            sentinels: Which sentinels stand in the pairs.
            maximum: See `mixing_rate`.
            temperature: See `mixing_rate`.

        Raises:
            DataError: When a task has no pairs.
            ConfigError: When a number is out of range, or a task is so rare that it would hardly
                ever be drawn.
        """
        check_source_numbers(
            seed, batch_size=batch_size, inputs_length=inputs_length, targets_length=targets_length
        )
        for name, pairs in tasks.items():
            if not pairs:
                raise DataError(
                    f"Task {name!r} has no training examples. Leave it out, or give its training rows."
                )
        rates = {
            n: mixing_rate(len(p), maximum=maximum, temperature=temperature)
            for n, p in tasks.items()
        }
        self.shares = {name: rate / sum(rates.values()) for name, rate in rates.items()}
        self.batch_size, self._seed = batch_size, seed
        self._row_lengths = inputs_length, targets_length
        self.lengths = self._row_lengths if pack else None
        self._bounds = [0, *(round(total * _WHOLE) for total in accumulate(self.shares.values()))]
        self._bounds[-1] = _WHOLE
        self._window_size = self._choose_window()
        self._padding = SpecialIds.of(tokenizer).pad
        self._examples = [
            encode_pairs(p, tokenizer, self._row_lengths, sentinels) for p in tasks.values()
        ]
        self._row_starts = [0]
        self._rows_of = lru_cache(maxsize=2)(self._make_rows)
        settings = (list(tasks), self._bounds, *self._row_lengths, batch_size, seed, pack)
        hashes = map(examples_fingerprint, self._examples)  # sentinels show in the examples
        self.fingerprint = fingerprint(*hashes, repr(settings).encode())

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns a batch in the form of `PairSource.batch`."""
        packed = [
            self._row(position)
            for position in range(step * self.batch_size, (step + 1) * self.batch_size)
        ]
        return stack_rows(packed, self.lengths, self._padding, rows)

    def window(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns <int64>[W] the tasks of a window's examples, in order, and <int64>[W] which of
        its task each is.
        """
        starts, ends = self._num_drawn(number), self._num_drawn(number + 1)
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        drawn = np.random.default_rng([self._seed, 2, number])
        tasks = drawn.permutation(np.repeat(np.arange(len(counts)), counts))
        places = np.empty_like(tasks)
        for task, (start, end) in enumerate(zip(starts, ends, strict=True)):
            places[tasks == task] = self._places(task, start, end)
        return tasks, places

    def _num_drawn(self, num_windows: int) -> list[int]:
        """Returns how many examples of each task the first windows have: its share of all, rounded."""
        bounds = [num_windows * self._window_size * bound // _WHOLE for bound in self._bounds]
        return [end - start for start, end in pairwise(bounds)]

    def _places(self, task: int, start: int, end: int) -> NDArray[np.int64]:
        """Returns <int64>[end - start] the examples of a task from its `start`-th on, counted over
        its epochs.
        """
        size = len(self._examples[task])
        first, last = start // size, (end - 1) // size
        epochs = [
            np.random.default_rng([self._seed, 3, task, e]).permutation(size)
            for e in range(first, last + 1)
        ]
        return np.concatenate(epochs)[start - first * size : end - first * size]

    def _row(self, position: int) -> list[Example]:
        """Returns the examples of a row."""
        if self.lengths is None:
            number, place = divmod(position, self._window_size)
        else:
            while self._row_starts[-1] <= position:
                self._row_starts.append(
                    self._row_starts[-1] + len(self._rows_of(len(self._row_starts) - 1))
                )
            number = bisect_right(self._row_starts, position) - 1
            place = position - self._row_starts[number]
        return self._rows_of(number)[place]

    def _make_rows(self, number: int) -> list[list[Example]]:
        """Returns the rows of a window."""
        tasks, places = self.window(number)
        examples = [
            self._examples[task][place]
            for task, place in zip(tasks.tolist(), places.tolist(), strict=True)
        ]
        if self.lengths is None:
            return [[example] for example in examples]
        return [[examples[i] for i in row] for row in pack_rows(examples, *self._row_lengths)]

    def _choose_window(self) -> int:
        """Returns the examples of a window: so many that rounding leaves each task one at least.

        Raises:
            ConfigError: When that would be too many.
        """
        widths = [end - start for start, end in pairwise(self._bounds)]
        name, narrowest = min(zip(self.shares, widths, strict=True), key=lambda item: item[1])
        if narrowest * _LARGEST_WINDOW < 2 * _WHOLE:
            raise ConfigError(
                f"Task {name!r} would be {self.shares[name]:.2g} of the mixture and hardly ever drawn. Lower "
                "mixture.maximum, raise mixture.temperature, or leave the task out."
            )
        return max(_WINDOW, -(-2 * _WHOLE // narrowest))


def build_source(
    tasks: Mapping[str, Sequence[tuple[str, str]]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    maximum: int | None,
    temperature: float,
    **settings: Any,
) -> PairSource | MixtureSource:
    """Returns training batches of one task or several; see `MixtureSource`. One alone has nothing
    to be mixed with.
    """
    if len(tasks) == 1:
        return PairSource(next(iter(tasks.values())), tokenizer, **settings)
    return MixtureSource(tasks, tokenizer, maximum=maximum, temperature=temperature, **settings)
