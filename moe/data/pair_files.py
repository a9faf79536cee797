"""Your own pairs of texts: JSONL files, and the share that is held out of training.

Comes after `documents`, before `pairs`, which tokenizes them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe.checks import shown
from moe.errors import DataError
from moe.parsing import read_json_lines

_ADVICE = 'Expected an object like {"inputs": "...", "targets": "..."} a line.'

LEAST_PAIRS = 20
"""With fewer pairs none are held out, unless a share is given: scores on one or two pairs mean nothing."""


class Pair(NamedTuple):
    """A line of a file of pairs.

    Attributes:
        inputs: Text that the model sees.
        targets: Text that the model should write.
        group: Pairs of one group depend on each other; None if the pair is its own group.
    """

    inputs: str
    targets: str
    group: str | None = None

    @property
    def texts(self) -> tuple[str, str]:
        """Input and target, which training sees."""
        return self.inputs, self.targets


def read_pairs(path: Path) -> list[Pair]:
    """Returns the pairs of a JSONL file, an object with `inputs` and `targets` a line.

    The object may have a `group`, a text or an integer; other keys are not read.

    Raises:
        DataError: When a line is something else, or there is none.
    """
    pairs = []
    for number, record in read_json_lines(path, advice=_ADVICE, nan=True, pipe=True):
        for name in ("inputs", "targets"):
            if not isinstance(record.get(name), str):
                value = shown(record[name]) if name in record else "missing"
                raise DataError(f"{path}, line {number}: {name} is {value}. {_ADVICE}")

        group = record.get("group")
        if group is not None and (isinstance(group, bool) or not isinstance(group, str | int)):
            raise DataError(
                f"{path}, line {number}: group is {shown(group)}. Expected a text or an integer, "
                "or no group."
            )
        pairs.append(
            Pair(record["inputs"], record["targets"], None if group is None else str(group))
        )

    if not pairs:
        raise DataError(f"{path} holds no pairs. {_ADVICE}")
    return pairs


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


def num_shared_inputs(train: Sequence[Pair], dev: Sequence[Pair]) -> int:
    """Returns how many dev pairs have an input that is also trained on."""
    trained = {pair.inputs for pair in train}
    return sum(pair.inputs in trained for pair in dev)
