"""Models whose weights stay in their files: the same answers, and no memory of their own."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

from moe import CheckpointError
from moe.checkpoint.loading import load_model
from moe.commands import quantize
from moe.hosts.upcycle import upcycle_host
from moe.kernels.quantized_weight import QuantizedWeight
from moe.surgery.upcycle import Upcycling
from tests.hosts.tiny_hosts import STACK, experts_of, sparse_host
from tests.models.tiny import tiny_batch, tiny_model
from tests.serving.tiny_words import switch


def mapped_ranges(file):
    """Returns the addresses at which a file is mapped into this process."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(file)):
            start, _, end = line.split()[0].partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


class ReadBytes(TorchDispatchMode):
    """Records which bytes of mapped files operations read; views read none."""

    def __init__(self, folder):
        super().__init__()
        self.ranges = [
            pair for file in folder.glob("*.safetensors") for pair in mapped_ranges(file)
        ]
        self.pieces = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for x in () if function.is_view else tensors:
            for part in x.parts().values() if isinstance(x, QuantizedWeight) else [x]:
                address = part.data_ptr()
                if any(start <= address < end for start, end in self.ranges):
                    self.pieces.add((address, part.nbytes))
        return function(*args, **(kwargs or {}))

    def total(self):
        return sum(size for _, size in self.pieces)


def wide_model(kind):
    """Returns a model with 2 sparse layers of 37 experts, which are most of its weights."""
    fields = {"router_initializer_std": 1.0}
    if kind == "ours":
        return tiny_model(d_model=32, d_ff=64, num_experts=37, **fields)
    wide = {**STACK, "hidden_size": 32, "intermediate_size": 64}
    dense = T5GemmaForConditionalGeneration(
        T5GemmaConfig(encoder=wide, decoder=wide, vocab_size=131)
    )
    return upcycle_host(dense.eval(), Upcycling(37, fields=fields))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kind", "bits"), [("host", None), ("host", 8), ("host", 4), ("ours", 8)])
def test_a_token_reads_only_its_own_experts(kind, bits, tmp_path, capsys):
    model = wide_model(kind).to(torch.bfloat16 if bits == 4 else torch.float32)
    model.save_pretrained(tmp_path / "float")
    size = sum(weight.nbytes for weight in experts_of(model))
    rest = sum(weight.nbytes for weight in model.parameters()) - size
    folder = tmp_path / ("small" if bits else "float")
    if bits:
        quantize.main(["--from", str(tmp_path / "float"), "--to", str(folder), "--bits", str(bits)])
    mapped = load_model(folder, mmap=True)
    one = {"input_ids": torch.tensor([[7]]), "decoder_input_ids": torch.tensor([[0]])}
    with torch.no_grad(), ReadBytes(folder) as read:
        logits = mapped(**one).logits
    rounding = {"rtol": 0.05, "atol": 0.05} if bits == 4 else {}
    torch.testing.assert_close(logits, load_model(folder)(**one).logits, **rounding)
    assert not any(getattr(weight, "packed_experts", None) for weight in mapped.parameters())

    # 2 of 37 experts in each layer; scales of 4 bits are as many bytes as codes.
    assert 2 / 37 * size * (bits or 32) / 32 <= read.total() < rest + 3 / 37 * size


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_a_mapped_model_computes_the_same_from_the_pages_of_its_files(tmp_path, max_shard_size):
    model = tiny_model(num_experts=6, tie_word_embeddings=True).eval()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    mapped = load_model(tmp_path, mmap=True)
    batch = tiny_batch()
    with torch.no_grad():
        assert torch.equal(mapped(**batch).logits, model(**batch).logits)
    assert mapped.generation_config.max_new_tokens == 7
    assert mapped.lm_head.weight.data_ptr() == mapped.get_input_embeddings().weight.data_ptr()
    assert not mapped.training
    assert not any(parameter.requires_grad for parameter in mapped.parameters())

    dropless = load_model(tmp_path, mmap=True, dropless=True)
    assert dropless.config.eval_capacity_factor is None
    if sys.platform == "linux":
        ranges = [found for file in tmp_path.glob("*.safetensors") for found in mapped_ranges(file)]
        for name, parameter in mapped.named_parameters():
            address = parameter.data_ptr()
            assert any(start <= address < end for start, end in ranges), name


def test_what_cannot_be_mapped_is_refused(tmp_path):
    switch().save_pretrained(tmp_path / "switch")
    with pytest.raises(CheckpointError, match="stmoe convert"):
        load_model(tmp_path / "switch", mmap=True)
    model = sparse_host("t5gemma")
    model.config.save_pretrained(tmp_path / "host")
    torch.save(model.state_dict(), tmp_path / "host/pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors"):
        load_model(tmp_path / "host", mmap=True, dropless=True)
    model = tiny_model()
    model.save_pretrained(tmp_path / "torn")
    file = tmp_path / "torn/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="torn"):
        load_model(tmp_path / "torn", mmap=True)
