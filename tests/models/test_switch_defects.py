"""What transformers 5.23.0 does wrong with Switch, and what a model converted from it does here
instead.

Each test shows both: their number, and ours beside an oracle. Where they are right,
test_conversion.py asks for theirs.
"""

import pytest
import torch
from transformers.models.switch_transformers.modeling_switch_transformers import (
    load_balancing_loss_func,
)

from moe import STMoEForConditionalGeneration
from tests.models.folders import change_config, change_weights
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


def test_a_gated_switch_has_a_place_here(tmp_path):
    """9: theirs has no class for GEGLU experts (switch-xxl-128); ours loads them by the names that
    they would have.
    """

    theirs = their_model()
    theirs.save_pretrained(tmp_path)

    def gate(weights):
        for name in [name for name in weights if name.endswith(".wi.weight")]:
            up = weights.pop(name)
            weights[name.replace("wi", "wi_0")], weights[name.replace("wi", "wi_1")] = up, 2 * up

    change_weights(tmp_path, gate)
    gelu = {"dense_act_fn": "gelu_new", "feed_forward_proj": "gated-gelu"}
    change_config(tmp_path, is_gated_act=True, **gelu)
    ours = STMoEForConditionalGeneration.from_pretrained(tmp_path)
    gate, up = ours.sparse_layers()[0].experts.gate_up_proj.chunk(2, dim=1)
    experts = sparse_block(theirs).experts.values()
    wi = torch.stack([expert.wi.weight for expert in experts])
    assert torch.equal(gate, wi)
    assert torch.equal(up, 2 * wi)
    assert ours.config.d_ff == SIZES["d_ff"]
