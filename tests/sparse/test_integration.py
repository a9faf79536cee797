"""The sparse layer in transformers' T5 and torch's TransformerEncoder.

Oracles: an adapter with one expert is T5's own dense feed-forward with the same weights; real tokens
are counted by hand; checkpointed layers must do what layers that keep their activations do. The two
parts marked `guide` hold the lines that docs/guides/layer.md shows.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import T5Config, T5ForConditionalGeneration

from moe import ConfigError, DataError, RouterStats, SparseConfig, SparseFeedForward
from moe.models.pretrained import enable_activation_checkpointing
from moe.sparse.integration import (
    SparseFeedForwardAdapter,
    collect_routers,
    replace_feed_forward,
    router_loss,
)

B, L, T, D, F, E = 3, 13, 11, 21, 17, 5
LAYERS = 2


def dense_t5(seed=0, dropout_rate=0.0, feed_forward="gated-gelu"):
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=131, d_model=D, d_kv=5, d_ff=F, num_layers=LAYERS, num_heads=3, feed_forward_proj=feed_forward,
        dropout_rate=dropout_rate, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def sparse_t5(seed=0, dropout_rate=0.0):
    model = dense_t5(seed, dropout_rate)
    # guide
    for stack in (model.encoder, model.decoder):
        config = SparseConfig(
            d_model=model.config.d_model,
            d_ff=model.config.d_ff,
            num_experts=5,
            decoder=stack is model.decoder,
            eval_capacity_factor=None,
        )
        for block in stack.block:
            block.layer[-1].DenseReluDense = SparseFeedForwardAdapter(config)
    # end of guide
    return model


def t5_batch():
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(B, L, dtype=torch.int64)
    labels = torch.randint(2, 131, (B, T), generator=generator)
    for row in range(B):
        mask[row, L - 3 * row :] = 0
        labels[row, T - 2 * row :] = -100
    return torch.randint(2, 131, (B, L), generator=generator) * mask, mask, labels


def sparse_encoder(seed=0, **changes):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(D, 3, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=LAYERS, enable_nested_tensor=False)
    for layer in encoder.layers:
        config = SparseConfig(**{"d_model": D, "d_ff": F, "num_experts": E, **changes})
        replace_feed_forward(layer, config)
    return encoder


def gates(model):
    return [layer.router.gate for layer in model.modules() if isinstance(layer, SparseFeedForward)]


def hooks_left(model):
    layers = [module for module in model.modules() if hasattr(module, "experts")]
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in layers)


def expected_counts(routers, tokens, positions):
    stats = RouterStats.sum(router.stats for router in routers)
    assert [int(router.stats.num_tokens) for router in routers] == [tokens] * LAYERS
    assert int(stats.num_positions) == LAYERS * positions
    assert int(stats.expert_load.sum()) >= int(stats.num_tokens) == LAYERS * tokens


@pytest.mark.parametrize("feed_forward", ["gated-gelu", "relu"])
def test_a_slot_with_one_expert_is_the_dense_feed_forward_of_t5(feed_forward):
    dense = dense_t5(feed_forward=feed_forward).eval()
    model = copy.deepcopy(dense)
    gated = feed_forward == "gated-gelu"
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            old = block.layer[-1].DenseReluDense
            config = SparseConfig(
                d_model=D, d_ff=F, num_experts=1, num_selected_experts=1, gated=gated,
                activation="gelu_pytorch_tanh" if gated else "relu", decoder=stack is model.decoder,
            )  # fmt: skip
            adapter = SparseFeedForwardAdapter(SparseFeedForward(config))
            weights = dict(adapter.sparse.experts.named_parameters())
            first = torch.cat([old.wi_0.weight, old.wi_1.weight]) if gated else old.wi.weight
            with torch.no_grad():
                weights["gate_up_proj" if gated else "up_proj"].copy_(first[None])
                weights["down_proj"].copy_(old.wo.weight[None])
            block.layer[-1].DenseReluDense = adapter
    ids, mask, labels = t5_batch()
    ours, theirs = (m(input_ids=ids, attention_mask=mask, labels=labels) for m in (model, dense))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)


def test_a_t5_with_sparse_slots_trains_and_generates():
    model, (ids, mask, labels) = sparse_t5().train(), t5_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(9):
        optimizer.zero_grad()
        # guide
        with (
            collect_routers(model.encoder, token_mask=mask) as encoder,
            collect_routers(model.decoder) as decoder,
        ):
            output = model(input_ids=ids, attention_mask=mask, labels=labels)
            (output.loss + router_loss(encoder + decoder)).backward()
        # end of guide
        optimizer.step()
        losses.append(float(output.loss.detach()))
    assert losses[-1] < 0.8 * losses[0], losses
    expected_counts(encoder, int(mask.sum()), B * L)
    expected_counts(decoder, B * T, B * T)
    share = RouterStats.sum(router.stats for router in encoder).summary()["fraction_padding"]
    assert share == pytest.approx(1 - int(mask.sum()) / (B * L))

    model.eval()
    new = {"max_new_tokens": 5, "min_new_tokens": 5}
    with (
        collect_routers(model.encoder, token_mask=mask) as encoder,
        collect_routers(model.decoder) as decoder,
    ):
        generated = model.generate(ids, attention_mask=mask, **new)
    expected_counts(encoder, int(mask.sum()), B * L)
    assert len(decoder) == LAYERS * 5
    assert hooks_left(model) == 0
    alone = [model.generate(ids[i : i + 1, : int(mask[i].sum())], **new) for i in range(B)]
    assert torch.equal(generated, torch.cat(alone))


# ---- torch's layers, which have a fast path ----

ONE_EXPERT = {
    "d_model": 14, "d_ff": F, "num_experts": 1, "num_selected_experts": 1, "gated": False, "activation": "relu",
    "capacity_factor": None, "eval_capacity_factor": None,
}  # fmt: skip


def fast_layer(kind=nn.TransformerEncoderLayer, **options):
    """A layer of torch as it comes: ReLU, dropout, and an even number of heads."""
    layer = kind(14, 2, F, batch_first=True, **options)
    nn.init.zeros_(layer.linear1.bias)
    nn.init.zeros_(layer.linear2.bias)
    return layer


def replace_by_one_expert(layer):
    """Puts one expert with the weights of the dense layer in its place."""
    weights = [layer.linear1.weight.detach().clone(), layer.linear2.weight.detach().clone()]
    config = SparseConfig(**ONE_EXPERT, decoder=isinstance(layer, nn.TransformerDecoderLayer))
    experts = replace_feed_forward(layer, config).sparse.experts
    with torch.no_grad():
        experts.up_proj.copy_(weights[0])
        experts.down_proj.copy_(weights[1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("with_gradient", "is_padded", "norm_first"),
    [
        (torch.enable_grad, True, False),
        (torch.no_grad, False, True),
        (torch.inference_mode, True, True),
        (torch.inference_mode, False, False),
    ],
)
def test_one_expert_in_torchs_encoder_is_its_dense_layer(with_gradient, is_padded, norm_first):
    torch.manual_seed(0)
    stack = nn.TransformerEncoder(
        fast_layer(norm_first=norm_first), LAYERS, enable_nested_tensor=not norm_first
    )
    dense = stack.eval()
    sparse = copy.deepcopy(stack)
    for layer in sparse.layers:
        replace_by_one_expert(layer)

    x = torch.randn(B, L, 14)
    padding = torch.arange(L) >= torch.tensor([[13], [7], [2]])
    mask = padding if is_padded else None
    real = ~padding if is_padded else slice(None)
    with with_gradient():
        expected = dense(x, src_key_padding_mask=mask)
        y = sparse(x, src_key_padding_mask=mask)
    assert not y.is_nested
    torch.testing.assert_close(y[real], expected[real])


@pytest.mark.parametrize(
    ("with_gradient", "training"), [(torch.enable_grad, True), (torch.inference_mode, False)]
)
def test_one_expert_in_torchs_decoder_is_its_dense_layer(with_gradient, training):
    torch.manual_seed(0)
    dense = nn.TransformerDecoder(fast_layer(nn.TransformerDecoderLayer, dropout=0.0), LAYERS)
    sparse = copy.deepcopy(dense)
    for layer in sparse.layers:
        replace_by_one_expert(layer)

    memory = torch.randn(B, L, 14)
    x = torch.randn(B, T, 14)
    padding = torch.arange(L) >= torch.tensor([[13], [7], [2]])
    causal = nn.Transformer.generate_square_subsequent_mask(T)
    options = {"tgt_mask": causal, "memory_key_padding_mask": padding, "tgt_is_causal": True}
    with with_gradient():
        expected = dense.train(training)(x, memory, **options)
        y = sparse.train(training)(x, memory, **options)
    torch.testing.assert_close(y, expected)


def test_a_replaced_layer_has_the_dtype_of_the_dense_one_and_one_dropout_on_its_output():
    layer = fast_layer(dropout=0.5).to(torch.bfloat16).train()
    adapter = replace_feed_forward(layer, SparseConfig(d_model=14, d_ff=F, num_experts=E))
    assert {weight.dtype for weight in adapter.parameters()} == {torch.bfloat16}
    x = torch.randn(B, L, 14, dtype=torch.bfloat16)
    assert torch.equal(layer.dropout(x), x)
    assert layer(x).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="batch_first of the layer is False"):
        replace_feed_forward(nn.TransformerEncoderLayer(14, 2, F), adapter.sparse.config)


def test_router_loss_is_the_weighted_sum_of_the_papers_equation_6():
    model = sparse_encoder()
    with torch.no_grad(), collect_routers(model.eval()) as routers:
        model(torch.randn(B, L, D))
    balance = sum(float(router.losses.load_balance_loss) for router in routers)
    z = sum(float(router.losses.router_z_loss) for router in routers)
    assert float(router_loss(routers)) == pytest.approx(0.01 * balance + 0.001 * z)
    weights = {"load_balance_weight": 0.3, "router_z_weight": 0.7}
    mean = float(router_loss(routers, **weights, reduction="mean"))
    assert mean == pytest.approx((0.3 * balance + 0.7 * z) / LAYERS)
    with pytest.raises(ConfigError, match="reduction is 'max'; expected one of sum, mean"):
        router_loss(routers, reduction="max")


def step_of(model, ids, mask, labels):
    """Losses, statistics and gradients of one step; dropout and the second expert's choice are
    random.
    """
    model.zero_grad()
    torch.manual_seed(1)
    with (
        collect_routers(model.encoder, token_mask=mask) as encoder,
        collect_routers(model.decoder) as decoder,
    ):
        output = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        loss = output.loss + router_loss(encoder + decoder)
        loss.backward()
    assert len(encoder) == len(decoder) == LAYERS
    stats = RouterStats.sum(router.stats for router in encoder + decoder)
    return loss.detach(), list(stats), [parameter.grad for parameter in model.parameters()]


def test_activation_checkpointing_changes_no_loss_no_statistic_and_no_gradient():
    model, batch = sparse_t5(dropout_rate=0.1).train(), t5_batch()
    kept = step_of(model, *batch)
    recomputations = []
    layer = model.encoder.block[1].layer[-1].DenseReluDense.sparse
    layer.register_forward_pre_hook(lambda *_: recomputations.append(1))
    enable_activation_checkpointing(model, {"use_reentrant": False})
    checkpointed = step_of(model, *batch)
    assert len(recomputations) == 2
    torch.testing.assert_close(checkpointed, kept, rtol=0, atol=0)
    assert all(float(gate.grad.norm()) > 0 for gate in gates(model))


def test_closing_the_context_before_a_backward_pass_that_recomputes_is_refused():
    model, (ids, mask, labels) = sparse_t5().train(), t5_batch()
    enable_activation_checkpointing(model, {"use_reentrant": False})
    message = r"ended before the backward pass.*loss.backward\(\) inside the context"
    with pytest.raises(ConfigError, match=message), collect_routers(model.encoder, token_mask=mask):
        model(input_ids=ids, attention_mask=mask, labels=labels)
    assert hooks_left(model) == 0
    with torch.no_grad(), collect_routers(model.encoder, token_mask=mask) as routers:
        model(input_ids=ids, attention_mask=mask, labels=labels)
    expected_counts(routers, int(mask.sum()), B * L)


def test_without_a_mask_or_without_checkpointing_the_backward_pass_may_come_later():
    model, (ids, mask, labels) = sparse_t5().train(), t5_batch()
    with collect_routers(model.encoder, token_mask=mask) as routers:
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss + router_loss(routers)
    loss.backward()
    enable_activation_checkpointing(model, {"use_reentrant": False})
    with collect_routers(model) as routers:
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss + router_loss(routers)
    loss.backward()
    assert len(routers) == 2 * LAYERS


def test_reentrant_checkpointing_is_refused_because_the_losses_would_have_no_gradient():
    model, (ids, mask, labels) = sparse_t5().train(), t5_batch()
    enable_activation_checkpointing(model, {"use_reentrant": True})
    with (
        pytest.raises(ConfigError, match="set use_reentrant=False"),
        collect_routers(model.encoder, token_mask=mask),
    ):
        model(input_ids=ids, attention_mask=mask, labels=labels)
    assert hooks_left(model) == 0


def test_of_nested_masks_the_innermost_holds_and_the_callers_own_comes_first():
    layer = SparseFeedForward(SparseConfig(d_model=D, d_ff=F, num_experts=E))
    x = torch.randn(B, L, D)
    outer, inner, own = (torch.arange(L).expand(B, L) < length for length in (2, 3, 5))
    with collect_routers(layer, outer) as outer_routers, collect_routers(layer) as middle_routers:
        with collect_routers(layer, inner) as inner_routers:
            layer(x)
            layer(x, own)
            layer(x, token_mask=own)
            layer(x=x)
        layer(x, None)
    expected = [3, 5, 5, 3, 2]
    for routers in (outer_routers, middle_routers, inner_routers):
        lengths = [int(router.stats.num_tokens) // B for router in routers]
        assert lengths == expected[: 4 if routers is inner_routers else 5]


def test_a_context_collects_the_calls_of_its_own_thread_alone():
    layer = SparseFeedForward(SparseConfig(d_model=D, d_ff=F, num_experts=E))
    both_are_open, both_have_run = threading.Barrier(2), threading.Barrier(2)

    def lengths_in_thread(length):
        mask = torch.arange(L).expand(B, L) < length
        with collect_routers(layer, mask) as routers:
            both_are_open.wait()
            layer(torch.randn(B, L, D))
            both_have_run.wait()
        return [int(router.stats.num_tokens) // B for router in routers]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lengths_in_thread, (2, 5))) == [[2], [5]]


def test_a_slot_takes_a_sparse_layer_that_something_wraps():
    layer = SparseFeedForward(SparseConfig(d_model=D, d_ff=F, num_experts=E))
    adapter = SparseFeedForwardAdapter(checkpoint_wrapper(layer))
    assert any(module is layer for module in adapter.modules())
    x = torch.randn(B, L, D)
    assert adapter(x).shape == x.shape


def test_what_cannot_be_collected_or_summed_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match=r"no SparseFeedForward in this Linear"):
        collect_routers(nn.Linear(2, 3)).__enter__()
    model = sparse_t5()
    with pytest.raises(ConfigError, match=r"one token_mask.*model.decoder, decoder_mask"):
        collect_routers(model, torch.ones(B, L)).__enter__()
    with (
        pytest.raises(DataError, match="no sparse layer has run"),
        collect_routers(model) as routers,
    ):
        router_loss(routers)


def test_statistics_of_layers_of_different_shape_are_added_without_their_load():
    few, many = sparse_encoder(num_experts=3), sparse_encoder(num_selected_experts=1)
    with collect_routers(few) as few_routers, collect_routers(many) as many_routers:
        many(few(torch.randn(B, L, D)))
    stats = RouterStats.sum(router.stats for router in few_routers + many_routers)
    assert int(stats.num_tokens) == 2 * LAYERS * B * L
    assert stats.expert_load.numel() == 0 and stats.dropped_by_choice.numel() == 2
