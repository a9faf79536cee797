"""Upcycling: identities at step 0, what other settings lose, and what is refused."""

import pytest
import torch

from moe import STMoEForConditionalGeneration
from moe.errors import ConfigError
from moe.sparse.editing import sparse_layers
from moe.surgery.kept_output import kept_output
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
    for row in kept_output(sparse, [tiny_batch()]):
        assert row.losses() == []
        assert row.training.accepted == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("granularity", [3, 6])
def test_parts_of_copies_compute_what_the_dense_model_does(tmp_path, granularity):
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


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"capacity_factor": 0.5}, "capacity"),
        ({"router_options": {"second_expert_policy": "none"}}, "policy for second experts"),
        ({"router_options": {"normalize_gates": False}}, "gates of a token"),
        ({"router": "switch", "num_selected_experts": 1}, "gates of a token"),
    ],
)
def test_the_report_names_the_setting_that_loses_output(dense, tmp_path, fields, reason):
    num_selected = fields.get("num_selected_experts", 2)
    fields = {name: value for name, value in fields.items() if name != "num_selected_experts"}
    sparse = upcycle(dense, tmp_path / "s", num_selected_experts=num_selected, fields=fields)
    for row in kept_output(sparse, [tiny_batch()]):
        (loss,) = row.losses()
        assert reason in loss
        assert row.training.accepted < 0.95


def test_what_is_reported_is_the_factor_between_the_layers(dense, tmp_path):
    """The output of one sparse layer, over that of the dense layer that it copies."""
    fields = {"router": "switch"}
    settings = {"num_selected_experts": 1, "num_sparse_encoder_layers": 4, "fields": fields}
    sparse = upcycle(dense, tmp_path / "s", **settings)
    before = STMoEForConditionalGeneration.from_pretrained(dense).eval()
    batch = {**tiny_batch(), "attention_mask": None}

    seen = []
    block = before.get_encoder().stack.blocks[0]
    block.feed_forward.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    before(**batch)
    x, expected = seen[0]
    layer = next(iter(sparse_layers(sparse).values()))
    y, _ = layer(x, drop_tokens=False)
    factor = (y * expected).sum(-1) / expected.square().sum(-1)
    (row, *_) = kept_output(sparse, [batch])
    assert row.evaluation.requested == pytest.approx(factor.mean().item(), rel=1e-4)


def test_a_scale_makes_up_for_small_gates(dense, tmp_path):
    fields = {"router_options": {"normalize_gates": False}, "router_initializer_std": 1e-9}
    sparse = upcycle(dense, tmp_path / "s", scale=2.5, fields=fields)  # gates of 1/5, two of them
    before = STMoEForConditionalGeneration.from_pretrained(dense).eval()
    real = tiny_batch()["labels"] != -100
    expected = before(**tiny_batch()).logits[real]
    torch.testing.assert_close(sparse(**tiny_batch()).logits[real], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_what_is_kept_includes_the_scale(dense, tmp_path, scale):
    """A scale of 1/2 leaves half of the output."""
    sparse = upcycle(dense, tmp_path / "s", scale=scale)
    for row in kept_output(sparse, [tiny_batch()], scale=scale):
        assert row.evaluation.accepted == pytest.approx(scale, abs=1e-5)
        assert len(row.losses()) == (scale != 1)


def test_where_experts_choose_the_capacity_loses_output(dense, tmp_path):
    fields = {"router": "expert_choice", "decoder_router": "token_choice"}
    capacity = {"capacity_factor": 2.0, "eval_capacity_factor": 2.0}
    sparse = upcycle(dense, tmp_path / "s", fields={**fields, **capacity})
    *encoder, _ = kept_output(sparse, [tiny_batch()])
    assert [reason.split(" drops")[0] for row in encoder for reason in row.losses()] == [
        "the capacity",
        "the capacity",
    ]

    # Without a capacity nothing is lost, in the decoder with its other router either.
    sparse = upcycle(dense, tmp_path / "t", fields=fields)
    for row in kept_output(sparse, [tiny_batch()]):
        assert row.losses() == []
        assert row.evaluation.accepted == pytest.approx(1, abs=1e-5)


def test_a_sharded_model_keeps_its_dtype_and_a_share_too_small_redraws_one_unit(dense, tmp_path):
    model = STMoEForConditionalGeneration.from_pretrained(dense, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "dense", max_shard_size="50KB")
    settings = {"method": "drop_reinit", "reinit_share": 1e-9}
    sparse = upcycle(tmp_path / "dense", tmp_path / "s", **settings)
    assert sparse.dtype == torch.bfloat16
    layer = sparse_layers(sparse)["encoder", 0]
    differing = layer.experts.down_proj[0] != layer.experts.down_proj[1]
    assert 1 <= differing.any(0).sum() <= 2


def test_dropped_units_are_the_same_in_all_projections_and_differ_between_experts(dense, tmp_path):
    settings = {"method": "drop_reinit", "reinit_share": 0.3, "num_sparse_encoder_layers": 4}
    sparse = upcycle(dense, tmp_path / "s", **settings)
    again = upcycle(dense, tmp_path / "t", **settings)
    before = STMoEForConditionalGeneration.from_pretrained(dense)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, sparse.state_dict()[name])

    chosen = []
    blocks = before.get_encoder().stack.blocks
    layers = [layer for key, layer in sparse_layers(sparse).items() if key[0] == "encoder"]
    for block, layer in zip(blocks, layers, strict=True):
        gate, up = block.feed_forward.up_proj.weight.chunk(2)
        for expert in range(5):
            new_gate, new_up = layer.experts.gate_up_proj[expert].chunk(2)
            changed = (new_gate != gate).all(1)
            assert torch.equal(changed, (new_up != up).all(1))
            down = block.feed_forward.down_proj.weight
            assert torch.equal(changed, (layer.experts.down_proj[expert] != down).all(0))
            assert changed.sum() == round(0.3 * 31)
            assert torch.equal(new_gate[~changed], gate[~changed])
            chosen.append(tuple(changed.tolist()))
    assert len(set(chosen)) == len(chosen)


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
        ({"granularity": 31, "fields": {"router": "hash"}}, "num_selected_experts is 62"),
        ({"method": "noise"}, "method is 'noise'"),
        ({"reinit_share": 1.5}, "reinit_share is 1.5"),
        ({"fields": {"d_ff": 64}}, "d_ff cannot be set"),
        ({"fields": {"num_experts": 12}}, "num_experts cannot be set as a field. Give --experts"),
        ({"fields": {"tie_word_embeddings": True}}, "tie_word_embeddings cannot be set"),
        ({"fields": {"hidden_size": 3}}, "hidden_size cannot be set"),
        ({"fields": {"router_options": []}}, "router_options is \\[\\]"),
        ({"seed": 2**32}, "seed is 4294967296"),
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
