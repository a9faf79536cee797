"""What the models return beside logits: names, counts, shapes and numbers are those of
transformers' T5.
"""

import pytest
import torch

from moe import STMoEEncoderModel, STMoEForConditionalGeneration
from tests.models.t5 import as_t5
from tests.models.tiny import DENSE, checkpointed, tiny_batch, tiny_model

ALL = {"output_attentions": True, "output_hidden_states": True}
T5_NAMES = (
    "encoder_last_hidden_state",
    "encoder_hidden_states",
    "decoder_hidden_states",
    "encoder_attentions",
    "decoder_attentions",
    "cross_attentions",
)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def without_padding(batch):
    """All positions real: at padding, what a row of masks only gives is nobody's promise."""
    return {
        "input_ids": batch["input_ids"].clamp(min=2),
        "decoder_input_ids": batch["labels"].clamp(min=2),
    }


def equal_depth(**changes) -> STMoEForConditionalGeneration:
    return tiny_model(
        **DENSE, num_decoder_layers=2, **changes
    )  # with another, T5's generation fails


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("training", [False, True])
def test_hidden_states_and_attentions_are_those_of_t5(attention, training):
    ours = tiny_model(**DENSE, attn_implementation=attention).train(training)
    theirs, batch = as_t5(ours).train(training), without_padding(tiny_batch())
    a, b = ours(**batch, **ALL), theirs(**batch, **ALL)
    for name in T5_NAMES:
        close(a[name], b[name])
    a, b = ours.model(**batch, **ALL), theirs.encoder(batch["input_ids"], **ALL)
    close(a.encoder_attentions, b.attentions)
    a = ours.get_encoder()(batch["input_ids"], **ALL)
    close((a.hidden_states, a.attentions), (b.hidden_states, b.attentions))


def test_attention_to_padding_is_zero_and_rows_sum_to_one():
    batch = tiny_batch()
    out = tiny_model()(**batch, output_attentions=True)
    hidden = (batch["attention_mask"] == 0)[:, None, None, :]
    for weights in (*out.encoder_attentions, *out.cross_attentions):
        assert not (weights * hidden).any()
        close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    for weights in out.decoder_attentions:
        assert not weights.triu(1).any()


@pytest.mark.parametrize("generation", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_generation_returns_what_t5_returns(generation):
    ours = equal_depth()
    theirs, batch = as_t5(ours), tiny_batch()
    del batch["labels"]
    wanted = {
        "max_new_tokens": 7,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    a, b = (model.generate(**batch, **generation, **wanted, **ALL) for model in (ours, theirs))
    assert list(a) == list(b)
    for name in set(a) - {"past_key_values", "beam_indices"}:
        if not name.startswith("encoder"):  # whose rows at padding are compared by nobody
            close(a[name], b[name])
    assert [x.shape for x in a.encoder_attentions] == [x.shape for x in b.encoder_attentions]
    assert [x.shape for x in a.encoder_hidden_states] == [x.shape for x in b.encoder_hidden_states]


def test_the_argument_wins_over_the_configuration():
    batch = without_padding(tiny_batch())
    names = {
        "output_attentions": "cross_attentions",
        "output_hidden_states": "decoder_hidden_states",
    }
    names["output_router_logits"] = "decoder_router_logits"
    for option, name in names.items():
        for default in (True, False):
            model = tiny_model(attn_implementation="eager", **{option: default})
            assert (getattr(model(**batch), name) is not None) == default
            assert (getattr(model(**batch, **{option: not default}), name) is not None) != default
            encoder = model.get_encoder()
            name_there = {"output_router_logits": "encoder_router_logits"}.get(
                option, option.removeprefix("output_")
            )
            assert (getattr(encoder(batch["input_ids"]), name_there) is not None) == default


def test_attentions_are_returned_whatever_computes_them():
    model, batch = tiny_model(attn_implementation="sdpa"), tiny_batch()
    eager = tiny_model(attn_implementation="eager")
    close(
        model(**batch, output_attentions=True).cross_attentions,
        eager(**batch, **ALL).cross_attentions,
    )
    assert model.config._attn_implementation == "sdpa"


def test_router_logits_stand_by_sequence():
    model, batch = tiny_model(group_size=26), tiny_batch()
    out = model(**batch)
    assert [x.shape for x in out.encoder_router_logits] == [(4, 13, 7)]
    assert [x.shape for x in out.decoder_router_logits] == [(4, 11, 7)]
    assert out.encoder_router_outputs[0].router_logits.shape == (2, 26, 7)
    assert [x.shape for x in out.router_logits] == [(4, 13, 7), (4, 11, 7)]
    alone = model(**{name: x[1:2] for name, x in batch.items()})
    close(alone.encoder_router_logits[0], out.encoder_router_logits[0][1:2])
    assert not out.encoder_router_logits[0][batch["attention_mask"] == 0].any()
    assert model(**batch, output_router_logits=False).router_logits is None
    close(model(**batch, output_router_logits=False).loss, out.loss)


def test_a_tuple_begins_as_t5_does_and_holds_what_the_record_holds():
    model, batch = tiny_model(), tiny_batch()
    as_record, as_tuple = (
        model(**batch, **ALL, use_cache=True, return_dict=choice) for choice in (True, False)
    )
    theirs = as_t5(equal_depth())(**tiny_batch(), **ALL)
    assert list(as_record)[:9] == list(theirs)
    assert type(as_tuple) is tuple and len(as_tuple) == len(as_record)
    close(as_tuple[0], as_record.loss)
    close(as_tuple[1], as_record.logits)
    model.config.return_dict = False
    assert len(model(**batch, **ALL, use_cache=True)) == len(as_record)
    encoded = model.get_encoder()(batch["input_ids"], batch["attention_mask"])
    again = model(
        encoder_outputs=encoded, attention_mask=batch["attention_mask"], labels=batch["labels"]
    )
    close(again[1], model(**batch, return_dict=True).logits)


def test_an_encoder_that_ran_before_gives_the_same_outputs():
    model, batch = tiny_model(), tiny_batch()
    encoded = model.get_encoder()(batch["input_ids"], batch["attention_mask"], **ALL)
    a, b = (
        model(**batch, **ALL),
        model(encoder_outputs=encoded, **{**batch, "input_ids": None}, **ALL),
    )
    for name in ("loss", *T5_NAMES, "encoder_router_logits"):
        close(a[name], b[name])


def test_activation_checkpointing_returns_the_same_with_the_same_gradients():
    batch, results = tiny_batch(), []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            checkpointed(model)
        out = model(**batch, **ALL)
        loss = out.loss + sum(
            x.square().sum() for x in (*out.cross_attentions, *out.decoder_hidden_states[1:2])
        )
        results.append(
            (out.encoder_attentions, torch.autograd.grad(loss, list(model.parameters())))
        )
    close(*results)


def test_the_encoder_alone_returns_them_too():
    model = STMoEEncoderModel(tiny_model().config).eval()
    out = model(tiny_batch()["input_ids"], **ALL)
    assert (
        len(out.hidden_states) == 3
        and len(out.attentions) == 2
        and len(out.encoder_router_logits) == 1
    )
    assert out.hidden_states[-1] is out.last_hidden_state
