"""What a recording leaves behind: the modes of a model, tensors that training may use, any source's
batches.
"""

import pytest
import torch

from moe import DataError
from moe.data.packing import pack_rows
from moe.data.pipeline import stack_rows
from moe.tracing.recorder import record_routing, traced_batches
from tests.models.tiny import tiny_batch, tiny_model

EXAMPLES = [([7, 8, 9], [5, 1]), ([11, 12], [6, 3, 1]), ([13, 14, 15, 16], [1])]


def record(model, batch):
    return record_routing(model, traced_batches([batch]))


def modes(model):
    return {name: part.training for name, part in model.named_modules()}


def test_each_part_gets_its_own_mode_back_and_an_error_leaves_none_in_evaluation():
    model = tiny_model().train()
    model.model.encoder.eval()
    before = modes(model)
    record(model, tiny_batch())
    assert modes(model) == before

    model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record(model, tiny_batch())
    assert modes(model) == before


def test_what_was_recorded_can_be_used_where_there_is_a_gradient():
    trace = record(tiny_model(), tiny_batch())
    for layer in trace.layers:
        assert not layer.gate.is_inference()
        assert not any(values.is_inference() for values in layer.stats)


def test_under_autocast_what_is_recorded_keeps_its_precision():
    batches = list(traced_batches([tiny_batch(), tiny_batch(seed=1)]))
    with torch.autocast("cpu", torch.bfloat16):
        trace = record_routing(tiny_model(), batches, num_best=3)
    for layer in trace.layers:
        assert (layer.gate.dtype, layer.best_prob.dtype) == (torch.float32, torch.float16)


def segmented(pack):
    rows = [[index] for index in range(len(EXAMPLES))]
    if pack:
        rows = pack_rows(EXAMPLES, 13, 11)
    examples = [[EXAMPLES[index] for index in row] for row in rows]
    return stack_rows(examples.__getitem__, range(len(rows)), (13, 11), 0)


def test_rows_of_one_segment_are_traced_as_those_of_a_mask():
    batch = segmented(pack=False)
    masked = {
        "input_ids": batch["input_ids"],
        "attention_mask": (batch["segment_ids"] > 0).long(),
        "labels": batch["labels"],
    }
    ours, theirs = record(tiny_model(), batch), record(tiny_model(), masked)
    assert ours.encoder.ids.tolist() == [*EXAMPLES[0][0], *EXAMPLES[1][0], *EXAMPLES[2][0]]
    assert ours.facts.inputs_fingerprint == theirs.facts.inputs_fingerprint
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(layer.choices, other.choices)


def test_packed_rows_are_refused():
    with pytest.raises(DataError, match=r"one example in each row: .* Give batches that are not"):
        record(tiny_model(), segmented(pack=True))
