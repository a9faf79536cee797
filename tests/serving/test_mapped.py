"""Models whose weights stay in their files: the same answers, and no memory of their own."""

import sys
from pathlib import Path

import pytest
import torch

from moe import CheckpointError
from moe.checkpoint.loading import load_model
from tests.hosts.tiny_hosts import dense_host
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
    dense_host("t5gemma").save_pretrained(tmp_path / "host")
    with pytest.raises(CheckpointError, match="'t5gemma', but only"):
        load_model(tmp_path / "host", mmap=True, dropless=True)
    model = tiny_model()
    model.save_pretrained(tmp_path / "torn")
    file = tmp_path / "torn/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="torn"):
        load_model(tmp_path / "torn", mmap=True)
