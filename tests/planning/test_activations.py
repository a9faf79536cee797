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
from tests.models.tiny import UL2_AND_UMT5, tiny_model
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
    "SwiGLU, tables": UL2_AND_UMT5,
    "expert choice": {"router": "expert_choice", "router_options": {}}
    | {"decoder_router": "token_choice"},
    "shared experts": {"num_shared_experts": 2},
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
def test_a_forward_pass_keeps_what_is_planned(form):
    for precision, checkpointing in (("float32", True), ("bfloat16", False)):
        options = {"precision": precision, "activation_checkpointing": checkpointing}
        workload = Workload(ROWS, LENGTH, TARGETS, **options)
        saved, model = saved_bytes(workload, **FORMS[form])
        planned = activations(model, workload, MeshConfig(), cpu=True)
        assert planned.saved == pytest.approx(saved.activations, rel=0.1)

    # Without FSDP, bfloat16 keeps a copy of every weight of a product.
    if form == "as published":
        layouts = model_layouts(model, model.config, MeshConfig())
        copies = gathered_bytes(layouts, MeshConfig(), bfloat16=True, accumulates=False)
        assert copies == pytest.approx(saved.copies, rel=0.02)


def test_checkpointing_keeps_inputs_of_blocks_and_one_block_at_a_time():
    model = build_model(tiny_model(**FIELDS).config)
    checkpointed = Workload(ROWS, LENGTH, TARGETS, activation_checkpointing=True)
    whole = activations(model, Workload(ROWS, LENGTH, TARGETS), MeshConfig())
    again = activations(model, checkpointed, MeshConfig())
    assert again.total < whole.total / 2
    assert whole.recomputed == 0
    assert 0 < again.recomputed < whole.saved
