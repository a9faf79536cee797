"""Maps checkpoints of transformers' T5, mT5, umT5 and Switch to our weights, read on demand.

One table of names serves loading and writing. The last lines register all families for
`from_pretrained`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe.convert.hf_config import (
    FAMILIES,
    IGNORED_FIELDS,
    Family,
    from_hf_config,
    hf_family,
    is_written_tied,
)
from moe.convert.weight_map import (
    ConvertedCheckpoint,
    WeightMapping,
    are_equal,
    convert_weights,
    empty_weights,
    renamed_weights,
)
from moe.errors import CheckpointError
from moe.models.checkpoint_formats import CHECKPOINT_FORMATS, CheckpointFormat
from moe.models.configuration import STMoEConfig
from moe.models.weight_files import LazyTensor, find_weight_files, open_weights

_THEIR_NAMES = {
    r"^model\.encoder\.embed_tokens": "shared",
    r"^model\.(encoder|decoder)(\.stack)?": r"\1",
    r"final_norm": "final_layer_norm",
    # The first block holds the table that all of them use.
    r"^(\w+)\.position_bias": r"\1.blocks.0.position_bias",
    # The layers of a block are numbered, and a decoder has one more.
    r"blocks\.(\d+)": r"block.\1.layer",
    r"position_bias\.table": "0.SelfAttention.relative_attention_bias.weight",
    r"self_attention_norm": "0.layer_norm",
    r"self_attention\.(\w)_proj": r"0.SelfAttention.\1",
    r"cross_attention_norm": "1.layer_norm",
    r"cross_attention\.(\w)_proj": r"1.EncDecAttention.\1",
    r"^(encoder.*layer)\.(sparse|feed_forward)": r"\1.1.\2",
    r"^(decoder.*layer)\.(sparse|feed_forward)": r"\1.2.\2",
    r"(sparse|feed_forward)_norm": "layer_norm",
    r"sparse_feed_forward\.router\.gate": "mlp.router.classifier.weight",
    r"sparse_feed_forward\.experts\.(gate_)?up_proj": "mlp.experts.expert_{expert}.{up}.weight",
    r"sparse_feed_forward\.experts\.down_proj": "mlp.experts.expert_{expert}.wo.weight",
    # Settings may add weights, which start as new ones.
    r".*sparse_feed_forward.*": "",
    r"feed_forward\.up_proj": "DenseReluDense.{up}",
    r"feed_forward\.down_proj": "DenseReluDense.wo",
}
"""Patterns in our names, and what transformers has instead; see `renamed_weights`."""


def hf_weight_map(config: STMoEConfig, family: Family) -> list[WeightMapping]:
    """Returns our weights with their names in transformers' T5 and Switch.

    Args:
        config: Config of our model.
        family: Whose names; those of T5, mT5 and umT5 are equal.

    Source:
        transformers 5.23.0 models/t5, models/umt5, models/switch_transformers.
    """
    patterns = _THEIR_NAMES
    if family == "switch_transformers":
        patterns = {**patterns, "DenseReluDense": "mlp"}
    return renamed_weights(empty_weights(config), patterns, up_names(config))


def up_names(config: STMoEConfig) -> tuple[str, ...]:
    """Returns the names of the projections into the hidden units, the gate first."""
    return ("wi_0", "wi_1") if config.gated else ("wi",)


_SHARED = "shared.weight"
_ENCODER_TABLE = "encoder.embed_tokens.weight"
_DECODER_TABLE = "decoder.embed_tokens.weight"
_HEAD = "lm_head.weight"
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def open_hf_checkpoint(
    source: Path | str,
    raw_config: Mapping[str, Any],
    config: STMoEConfig,
    *,
    leave_out: Iterable[str] = (),
    use_safetensors: bool | None = None,
    **download: Any,
) -> ConvertedCheckpoint:
    """Returns a T5 or Switch of a folder or the hub as a model of ours; reads no weight yet.

    Args:
        source: The folder or name.
        raw_config: Content of its config.json.
        config: Config of our model.
        leave_out: Patterns of our names to leave out.
        use_safetensors: See `find_weight_files`.
        download: `revision`, `token`, `cache_dir` and the like of transformers' `cached_file`.

    Raises:
        CheckpointError: When there are no weights, or they are incomplete.
    """
    family = hf_family(raw_config)
    paths = find_weight_files(source, use_safetensors=use_safetensors, **download)
    stored = open_weights(paths)

    # A T5 has the head that is stored, whatever its config.json says.
    is_tied = family != "switch_transformers" and from_hf_config(raw_config)["tie_word_embeddings"]
    if is_tied and {_HEAD, _SHARED} <= stored.keys():
        config.tie_word_embeddings = are_equal(stored[_HEAD], stored[_SHARED])

    # transformers 5 writes every T5 as tied, and its head only when that is another tensor.
    written_tied = is_written_tied(raw_config, family)
    stored, embedding, ignored = _resolve_embeddings(
        stored, config, source=str(source), head_is_embedding=written_tied
    )
    for name in raw_config:
        if name in IGNORED_FIELDS:
            ignored[f"{name} of config.json"] = IGNORED_FIELDS[name]
    if family == "umt5" and not config.scale_decoder_outputs:
        ignored["d_model^-0.5 on logits"] = "is a mistake of transformers 5.0.0 to 5.23"

    # The table with which the stacks compute replaces the shared one.
    weight_map = []
    for mapping in hf_weight_map(config, family):
        if mapping.parts == (_SHARED,):
            mapping = mapping._replace(parts=(embedding,))
        weight_map.append(mapping)
    return convert_weights(
        str(source), config, weight_map, stored, ignored=ignored, leave_out=leave_out
    )


def open_hf_weights(*args: Any, **options: Any) -> dict[str, LazyTensor]:
    """Returns our weights <any>[...] by name, converted from a T5 or Switch; see `open_hf_checkpoint`."""
    checkpoint = open_hf_checkpoint(*args, **options)
    checkpoint.report.refuse_unexplained()
    return checkpoint.weights


# ---------------------------------------------------------------------------
# Embeddings: one table here, up to four copies there


def _resolve_embeddings(
    stored: Mapping[str, LazyTensor], config: STMoEConfig, *, source: str, head_is_embedding: bool
) -> tuple[dict[str, LazyTensor], str, dict[str, str]]:
    """Returns the tensors of a T5 or Switch with one embedding among them.

    A stack computes with its own table if one is stored, and with the shared one otherwise.

    Args:
        stored: Tensors <any>[...] of the checkpoint by name.
        config: Config of our model.
        source: The folder or hub name, for messages.
        head_is_embedding: Whether a missing head is the embedding, although its input is not scaled.

    Returns:
        The tensors by name, of which tables that differ from the embedding are renamed; the name of
        the embedding; and names that are not needed, with the reasons.

    Raises:
        CheckpointError: When the stacks, or a stack and a tied head, compute with different tables.

    Source:
        transformers 5.23.0: tensors tied by the config but stored with other numbers are not tied.
    """
    # Copied, since entries are renamed and added.
    stored = dict(stored)
    ignored: dict[str, str] = {}
    if _UNUSED in stored:
        ignored[_UNUSED] = "is not used: T5 1.0 stored it, cross-attention has no positions"
    tables = [name for name in (_SHARED, _ENCODER_TABLE, _DECODER_TABLE) if name in stored]
    if not tables:
        return stored, _SHARED, ignored

    # The table of each part of the original.
    shared = tables[0]
    encoder = _ENCODER_TABLE if _ENCODER_TABLE in stored else shared
    decoder = _DECODER_TABLE if _DECODER_TABLE in stored else shared
    if not are_equal(stored[encoder], stored[decoder]):
        raise CheckpointError(_two_tables(source, "encoder", encoder, "decoder", decoder))

    embedding = shared if are_equal(stored[shared], stored[encoder]) else encoder
    if config.tie_word_embeddings and embedding != shared:
        raise CheckpointError(_two_tables(source, "stacks", encoder, "head", shared))
    if head_is_embedding and _HEAD not in stored:
        stored[_HEAD] = stored[shared]

    # All others must be copies of it, or unused.
    others = [*tables, _HEAD] if config.tie_word_embeddings else tables
    for name in others:
        if name == embedding or name not in stored:
            continue
        if are_equal(stored[name], stored[embedding]):
            ignored[name] = f"is a copy of {embedding}"
        elif name == shared:
            ignored[name] = "is not used: both stacks compute with tables of their own"
        else:
            stored[f"{name} (other numbers than {embedding})"] = stored.pop(name)
    return stored, embedding, ignored


def _two_tables(source: str, first: str, first_table: str, second: str, second_table: str) -> str:
    """Returns the message for a model with two different embeddings."""
    return (
        f"{source} cannot be converted: its own class computes the {first} with {first_table} "
        f"and the {second} with {second_table}, whose numbers differ; here they share one "
        "embedding. If one of them is left over from training, remove it from the checkpoint."
    )


for _family in FAMILIES:
    CHECKPOINT_FORMATS.add(_family, CheckpointFormat(from_hf_config, open_hf_weights))
