"""The tensors of another library that each of our weights is made of, and what became of each."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moe.errors import CheckpointError
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import (
    LazyTensor,
    describe_misfits,
    describe_reshaped,
    first_names,
    refuse_integers,
)


class WeightMapping(NamedTuple):
    """One of our weights and the tensors of another library that it is made of.

    Attributes:
        name: Ours, in STMoEForConditionalGeneration.
        parts: Names of those tensors, expert by expert, of each expert the gate before the rest.
        num_experts: Experts that are stacked along a new first dimension; 0 for none.
        transposed: Whether the last two dimensions of the parts are the other way round.
    """

    name: str
    parts: tuple[str, ...]
    num_experts: int = 0
    transposed: bool = False

    def join(self, parts: Iterable[Tensor], shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Returns our tensor <dtype>[...] of `shape`, copied from its parts one at a time.

        Args:
            parts: Tensors <any>[...] in the order of `self.parts`.
            shape: Of our tensor.
            dtype: Of our tensor.
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
            # The gate stands above the rest, in one tensor.
            pieces = expert.chunk(pieces_per_expert, dim=-2) if pieces_per_expert > 1 else [expert]
            for piece in pieces:
                yield piece.transpose(-1, -2) if self.transposed else piece


class Stack(NamedTuple):
    """A stack of the model and of the other library's.

    Attributes:
        name: Name here.
        other_name: Name in the other library.
        num_blocks: Blocks.
        decoder: Whether it is the decoder.
    """

    name: str
    other_name: str
    num_blocks: int
    decoder: bool


def stacks_of(config: STMoEConfig) -> tuple[Stack, Stack]:
    """Returns the encoder and the decoder of a model."""
    num_encoder_blocks, _ = config.stack_sizes(False)
    num_decoder_blocks, _ = config.stack_sizes(True)
    return (
        Stack("model.encoder.stack", "encoder", num_encoder_blocks, decoder=False),
        Stack("model.decoder", "decoder", num_decoder_blocks, decoder=True),
    )


@dataclass(frozen=True)
class ConversionReport:
    """What became of every tensor of another library's checkpoint.

    Attributes:
        source: The folder or hub name.
        mapped: Names of the source by ours.
        ignored: Names of the source that are not needed, each with the reason; fields of
            config.json too.
        missing: Names that the model needs and the source has not.
        unexpected: Names of the source that nothing is known of.
        reshaped: Names of the source, with the shape in it and the shape of the model.
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

        # Reasons in the order in which they came up.
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.ignored.items():
            names_by_reason.setdefault(reason, []).append(name)
        for reason, names in names_by_reason.items():
            lines.append(f"  ignored, {reason}: {first_names(names)}")

        # What stands in the way of the conversion, one name a line.
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "reshaped": self.reshaped}
        for kind, names in kinds.items():
            lines += [f"  {kind}: {name}" for name in names]
        return "\n".join(lines)


class ConvertedCheckpoint(NamedTuple):
    """A checkpoint as a model of ours.

    Attributes:
        config: Of the model.
        weights: Ours by name <any>[...]; each is read, and joined of its parts, when it is indexed.
        report: What became of every tensor.
    """

    config: STMoEConfig
    weights: dict[str, LazyTensor]
    report: ConversionReport


def convert_weights(
    source: str,
    config: STMoEConfig,
    weight_map: Iterable[WeightMapping],
    stored: Mapping[str, LazyTensor],
    *,
    ignored: Mapping[str, str],
    leave_out: Iterable[str] = (),
) -> ConvertedCheckpoint:
    """Returns stored tensors as weights of ours, and what became of each.

    Args:
        source: The folder or hub name, for messages.
        config: Of our model.
        weight_map: Our weights and the names of their parts.
        stored: Tensors <any>[...] of the source by name.
        ignored: Names of the source that no weight of ours needs, with the reason.
        leave_out: Patterns of our names that are not wanted.
    """
    # Shapes of our weights; no memory is taken for them.
    with torch.device("meta"):
        expected = STMoEForConditionalGeneration(config).state_dict()

    report = ConversionReport(source, ignored=dict(ignored))
    weights: dict[str, LazyTensor] = {}
    known = set(ignored)
    for mapping in weight_map:
        known |= set(mapping.parts)

        # A class that is a part of the whole model.
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

    # Tensors that no weight of ours needs.
    report.unexpected.extend(name for name in stored if name not in known)
    return ConvertedCheckpoint(config, weights, report)


def _join_parts(
    mapping: WeightMapping,
    expected: Tensor,
    stored: Mapping[str, LazyTensor],
    report: ConversionReport,
) -> LazyTensor:
    """Returns our weight, joined of its parts when it is indexed; reports parts of another shape.

    Args:
        mapping: Names of its parts.
        expected: <any>[...] our weight without memory.
        stored: Tensors <any>[...] of the source by name.
        report: Gains the parts of another shape.

    Raises:
        CheckpointError: When a part holds integers in the place of floating-point numbers.
    """
    parts = [stored[name] for name in mapping.parts]
    pieces = mapping.pieces(expected)
    for name, part, piece in zip(mapping.parts, parts, pieces, strict=True):
        if part.shape != tuple(piece.shape):
            report.reshaped.append(describe_reshaped(name, part.shape, piece.shape))
        refuse_integers(report.source, {name: expected}, {name: part.dtype})

    shape = tuple(expected.shape)
    dtype = parts[0].dtype
    return LazyTensor(shape, dtype, partial(_read_and_join, mapping, parts, shape, dtype))


def _read_and_join(
    mapping: WeightMapping, parts: list[LazyTensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Returns our weight <dtype>[...], reading its parts one at a time."""
    return mapping.join((part.read() for part in parts), shape, dtype)
