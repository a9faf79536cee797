"""Generation: every way to the same tokens gives the same tokens; greedy decoding without a cache
is the oracle.
"""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from moe import ConfigError, DataError
from tests.models.tiny import tiny_batch, tiny_model

NEW = {"max_new_tokens": 7}


def prompt(rows=4):
    batch = tiny_batch()
    return {name: batch[name][:rows] for name in ("input_ids", "attention_mask")}


def same(a, b):
    assert torch.equal(a, b), (a, b)


def static_cache(config, length, memory_length):
    sizes = (length, memory_length)
    return EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=size) for size in sizes))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("attention", "generation"),
    [
        ("eager", {}),
        ("sdpa", {"num_beams": 3}),
        ("eager", {"do_sample": True, "num_beams": 3, "top_k": 20, "top_p": 0.9}),
    ],
    ids=str,
)
def test_every_cache_gives_the_tokens_of_none(attention, generation):
    model, tokens = tiny_model(attn_implementation=attention), []
    for cache in ({"use_cache": False}, {}, {"cache_implementation": "static"}):
        torch.manual_seed(0)
        tokens.append(model.generate(**prompt(), **NEW, **generation, **cache))
    same(tokens[0], tokens[1])
    same(tokens[0], tokens[2])


def test_a_prefix_with_padding_gives_the_same_tokens_with_every_cache():
    prefix = torch.tensor([[0, 5, 6], [0, 5, 6], [7, 0, 9], [0, 2, 3]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]])
    given = {"decoder_input_ids": prefix, "decoder_attention_mask": mask}
    model = tiny_model()
    expected = model.generate(**prompt(), **NEW, **given, use_cache=False)
    same(model.generate(**prompt(), **NEW, **given), expected)
    same(model.generate(**prompt(), **NEW, **given, cache_implementation="static"), expected)


def test_logits_by_steps_through_any_cache_are_those_of_one_call():
    model, ids = tiny_model(num_shared_experts=1), tiny_batch()["labels"].clamp(min=2)
    expected = model(**prompt(), decoder_input_ids=ids, decoder_drop_tokens=False).logits
    static = static_cache(model.config, 17, 19)
    for cache in (static, EncoderDecoderCache(DynamicCache(), DynamicCache()), static):
        steps = []
        for part in ids.split([3, 1, 1, 4, 2], dim=1):
            out = model(**prompt(), decoder_input_ids=part, past_key_values=cache)
            assert out.past_key_values is cache
            steps.append(out.logits)
        close(torch.cat(steps, dim=1), expected)
        static.reset()


def test_assisted_decoding_and_prompt_lookup_give_the_greedy_tokens():
    model, other = tiny_model(), tiny_model(1, num_layers=1, num_decoder_layers=1)
    expected = model.generate(**prompt(1), max_new_tokens=13)
    for assistance in (
        {"assistant_model": tiny_model()},
        {"assistant_model": other},
        {"prompt_lookup_num_tokens": 3},
    ):
        same(model.generate(**prompt(1), max_new_tokens=13, **assistance), expected)


def test_embeddings_in_place_of_ids_give_the_same_logits_and_losses():
    model, batch = tiny_model(), tiny_batch()
    a = model(**batch)
    embed = model.get_input_embeddings()
    decoder_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    embedded = {
        "inputs_embeds": embed(batch.pop("input_ids")),
        "decoder_inputs_embeds": embed(decoder_ids),
    }
    b = model(**batch, **embedded)
    close((a.logits, a.loss), (b.logits, b.loss))


def test_a_router_that_needs_ids_says_so_when_it_gets_embeddings():
    model = tiny_model(router="hash", router_options=None, num_selected_experts=1)
    assert model.generate(**prompt(), **NEW).shape == (4, 8)
    inputs = prompt()
    embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
    with pytest.raises(DataError, match="token_ids"):
        model.generate(**inputs, inputs_embeds=embedded, **NEW)


def test_generation_builds_no_router_outputs_and_refuses_to_hide_them():
    model, seen = tiny_model(), []
    hooks = [
        m.register_forward_hook(lambda *call: seen.append(call[-1]))
        for m in (model, model.get_encoder())
    ]
    model.generate(**prompt(), **NEW)
    assert len(seen) > 5
    assert all(not any("router" in name for name in out) for out in seen)
    for hook in hooks:
        hook.remove()
    with pytest.raises(ConfigError, match="output_router_logits is not supported by generate"):
        model.generate(**prompt(), output_router_logits=True)
