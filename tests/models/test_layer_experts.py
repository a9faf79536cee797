"""Sparse layers with different numbers of experts: one config, and everything that a model can do."""

import math

import pytest
import torch

from moe import STMoEConfig, STMoEForConditionalGeneration
from moe.distributed.mesh import MeshConfig, check_mesh
from moe.errors import ConfigError
from moe.models.parallelize import mesh_limits
from moe.sparse.editing import sparse_layers
from moe.sparse.stats import RouterStats
from moe.tracing.recorder import record_routing, traced_batches
from moe.tracing.replay import replay_routing
from moe.training.recipe import PretrainRecipe
from moe.training.router_health import router_values
from tests.models.tiny import FIELDS, tiny_batch, tiny_model
from tests.training.one_step import train_step

UNEQUAL = {
    "num_layers": 2,
    "num_decoder_layers": 4,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "encoder_experts": [7, 3],
    "decoder_experts": [2, 5],
}
NUMBERS = [7, 3, 2, 5]


def config_of(**changes):
    return STMoEConfig(**{**FIELDS, **UNEQUAL, **changes})


def test_a_model_is_saved_loaded_and_generates(tmp_path):
    model = tiny_model(**UNEQUAL)
    layers = sparse_layers(model).values()
    assert [layer.router.gate.shape[0] for layer in layers] == NUMBERS
    assert [layer.experts.down_proj.shape[0] for layer in layers] == NUMBERS
    assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters()
    idle_experts = sum(NUMBERS) - 2 * len(NUMBERS)
    idle = model.config.num_parameters() - model.config.num_active_parameters()
    assert idle == idle_experts * 3 * 29 * 31

    model.save_pretrained(tmp_path)
    loaded = STMoEForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.config == model.config
    inputs = {"input_ids": tiny_batch()["input_ids"], "max_new_tokens": 5}
    assert torch.equal(loaded.generate(**inputs), model.generate(**inputs))
    assert "2 to 7 in each" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("router", ["token_choice", "bias_balanced"])
def test_a_step_reports_what_layers_have_in_common(router):
    model = tiny_model(**UNEQUAL, router=router, router_options=None).train()
    optimizer = torch.optim.AdamW(model.parameters())
    metrics = train_step(model, optimizer, PretrainRecipe(), tiny_batch(), step=0)
    assert metrics.encoder_stats is not None
    values = router_values("encoder", metrics.encoder_stats)
    assert values["router/encoder/entropy"] > 0
    assert "router/encoder/load_cv" not in values


def test_statistics_of_layers_that_differ_are_added_without_their_load():
    routers = tiny_model(**UNEQUAL)(**tiny_batch()).encoder_router_outputs
    first, second = [router.stats.summary() for router in routers]
    both = RouterStats.sum(router.stats for router in routers).summary()
    assert both["entropy"] == pytest.approx((first["entropy"] + second["entropy"]) / 2)
    accepted = sum(int(router.stats.accepted_load.sum()) for router in routers)
    assert RouterStats.sum(router.stats for router in routers).accepted_load.tolist() == [accepted]
    assert math.isnan(both["load_cv"]) and math.isnan(both["dead_experts"])

    # Where experts choose, layers also differ in their choices.
    fields = {"router": "expert_choice", "decoder_router": "token_choice", "router_options": None}
    routers = tiny_model(**UNEQUAL, **fields)(**tiny_batch()).encoder_router_outputs
    assert RouterStats.sum(router.stats for router in routers).dropped_by_choice.numel() == 7


def test_a_trace_is_recorded_and_replayed():
    model = tiny_model(**UNEQUAL)
    trace = record_routing(model, traced_batches([tiny_batch()]), num_best=2)
    assert [layer.facts.num_experts for layer in trace.layers] == NUMBERS
    with replay_routing(model, trace):
        loss = model(**tiny_batch()).ce_loss.item()
    assert loss == pytest.approx(trace.facts.loss, abs=1e-6)
    with pytest.raises(ConfigError, match=r"num_best is 3; expected .* 0 to 2"):
        record_routing(model, [], num_best=3)


def test_equal_models_have_equal_configs():
    equal = config_of(encoder_experts=[7, 7], decoder_experts=[7, 7])
    assert equal.encoder_experts is None and equal == config_of(**dict.fromkeys(LISTS))
    fewer = config_of(num_experts=3, encoder_experts=[3, 3], decoder_experts=[3, 2])
    assert (fewer.num_experts, fewer.encoder_experts, fewer.decoder_experts) == (3, None, [3, 2])
    assert fewer.layer_experts(decoder=False) == [3, 3]


def test_a_config_of_merged_experts_is_refused_by_name_and_one_without_loads():
    """Earlier versions wrote both fields into every config.json."""
    content = config_of().to_dict()
    assert STMoEConfig.from_dict(content | {"encoder_expert_maps": None}) == config_of()
    with pytest.raises(ConfigError, match=r"decoder_expert_maps is \[\[0, 0\]\].*merged"):
        STMoEConfig.from_dict(content | {"decoder_expert_maps": [[0, 0]]})


LISTS = ("encoder_experts", "decoder_experts")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_experts": [7]}, r"encoder_experts is \[7\]; .* each of the 2 sparse layers"),
        ({"decoder_experts": [1, 7]}, "num_selected_experts is 2; .* num_experts, 1"),
        ({"num_experts": 8}, "num_experts is 8; expected 7, the largest"),
    ],
)
def test_numbers_that_contradict_the_model_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**fields)


def test_a_mesh_that_does_not_divide_the_experts_of_every_layer_is_refused():
    config = config_of(num_experts=6, encoder_experts=[6, 4], decoder_experts=[2, 4])
    check_mesh(MeshConfig(ep=2), mesh_limits(config, 2)._replace(num_heads=4))
    with pytest.raises(ConfigError, match="2 and 6 experts cannot be spread evenly over ep 4"):
        check_mesh(MeshConfig(ep=4), mesh_limits(config, 4))
