"""The common table of surgery: what changed between two models on the same examples."""

import copy

import pytest
import torch

from moe.commands.surgery_report import compare, measure
from moe.sparse.editing import sparse_layers
from moe.tracing.recorder import traced_batches
from tests.models.tiny import tiny_batch, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def batches():
    return list(traced_batches([tiny_batch()]))


def permuted(model, key, order):
    """Returns a copy of a model with the experts of one layer in another order."""
    other = copy.deepcopy(model)
    layer = sparse_layers(other)[key]
    for parameter in [layer.router.gate, *layer.experts.parameters()]:
        parameter.data = parameter.data[order].clone()
    return other


def test_experts_in_another_order_are_traced_back_to_their_origins(model, batches):
    key = next(iter(sparse_layers(model)))
    num_experts = sparse_layers(model)[key].config.num_experts
    order = torch.arange(num_experts).roll(1)
    before = measure(model, batches)
    after = measure(permuted(model, key, order), batches)

    effects = compare(before, after, {key: order})
    first = effects.routing[0]
    assert first["first_expert_changed"] == 0
    assert first["load_after"] == [first["load_before"][origin] for origin in order.tolist()]
    assert [change["first_expert_changed"] for change in effects.routing[1:]] == [0, 0][
        : len(effects.routing) - 1
    ]

    # Without the origins every token of that layer has another expert.
    assert compare(before, after, {}).routing[0]["first_expert_changed"] == 1


def test_the_change_of_the_loss_is_that_of_the_means(model, batches):
    other = copy.deepcopy(model)
    other.lm_head.weight.data.mul_(1.7)
    effects = compare(measure(model, batches), measure(other, batches), {})
    before, after = effects.loss
    change = effects.loss_change
    assert change.value == pytest.approx(after - before) and change.low < change.value < change.high
    assert effects.changed_answers[1] == len(tiny_batch()["input_ids"])
    assert model(**tiny_batch()).ce_loss.item() == pytest.approx(before, abs=1e-5)


def test_answers_count_up_to_their_end_whatever_else_is_in_the_batch():
    model = tiny_model(eval_capacity_factor=None)
    batch = tiny_batch()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    answers = model.generate(**inputs, max_new_tokens=32, do_sample=False)[:, 1:].tolist()
    end = answers[1][3]
    model.generation_config.eos_token_id = end
    lengths = [answer.index(end) + 1 if end in answer else 32 for answer in answers]
    assert len(set(lengths)) > 1

    rows = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(4)]
    together = measure(model, list(traced_batches([batch])))
    alone = measure(model, list(traced_batches(rows)))
    effects = compare(together, alone, {})
    ratio = sum(lengths) / int((batch["labels"] != -100).sum())
    assert effects.changed_answers == (0, 4)
    assert effects.length_ratio == pytest.approx((ratio, ratio))
