"""The report of a conversion: what became of every tensor of another library's checkpoint."""

from dataclasses import dataclass, field
from typing import NamedTuple

from moe.errors import CheckpointError
from moe.models.configuration import STMoEConfig
from moe.models.weight_files import LazyTensor, count_by_kind, first_names


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
        misfits = count_by_kind(self.missing, self.unexpected, self.reshaped)
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
