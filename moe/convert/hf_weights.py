"""Checkpoints of T5 and Switch as weights of ours, read when they are asked for; every tensor is
accounted for.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.convert.hf_config import EXPLAINED, FAMILIES, family_of, own_fields
from moe.convert.hf_names import Weight, transformers_names
from moe.errors import CheckpointError
from moe.models.checkpoint_formats import CHECKPOINT_FORMATS, CheckpointFormat
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import LazyTensor, find_weight_files, open_weights, refuse_integers

_SHOWN = 8
_SHARED = "shared.weight"
_EMBEDDINGS = (_SHARED, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


@dataclass(frozen=True)
class ConversionReport:
    """What became of every tensor of a foreign checkpoint.

    Attributes:
        source: The folder or hub name.
        mapped: Their names by ours.
        ignored: Their names that are not needed, each with the reason; fields of config.json too.
        missing: Their names that the model needs and the checkpoint has not.
        unexpected: Their names that nothing is known of.
        reshaped: Ours, with the shape that the checkpoint gives and the shape of the model.
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
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.reshaped),
        )
        if found := "; ".join(
            f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names
        ):
            raise CheckpointError(
                f"{self.source} cannot be converted: not every tensor is accounted for. {found}. Download or copy it "
                "again; if config.json was edited or a setting was given, undo that."
            )

    def __str__(self) -> str:
        """Returns the report as lines for a terminal."""
        joined = sum(len(parts) for parts in self.mapped.values())
        lines = [
            f"{self.source}: {joined} tensors mapped to {len(self.mapped)}, {len(self.ignored)} ignored"
        ]
        for reason in dict.fromkeys(self.ignored.values()):
            names = [name for name, why in self.ignored.items() if why == reason]
            lines.append(f"  ignored, {reason}: {_some(names)}")
        for kind in ("missing", "unexpected", "reshaped"):
            lines += [f"  {kind}: {name}" for name in getattr(self, kind)]
        return "\n".join(lines)


def _some(names: list[str]) -> str:
    """Returns the first few names and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class Foreign(NamedTuple):
    """A checkpoint as a model of ours.

    Attributes:
        config: Of the model.
        weights: Each is read, and joined of its parts, when it is indexed.
        report: What became of every tensor.
    """

    config: STMoEConfig
    weights: dict[str, LazyTensor]
    report: ConversionReport


def open_transformers(
    source: Path | str,
    config: STMoEConfig | None = None,
    *,
    leave_out: Iterable[str] = (),
    use_safetensors: bool | None = None,
    **download: Any,
) -> Foreign:
    """Returns a T5 or Switch model of transformers, of a folder or the hub, as one of ours; reads
    no weight yet.

    Args:
        source: The folder or name.
        config: With settings that differ from the source's; None for the source's.
        leave_out: Patterns of our names that are not wanted.
        use_safetensors: See `find_weight_files`.
        download: `revision`, `token`, `cache_dir` and the like of transformers' `cached_file`.

    Raises:
        ConfigError: When its config.json holds what this library cannot represent.
        CheckpointError: When there are no weights, or they are torn.
    """
    raw = STMoEConfig.read_raw(source, **download)
    family = family_of(raw)
    assert family is not None, "the caller has looked"
    config = config or STMoEConfig.from_pretrained(source, **download)
    stored = open_weights(find_weight_files(source, use_safetensors=use_safetensors, **download))
    # transformers 5 writes an untied T5 as tied and unscaled, and its head only when that is
    # another tensor.
    written_tied = family == "t5" and raw.get("scale_decoder_outputs") is False
    stored, embedding, ignored = _settle_copies(
        stored, config, source=str(source), head_is_embedding=written_tied
    )
    ignored |= {f"{name} of config.json": EXPLAINED[name] for name in raw if name in EXPLAINED}
    names = transformers_names(config, family)
    table = [
        weight._replace(parts=(embedding,)) if weight.parts == (_SHARED,) else weight
        for weight in names
    ]
    return convert_weights(str(source), config, table, stored, ignored=ignored, leave_out=leave_out)


def convert_weights(
    source: str,
    config: STMoEConfig,
    table: Iterable[Weight],
    stored: Mapping[str, LazyTensor],
    *,
    ignored: Mapping[str, str],
    leave_out: Iterable[str] = (),
) -> Foreign:
    """Returns `stored` tensors as weights of ours, and what became of each.

    Args:
        source: The folder or hub name, for messages.
        config: Of our model.
        table: Our weights with their names.
        stored: Theirs by name.
        ignored: Those of them that need no place, with the reason.
        leave_out: Patterns of our names that are not wanted.
    """
    whole = _whole_shapes(config)
    report = ConversionReport(source, ignored=dict(ignored))
    weights, known = {}, set(ignored)
    for weight in table:
        known |= set(weight.parts)
        if any(re.search(pattern, weight.name) for pattern in leave_out):
            report.ignored.update(
                {part: "is not part of this class" for part in weight.parts if part in stored}
            )
            continue
        if absent := [part for part in weight.parts if part not in stored]:
            report.missing.extend(absent)
            continue
        report.mapped[weight.name] = weight.parts
        parts = [stored[part] for part in weight.parts]
        expected = [tuple(piece.shape) for piece in weight.pieces(whole[weight.name])]
        both = zip(weight.parts, parts, expected, strict=True)
        report.reshaped.extend(
            f"{name} {a.shape} instead of {b}" for name, a, b in both if a.shape != b
        )
        refuse_integers(
            source,
            {part: whole[weight.name] for part in weight.parts},
            {part: stored[part].dtype for part in weight.parts},
        )
        weights[weight.name] = _joined(weight, parts, tuple(whole[weight.name].shape))
    report.unexpected.extend(name for name in stored if name not in known)
    return Foreign(config, weights, report)


def _joined(weight: Weight, parts: list[LazyTensor], shape: tuple[int, ...]) -> LazyTensor:
    """Returns our weight, joined of its parts when it is indexed."""
    dtype = parts[0].dtype
    return LazyTensor(
        shape, dtype, lambda: weight.join((part.read() for part in parts), shape, dtype)
    )


def _whole_shapes(config: STMoEConfig) -> dict[str, Tensor]:
    """Returns our weights as tensors without memory."""
    with torch.device("meta"):
        return STMoEForConditionalGeneration(config).state_dict()


def _settle_copies(
    stored: Mapping[str, LazyTensor], config: STMoEConfig, *, source: str, head_is_embedding: bool
) -> tuple[dict[str, LazyTensor], str, dict[str, str]]:
    """Returns the tensors of a T5 or Switch checkpoint, the name of their embedding, and those that
    are not needed.

    A stack computes with a table of its own when one is stored, and with the shared one when not.

    Args:
        stored: Theirs by name.
        config: Of our model.
        source: The folder or hub name, for messages.
        head_is_embedding: Whether a head that is not stored is the embedding, though its input is
            not scaled.

    Raises:
        CheckpointError: When the stacks, or a stack and a tied head, compute with different tables.

    Source:
        transformers 5.23.0: what is tied by the config, and stored with other numbers, is not tied.
    """
    stored, ignored = dict(stored), {}
    if _UNUSED in stored:
        ignored[_UNUSED] = "is not used: T5 1.0 stored it, cross-attention has no positions"
    tables = [name for name in _EMBEDDINGS if name in stored]
    if not tables:
        return stored, _SHARED, ignored

    # What each part of the original computes with.
    shared = tables[0]
    encoder, decoder = (name if name in stored else shared for name in _EMBEDDINGS[1:])
    if not _equal(stored[encoder], stored[decoder]):
        raise CheckpointError(_two_tables(source, "encoder", encoder, "decoder", decoder))
    embedding = shared if _equal(stored[shared], stored[encoder]) else encoder
    if config.tie_word_embeddings and embedding != shared:
        raise CheckpointError(_two_tables(source, "stacks", encoder, "head", shared))
    if head_is_embedding and "lm_head.weight" not in stored:
        stored["lm_head.weight"] = stored[shared]

    # What that makes of the others.
    copies = [*tables, "lm_head.weight"] if config.tie_word_embeddings else tables
    for name in copies:
        if name == embedding or name not in stored:
            continue
        if _equal(stored[name], stored[embedding]):
            ignored[name] = f"is a copy of {embedding}"
        elif name == shared:
            ignored[name] = "is not used: both stacks compute with tables of their own"
        else:
            stored[f"{name} (other numbers than {embedding})"] = stored.pop(name)
    return stored, embedding, ignored


def _two_tables(source: str, first: str, of_first: str, second: str, of_second: str) -> str:
    """Returns why a model with two different embeddings is refused."""
    return (
        f"{source} cannot be converted: its own class computes the {first} with {of_first} and the {second} with "
        f"{of_second}, whose numbers differ; here they share one embedding. If one of them is left over from training, "
        "remove it from the checkpoint."
    )


def _equal(a: LazyTensor, b: LazyTensor) -> bool:
    """Returns whether two tensors hold the same numbers."""
    return a is b or (a.shape == b.shape and torch.equal(a.read(), b.read()))


def open_hf_weights(
    source: Path | str,
    config: STMoEConfig,
    *,
    leave_out: Iterable[str] = (),
    use_safetensors: bool | None = None,
    **download: Any,
) -> dict[str, LazyTensor]:
    """Returns the weights of a T5 or Switch as ours; see `OpenWeights`."""
    checkpoint = open_transformers(
        source, config, leave_out=leave_out, use_safetensors=use_safetensors, **download
    )
    checkpoint.report.refuse_unexplained()
    return checkpoint.weights


for _family in FAMILIES:
    CHECKPOINT_FORMATS.add(_family, CheckpointFormat(own_fields, open_hf_weights))
