"""Checkpoints of T5X, written here by tensorstore and msgpack from models of ours: logits are those
of the model.

The names are spelled out by a small rule book of their own, from the facts of the format, not by
the library's table.
"""

import json
import random
import re
import sys

import msgpack
import pytest
import tensorstore
import torch

from moe import CheckpointError, ConfigError, STMoEForConditionalGeneration
from moe.commands.convert import main
from moe.convert.t5x import open_t5x
from tests.models.hf_models import assert_equal_to_rounding, their_inputs
from tests.models.tiny import DENSE, tiny_model

SWITCH = {
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "router": "switch",
    "router_options": None,
    "num_selected_experts": 1,
    "sparse_dense_stacking": False,
}
MODELS = {
    "ST-MoE": {},
    "Switch": SWITCH,
    "Switch, second blocks": {**SWITCH, "num_layers": 3, "sparse_position": "second"},
    "T5 1.1": DENSE,
    "umT5": {**DENSE, "relative_bias_in_every_block": True},
    "T5 1.0": {**DENSE, "feed_forward_proj": "relu", "tie_word_embeddings": True},
}
FREE = {  # what names and shapes do not say
    "eval_capacity_factor": 0.7,
    "min_expert_capacity": 1,
    "convention": "ours",
    "router_options": None,
}
PARTS = {"q": "query", "k": "key", "v": "value", "o": "out"}


def t5x_tree(model):
    """The arrays of a model of ours under the names of T5X, as a flat dict."""
    tree = {}
    for name, weight in model.named_parameters():
        array = weight.detach()
        path = name.replace("model.encoder.stack.", "encoder/").replace(
            "model.decoder.", "decoder/"
        )
        path = re.sub(r"blocks\.(\d+)\.", r"layers_\1/", path)
        stack, sparse = path.split("/")[0], ".sparse_feed_forward." in name
        block = name.split("_norm")[0].split(".feed_forward")[0]
        extra = "extra_" if f"{block}.sparse_norm.weight" in dict(model.named_parameters()) else ""
        if match := re.search(r"(self|cross)_attention\.(.)_proj", path):
            kind = {"encoder": "attention", "decoder": f"{match[1]}_attention"}[stack]
            kind = kind.replace("cross_attention", "encoder_decoder_attention")
            tree[f"{path[: match.start()]}{kind}/{PARTS[match[2]]}/kernel"] = array.T
        elif name == "model.encoder.embed_tokens.weight":
            tree["token_embedder/embedding"] = array
        elif name == "lm_head.weight":
            tree["decoder/logits_dense/kernel"] = array.T
        elif name.endswith("position_bias.table"):
            tree[path.replace("position_bias.table", "relpos_bias/rel_embedding")] = array.T
        elif name.endswith("final_norm.weight"):
            tree[f"{stack}/{stack}_norm/scale"] = array
        elif match := re.search(r"(self|cross)_attention_norm", path):
            kind = "attention" if stack == "encoder" else f"{match[1]}_attention"
            tree[f"{path[: match.start()]}pre_{kind}_layer_norm/scale"] = array
        elif name.endswith(".sparse_norm.weight"):
            tree[path.replace("sparse_norm.weight", "pre_mlp_layer_norm/scale")] = array
        elif name.endswith(".feed_forward_norm.weight"):
            tree[path.replace("feed_forward_norm.weight", f"pre_{extra}mlp_layer_norm/scale")] = (
                array
            )
        elif name.endswith("router.gate"):
            tree[
                path.replace(
                    "sparse_feed_forward.router.gate", "mlp/router/router_weights/w/kernel"
                )
            ] = array.T
        else:
            at = path.split("sparse_feed")[0].split("feed_forward")[0] + (
                "mlp/expert" if sparse else f"{extra}mlp"
            )
            if "down_proj" in name:
                tree[f"{at}/wo/kernel"] = array.mT
            elif model.config.feed_forward_proj == "relu":
                tree[f"{at}/wi/kernel"] = array.mT
            else:
                for i, half in enumerate(array.chunk(2, dim=-2)):
                    tree[f"{at}/wi_{i}/kernel"] = half.mT
    return tree


def nested(flat):
    """A flat dict as a tree."""
    tree = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def pack(value):
    """A leaf in the msgpack of flax."""
    if isinstance(value, torch.Tensor):
        array = value.contiguous()
        data = array.flatten().view(torch.uint8).numpy().tobytes()
        packed = msgpack.packb(
            (tuple(array.shape), str(array.dtype).removeprefix("torch."), data), use_bin_type=True
        )
        return msgpack.ExtType(1, packed)
    raise TypeError(type(value))


def write(folder, flat, *, wrapped=True):
    """Writes a checkpoint of T5X: arrays of more than 64 numbers into zarr folders, the rest into
    msgpack.
    """
    folder.mkdir()
    leaves = {}
    for name, array in flat.items():
        leaves[name] = array
        if array.numel() > 64:
            path = f"target.{name.replace('/', '.')}"
            bfloat16 = array.dtype == torch.bfloat16
            metadata = {"shape": list(array.shape), "chunks": [max(1, s // 2) for s in array.shape]}
            metadata["dtype"] = "bfloat16" if bfloat16 else "<f4"
            metadata["compressor"] = {"id": "gzip"}
            kvstore = {"driver": "file", "path": f"{folder / path}/"}
            spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata, "create": True}
            store = tensorstore.open(spec).result()
            store.write(array.float().numpy().astype(store.dtype.numpy_dtype)).result()
            bucket = {
                "driver": "gfile",
                "path": f"/gs/bucket/checkpoint_500100/{path}",
            }  # where it was written
            leaves[name] = {"driver": "zarr", "kvstore": bucket, "metadata": metadata}
    slots = {"embedding": {"v_row": torch.zeros(131)}}
    state = {"step": torch.tensor(500_100, dtype=torch.int32), "param_states": slots}
    root = {"target": nested(leaves), "state": state}
    tree = {"version": 3, "optimizer": root} if wrapped else root
    (folder / "checkpoint").write_bytes(msgpack.packb(tree, default=pack, use_bin_type=True))
    return folder


SAME = (
    *("num_experts", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads"),
    *("feed_forward_proj", "tie_word_embeddings", "sparse_dense_stacking", "sparse_position"),
    *("router", "num_selected_experts", "relative_bias_in_every_block"),
)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_the_model_that_was_written(tmp_path, kind):
    fields = {} if "T5" in kind else FREE
    if kind == "ST-MoE":
        fields = {**fields, "decoder_router_options": None}
    model, inputs = tiny_model(**{**MODELS[kind], **fields}), their_inputs()
    folder = write(tmp_path / "t5x", t5x_tree(model))
    free = {name: getattr(model.config, name) for name in FREE} | {"router_initializer_std": 0.5}
    settings = [f"{name}={json.dumps(value)}" for name, value in free.items()]
    main(["--from", str(folder), "--to", str(tmp_path / "ours"), "--set", *settings])
    loaded = STMoEForConditionalGeneration.from_pretrained(tmp_path / "ours")
    for name in SAME:
        assert getattr(loaded.config, name) == getattr(model.config, name), name
    expected = dict(model.named_parameters())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, expected.pop(name)), name
    assert not expected
    assert_equal_to_rounding(loaded(**inputs).logits, model(**inputs).logits)


def test_bfloat16_and_trees_without_an_optimizer_are_read(tmp_path):
    model = tiny_model(**SWITCH).to(torch.bfloat16)
    folder = write(tmp_path / "t5x", t5x_tree(model), wrapped=False)
    weights = open_t5x(folder).weights
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weights[name][...], weight) for name, weight in model.named_parameters())


def test_an_array_in_chunks_is_put_together(tmp_path):
    model = tiny_model(**SWITCH)
    flat = t5x_tree(model)
    norm = flat["encoder/encoder_norm/scale"]
    parts = {str(i): part.clone() for i, part in enumerate(norm.split(11))}
    folder = write(tmp_path / "t5x", {})
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 29}, "chunks": parts}
    tree = {"target": nested({**flat, "encoder/encoder_norm/scale": chunked})}
    (folder / "checkpoint").write_bytes(msgpack.packb(tree, default=pack, use_bin_type=True))
    assert torch.equal(open_t5x(folder).weights["model.encoder.stack.final_norm.weight"][...], norm)


SCANNED = "encoder/encoder/subblock_0/mlp/wi/kernel"


@pytest.mark.parametrize(
    ("remove", "add", "error", "message"),
    [
        ("encoder/encoder_norm/scale", [], CheckpointError, "1 missing: encoder/encoder_norm"),
        (None, ["what"], CheckpointError, "1 unexpected: what"),
        ("token_embedder/embedding", [], CheckpointError, "no target/token_embedder/embedding"),
        (None, [SCANNED], ConfigError, f"{SCANNED} belongs to scanned layers.*scan_layers = False"),
    ],
)
def test_what_is_not_accounted_for_is_an_error(tmp_path, remove, add, error, message):
    tree = t5x_tree(tiny_model(**SWITCH))
    tree.pop(remove, None)
    tree.update(dict.fromkeys(add, torch.zeros(3, 5, 2)))
    folder = write(tmp_path / "t5x", tree)
    with pytest.raises(error, match=message):
        main(["--from", str(folder), "--to", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_sparse_blocks_out_of_step_are_refused_with_their_numbers(tmp_path):
    tree = t5x_tree(tiny_model(**{**SWITCH, "num_layers": 3}))
    moved = {
        re.sub(r"^encoder/layers_([02])", lambda m: f"encoder/layers_{2 - int(m[1])}", k): v
        for k, v in tree.items()
    }
    with pytest.raises(ConfigError, match=r"blocks \[0\] in the encoder and \[2\] in the decoder"):
        open_t5x(write(tmp_path / "t5x", moved))


def test_torn_files_are_one_message(tmp_path):
    folder = write(tmp_path / "t5x", t5x_tree(tiny_model(**SWITCH)))
    for file in (folder / "target.token_embedder.embedding").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match=r"token_embedder/embedding in .* cannot be read"):
        open_t5x(folder)
    packed = folder / "checkpoint"
    packed.write_bytes(packed.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"checkpoint cannot be read as msgpack"):
        open_t5x(folder)


def test_damaged_bytes_are_a_checkpoint_or_one_message(tmp_path):
    arrays = {"token_embedder/embedding": torch.ones(3, 2), "decoder/scale": torch.ones(2)}
    folder = write(tmp_path / "t5x", arrays)
    whole = (folder / "checkpoint").read_bytes()
    for seed in range(40):
        content, draw = bytearray(whole), random.Random(seed)
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
        (folder / "checkpoint").write_bytes(content)
        with pytest.raises((CheckpointError, ConfigError)):  # it is no whole model, damaged or not
            open_t5x(folder)


def test_a_missing_library_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch):
    folder = write(tmp_path / "t5x", t5x_tree(tiny_model(**SWITCH)))
    for module in ("tensorstore", "msgpack"):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"{module}, which .* 'stmoe\[t5x\]'"):
            open_t5x(folder)
