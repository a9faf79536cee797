"""The model by invariances (padding, packing, cache, cutting, saving) and against transformers' own
T5 as an oracle.
"""

import re

import pytest
import torch

from moe import ConfigError, STMoEEncoderModel, STMoEForConditionalGeneration, STMoEModel
from tests.models.t5 import as_t5
from tests.models.tiny import DENSE, checkpointed, tiny_batch, tiny_model

load = STMoEForConditionalGeneration.from_pretrained


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(("attention", "feed_forward"), [("eager", "gated-gelu"), ("sdpa", "relu")])
def test_a_dense_model_equals_transformers_t5(attention, feed_forward):
    ours = tiny_model(
        **DENSE,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=7,  # shorter than the inputs
        feed_forward_proj=feed_forward,
        tie_word_embeddings=feed_forward == "relu",
        attn_implementation=attention,
    )
    theirs, batch = as_t5(ours, attention), tiny_batch()
    real = batch["labels"] != -100
    close(ours(**batch).logits[real], theirs(**batch).logits[real])


def test_eager_and_sdpa_drop_the_same_on_a_cpu():
    """torch's sdpa has no fused kernel with dropout there: both are eager, and draw alike."""
    losses = []
    for attention in ("eager", "sdpa"):
        model = tiny_model(attn_implementation=attention, dropout_rate=0.3).train()
        torch.manual_seed(0)
        losses.append(model(**tiny_batch()).loss)
    assert torch.equal(*losses)
    assert not torch.equal(losses[0], model.eval()(**tiny_batch()).loss)


def test_eager_and_sdpa_attend_alike_from_one_token_in_bfloat16_on_a_cpu():
    """torch's sdpa copies all keys for each query there: both are eager, and round alike."""
    for length, is_equal in ((1, True), (5, False)):
        logits = []
        for attention in ("eager", "sdpa"):
            model = tiny_model(attn_implementation=attention).bfloat16().eval()
            memory = (
                torch.randn(3, 9, model.config.d_model, generator=torch.manual_seed(0)).bfloat16(),
            )
            ids = torch.arange(2, 2 + length).expand(3, -1)
            logits.append(model(encoder_outputs=memory, decoder_input_ids=ids).logits)
        assert torch.equal(*logits) == is_equal


def test_generation_never_drops_a_decoder_token():
    model = tiny_model(eval_capacity_factor=0.01, min_expert_capacity=1)
    ids = tiny_batch()["input_ids"]
    for options, drops in (
        ({"decoder_drop_tokens": False}, False),
        ({"use_cache": True}, False),
        ({}, True),
    ):
        out = model(ids, decoder_input_ids=ids, **options)
        dropped = [int(router.stats.dropped_tokens) for router in out.decoder_router_outputs]
        assert (sum(dropped) > 0) == drops
    prepared = model.prepare_inputs_for_generation(ids, is_first_iteration=True)
    assert prepared["decoder_drop_tokens"] is False


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_leaves_logits_and_losses_alone(side):
    model, batch = tiny_model(eval_capacity_factor=None), tiny_batch(batch=3)
    padding = torch.zeros(3, 5, dtype=torch.int64)

    def padded(x, value):
        fill = torch.full_like(padding, value)
        return torch.cat([fill, x] if side == "left" else [x, fill], dim=1)

    wider = {
        "input_ids": padded(batch["input_ids"], 99),
        "attention_mask": padded(batch["attention_mask"], 0),
        "labels": batch["labels"],
    }
    a, b = model(**batch), model(**wider)
    real = batch["labels"] != -100
    close(a.logits[real], b.logits[real])
    for name in ("loss", "ce_loss", "z_loss", "load_balance_loss", "router_z_loss"):
        close(getattr(a, name), getattr(b, name))


def test_packed_examples_do_not_see_each_other():
    model = tiny_model(eval_capacity_factor=None)
    a, b = torch.randint(2, 131, (1, 5)), torch.randint(2, 131, (1, 7))
    ta, tb = torch.randint(2, 131, (1, 3)), torch.randint(2, 131, (1, 4))
    pad = torch.zeros(1, 2, dtype=torch.int64)
    packed = model(
        torch.cat([a, b, pad], dim=1),
        segment_ids=torch.tensor([[1] * 5 + [2] * 7 + [0] * 2]),
        labels=torch.cat([ta, tb, pad - 100], dim=1),
        decoder_segment_ids=torch.tensor([[1] * 3 + [2] * 4 + [0] * 2]),
    )
    close(packed.logits[:, :3], model(a, labels=ta).logits)
    close(packed.logits[:, 3:7], model(b, labels=tb).logits)
    alone = 3 * model(a, labels=ta).ce_loss + 4 * model(b, labels=tb).ce_loss
    close(packed.ce_loss * 7, alone)


def test_losses_and_gradients_of_micro_batches_add_up_to_those_of_the_batch():
    model = tiny_model(
        group_size=13, load_balance_loss_weight=0.7, router_z_loss_weight=0.3, z_loss_weight=0.2
    ).double()
    batch = tiny_batch()
    parameters = list(model.parameters())
    whole = model(**batch).loss
    expected = torch.autograd.grad(whole, parameters)
    counts = model.loss_counts(batch)
    total, summed = 0.0, [torch.zeros_like(p) for p in parameters]
    for rows in (slice(0, 1), slice(1, 4)):
        loss = model(**{name: x[rows] for name, x in batch.items()}, loss_counts=counts).loss
        total += loss.item()
        for s, g in zip(summed, torch.autograd.grad(loss, parameters), strict=True):
            s += g
    assert abs(total - whole.item()) < 1e-12
    for a, b in zip(summed, expected, strict=True):
        close(a, b, atol=1e-12)


def test_the_total_loss_is_the_weighted_sum_of_its_parts():
    model, batch = tiny_model(), tiny_batch()
    out = model(**batch)
    router = (*out.encoder_router_outputs, *out.decoder_router_outputs)
    balance = sum(r.losses.load_balance_loss for r in router)
    router_z = sum(r.losses.router_z_loss for r in router)
    close(out.load_balance_loss, balance)
    close(out.router_z_loss, router_z)
    close(out.loss, out.ce_loss + 1e-4 * out.z_loss + 0.01 * balance + 0.001 * router_z)
    oracle = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten())
    close(out.ce_loss, oracle)


def test_reentrant_checkpointing_is_refused_since_it_loses_the_gradient_of_the_router_losses():
    model = tiny_model()
    for arguments in ({"use_reentrant": True}, {"preserve_rng_state": True}):
        with pytest.raises(
            ConfigError, match=r"without use_reentrant=False: .* loses the gradient"
        ):
            checkpointed(model, arguments)
    checkpointed(model, {"use_reentrant": False, "preserve_rng_state": True})


def test_loading_initialises_what_a_checkpoint_lacks(tmp_path):
    model = tiny_model()
    kept = {
        name: w for name, w in model.state_dict().items() if "final_norm" in name or "embed" in name
    }
    model.save_pretrained(tmp_path, state_dict=kept)
    torch.manual_seed(1)
    loaded = load(tmp_path).state_dict()
    for name, weight in model.state_dict().items():
        if name in kept:
            assert torch.equal(loaded[name], weight), name
        elif weight.std() > 0:
            assert 0.5 < loaded[name].std() / weight.std() < 2, name


@pytest.mark.parametrize(
    ("tied", "asked", "multiple", "expected"),
    [(False, 150, None, 150), (True, 131, 64, 192), (True, 101, None, 101)],
)
def test_a_resized_vocabulary_keeps_old_logits_and_survives_saving(
    tmp_path, tied, asked, multiple, expected
):
    model, batch = tiny_model(tie_word_embeddings=tied), tiny_batch()
    for name in ("input_ids", "labels"):
        batch[name].clamp_(max=100)
    before, head = model(**batch).logits, model.lm_head.weight.detach().clone()
    model.resize_token_embeddings(asked, pad_to_multiple_of=multiple)
    after = model(**batch)
    assert model.config.vocab_size == expected == after.logits.shape[-1]
    assert model.get_input_embeddings().weight.shape == model.lm_head.weight.shape == (expected, 29)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    close(after.logits[..., :131], before[..., :expected])
    if expected > 131:  # transformers draws new rows around the mean of the old
        close(model.lm_head.weight[131:].mean(0), head.mean(0), atol=1e-4)

    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert torch.equal(loaded(**batch).logits, after.logits)
    tokens = [m.generate(batch["input_ids"], max_new_tokens=5) for m in (model, loaded)]
    assert torch.equal(*tokens)
    assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters()


def test_head_and_base_load_from_each_other(tmp_path):
    model, ids = tiny_model(), tiny_batch()["input_ids"]
    model.save_pretrained(tmp_path / "head")
    base, found = STMoEModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not any(found.values()), found
    expected = model.model(ids, decoder_input_ids=ids).last_hidden_state
    assert torch.equal(base(ids, decoder_input_ids=ids).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    again, found = load(tmp_path / "base", output_loading_info=True)
    assert set(found.pop("missing_keys")) == {"lm_head.weight"} and not any(found.values())
    assert torch.equal(again.model(ids, decoder_input_ids=ids).last_hidden_state, expected)
    encoder, found = STMoEEncoderModel.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not any(found.values()), found
    assert torch.equal(encoder(ids).last_hidden_state, model.get_encoder()(ids).last_hidden_state)


def test_saving_a_loaded_model_over_itself_changes_nothing(tmp_path):
    model, batch = tiny_model(tie_word_embeddings=True), tiny_batch()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    load(tmp_path).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "SHA256SUMS",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_st_moe.py",
    ]


def test_loading_takes_a_dtype_and_a_device_map(tmp_path):
    model, batch = tiny_model(), tiny_batch()
    model.save_pretrained(tmp_path, max_shard_size="40KB")  # several files
    for dtype, device_map in (
        (torch.float32, None),
        (torch.float32, {"": "cpu"}),
        (torch.bfloat16, "auto"),
    ):
        loaded = load(tmp_path, dtype=dtype, device_map=device_map)
        assert {p.dtype for p in loaded.parameters()} == {dtype} and loaded.dtype == dtype
        assert torch.equal(loaded(**batch).logits, model.to(dtype)(**batch).logits)


def test_weights_that_wait_on_a_disk_give_the_same_logits(tmp_path):
    model, batch = tiny_model(), tiny_batch()
    model.save_pretrained(tmp_path)
    places = {"model.encoder": "cpu", "model.decoder": "disk", "lm_head": "cpu"}
    loaded = load(tmp_path, device_map=places, offload_folder=tmp_path / "off")
    assert (
        loaded.model.decoder.blocks[2].sparse_feed_forward.experts.down_proj.device.type == "meta"
    )
    close(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("kind", [STMoEModel, STMoEForConditionalGeneration, STMoEEncoderModel])
def test_the_parts_that_transformers_asks_for_are_there(kind):
    model = kind(tiny_model().config)
    assert model.get_input_embeddings() is model.get_encoder().embed_tokens
    assert model.base_model_prefix == "model" and model.main_input_name == "input_ids"
    new = torch.nn.Embedding(131, 29)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new

    inputs = {"input_ids": tiny_batch()["input_ids"]}
    if kind is not STMoEEncoderModel:
        assert model.get_decoder() is getattr(model, "model", model).decoder
        inputs["decoder_input_ids"] = torch.tensor([[0, 5, 6, 7]]).repeat(4, 1)
    model.half()(**inputs)


def test_attention_that_knows_no_position_bias_is_refused():
    model = tiny_model()
    for attention in ("flash_attention_2", "kernels-community/metal-attn", "paged|eager"):
        message = f"'{re.escape(attention)}'; expected 'sdpa' or 'eager'"
        with pytest.raises(ConfigError, match=message):
            tiny_model(attn_implementation=attention)
        with pytest.raises(ConfigError, match=message):
            model.set_attn_implementation(attention)


def test_shards_of_transformers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tp_plan is 'auto'.*moe\.shard_model"):
        load(tmp_path, tp_plan="auto")


def test_initialisation_has_the_deviations_of_the_references():
    model = tiny_model(
        d_model=512,
        d_kv=64,
        d_ff=256,
        num_heads=8,
        initializer_scale=0.1,
        router_initializer_std=0.02,
    )
    block = model.model.encoder.stack.blocks[1]
    experts = block.sparse_feed_forward.experts
    expected = {
        "embedding": (model.get_input_embeddings().weight, 1.0),
        "query": (block.self_attention.q_proj.weight, (0.1 / 512) ** 0.5 / 8),
        "key": (block.self_attention.k_proj.weight, (0.1 / 512) ** 0.5),
        "expert": (experts.gate_up_proj, (0.1 / 512) ** 0.5),
        "expert_out": (experts.down_proj, (0.1 / 256) ** 0.5),
        "gate": (block.sparse_feed_forward.router.gate, 0.02),
        "head": (model.lm_head.weight, (0.1 / 512) ** 0.5),
    }
    for name, (weight, std) in expected.items():
        assert abs(weight.std().item() / std - 1) < 0.06, name


def test_a_cache_is_refused_with_activation_checkpointing():
    model, ids = checkpointed(tiny_model()), tiny_batch()["input_ids"]
    with pytest.raises(ConfigError, match="cache cannot be used with activation checkpointing"):
        model.train()(ids, decoder_input_ids=ids, use_cache=True)


def test_a_state_dict_can_be_loaded_without_a_folder():
    model = tiny_model()
    loaded = load(None, config=model.config, state_dict=model.state_dict())
    assert torch.equal(loaded(**tiny_batch()).logits, model(**tiny_batch()).logits)


def test_a_replica_of_data_parallel_is_refused_with_a_way_out():
    model = tiny_model()
    model._is_replica = True  # as torch.nn.parallel.replicate marks them
    with pytest.raises(ConfigError, match=r"DataParallel cannot combine .* torchrun"):
        model(**tiny_batch())
