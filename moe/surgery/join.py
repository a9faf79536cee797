"""Joining: one model with the experts of prefixes that several people added to the same model.

All weights outside of these experts and their rows of the router must be the same in all parents,
bit for bit; nothing is trained. The experts of the first parent's prefixes come first.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe.checks import check, shown
from moe.convert.formats import find_tokenizer_files, open_checkpoint, write_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint, empty_weights
from moe.data.tokenizer import TOKENIZER_FILE
from moe.errors import CheckpointError
from moe.models.checkpoint_formats import read_json_object
from moe.models.configuration import STMoEConfig
from moe.models.weight_files import LazyTensor


def join_checkpoints(sources: Sequence[Path | str], folder: Path) -> STMoEConfig:
    """Writes the model with the experts of all parents' prefixes; holds one tensor of each in memory.

    Args:
        sources: Folders or hub names of the parents.
        folder: Exists, and is empty.

    Returns:
        The config of the joined model.

    Raises:
        ConfigError: When a parent has no experts of a prefix, or two have those of the same one.
        CheckpointError: When the parents do not come from the same model; names the first setting
            or weight that differs.
    """
    parents = [open_checkpoint(source) for source in sources]
    joined = join(parents)

    vocabularies: list[Any] = []
    for source in sources:
        path = find_tokenizer_files(source, {}).get(TOKENIZER_FILE)
        vocabularies.append(path and read_json_object(path))
        if vocabularies[-1] != vocabularies[0]:
            _refuse(sources[0], source, TOKENIZER_FILE)
    write_checkpoint(joined, sources[0], folder)
    return joined.config


def join(parents: Sequence[ConvertedCheckpoint]) -> ConvertedCheckpoint:
    """Returns the joined model, whose parents' weights are compared when they are read.

    See `join_checkpoints` for the errors.
    """
    for parent in parents:
        parent.report.refuse_unexplained()
        own = getattr(parent.config, "prefix_experts", None)  # hosts have none
        expected = "experts to join, which stmoe upcycle --prefix adds"
        check(bool(own), f"prefix_experts of {parent.report.source}", own, expected)

    # The model they come from may have prefixes, too; a parent's last one is its own.
    records = [parent.config.prefix_experts for parent in parents]
    num_shared = 0
    for at_same_place in zip(*[of_parent[:-1] for of_parent in records], strict=False):
        if any(record != at_same_place[0] for record in at_same_place):
            break
        num_shared += 1
    own_records = [of_parent[num_shared:] for of_parent in records]

    # Without its own prefixes, each is the same model.
    first = parents[0]
    settings = with_prefixes(first.config, records[0][:num_shared]).settings()
    for parent in parents[1:]:
        others = with_prefixes(parent.config, records[0][:num_shared]).settings()
        for name, value in others.items():
            if value != settings.get(name):
                values = f"{name} ({shown(settings.get(name))} and {shown(value)})"
                _refuse(first.report.source, parent.report.source, values)

    config = with_prefixes(first.config, [*records[0], *chain.from_iterable(own_records[1:])])
    num_own = sum(record["num_experts"] for record in own_records[0])
    weights: dict[str, LazyTensor] = {}
    for name, tensor in empty_weights(config).items():
        num_rows = first.weights[name].shape[0]
        if tensor.shape[0] != num_rows:  # a row for each expert
            num_rows -= num_own
        weights[name] = _joined(parents, name, tuple(tensor.shape), num_rows)
    return first._replace(config=config, weights=weights)


def with_prefixes(config: STMoEConfig, records: Sequence[dict[str, Any]]) -> STMoEConfig:
    """Returns the config with the same base experts, and others of prefixes.

    Args:
        config: Config of a sparse model.
        records: See `STMoEConfig.prefix_experts`; none for the base experts alone.
    """
    change = sum(record["num_experts"] for record in records) - sum(config.prefix_counts())
    experts: dict[str, list[int]] = {}
    for stack, decoder in (("encoder", False), ("decoder", True)):
        numbers = config.layer_experts(decoder=decoder)
        experts[f"{stack}_experts"] = [number + change for number in numbers]
    return config.replaced(
        prefix_experts=list(records) or None, num_experts=config.num_experts + change, **experts
    )


def _joined(
    parents: Sequence[ConvertedCheckpoint], name: str, shape: tuple[int, ...], num_common: int
) -> LazyTensor:
    """Returns a weight <any>[...]: the first rows of the first parent, which all have, and all others'."""
    stacks = [parent.weights[name] for parent in parents]

    def read_each() -> Iterator[Tensor]:
        rows = [iter(stack) for stack in stacks]
        for number in range(num_common):
            first, *others = [next(of_parent) for of_parent in rows]
            for parent, other in zip(parents[1:], others, strict=True):
                if first.dtype != other.dtype or not torch.equal(first, other):
                    what = f"row {number} of {name}"
                    _refuse(parents[0].report.source, parent.report.source, what)
            yield first
        yield from chain.from_iterable(rows)

    return LazyTensor(shape, stacks[0].dtype, read_each=read_each)


def _refuse(source: Path | str, other: Path | str, what: str) -> NoReturn:
    raise CheckpointError(
        f"{source} and {other} do not come from the same model: they differ in {what}. Join models to which stmoe "
        "upcycle --prefix added experts, if nothing else was trained (stmoe finetune --parameters new_experts)."
    )
