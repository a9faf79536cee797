"""Activations are planned within 10 % of what saved-tensor hooks count in a forward pass of one
process.
"""

import pytest
import torch

from moe.distributed.mesh import MeshConfig
from moe.models.parallelize import model_layouts
from moe.models.pretrained import enable_activation_checkpointing
from moe.planning.activations import activations
from moe.planning.memory import gathered_bytes
from moe.planning.plan import build_model
from moe.planning.workload import Workload
from tests.models.tiny import tiny_model
from tests.planning.counting import SavedBytes

ROWS, LENGTH, TARGETS = 8, 53, 37
FIELDS = {
    "vocab_size": 211,
    "d_model": 53,
    "d_kv": 7,
    "d_ff": 74,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "group_size": 106,
    "router_initializer_std": 0.02,
}
FORMS = {
    "as published": {},
    "static": {"dispatch": "static"},
    "no expert drops": {"capacity_factor": None},
    "ReLU, tied head": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "dense": {"num_experts": 0, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0},
    "expert choice": {
        "router": "expert_choice",
        "router_options": {},
        "decoder_router": "token_choice",
    },
    "dropout": {"dropout_rate": 0.1, "expert_dropout_rate": 0.4},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Several threads wait for each other longer than such a small model takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def saved_bytes(workload, **fields):
    """Returns the context after a forward pass, and the model."""
    model = tiny_model(**{**FIELDS, **fields}).train()
    if workload.activation_checkpointing:
        enable_activation_checkpointing(model, {"use_reentrant": False})
    ids, labels = (torch.randint(2, 211, (ROWS, length)) for length in workload.lengths)
    batch = {"input_ids": ids, "labels": labels}
    with (
        SavedBytes(model) as saved,
        torch.autocast("cpu", torch.bfloat16, enabled=workload.precision == "bfloat16"),
    ):
        model(**batch)
    return saved, model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_forward_pass_keeps_what_is_planned(form, precision, checkpointing):
    workload = Workload(
        ROWS, LENGTH, TARGETS, precision=precision, activation_checkpointing=checkpointing
    )
    saved, model = saved_bytes(workload, **FORMS[form])
    planned = activations(model, workload, MeshConfig(), cpu=True)
    assert planned.saved == pytest.approx(saved.activations, rel=0.1)


def test_without_fsdp_bfloat16_keeps_a_copy_of_every_weight_of_a_product():
    workload = Workload(ROWS, LENGTH, TARGETS, precision="bfloat16")
    saved, model = saved_bytes(workload)
    layouts = model_layouts(model, model.config, MeshConfig())
    planned = gathered_bytes(layouts, MeshConfig(), bfloat16=True, accumulates=False)
    assert planned == pytest.approx(saved.copies, rel=0.02)


def test_checkpointing_keeps_inputs_of_blocks_and_one_block_at_a_time():
    model = build_model(tiny_model(**FIELDS).config)
    whole, again = (
        activations(
            model, Workload(ROWS, LENGTH, TARGETS, activation_checkpointing=again), MeshConfig()
        )
        for again in (False, True)
    )
    assert again.total < whole.total / 2
    assert whole.recomputed == 0
    assert 0 < again.recomputed < whole.saved


def test_activations_grow_with_the_micro_batch_and_shrink_over_tp():
    model = tiny_model(**FIELDS)
    small, large = (
        activations(
            model, Workload(16, LENGTH, TARGETS, micro_batch_size=micro), MeshConfig()
        ).total
        for micro in (2, 8)
    )
    assert large == pytest.approx(4 * small, rel=0.05)
    sharded = activations(
        model, Workload(16, LENGTH, TARGETS, micro_batch_size=8), MeshConfig(tp=3)
    ).total
    assert large / 3 < sharded < large
