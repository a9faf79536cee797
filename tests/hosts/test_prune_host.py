"""Hosts whose sparse layers have different numbers of experts."""

from moe.checkpoint.loading import load_model
from moe.hosts.all_hosts import count_parameters
from moe.sparse.editing import sparse_layers
from tests.hosts.tiny_hosts import sparse_host


def test_stacks_may_have_different_numbers_of_experts(tmp_path):
    config = sparse_host("t5gemma").config
    config.sparse_layers |= {"encoder_experts": [5], "decoder_experts": [3]}
    model_class = type(sparse_host("t5gemma"))
    model_class(config).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    layers = sparse_layers(model)
    assert [layer.experts.down_proj.shape[0] for layer in layers.values()] == [5, 3]
    idle = 3 * layers["encoder", 0].experts.down_proj[0].numel() * 3
    idle += 1 * layers["decoder", 0].experts.down_proj[0].numel() * 3
    total = model.num_parameters()
    assert count_parameters(tmp_path) == (total, total - idle)
