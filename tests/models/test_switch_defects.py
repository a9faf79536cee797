"""What transformers 5.23.0 does wrong with Switch, and what a model converted from it does here
instead.

Each test shows both: their number, and ours beside an oracle. Where they are right,
test_conversion.py asks for theirs.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.switch_transformers.modeling_switch_transformers import (
    load_balancing_loss_func,
)

from moe import STMoEConfig, STMoEForConditionalGeneration
from tests.models.hf_models import (
    SIZES,
    assert_equal_to_rounding,
    needs_a_right_switch,
    their_inputs,
    their_model,
)

pytestmark = needs_a_right_switch
LABELS = their_inputs()["decoder_input_ids"]


@pytest.fixture
def both(tmp_path):
    """Returns a function that makes their model and ours of it."""

    def make(kind="Switch", **changes):
        theirs = their_model(kind, **changes)
        theirs.save_pretrained(tmp_path / "model")
        return theirs, STMoEForConditionalGeneration.from_pretrained(tmp_path / "model")

    return make


def sparse_block(model):
    """Their first sparse feed-forward layer."""
    return next(
        block.layer[-1].mlp
        for block in model.encoder.block
        if hasattr(block.layer[-1].mlp, "router")
    )


def test_the_routers_losses_count_by_default_since_a_model_trained_without_them_collapses(both):
    """1: theirs are added only if output_router_logits=True is given to each call, which Trainer
    does not.
    """
    theirs, ours = both(router_aux_loss_coef=0.5, router_z_loss_coef=0.25)
    ids = their_inputs()["input_ids"]
    expected, actual = theirs(ids, labels=LABELS), ours(ids, labels=LABELS)
    cross_entropy = F.cross_entropy(expected.logits.flatten(0, 1), LABELS.flatten())
    assert_equal_to_rounding(expected.loss, cross_entropy)
    assert_equal_to_rounding(actual.ce_loss, expected.loss)
    weighed = actual.ce_loss + 0.5 * actual.load_balance_loss + 0.25 * actual.router_z_loss
    assert_equal_to_rounding(actual.loss, weighed)
    assert actual.load_balance_loss > 0.5
    assert actual.router_z_loss > 0


def test_the_losses_count_where_every_layer_is_sparse(both):
    """2: theirs are 0 unless the step between sparse layers is above 1."""
    theirs, ours = both("Switch, every layer sparse")
    ids = their_inputs()["input_ids"]
    expected = theirs(ids, labels=LABELS, output_router_logits=True)
    assert expected.encoder_aux_loss == expected.decoder_z_loss == 0
    actual = ours(ids, labels=LABELS)
    assert len(actual.encoder_router_outputs) == 4
    assert actual.load_balance_loss > 0.5
    assert actual.router_z_loss > 0


def test_no_sparse_layer_is_none_but_a_converted_model_has_those_that_were_built(both):
    """3: num_sparse_encoder_layers=0 builds one in theirs, whose weights are in the checkpoint."""
    theirs, ours = both("Switch, no layer named sparse")
    assert sum(hasattr(block.layer[-1].mlp, "router") for block in theirs.encoder.block) == 1
    assert ours.config.num_sparse_encoder_layers == 1
    sparse = {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 2, "num_experts": 7}
    config = STMoEConfig(num_layers=4, num_decoder_layers=4, **sparse)
    assert not any(config.is_sparse_block(block, decoder=False) for block in range(4))


def test_balance_is_of_each_layer_since_two_layers_can_be_out_of_balance_in_opposite_ways(both):
    """4: theirs is over the pool of a stack's layers; the oracle is their own function, layer by
    layer.
    """
    theirs, ours = both()
    ids = their_inputs()["input_ids"]
    pooled = theirs(ids, labels=LABELS, output_router_logits=True)
    logits = (*pooled.encoder_router_logits, *pooled.decoder_router_logits)
    layers = [load_balancing_loss_func(x.softmax(dim=-1), x.argmax(dim=-1)) for x in logits]
    actual = ours(ids, labels=LABELS)
    assert_equal_to_rounding(actual.load_balance_loss, torch.stack(layers).mean())
    mean_of_pools = (pooled.encoder_aux_loss + pooled.decoder_aux_loss) / 2
    assert abs(mean_of_pools - actual.load_balance_loss) > 0.01


def test_padding_takes_no_capacity_so_that_left_padding_moves_nothing(both):
    """5 and 6: in theirs padding takes slots before real tokens; router_ignore_padding_tokens is
    never read.
    """
    theirs, ours = both(router_ignore_padding_tokens=True)
    ids = their_inputs()["input_ids"]
    padded = F.pad(ids, (12, 0))
    moved = []
    for model in (theirs, ours):
        encoder = model.get_encoder()
        alone = encoder(ids).last_hidden_state
        beside = encoder(padded, attention_mask=(padded != 0).long()).last_hidden_state
        moved.append((alone - beside[:, 12:]).abs().max().item())
    assert moved[0] > 0.1
    assert moved[1] < 1e-5


def test_jitter_is_for_the_router_alone_and_changes_no_input(both):
    """7: theirs multiplies in place, so that the experts see jittered tokens too."""
    theirs, ours = both(router_jitter_noise=0.3)
    x = torch.randn(3, 17, 29)
    changed = x.clone()
    sparse_block(theirs.train())(changed)
    assert (changed - x).abs().max() > 0.1

    layer, seen = ours.train().sparse_layers()[0], []
    layer.experts.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    kept = x.clone()
    outputs = [layer(kept)[1].router_logits for _ in range(2)]
    assert not torch.equal(*outputs)  # it did jitter
    assert torch.equal(kept, x)
    assert all(torch.equal(rows.wait().tokens, x.flatten(0, 1)) for rows in seen)


def test_a_forward_pass_leaves_the_routers_parameters_in_their_dtype(both):
    """8: theirs rewrites the classifier as float32, behind the back of FSDP and optimizer; ours
    only computes in it.
    """
    theirs, ours = both()
    ids = their_inputs()["input_ids"]
    theirs, ours = theirs.to(torch.bfloat16), ours.to(torch.bfloat16)
    theirs(ids, labels=LABELS), ours(ids, labels=LABELS)
    assert sparse_block(theirs).router.classifier.weight.dtype == torch.float32
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert ours(ids, labels=LABELS).encoder_router_outputs[0].router_logits.dtype == torch.float32


def test_a_gated_switch_has_a_place_here(tmp_path):
    """9: theirs has no class for GEGLU experts (switch-xxl-128); ours loads them by the names that
    they would have.
    """

    theirs = their_model()
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith(".wi.weight")]:
        up = weights.pop(name)
        weights[name.replace("wi", "wi_0")], weights[name.replace("wi", "wi_1")] = up, 2 * up
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"is_gated_act": True, "dense_act_fn": "gelu_new", "feed_forward_proj": "gated-gelu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = STMoEForConditionalGeneration.from_pretrained(tmp_path)
    gate, up = ours.sparse_layers()[0].experts.gate_up_proj.chunk(2, dim=1)
    experts = sparse_block(theirs).experts.values()
    wi = torch.stack([expert.wi.weight for expert in experts])
    assert torch.equal(gate, wi)
    assert torch.equal(up, 2 * wi)
    assert ours.config.d_ff == SIZES["d_ff"]
