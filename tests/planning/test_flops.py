"""Arithmetic is counted as torch's FlopCounterMode counts it, and as the papers print it."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe.distributed.mesh import MeshConfig
from moe.models.configuration import STMoEConfig
from moe.planning.layer_costs import forward_flops
from moe.planning.plan import build_model, make_plan
from moe.planning.workload import Workload
from tests.models.tiny import checkpointed, tiny_model

WORK = Workload(batch_size=4, inputs_length=53, targets_length=37)
MODELS = {
    "dense": {"num_experts": 0, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0},
    "sparse": {},
    "sparse, ReLU": {"feed_forward_proj": "relu"},
    "sparse without stacking": {"sparse_dense_stacking": False, "num_shared_experts": 2},
}


@pytest.mark.parametrize(
    ("model", "checkpointing", "dropout_rate"),
    [(model, True, 0.0) for model in MODELS] + [("sparse", False, 0.1), ("sparse", True, 0.1)],
)
def test_products_are_counted_as_torch_counts_them(model, checkpointing, dropout_rate):
    # Eager attention and static dispatch consist of products that torch's counter knows.
    fields = {"dispatch": "static", "attn_implementation": "eager", "group_size": 106}
    rates = {"dropout_rate": dropout_rate, "expert_dropout_rate": dropout_rate}
    ours = tiny_model(**fields, **rates, **MODELS[model]).train()
    if checkpointing:
        checkpointed(ours, {"use_reentrant": False})

    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(2, 131, (4, n), generator=generator) for n in WORK.lengths)
    with FlopCounterMode(display=False) as forward:
        loss = ours(ids, labels=labels).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()

    work = replace(WORK, activation_checkpointing=checkpointing)
    plan = make_plan(ours, work, MeshConfig())
    counted = forward.get_total_flops()
    assert plan.forward_flops == counted
    assert plan.flops_per_token == 3 * counted / (4 * (53 + 37))
    assert plan.flops_per_rank == counted + backward.get_total_flops()


def test_a_balance_loss_over_all_passes_takes_a_forward_pass_first():
    model = tiny_model(group_size=53, balance_scope="global")
    work = Workload(8, 53, 37, micro_batch_size=2)
    plan = make_plan(model, work, MeshConfig())
    assert plan.flops_per_rank == 4 * plan.forward_flops
    whole = make_plan(model, replace(work, micro_batch_size=None), MeshConfig())
    assert whole.flops_per_rank == 3 * whole.forward_flops


def test_st_moe_32b_takes_the_time_of_its_products_and_of_those_repeated():
    # By hand: 24 + 24 blocks of attention, of which the decoder has two, and a dense layer; six
    # sparse layers in each stack. Every product is 2 x tokens x inputs x outputs.
    D, F, A, V, E = 5120, 20480, 64 * 128, 32128, 64
    encoder, decoder = 2048 * 512, 2048 * 114
    dense = 2 * 3 * D * F
    attention = 2 * 4 * D * A
    scores = 2 * 2 * A
    blocks = 24 * (encoder + decoder) * (attention + dense)
    blocks += 24 * (encoder * 512 + decoder * 114) * scores
    blocks += 24 * (decoder * 2 * 2 * D * A + encoder * 2 * 2 * D * A + decoder * 512 * scores)
    rows = 1.25 * (encoder + decoder)  # slots for 5/4 of the tokens
    blocks += 6 * (rows * dense + 2 * (encoder + decoder) * D * E)
    head = 2 * decoder * D * V
    not_repeated = 24 * (encoder + decoder) * 2 * D * F  # the last product of each block

    model = build_model(STMoEConfig.from_preset("st-moe-32b"))
    work = Workload(2048, 512, 114, precision="bfloat16", activation_checkpointing=True)
    plan = make_plan(model, work, MeshConfig(ep=64, tp=16))
    expected = (4 * blocks + 3 * head - not_repeated) / 1024
    assert plan.flops_per_rank == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "fields", "printed"),
    [
        ("st-moe-32b", {"capacity_factor": 2.0}, 20.2e12),  # room for both experts of every token
        ("t5-1.1-xxl", {}, 6.3e12),
    ],
)
def test_a_sequence_of_512_and_114_tokens_takes_what_the_paper_prints(preset, fields, printed):
    # ST-MoE Table 11 is parameters times tokens of their stack: it counts keys and values of the
    # memory once for each of the 114 tokens that read it, not of the 512 that they are made of
    config = STMoEConfig.from_preset(preset, **fields)
    workload = Workload(batch_size=64, inputs_length=512, targets_length=114)
    ours = forward_flops(build_model(config), workload) / 64
    attention = config.d_model * config.num_heads * config.d_kv
    keys_and_values = 4 * config.num_layers * attention * (512 - 114)
    assert ours - keys_and_values == pytest.approx(printed, rel=0.03)
