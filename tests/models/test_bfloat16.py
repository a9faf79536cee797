"""The forward in bfloat16: what a sparse model errs more than a dense one is tokens that choose
other experts.
"""

import copy

import torch

from tests.models.tiny import DENSE, tiny_batch, tiny_model

WIDTH = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "eval_capacity_factor": None,
    "sparse_dense_stacking": False,
}


def relative_error(model, expected):
    with torch.no_grad():
        logits = model(**tiny_batch()).logits.float()
    return ((logits - expected).norm() / expected.norm()).item()


def record_plans(model):
    """Returns the plans of every sparse layer in one forward, and its logits."""
    plans = []
    with torch.no_grad():
        output = model(**tiny_batch())
    for records in (output.encoder_router_outputs, output.decoder_router_outputs):
        plans += [record.plan for record in records]
    return plans, output.logits


def test_with_the_choices_of_float32_a_sparse_model_errs_no_more_than_a_dense_one(monkeypatch):
    dense = tiny_model(**{**WIDTH, **DENSE})
    with torch.no_grad():
        dense_error = relative_error(copy.deepcopy(dense).bfloat16(), dense(**tiny_batch()).logits)

    sparse = tiny_model(**WIDTH)
    plans, expected = record_plans(sparse)
    narrow = copy.deepcopy(sparse).bfloat16()
    for layer, plan in zip(narrow.sparse_layers(), plans, strict=True):
        monkeypatch.setattr(layer.router, "assign", lambda *_, replayed=plan, **__: replayed)
    assert 0 < relative_error(narrow, expected) < 1.2 * dense_error
