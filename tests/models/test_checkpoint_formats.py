"""The registry of other libraries' checkpoints: a new format is one entry, and no edit elsewhere."""

import json
from dataclasses import fields

import pytest
import torch

from moe import SparseConfig, STMoEConfig, STMoEForConditionalGeneration
from moe.models.checkpoint_formats import CHECKPOINT_FORMATS, CheckpointFormat, find_format
from moe.models.weight_files import LazyTensor
from tests.models.tiny import FIELDS, tiny_model


@pytest.fixture
def formats(monkeypatch):
    monkeypatch.setattr(CHECKPOINT_FORMATS, "_entries", dict(CHECKPOINT_FORMATS._entries))
    return CHECKPOINT_FORMATS


def test_a_format_that_is_entered_is_read_by_from_pretrained(formats, tmp_path):
    model = tiny_model()

    def convert_config(raw):
        return {**FIELDS, "num_heads": raw["heads"]}

    def open_weights(source, raw_config, config, **options):
        assert (source, raw_config["heads"], config.num_heads) == (tmp_path, 3, 3)
        weights = {}
        for name, tensor in model.state_dict().items():
            weights[name] = LazyTensor(tensor.shape, tensor.dtype, lambda tensor=tensor: tensor)
        return weights

    formats.add("toy", CheckpointFormat(convert_config, open_weights))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy", "heads": 3}))
    loaded = STMoEForConditionalGeneration.from_pretrained(tmp_path)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_config_of_ours_has_no_other_format():
    for raw in ({}, {"model_type": None}, {"model_type": "st_moe"}):
        assert find_format(raw) is None


def test_every_setting_of_a_sparse_layer_can_be_given_for_a_model():
    derived = {"decoder", "activation", "gated", "product_bias"}
    settings = {item.name for item in fields(STMoEConfig)}
    assert {item.name for item in fields(SparseConfig)} - derived <= settings
