"""What the models return beside logits: names, counts, shapes and numbers are those of
transformers' T5.
"""

import pytest
import torch

from moe import STMoEForConditionalGeneration
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


def equal_depth() -> STMoEForConditionalGeneration:
    return tiny_model(**DENSE, num_decoder_layers=2)  # with another, T5's generation fails


@pytest.mark.parametrize(("attention", "training"), [("eager", True), ("sdpa", False)])
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


def test_generation_returns_what_t5_returns():
    ours = equal_depth()
    theirs, batch = as_t5(ours), tiny_batch()
    del batch["labels"]
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **ALL}
    for generation in ({"num_beams": 3}, {"cache_implementation": "static"}):
        options = {"max_new_tokens": 5, **generation, **wanted}
        a, b = (model.generate(**batch, **options) for model in (ours, theirs))
        assert list(a) == list(b)
        for name in set(a) - {"past_key_values", "beam_indices"}:
            if name.startswith("encoder"):  # nobody compares its rows at padding
                assert [x.shape for x in a[name]] == [x.shape for x in b[name]]
            else:
                close(a[name], b[name])


def test_the_argument_wins_over_the_configuration():
    batch = without_padding(tiny_batch())
    for option, name, encoder_name in (
        ("output_attentions", "cross_attentions", "attentions"),
        ("output_hidden_states", "decoder_hidden_states", "hidden_states"),
        ("output_router_logits", "decoder_router_logits", "encoder_router_logits"),
    ):
        for default in (True, False):
            model = tiny_model(attn_implementation="eager", **{option: default})
            assert (getattr(model(**batch), name) is not None) == default
            assert (getattr(model(**batch, **{option: not default}), name) is None) == default
            encoded = model.get_encoder()(batch["input_ids"])
            assert (getattr(encoded, encoder_name) is not None) == default


def test_router_logits_stand_by_sequence():
    model, batch = tiny_model(group_size=26), tiny_batch()
    out = model(**batch)
    assert [x.shape for x in out.encoder_router_logits] == [(4, 13, 7)]
    assert [x.shape for x in out.decoder_router_logits] == [(4, 11, 7)]
    assert out.encoder_router_outputs[0].router_logits.shape == (2, 26, 7)
    alone = model(**{name: x[1:2] for name, x in batch.items()})
    close(alone.encoder_router_logits[0], out.encoder_router_logits[0][1:2])
    assert not out.encoder_router_logits[0][batch["attention_mask"] == 0].any()
    close(model(**batch, output_router_logits=False).loss, out.loss)


def test_outputs_begin_as_those_of_t5_and_the_configuration_can_ask_for_a_tuple():
    model, batch = tiny_model(), tiny_batch()
    wanted = {**ALL, "use_cache": True}
    as_record, theirs = model(**batch, **wanted), as_t5(equal_depth())(**batch, **ALL)
    assert list(as_record)[:9] == list(theirs)
    model.config.return_dict = False
    as_tuple = model(**batch, **wanted)
    assert type(as_tuple) is tuple and len(as_tuple) == len(as_record)
    close(as_tuple[:2], (as_record.loss, as_record.logits))

    # Such a tuple of the encoder is taken by the model.
    encoded = model.get_encoder()(batch.pop("input_ids"), batch["attention_mask"])
    close(model(encoder_outputs=encoded, **batch, use_cache=True)[1], as_record.logits)


def test_activation_checkpointing_returns_the_same_with_the_same_gradients():
    batch, results = tiny_batch(), []
    for model in (tiny_model().train(), checkpointed(tiny_model().train())):
        out = model(**batch, **ALL)
        loss = out.loss + out.decoder_hidden_states[1].square().sum()
        loss = loss + sum(x.square().sum() for x in out.cross_attentions)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append((out.encoder_attentions, gradients))
    close(*results)
