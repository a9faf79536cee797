"""Checkpoints of T5X: a msgpack tree whose leaves are arrays, or say where tensorstore finds them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.checks import shown
from moe.convert.hf_names import t5x_names
from moe.convert.hf_weights import Foreign, convert_weights
from moe.errors import CheckpointError, ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.weight_files import LazyTensor

_FILE = "checkpoint"
_NDARRAY, _SCALAR = 1, 3
"""Kinds of msgpack extension that flax writes for arrays."""

_DAMAGE = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RuntimeError,
    OverflowError,
    MemoryError,
)
"""What msgpack, tensorstore and torch raise for files that are torn or hold something else."""

_SCANNED = r"subblock_|^(en|de)coder/((en|de)coder|layers)/"


def is_t5x(folder: Path | str) -> bool:
    """Returns whether a folder holds a checkpoint of T5X."""
    return (Path(folder) / _FILE).is_file() and not (Path(folder) / "config.json").is_file()


def open_t5x(folder: Path | str, **settings: Any) -> Foreign:
    """Returns a checkpoint of T5X as a model of ours; tensors are read from their zarr folders when
    they are indexed.

    The architecture is read off names and shapes. What they do not say is a default: of a model
    with experts the conventions of Flaxformer, and the router `switch` where experts are not gated.

    Args:
        folder: With the msgpack file `checkpoint`.
        settings: Fields of STMoEConfig that are known better.

    Raises:
        ConfigError: When the architecture cannot be represented, or tensorstore and msgpack are not
            installed.
        CheckpointError: When the files are torn or hold no encoder-decoder.
    """
    tree = _read_tree(Path(folder) / _FILE)
    root = tree.get("optimizer", tree) if isinstance(tree, Mapping) else None
    if not isinstance(root, Mapping) or not isinstance(root.get("target"), Mapping):
        raise CheckpointError(
            f"{folder} holds no T5X model: {_FILE} has no tree called target or optimizer/target."
        )
    stored = {name: _lazy(Path(folder), name, leaf) for name, leaf in _leaves(root["target"])}
    config = _infer_config({name: tensor.shape for name, tensor in stored.items()}, settings)
    config.dtype = stored["token_embedder/embedding"].dtype
    ignored = {f"state/{name}": "is of the optimizer" for name, _ in _leaves(root.get("state", {}))}
    return convert_weights(str(folder), config, t5x_names(config), stored, ignored=ignored)


def _read_tree(path: Path) -> object:
    """Returns what a msgpack file holds: a tree, when flax wrote it.

    Raises:
        CheckpointError: When it is torn.
    """
    msgpack: Any = _need("msgpack")
    try:
        return msgpack.unpackb(
            path.read_bytes(), ext_hook=partial(_array, msgpack), raw=False, strict_map_key=False
        )
    except (*_DAMAGE, msgpack.exceptions.UnpackException) as error:
        raise CheckpointError(
            f"{path} is no whole msgpack file: {error}. Copy the checkpoint again."
        ) from error


def _need(name: str) -> Any:
    """Returns an optional module.

    Raises:
        ConfigError: When it is not installed.
    """
    try:
        return __import__(name)
    except ImportError as error:
        raise ConfigError(
            f"Checkpoints of T5X are read with {name}, which is not installed. Run pip install 'stmoe[t5x]'."
        ) from error


def _array(msgpack: Any, kind: int, data: bytes) -> object:
    """Returns an array that flax wrote as a tensor <any>[...]; what is no array as its bytes.

    Source:
        google/flax serialization.py, `_msgpack_ext_unpack`.
    """
    if kind not in (_NDARRAY, _SCALAR):
        return data
    shape, dtype, buffer = msgpack.unpackb(data, raw=True, strict_map_key=False)
    kind_of = _dtype(dtype.decode() if isinstance(dtype, bytes) else dtype)
    if not buffer:
        return torch.empty(tuple(shape), dtype=kind_of)
    return torch.frombuffer(bytearray(buffer), dtype=kind_of).reshape(tuple(shape))


def _dtype(name: str) -> torch.dtype:
    """Returns the dtype that numpy and torch call `name`.

    Raises:
        ValueError: When torch has none of that name.
    """
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {shown(name)}")
    return dtype


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a tree with their path: tensors, and what says where a tensor is."""
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        leaf = (
            not isinstance(value, Mapping)
            or "kvstore" in value
            or "__msgpack_chunked_array__" in value
        )
        yield from [(f"{prefix}{name}", value)] if leaf else _leaves(value, f"{prefix}{name}/")


def _lazy(folder: Path, name: str, leaf: Any) -> LazyTensor:
    """Returns a leaf of the tree as a tensor <any>[...] that is read when it is indexed."""
    if isinstance(leaf, Mapping) and "kvstore" in leaf:
        return _stored(folder, name, leaf)
    if isinstance(leaf, Mapping):
        try:
            shape = [leaf["shape"][str(i)] for i in range(len(leaf["shape"]))]
            leaf = torch.cat(
                [leaf["chunks"][str(i)].flatten() for i in range(len(leaf["chunks"]))]
            ).reshape(shape)
        except _DAMAGE as error:
            raise CheckpointError(
                f"target/{name} in {folder / _FILE} is no whole array in chunks: {error}"
            ) from error
    if not isinstance(leaf, Tensor):
        raise CheckpointError(
            f"target/{name} in {folder / _FILE} is a {type(leaf).__name__}; expected a tensor."
        )
    return LazyTensor(leaf.shape, leaf.dtype, lambda: leaf)


def _stored(folder: Path, name: str, spec: Mapping[str, Any]) -> LazyTensor:
    """Returns the tensor <any>[...] of a tensorstore spec; its path may name the place where it was
    written.
    """
    tensorstore: Any = _need("tensorstore")
    written = str(
        spec["kvstore"].get("path", "") if isinstance(spec["kvstore"], Mapping) else spec["kvstore"]
    )
    path = folder / Path(written.rstrip("/")).name
    spec = {"driver": spec.get("driver", "zarr"), "kvstore": {"driver": "file", "path": f"{path}/"}}
    try:
        store = tensorstore.open(spec, open=True, read=True).result()
        dtype = _dtype(store.dtype.name)
    except _DAMAGE as error:
        raise CheckpointError(f"target/{name} cannot be read from {path}: {error}") from error

    def read() -> Tensor:
        array = store.read().result()
        bfloat16 = array.dtype.name == "bfloat16"  # which torch does not know in numpy
        tensor = torch.from_numpy(array.view("uint16") if bfloat16 else array)
        return tensor.view(torch.bfloat16) if bfloat16 else tensor

    return LazyTensor(store.shape, dtype, read)


def _infer_config(
    shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]
) -> STMoEConfig:
    """Returns the configuration that tensors of these shapes are of.

    Raises:
        CheckpointError: When a tensor is missing that says it.
        ConfigError: When it cannot be represented.
    """
    if scanned := next((name for name in shapes if re.search(_SCANNED, name)), None):
        raise ConfigError(
            f"target/{scanned} is of scanned layers, which hold all blocks in one tensor. Write the checkpoint with "
            "scan_layers = False in T5X, and convert that."
        )
    stacks = {stack: _blocks(shapes, stack) for stack in ("encoder", "decoder")}
    vocab_size, d_model = _shape(shapes, r"token_embedder/embedding")
    num_heads, num_buckets = _shape(shapes, r"encoder/relpos_bias/rel_embedding")
    gated = any(name.endswith("/wi_0/kernel") for name in shapes)
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_kv": _shape(shapes, r"encoder/layers_\d+/attention/query/kernel")[-1] // num_heads,
        "d_ff": _shape(shapes, r"encoder/layers_\d+/mlp/(expert/)?wi(_0)?/kernel")[-1],
        "num_layers": len(stacks["encoder"]),
        "num_decoder_layers": len(stacks["decoder"]),
        "num_heads": num_heads,
        "relative_attention_num_buckets": num_buckets,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": "decoder/logits_dense/kernel" not in shapes,
    }
    if not any(any(blocks.values()) for blocks in stacks.values()):
        return STMoEConfig(**{**fields, **settings})
    fields |= {
        "num_experts": _shape(shapes, r"(en|de)coder/layers_\d+/mlp/expert/wo/kernel")[0],
        "num_sparse_encoder_layers": sum(stacks["encoder"].values()),
        "num_sparse_decoder_layers": sum(stacks["decoder"].values()),
        "sparse_dense_stacking": any("/extra_mlp/" in name for name in shapes),
        **({} if gated else {"router": "switch"}),
    }
    if {**fields, **settings}.get("router") == "switch":
        fields["num_selected_experts"] = 1
    for position in ("last", "second"):
        config = STMoEConfig.after(
            "flaxformer", **{**fields, "sparse_position": position, **settings}
        )
        if all(
            config.is_sparse_block(block, decoder=stack == "decoder") == sparse
            for stack, blocks in stacks.items()
            for block, sparse in blocks.items()
        ):
            return config
    found = {
        stack: [block for block, sparse in blocks.items() if sparse]
        for stack, blocks in stacks.items()
    }
    raise ConfigError(
        f"The checkpoint of T5X has sparse blocks {found['encoder']} in the encoder and {found['decoder']} in the "
        "decoder; expected the last or the second of equal stretches. Such a model cannot be represented here."
    )


def _shape(shapes: Mapping[str, tuple[int, ...]], pattern: str) -> tuple[int, ...]:
    """Returns the shape of the first tensor whose name is of a pattern.

    Raises:
        CheckpointError: When there is none.
    """
    for name, shape in shapes.items():
        if re.fullmatch(pattern, name):
            return shape
    raise CheckpointError(
        f"The checkpoint of T5X has no target/{pattern}: it is no encoder-decoder of T5, Switch or ST-MoE."
    )


def _blocks(shapes: Iterable[str], stack: str) -> dict[int, bool]:
    """Returns the blocks of a stack in order, and whether each is sparse."""
    pattern = re.compile(rf"{stack}/layers_(\d+)/(mlp/expert/)?")
    found: dict[int, bool] = {}
    for name in shapes:
        if match := pattern.match(name):
            found[int(match[1])] = found.get(int(match[1]), False) or bool(match[2])
    return dict(sorted(found.items()))
