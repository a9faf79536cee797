"""The loss by its parts: a batch must be the mean of its sequences, each as often as it has
targets.
"""

import pytest
import torch
import torch.nn.functional as F

from moe import ConfigError
from tests.models.tiny import tiny_batch, tiny_model

HEAVY = {"load_balance_loss_weight": 3.0, "router_z_loss_weight": 2.0, "z_loss_weight": 0.5}
PARTS = ("loss", "ce_loss", "z_loss", "load_balance_loss", "router_z_loss")


def heavy_model(**changes):
    """Returns a float64 model in training mode in whose loss every part counts."""
    return tiny_model(**{**HEAVY, "group_size": 13, **changes}).double().train()


def rows_of(batch, rows):
    return {name: values[rows] for name, values in batch.items()}


def run(model, batch, **arguments):
    """Returns the parts of the loss, and the gradient of it."""
    output = model(**batch, **arguments)
    gradient = torch.autograd.grad(output.loss, list(model.parameters()))
    return [torch.stack([getattr(output, name) for name in PARTS]).detach(), *gradient]


def assert_all_close(ours, theirs, atol=1e-10):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


EXPERTS_CHOOSE = {
    "router": "expert_choice",
    "router_options": None,
    "decoder_router": "token_choice",
    "decoder_router_options": {"second_expert_policy": "all"},
}


@pytest.mark.parametrize("changes", [{}, {"convention": "flaxformer"}, EXPERTS_CHOOSE])
def test_with_counted_items_a_batch_is_the_mean_of_its_sequences_by_their_targets(changes):
    model, batch = heavy_model(**changes), tiny_batch()
    targets = (batch["labels"] != -100).double().sum(dim=1)
    assert len(set(targets.tolist())) > 1, "else a plain mean would do"
    alone = [run(model, rows_of(batch, slice(row, row + 1))) for row in range(4)]
    expected = [
        sum(share * part for share, part in zip(targets / targets.sum(), parts, strict=True))
        for parts in zip(*alone, strict=True)
    ]
    assert_all_close(run(model, batch, num_items_in_batch=targets.sum()), expected)


@pytest.mark.parametrize("group_size", [1, 26])
def test_with_counted_items_the_parts_of_a_batch_add_up_to_it(group_size):
    model, batch = heavy_model(group_size=group_size), tiny_batch(batch=8)
    num_items = int((batch["labels"] != -100).sum())
    parts = [
        run(model, rows_of(batch, slice(row, row + 2)), num_items_in_batch=num_items)
        for row in range(0, 8, 2)
    ]
    whole = run(model, batch, num_items_in_batch=torch.tensor(num_items))
    assert_all_close([sum(values) for values in zip(*parts, strict=True)], whole)
    wider = heavy_model(group_size=group_size, balance_scope="micro_batch")
    balance = wider(**batch, num_items_in_batch=num_items).load_balance_loss
    torch.testing.assert_close(balance, wider(**batch).load_balance_loss)


def test_with_equally_many_tokens_and_targets_everywhere_counted_items_change_nothing():
    model, batch = heavy_model(), tiny_batch()
    batch = {"input_ids": batch["input_ids"], "labels": batch["labels"].clamp(min=2)}
    assert_all_close(run(model, batch, num_items_in_batch=4 * 11), run(model, batch))


def test_a_batch_without_a_target_costs_nothing_and_has_gradients_of_zero():
    model, batch = heavy_model(), tiny_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for number in run(model, batch, num_items_in_batch=0):
        assert torch.count_nonzero(number) == 0


@pytest.mark.parametrize("num_items", [None, 17])
def test_smoothed_cross_entropy_is_that_of_torch_in_training_alone(num_items):
    model, batch = heavy_model(label_smoothing=0.1), tiny_batch()
    labels, arguments = batch["labels"], {"num_items_in_batch": num_items}

    def expected(output, smoothing):
        flat = output.logits.flatten(0, 1)
        total = F.cross_entropy(flat, labels.flatten(), label_smoothing=smoothing, reduction="sum")
        return total / (num_items or (labels != -100).sum())

    output = model(**batch, **arguments)
    torch.testing.assert_close(output.ce_loss, expected(output, 0.1))
    assert output.load_balance_loss > 0 and output.router_z_loss > 0 and output.z_loss > 0
    assert (output.loss - output.ce_loss).item() > 1
    output = model.eval()(**batch, **arguments)
    torch.testing.assert_close(output.ce_loss, expected(output, 0.0))


def test_a_training_step_whose_labels_the_trainer_took_away_is_refused():
    model, batch = heavy_model(), tiny_batch()
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
    with pytest.raises(ConfigError, match=r"load_balance_loss_weight 3\.0.*Set label_smoothing"):
        model(**batch, num_items_in_batch=7)
    assert model.eval()(**batch, num_items_in_batch=7).loss is None
    weightless = heavy_model(**dict.fromkeys(HEAVY, 0.0))
    with pytest.raises(ConfigError, match="without a decoder_attention_mask"):
        weightless(**batch, num_items_in_batch=7)
    mask = torch.ones_like(batch["decoder_input_ids"])
    assert weightless(**batch, decoder_attention_mask=mask, num_items_in_batch=7).loss is None
