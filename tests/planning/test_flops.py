"""Arithmetic is counted as torch's FlopCounterMode counts it, and as the papers print it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe.models.configuration import STMoEConfig
from moe.planning.flops import forward_flops, training_flops_per_token
from moe.planning.plan import build_model
from moe.planning.workload import Workload
from tests.models.tiny import tiny_model

WORK = Workload(batch_size=4, inputs_length=53, targets_length=37)
MODELS = {
    "dense": {"num_experts": 0, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0},
    "sparse": {},
    "sparse, ReLU": {"feed_forward_proj": "relu"},
    "sparse without stacking": {"sparse_dense_stacking": False},
}


@pytest.mark.parametrize("model", MODELS)
def test_products_are_counted(model):
    # eager attention and static dispatch are made of products that the counter knows, in the thread
    # that it watches
    fields = {
        "dispatch": "static",
        "attn_implementation": "eager",
        "group_size": 106,
        **MODELS[model],
    }
    ours = tiny_model(**fields).train()
    generator = torch.Generator().manual_seed(0)
    ids, labels = (
        torch.randint(2, 131, (4, length), generator=generator) for length in WORK.lengths
    )
    with FlopCounterMode(display=False) as forward:
        loss = ours(ids, labels=labels).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counted = forward.get_total_flops()
    assert forward_flops(ours, WORK) == pytest.approx(counted, rel=0.02)
    per_token = (counted + backward.get_total_flops()) / (4 * (53 + 37))
    assert training_flops_per_token(ours, WORK) == pytest.approx(per_token, rel=0.02)


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
    keys_and_values = (
        4 * config.num_layers * config.d_model * config.num_heads * config.d_kv * (512 - 114)
    )
    assert ours - keys_and_values == pytest.approx(printed, rel=0.03)


def test_arithmetic_does_not_depend_on_how_a_batch_is_split():
    model = tiny_model(group_size=53)
    whole, split = (Workload(8, 53, 37, micro_batch_size=micro) for micro in (None, 2))
    assert forward_flops(model, whole) == forward_flops(model, split)
