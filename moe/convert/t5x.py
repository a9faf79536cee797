"""Checkpoints of T5X: a msgpack tree whose leaves are arrays or references to tensorstore files."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.checks import shown
from moe.convert.hf_weights import up_names
from moe.convert.weight_map import (
    ConvertedCheckpoint,
    WeightMapping,
    convert_weights,
    empty_weights,
    renamed_weights,
    sparse_blocks,
)
from moe.errors import CheckpointError, ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.weight_files import LazyTensor
from moe.parsing import reading
from moe.sparse.router_options import ROUTERS

_FILE = "checkpoint"

# Kinds of msgpack extension that flax writes for arrays.
_NDARRAY = 1
_SCALAR = 3
_ADVICE = "Copy the checkpoint again."

_SCANNED = r"subblock_|^(en|de)coder/((en|de)coder|layers)/"


# ---------------------------------------------------------------------------
# The checkpoint


def is_t5x(folder: Path | str) -> bool:
    """Returns whether a folder holds a checkpoint of T5X."""
    return (Path(folder) / _FILE).is_file() and not (Path(folder) / "config.json").is_file()


def open_t5x(folder: Path | str, **settings: Any) -> ConvertedCheckpoint:
    """Returns a checkpoint of T5X as a model of ours; tensors are read when they are indexed.

    The architecture follows from names and shapes. Other settings have defaults: with experts the
    conventions of Flaxformer, and the router `switch` if experts are not gated.

    Args:
        folder: Folder with the msgpack file `checkpoint`.
        settings: Fields of STMoEConfig that override them.

    Raises:
        ConfigError: When the architecture cannot be represented, or tensorstore and msgpack are not
            installed.
        CheckpointError: When the files are torn or hold no encoder-decoder.
    """
    folder = Path(folder)
    tree = _read_tree(folder / _FILE)

    # Besides the weights, `target`, the tree contains the optimizer's state.
    root = tree.get("optimizer", tree) if isinstance(tree, Mapping) else None
    if not isinstance(root, Mapping) or not isinstance(root.get("target"), Mapping):
        raise CheckpointError(
            f"{folder} holds no T5X model: {_FILE} has no tree called target or optimizer/target."
        )

    stored: dict[str, LazyTensor] = {}
    for name, leaf in _leaves(root["target"]):
        stored[name] = _lazy_tensor(folder, name, leaf)
    ignored: dict[str, str] = {}
    for name, _ in _leaves(root.get("state", {})):
        ignored[f"state/{name}"] = "belongs to the optimizer"

    shapes = {name: tensor.shape for name, tensor in stored.items()}
    config = _infer_config(shapes, settings)
    config.dtype = stored["token_embedder/embedding"].dtype
    return convert_weights(str(folder), config, t5x_weight_map(config), stored, ignored=ignored)


def _read_tree(path: Path) -> object:
    """Returns the content of a msgpack file: a tree if flax wrote it.

    Raises:
        CheckpointError: When it is torn.
    """
    msgpack: Any = _import_optional("msgpack")
    read_array = partial(_read_array, msgpack)
    with reading(path, problem="cannot be read as msgpack", advice=_ADVICE, error=CheckpointError):
        return msgpack.unpackb(
            path.read_bytes(), ext_hook=read_array, raw=False, strict_map_key=False
        )


def _import_optional(name: str) -> Any:
    """Returns an optional module.

    Raises:
        ConfigError: When it is not installed.
    """
    try:
        return __import__(name)
    except ImportError as error:
        raise ConfigError(
            f"Checkpoints of T5X are read with {name}, which is not installed. Run pip install "
            "'stmoe[t5x]'."
        ) from error


def _read_array(msgpack: Any, kind: int, data: bytes) -> object:
    """Returns an array that flax wrote as a tensor <any>[...]; other data as its bytes.

    Source:
        google/flax serialization.py, `_msgpack_ext_unpack`.
    """
    if kind not in (_NDARRAY, _SCALAR):
        return data

    # flax writes shape, dtype and bytes as a nested message.
    shape, dtype_name, buffer = msgpack.unpackb(data, raw=True, strict_map_key=False)
    if isinstance(dtype_name, bytes):
        dtype_name = dtype_name.decode()
    dtype = _find_dtype(dtype_name)
    # torch cannot create a tensor from an empty buffer.
    if not buffer:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(buffer), dtype=dtype).reshape(tuple(shape))


def _find_dtype(name: str) -> torch.dtype:
    """Returns the dtype that numpy and torch call `name`.

    Raises:
        ValueError: When torch has none of that name.
    """
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {shown(name)}")
    return dtype


# ---------------------------------------------------------------------------
# Leaves of the tree: arrays, arrays in chunks, and files of tensorstore


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a tree with their paths."""
    if not isinstance(tree, Mapping):
        return
    for name, value in tree.items():
        is_branch = isinstance(value, Mapping) and not (
            "kvstore" in value or "__msgpack_chunked_array__" in value
        )
        if is_branch:
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _lazy_tensor(folder: Path, name: str, leaf: Any) -> LazyTensor:
    """Returns a leaf of the tree as a tensor <any>[...] that is read when it is indexed."""
    if isinstance(leaf, Mapping) and "kvstore" in leaf:
        return _open_zarr(folder, name, leaf)
    if isinstance(leaf, Mapping):
        leaf = _join_chunks(folder, name, leaf)
    if not isinstance(leaf, Tensor):
        raise CheckpointError(
            f"target/{name} in {folder / _FILE} is a {type(leaf).__name__}; expected a tensor."
        )
    return LazyTensor(leaf.shape, leaf.dtype, lambda: leaf)


def _join_chunks(folder: Path, name: str, leaf: Mapping[str, Any]) -> Tensor:
    """Returns an array <any>[...] larger than 2 GB, which flax writes in chunks."""
    where = f"target/{name} in {folder / _FILE}"
    with reading(
        where, problem="cannot be read as chunks of an array", advice=_ADVICE, error=CheckpointError
    ):
        shape = _list_of(leaf["shape"])
        chunks = map(torch.flatten, _list_of(leaf["chunks"]))
        return torch.cat(list(chunks)).reshape(shape)


def _list_of(tree: Mapping[str, Any]) -> list[Any]:
    return [tree[str(number)] for number in range(len(tree))]


def _open_zarr(folder: Path, name: str, spec: Mapping[str, Any]) -> LazyTensor:
    """Returns the tensor <any>[...] of a tensorstore spec."""
    tensorstore: Any = _import_optional("tensorstore")

    # The spec names the original folder, but the arrays were copied with it.
    kvstore = spec["kvstore"]
    written_path = str(kvstore.get("path", "") if isinstance(kvstore, Mapping) else kvstore)
    path = folder / Path(written_path.rstrip("/")).name
    local_spec = {
        "driver": spec.get("driver", "zarr"),
        "kvstore": {"driver": "file", "path": f"{path}/"},
    }
    where = f"target/{name} in {path}"
    with reading(where, advice=_ADVICE, error=CheckpointError):
        store = tensorstore.open(local_spec, open=True, read=True).result()
        dtype = _find_dtype(store.dtype.name)

    def read() -> Tensor:
        array = store.read().result()
        # torch cannot read numpy's bfloat16.
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)
        return torch.from_numpy(array)

    return LazyTensor(store.shape, dtype, read)


# ---------------------------------------------------------------------------
# The architecture


def _infer_config(
    shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]
) -> STMoEConfig:
    """Returns the configuration of a model with tensors of these shapes.

    Args:
        shapes: Shapes by the tensors' names below `target`.
        settings: Fields of STMoEConfig that override it.

    Raises:
        CheckpointError: When a required tensor is missing.
        ConfigError: When it cannot be represented.
    """
    scanned = next((name for name in shapes if re.search(_SCANNED, name)), None)
    if scanned is not None:
        raise ConfigError(
            f"target/{scanned} belongs to scanned layers, which store all blocks in one tensor. Write the checkpoint "
            "with scan_layers = False in T5X, and convert that."
        )

    # Blocks, and which of them are sparse, follow from the names; sizes from the shapes.
    encoder = _find_blocks(shapes, "encoder")
    decoder = _find_blocks(shapes, "decoder")
    fields = _backbone_fields(shapes)
    fields["num_layers"] = len(encoder)
    fields["num_decoder_layers"] = len(decoder)
    if not any(encoder.values()) and not any(decoder.values()):
        return STMoEConfig(**{**fields, **settings})

    fields["num_experts"] = _shape(shapes, r"(en|de)coder/layers_\d+/mlp/expert/wo/kernel")[0]
    fields["num_sparse_encoder_layers"] = sum(encoder.values())
    fields["num_sparse_decoder_layers"] = sum(decoder.values())
    fields["sparse_dense_stacking"] = any("/extra_mlp/" in name for name in shapes)
    # Models with ungated experts are Switch models, which select one expert.
    if fields["feed_forward_proj"] == "relu":
        fields["router"] = "switch"
    router = {**fields, **settings}.get("router")
    if router is not None and ROUTERS.get(router).single:
        fields["num_selected_experts"] = 1

    # Find the position of the sparse block that matches the checkpoint.
    for position in ("last", "second"):
        all_settings = {**fields, "sparse_position": position, **settings}
        config = STMoEConfig(**{"convention": "flaxformer", **all_settings})
        if _matches(config, encoder, decoder=False) and _matches(config, decoder, decoder=True):
            return config

    encoder_blocks = _sparse_blocks(encoder)
    decoder_blocks = _sparse_blocks(decoder)
    raise ConfigError(
        f"The checkpoint of T5X has sparse blocks {encoder_blocks} in the encoder and {decoder_blocks} in the "
        "decoder; expected the last or the second layer of equally long groups. Such a model cannot be represented "
        "here."
    )


def _backbone_fields(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the fields of STMoEConfig that dense models have, too, except for the blocks."""
    vocab_size, d_model = _shape(shapes, r"token_embedder/embedding")
    num_heads, num_buckets = _shape(shapes, r"encoder/(layers_0/)?relpos_bias/rel_embedding")
    width = _shape(shapes, r"encoder/layers_\d+/attention/query/kernel")[-1]
    d_ff = _shape(shapes, r"encoder/layers_\d+/mlp/(expert/)?wi(_0)?/kernel")[-1]
    gated = any(name.endswith("/wi_0/kernel") for name in shapes)
    return {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_kv": width // num_heads,
        "d_ff": d_ff,
        "num_heads": num_heads,
        "relative_attention_num_buckets": num_buckets,
        "relative_bias_in_every_block": "encoder/relpos_bias/rel_embedding" not in shapes,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": "decoder/logits_dense/kernel" not in shapes,
    }


def _matches(config: STMoEConfig, blocks: Mapping[int, bool], *, decoder: bool) -> bool:
    """Returns whether the sparse blocks of a stack match those of a checkpoint."""
    built = [config.is_sparse_block(block, decoder=decoder) for block in blocks]
    return built == list(blocks.values())


def _sparse_blocks(blocks: Mapping[int, bool]) -> list[int]:
    return [block for block, is_sparse in blocks.items() if is_sparse]


def _shape(shapes: Mapping[str, tuple[int, ...]], pattern: str) -> tuple[int, ...]:
    """Returns the shape of the first tensor whose name matches a pattern.

    Raises:
        CheckpointError: When there is none.
    """
    for name, shape in shapes.items():
        if re.fullmatch(pattern, name):
            return shape
    raise CheckpointError(
        f"The checkpoint of T5X has no target/{pattern}: it is not an encoder-decoder of T5, "
        "Switch or ST-MoE."
    )


def _find_blocks(shapes: Iterable[str], stack: str) -> dict[int, bool]:
    """Returns the blocks of a stack in order, and whether each is sparse."""
    pattern = re.compile(rf"{stack}/layers_(\d+)/(mlp/expert/)?")
    is_sparse: dict[int, bool] = {}
    for name in shapes:
        match = pattern.match(name)
        if match:
            block = int(match[1])
            is_sparse[block] = is_sparse.get(block, False) or bool(match[2])
    return dict(sorted(is_sparse.items()))


# ---------------------------------------------------------------------------
# Names


_THEIR_NAMES = {
    r"^model\.encoder\.embed_tokens\.weight": "token_embedder/embedding",
    r"^lm_head\.weight": "decoder/logits_dense/kernel",
    r"^model\.(encoder|decoder)(\.stack)?\.": r"\1/",
    r"^(\w+)/final_norm\.weight": r"\1/\1_norm/scale",
    r"blocks\.(\d+)\.": r"layers_\1/",
    r"position_bias\.table": "relpos_bias/rel_embedding",
    r"^(encoder.*)self_attention": r"\1attention",
    r"cross_attention\.": "encoder_decoder_attention.",
    r"\.q_proj\.weight": "/query/kernel",
    r"\.k_proj\.weight": "/key/kernel",
    r"\.v_proj\.weight": "/value/kernel",
    r"\.o_proj\.weight": "/out/kernel",
    r"sparse_feed_forward\.router\.gate": "mlp/router/router_weights/w/kernel",
    r"sparse_feed_forward\.experts\.(gate_)?up_proj": "mlp/expert/{up}/kernel",
    r"sparse_feed_forward\.experts\.down_proj": "mlp/expert/wo/kernel",
    # Settings may add weights, which start as new ones.
    r".*sparse_feed_forward.*": "",
    r"feed_forward\.up_proj\.weight": "mlp/{up}/kernel",
    r"feed_forward\.down_proj\.weight": "mlp/wo/kernel",
    r"(sparse|feed_forward)_norm": "mlp_norm",
    r"(\w+)_norm\.weight": r"pre_\1_layer_norm/scale",
}
"""Patterns in our names, and what T5X has instead; see `renamed_weights`."""


def t5x_weight_map(config: STMoEConfig) -> list[WeightMapping]:
    """Returns our weights with their names in a checkpoint of T5X, below its `target`.

    Source:
        google/flaxformer at 399ea3a8, t5x/architectures/moe; google-research/t5x, unscanned
        checkpoints.
    """
    # A dense layer after a sparse one is called extra_mlp.
    patterns: dict[str, str] = {}
    for block in sparse_blocks(config):
        patterns[f"^{block}feed_forward"] = f"{block}extra_feed_forward"
    patterns |= _THEIR_NAMES

    weight_map: list[WeightMapping] = []
    for mapping in renamed_weights(empty_weights(config), patterns, up_names(config)):
        transposed = mapping.parts[0].endswith(("/kernel", "/rel_embedding"))
        weight_map.append(mapping._replace(transposed=transposed))
    return weight_map
