"""Your own pairs of texts, and the share that is held out of training.

Comes after `rows`, before `pairs`, which tokenizes them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe.checks import shown
from moe.data.rows import Row, read_rows, text_of
from moe.errors import DataError

COLUMNS = ("inputs", "targets", "group", "source_language", "target_language")
ADVICE = 'Expected rows like {"inputs": "...", "targets": "..."}; --columns names other columns.'

LEAST_PAIRS = 20
"""With fewer pairs none are held out, unless a share is given: scores on one or two pairs mean nothing."""


class Pair(NamedTuple):
    """A row of a table of pairs.

    Attributes:
        inputs: Text that the model sees.
        targets: Text that the model should write.
        group: Pairs of one group depend on each other; None if the pair is its own group.
        source_language: Code of the language of the input; None for the tokenizer's.
        target_language: Likewise of the target.
    """

    inputs: str
    targets: str
    group: str | None = None
    source_language: str | None = None
    target_language: str | None = None

    @property
    def texts(self) -> tuple[str, str]:
        """Input and target."""
        return self.inputs, self.targets

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """Codes of the languages of input and target."""
        return self.source_language, self.target_language


def read_pairs(path: Path, columns: Mapping[str, str] | None = None) -> list[Pair]:
    """Returns the pairs of a table, which has `inputs` and `targets`; see `read_rows` for its kinds.

    A row may have a `group`, a text or an integer, a `source_language` and a `target_language`;
    other columns are not read.

    Args:
        path: The table.
        columns: Names of these columns where they are others.

    Raises:
        DataError: When a row is something else, or there is none.
    """
    names = {name: name for name in COLUMNS} | dict(columns or {})
    rows = read_rows(path, advice=ADVICE, columns=names.values())
    pairs = [_to_pair(row, names, where) for where, row in rows]
    if not pairs:
        raise DataError(f"{path} holds no pairs. {ADVICE}")
    return pairs


def _to_pair(row: Row, names: Mapping[str, str], where: str) -> Pair:
    """Returns the pair of a row.

    Raises:
        DataError: When a value is missing or of another type.
    """
    inputs = text_of(row, names["inputs"], where=where, advice=ADVICE)
    targets = text_of(row, names["targets"], where=where, advice=ADVICE)
    group = row.get(names["group"])
    if group is not None and (isinstance(group, bool) or not isinstance(group, str | int)):
        raise DataError(
            f"{where}: {names['group']} is {shown(group)}. Expected a text or an integer, or no group."
        )
    codes = {}
    for name in COLUMNS[3:]:
        if row.get(names[name]) is not None:
            codes[name] = text_of(row, names[name], where=where, advice=ADVICE)
    return Pair(inputs, targets, None if group is None else str(group), **codes)


def hold_out(pairs: Sequence[Pair], share: float) -> tuple[list[Pair], list[Pair]]:
    """Returns the pairs to train on and the pairs to score, each in the order of the file.

    The choice depends on the pairs and the share alone. Pairs of one group, and pairs of equal
    inputs, stay together, so the held-out part may be a little larger than the share.

    Args:
        pairs: N pairs.
        share: Share of the pairs that is held out, in [0, 1); above 0 at least one pair is.

    Raises:
        DataError: When nothing would be left to train on.
    """
    if share == 0:
        return list(pairs), []

    # Pairs that stay together, in random order.
    members: dict[tuple[str, str], list[int]] = {}
    for number, pair in enumerate(pairs):
        key = ("inputs", pair.inputs) if pair.group is None else ("group", pair.group)
        members.setdefault(key, []).append(number)
    units = list(members.values())
    order = np.random.default_rng(0).permutation(len(units))

    # At least one, and whole units until the share is reached.
    wanted = max(1, round(share * len(pairs)))
    held_out: set[int] = set()
    for index in order:
        if len(held_out) >= wanted:
            break
        held_out.update(units[index])
    if len(held_out) == len(pairs):
        raise DataError(
            f"Holding out {share:g} of {len(pairs)} pairs in {len(units)} groups leaves none to train on. Give more "
            "pairs, a separate dev file (--dev), or --dev_share 0."
        )

    train = [pair for number, pair in enumerate(pairs) if number not in held_out]
    dev = [pair for number, pair in enumerate(pairs) if number in held_out]
    return train, dev
