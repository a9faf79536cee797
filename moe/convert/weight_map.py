"""Maps each of our weights to tensors of another library, and reports on every tensor."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from moe.checkpoint.loading import empty_model
from moe.checkpoint.sharded_weights import stored_tensors
from moe.errors import CheckpointError
from moe.models.weight_files import LazyTensor, describe_misfits, describe_reshaped, first_names
from moe.sparse.editing import LayerKey, sparse_layers


class WeightMapping(NamedTuple):
    """One of our weights and its parts, which are tensors of another library.

    Attributes:
        name: Our name, in STMoEForConditionalGeneration or the class of a host.
        parts: Names of those tensors, expert by expert, with the gate of each expert first.
        num_experts: Experts that are stacked along a new first dimension; 0 for none.
        transposed: Whether the last two dimensions of the parts are swapped.
    """

    name: str
    parts: tuple[str, ...]
    num_experts: int = 0
    transposed: bool = False

    def join(self, parts: Iterable[Tensor], shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Returns our tensor <dtype>[...] of `shape`, copied from its parts one at a time.

        Args:
            parts: Tensors <any>[...] in the order of `self.parts`.
            shape: Shape of our tensor.
            dtype: Dtype of our tensor.
        """
        joined = torch.empty(tuple(shape), dtype=dtype)
        for part, piece in zip(parts, self.pieces(joined), strict=True):
            piece.copy_(part)
        return joined

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Returns the parts by name as views of our tensor <any>[...]."""
        return dict(zip(self.parts, self.pieces(tensor), strict=True))

    def pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yields the views <any>[...] of our tensor that are its parts, in their order."""
        experts = tensor.unbind(0) if self.num_experts else [tensor]
        pieces_per_expert = len(self.parts) // max(self.num_experts, 1)
        for expert in experts:
            # The gate precedes the rest in one tensor.
            pieces = expert.chunk(pieces_per_expert, dim=-2) if pieces_per_expert > 1 else [expert]
            for piece in pieces:
                yield piece.transpose(-1, -2) if self.transposed else piece


def renamed_weights(
    weights: Mapping[str, Tensor], patterns: Mapping[str, str], up_names: Sequence[str] = ("",)
) -> list[WeightMapping]:
    """Returns weights of ours or of a host with their names in another library.

    Args:
        weights: <any>[...] by our names, without memory.
        patterns: Regular expressions, and what takes the place of each of their matches in a name,
            one after the other. `{expert}` becomes the number of each expert, and `{up}` each of
            `up_names`. A weight whose name becomes empty is left out.
        up_names: Names there of the projections into the hidden units, the gate first.
    """
    weight_map: list[WeightMapping] = []
    for name, weight in weights.items():
        theirs = name
        for pattern, replacement in patterns.items():
            theirs = re.sub(pattern, replacement, theirs)
        if not theirs:
            continue

        # Expert by expert, the gate before the rest.
        num_experts = len(weight) if "{expert}" in theirs else 0
        num_ups = len(up_names) if "{up}" in theirs else 1
        parts: list[str] = []
        for expert in range(max(1, num_experts)):
            parts += [theirs.format(expert=expert, up=up) for up in up_names[:num_ups]]
        weight_map.append(WeightMapping(name, tuple(parts), num_experts))
    return weight_map


def sparse_blocks(config: PreTrainedConfig) -> dict[str, LayerKey]:
    """Returns the sparse layers of a model of ours or a host, the encoder's first.

    The prefix is that of the module which holds the layer: in ours a block, in a host its feed-forward.
    """
    model = empty_model(config)
    names = {module: name for name, module in model.named_modules()}
    keys: dict[str, LayerKey] = {}
    for key, layer in sparse_layers(model).items():
        parent, _, _ = names[layer].rpartition(".")
        keys[f"{parent}."] = key
    return keys


def empty_weights(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Returns the weights <any>[...] that a model is stored as, by name and without memory."""
    return stored_tensors(empty_model(config))


@dataclass(frozen=True)
class ConversionReport:
    """Report on every tensor of another library's checkpoint.

    Attributes:
        source: The folder or hub name.
        mapped: Names in the source by our name.
        ignored: Names in the source that are not needed, with the reasons; also fields of
            config.json.
        missing: Names that the model needs and the source lacks.
        unexpected: Unknown names in the source.
        reshaped: Names in the source with their shapes there and in the model.
    """

    source: str
    mapped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)

    def refuse_unexplained(self) -> None:
        """Raises when a tensor is missing, unexpected or of another shape.

        Raises:
            CheckpointError: Counts them and names the first.
        """
        misfits = describe_misfits(self.missing, self.unexpected, self.reshaped)
        if misfits:
            raise CheckpointError(
                f"{self.source} cannot be converted: not every tensor is accounted for. "
                f"{misfits}. Download or copy it again; if config.json was edited or a setting "
                "was given, undo that."
            )

    def __str__(self) -> str:
        """Returns the report as lines for a terminal."""
        num_tensors = sum(map(len, self.mapped.values()))
        lines = [
            f"{self.source}: {num_tensors} tensors mapped to {len(self.mapped)}, "
            f"{len(self.ignored)} ignored"
        ]

        # Reasons in order of appearance.
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.ignored.items():
            names_by_reason.setdefault(reason, []).append(name)
        for reason, names in names_by_reason.items():
            lines.append(f"  ignored, {reason}: {first_names(names)}")

        # Obstacles to the conversion, one name per line.
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "reshaped": self.reshaped}
        for kind, names in kinds.items():
            lines += [f"  {kind}: {name}" for name in names]
        return "\n".join(lines)


class ConvertedCheckpoint(NamedTuple):
    """A checkpoint as a model of ours, or as a host.

    Attributes:
        config: Config of the model.
        weights: Our weights <any>[...] by name; each is read and joined from its parts when indexed.
        report: Report on every tensor.
    """

    config: Any
    weights: dict[str, LazyTensor]
    report: ConversionReport


def convert_weights(
    source: str,
    config: PreTrainedConfig,
    weight_map: Iterable[WeightMapping],
    stored: Mapping[str, LazyTensor],
    *,
    ignored: Mapping[str, str],
    leave_out: Iterable[str] = (),
) -> ConvertedCheckpoint:
    """Returns stored tensors as weights of ours, with a report on each.

    Args:
        source: The folder or hub name, for messages.
        config: Config of the model.
        weight_map: Our weights and the names of their parts.
        stored: Tensors <any>[...] of the source by name.
        ignored: Names in the source that none of our weights needs, with the reasons.
        leave_out: Patterns of our names to leave out.
    """
    # Shapes of our weights, without memory.
    expected = empty_model(config).state_dict()
    report = ConversionReport(source, ignored=dict(ignored))
    weights: dict[str, LazyTensor] = {}
    known = set(ignored)
    for mapping in weight_map:
        known |= set(mapping.parts)

        # The class may be only a part of the whole model.
        if any(re.search(pattern, mapping.name) for pattern in leave_out):
            for part in mapping.parts:
                if part in stored:
                    report.ignored[part] = "is not part of this class"
            continue

        missing = [part for part in mapping.parts if part not in stored]
        if missing:
            report.missing.extend(missing)
            continue

        report.mapped[mapping.name] = mapping.parts
        weights[mapping.name] = _join_parts(mapping, expected[mapping.name], stored, report)

    # Tensors that none of our weights needs.
    report.unexpected.extend(name for name in stored if name not in known)
    return ConvertedCheckpoint(config, weights, report)


def _join_parts(
    mapping: WeightMapping,
    expected: Tensor,
    stored: Mapping[str, LazyTensor],
    report: ConversionReport,
) -> LazyTensor:
    """Returns our weight, joined from its parts when indexed; reports parts of another shape.

    Args:
        mapping: Names of its parts.
        expected: <any>[...] our weight without memory.
        stored: Tensors <any>[...] of the source by name.
        report: Parts of another shape are added to it.
    """
    parts = [stored[name] for name in mapping.parts]
    pieces = mapping.pieces(expected)
    for name, part, piece in zip(mapping.parts, parts, pieces, strict=True):
        if part.shape != tuple(piece.shape):
            report.reshaped.append(describe_reshaped(name, part.shape, piece.shape))
        elif part.is_floating_point() != piece.is_floating_point():
            report.reshaped.append(f"{name} {part.dtype} instead of {piece.dtype}")

    shape = tuple(expected.shape)
    dtype = parts[0].dtype

    def read() -> Tensor:
        return mapping.join((part.read() for part in parts), shape, dtype)

    # The parts of an expert are whole tensors, or each is one of a stack.
    def read_each() -> Iterator[Tensor]:
        parts_per_expert = len(parts) // max(mapping.num_experts, 1)
        of_expert = mapping._replace(parts=mapping.parts[:parts_per_expert], num_experts=0)
        stacks = [] if mapping.num_experts else [iter(part) for part in parts]
        for number in range(shape[0]):
            start = number * parts_per_expert
            single = parts[start : start + parts_per_expert]
            pieces = [next(stack) for stack in stacks] or [part.read() for part in single]
            yield of_expert.join(pieces, shape[1:], dtype)

    return LazyTensor(shape, dtype, read, read_each=read_each)


def are_equal(a: LazyTensor, b: LazyTensor) -> bool:
    """Returns whether two tensors <any>[...] hold the same numbers."""
    return a is b or (a.shape == b.shape and torch.equal(a.read(), b.read()))
