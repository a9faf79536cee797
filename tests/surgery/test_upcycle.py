"""Upcycling: identities at step 0, and what is refused."""

import pytest
import torch

from moe import STMoEForConditionalGeneration
from moe.errors import ConfigError
from moe.sparse.editing import sparse_layers
from moe.surgery.upcycle import Upcycling, upcycle_checkpoint
from tests.models.t5 import as_t5
from tests.models.tiny import DENSE, tiny_batch, tiny_model


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "model"
    tiny_model(**DENSE, num_layers=4).save_pretrained(folder)
    return folder


def upcycle(source, folder, **settings):
    folder.mkdir()
    upcycle_checkpoint(source, folder, Upcycling(**{"num_experts": 5, **settings}))
    return STMoEForConditionalGeneration.from_pretrained(folder).eval()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("num_selected", [2, 3])
def test_copies_compute_what_the_dense_model_does(dense, tmp_path, num_selected, stacked):
    fields = {"sparse_dense_stacking": stacked, "expert_bias": "multiplicative"}
    sparse = upcycle(dense, tmp_path / "s", num_selected_experts=num_selected, fields=fields)
    before = STMoEForConditionalGeneration.from_pretrained(dense).eval()
    assert list(sparse_layers(sparse)) == [("encoder", 0), ("encoder", 1), ("decoder", 0)]

    # In evaluation and, without dropout, in training.
    for training in (False, True):
        theirs = before.train(training)(**tiny_batch()).logits
        ours = sparse.train(training)(**tiny_batch()).logits
        real = tiny_batch()["labels"] != -100
        torch.testing.assert_close(ours[real], theirs[real], atol=1e-5, rtol=1e-5)
    inputs = {"input_ids": tiny_batch()["input_ids"], "max_new_tokens": 7}
    assert torch.equal(sparse.eval().generate(**inputs), before.eval().generate(**inputs))


def test_parts_of_copies_compute_what_the_dense_model_does(tmp_path):
    granularity = 3
    model = tiny_model(**DENSE, d_ff=36)
    model.save_pretrained(tmp_path / "dense")
    sparse = upcycle(tmp_path / "dense", tmp_path / "sparse", granularity=granularity)
    experts = next(iter(sparse_layers(sparse).values())).experts
    assert experts.down_proj.shape == (5 * granularity, 29, 36 // granularity)
    assert sparse.config.num_parameters() == sum(p.numel() for p in sparse.parameters())
    real = tiny_batch()["labels"] != -100
    expected = model(**tiny_batch()).logits[real]
    torch.testing.assert_close(sparse(**tiny_batch()).logits[real], expected, atol=1e-5, rtol=1e-5)


def test_a_t5_of_transformers_keeps_its_logits(tmp_path):
    theirs = as_t5(tiny_model(**DENSE))
    theirs.save_pretrained(tmp_path / "t5")
    sparse = upcycle(tmp_path / "t5", tmp_path / "sparse")
    batch = tiny_batch()
    real = batch["labels"] != -100
    expected = theirs(**batch).logits[real]
    torch.testing.assert_close(sparse(**batch).logits[real], expected, atol=1e-5, rtol=1e-5)


def test_where_experts_choose_nothing_is_lost_without_a_capacity(dense, tmp_path):
    fields = {"router": "expert_choice", "decoder_router": "token_choice"}
    sparse = upcycle(dense, tmp_path / "s", fields=fields)
    before = STMoEForConditionalGeneration.from_pretrained(dense).eval()
    real = tiny_batch()["labels"] != -100
    expected = before(**tiny_batch()).logits[real]
    torch.testing.assert_close(sparse(**tiny_batch()).logits[real], expected, atol=1e-5, rtol=1e-5)


def test_a_sharded_model_keeps_its_dtype(dense, tmp_path):
    model = STMoEForConditionalGeneration.from_pretrained(dense, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "dense", max_shard_size="50KB")
    assert upcycle(tmp_path / "dense", tmp_path / "s").dtype == torch.bfloat16


def test_experts_have_memory_of_their_own_and_learn_apart(dense, tmp_path):
    sparse = upcycle(dense, tmp_path / "s").train()
    sparse(**tiny_batch()).loss.backward()
    for layer in sparse_layers(sparse).values():
        weight = layer.experts.down_proj
        assert len({expert.data_ptr() for expert in weight.unbind()}) == 5
        assert weight.grad is not None
        assert not torch.equal(weight.grad[0], weight.grad[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_selected_experts": 6}, "num_selected_experts is 6"),
        ({"num_experts": 1}, "num_experts is 1"),
        ({"granularity": 2}, "granularity is 2; expected a divisor of d_ff, 31"),
        ({"num_sparse_encoder_layers": 3}, "num_sparse_encoder_layers"),
        ({"fields": {"d_ff": 64}}, "d_ff cannot be set"),
        ({"fields": {"router_options": []}}, "router_options is \\[\\]"),
        ({"fields": {"capacity_facto": 2}}, "capacity_factor"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(dense, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        upcycle(dense, tmp_path / "s", **settings)


def test_a_sparse_model_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path / "sparse")
    with pytest.raises(ConfigError, match="7 experts already"):
        upcycle(tmp_path / "sparse", tmp_path / "again")
