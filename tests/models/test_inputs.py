"""The doors of the models' forward: what is no input is refused with its value, and what is one is
taken.
"""

import pytest
import torch
from transformers import DynamicCache

from moe import DataError, STMoEEncoderModel, STMoEForConditionalGeneration
from moe.errors import ConfigError, MoEError
from tests.models.tiny import tiny_batch, tiny_model

IDS = torch.full((2, 5), 7)
ONES = torch.ones(2, 5)
VECTORS = torch.ones(2, 5, 29)
ADDITIVE = torch.zeros(2, 5).index_fill(1, torch.tensor([3, 4]), float("-inf"))
SUFFIX = "; expected a token id from 0 to 130"


@pytest.fixture(scope="module")
def model() -> STMoEForConditionalGeneration:
    return tiny_model(eval_capacity_factor=None)


def with_value(value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[1, 3] = value
    return ids


REFUSED = {
    "ids beyond the vocabulary": (
        {"input_ids": with_value(131)},
        r"input_ids holds 131 at \[1, 3\]" + SUFFIX,
    ),
    "negative ids": ({"input_ids": with_value(-1)}, r"input_ids holds -1 at \[1, 3\]" + SUFFIX),
    "float ids": (
        {"input_ids": IDS.float()},
        r"input_ids is a tensor <float32>\[2, 5\]; expected a tensor <int64>",
    ),
    "bool ids": ({"input_ids": IDS.bool()}, "input_ids is a tensor <bool>"),
    "ids in a list": (
        {"input_ids": IDS.tolist()},
        r"input_ids is \[\[7, 7.* \(list\); expected a tensor",
    ),
    "ids of one dimension": (
        {"input_ids": IDS[0]},
        r"<int64>\[5\]; expected token ids of the shape \[batch, length\]",
    ),
    "no sequence": ({"input_ids": IDS[:0]}, r"input_ids is empty, \[0, 5\]"),
    "no token": ({"input_ids": IDS[:, :0]}, r"input_ids is empty, \[2, 0\]"),
    "no target": ({"labels": IDS[:, :0]}, r"labels is empty, \[2, 0\]"),
    "no decoder token": (
        {"labels": None, "decoder_input_ids": IDS[:, :0]},
        "decoder_input_ids is empty",
    ),
    "decoder ids": (
        {"labels": None, "decoder_input_ids": with_value(131)},
        r"decoder_input_ids holds 131 at \[1, 3\]",
    ),
    "labels beyond the vocabulary": (
        {"labels": with_value(131)},
        r"labels holds 131 at \[1, 3\]; expected -100 for no",
    ),
    "negative labels": (
        {"labels": with_value(-1)},
        r"labels holds -1 at \[1, 3\]; expected -100 for no target, or",
    ),
    "float labels": ({"labels": ONES}, "labels is a tensor <float32>"),
    "fewer labels than inputs": (
        {"decoder_input_ids": IDS, "labels": IDS[:, :3]},
        r"labels is \[2, 3\], but the deco",
    ),
    "nothing": ({"input_ids": None}, "neither were given"),
    "ids and embeddings": ({"inputs_embeds": VECTORS}, "both were given"),
    "narrow embeddings": (
        {"input_ids": None, "inputs_embeds": VECTORS[..., :28]},
        "expected vectors of d_model, 29",
    ),
    "integer embeddings": (
        {"input_ids": None, "inputs_embeds": VECTORS.long()},
        "expected floating point numbers",
    ),
    "additive mask": (
        {"attention_mask": ADDITIVE},
        r"attention_mask holds -inf at \[0, 3\].*give \(mask == 0\)",
    ),
    "additive decoder mask": (
        {"decoder_attention_mask": ADDITIVE - 1},
        r"decoder_attention_mask holds -1.0 at \[0, 0",
    ),
    "mask of counts": (
        {"attention_mask": IDS},
        r"attention_mask holds 7 at \[0, 0\]; expected 1 for a token and 0",
    ),
    "mask of not-a-number": ({"attention_mask": ONES * float("nan")}, "attention_mask holds nan"),
    "mask in a list": ({"attention_mask": [[1] * 5] * 2}, r"\(list\); expected a mask \[2, 5\]"),
    "short mask": (
        {"attention_mask": ONES[:, :4]},
        r"<float32>\[2, 4\]; expected a mask \[2, 5\], .* one column for each",
    ),
    "one mask for two sequences": (
        {"attention_mask": ONES[:1]},
        r"attention_mask is a tensor <float32>\[1, 5\]; expected a mask \[2, 5\], one row for each",
    ),
    "one decoder mask for two sequences": (
        {"decoder_attention_mask": ONES[:1, :3]},
        r"decoder_attention_mask is a tensor <float32>\[1, 5\]; expected a mask \[2, 5\]",
    ),
    "long decoder mask": (
        {"decoder_attention_mask": torch.ones(2, 7)},
        r"decoder_attention_mask is a tensor <float32>\[2, 7\]; expected a mask \[2, 5\]",
    ),
    "short decoder mask with a cache": (
        {"decoder_attention_mask": ONES[:, :3], "past_key_values": DynamicCache()},
        r"decoder_attention_mask is a tensor <float32>\[2, 3\]; expected a mask \[2, 5\]",
    ),
    "mask of three sequences": (
        {"attention_mask": torch.ones(3, 5)},
        r"\[3, 5\]; expected a mask \[2, 5\]",
    ),
    "mask of pairs": (
        {"attention_mask": torch.ones(2, 5, 5)},
        "one value for each token and not for each pair",
    ),
    "4-D mask": (
        {"attention_mask": torch.ones(2, 1, 5, 5)},
        "not for each pair.*told apart by segment_ids",
    ),
    "4-D decoder mask": (
        {"decoder_attention_mask": torch.ones(2, 1, 5, 5)},
        "decoder_attention_mask is a tensor",
    ),
    "short segments": ({"segment_ids": IDS[:, :4]}, "segment_ids is .* one number for each token"),
    "float segments": ({"segment_ids": ONES}, "segment_ids is a tensor <float32>"),
    "short decoder segments": ({"decoder_segment_ids": IDS[:, :4]}, "decoder_segment_ids is"),
    "encoder that returned nothing": (
        {"encoder_outputs": (None,)},
        r"encoder_outputs is \(None,\) \(tuple\)",
    ),
    "encoder outputs as a tensor": (
        {"encoder_outputs": VECTORS},
        "expected what the encoder returned, or a tuple",
    ),
    "narrow encoder outputs": (
        {"encoder_outputs": (VECTORS[..., :3],)},
        "expected vectors of d_model, 29",
    ),
    "three encoded, two to decode": (
        {"encoder_outputs": (torch.ones(3, 5, 29),)},
        "decoder has 2 seq.* the encoder 3",
    ),
    "a cache of another kind": (
        {"past_key_values": ((ONES,),)},
        "past_key_values is .*expected a cache",
    ),
    "no items": (
        {"num_items_in_batch": 0},
        "num_items_in_batch is 0; expected the number of targets",
    ),
    "negative items": ({"num_items_in_batch": torch.tensor(-3)}, "num_items_in_batch is -3"),
    "items without end": (
        {"num_items_in_batch": torch.tensor(float("inf"))},
        "num_items_in_batch is inf",
    ),
    "items in words": ({"num_items_in_batch": "3"}, r"num_items_in_batch is '3' \(str\)"),
    "a flag for items": ({"num_items_in_batch": True}, r"num_items_in_batch is True \(bool\)"),
    "items of each sequence": (
        {"num_items_in_batch": torch.ones(2)},
        r"num_items_in_batch is a tensor <float32>\[2\]",
    ),
    "negative logits": (
        {"labels": None, "decoder_input_ids": IDS, "logits_to_keep": -1},
        r"logits_to_keep is -1 \(int",
    ),
    "some logits for a loss": ({"logits_to_keep": 2}, "logits_to_keep and labels were both given"),
    "a typo": (
        {"lables": IDS},
        "an argument 'lables', which it does not have. Did you mean 'labels'",
    ),
    "positions": (
        {"position_ids": IDS},
        "given position_ids, but positions follow .* segment_ids.* Leave it out",
    ),
    "types of tokens": ({"token_type_ids": IDS}, "return_token_type_ids=False"),
    "masked heads": ({"head_mask": ONES}, "heads cannot be masked"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_input_is_refused_with_its_value(model, case):
    given, message = REFUSED[case]
    with pytest.raises(MoEError, match=message):
        model(**{"input_ids": IDS, "labels": IDS, **given})


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "typo"])
def test_the_encoder_alone_has_the_same_doors(model, name):
    encoder = STMoEEncoderModel(model.config).eval()
    for module in (encoder, encoder.encoder):
        with pytest.raises((DataError, ConfigError), match=name):
            module(**{"input_ids": IDS, name: with_value(131)})


TAKEN = {
    "integers of 32 bits": {"input_ids": IDS.int(), "labels": IDS.int()},
    "a mask of ones as floats": {"attention_mask": ONES, "decoder_attention_mask": ONES},
    "a mask of ones as bool": {
        "attention_mask": ONES.bool(),
        "decoder_attention_mask": ONES.bool(),
    },
    "a mask of ones as bytes": {"attention_mask": ONES.byte()},
    "None for what transformers' models have": {
        "head_mask": None,
        "position_ids": None,
        "cache_position": None,
    },
    "positions that follow from the cache": {"cache_position": torch.arange(5)},
    "a cache of self-attention": {"past_key_values": DynamicCache()},
    "nothing for what has a default": {
        "labels": IDS,
        "num_items_in_batch": None,
        "loss_counts": None,
    },
}


@pytest.mark.parametrize("case", TAKEN)
def test_other_ways_to_give_the_same_change_nothing(model, case):
    expected = model(input_ids=IDS, labels=IDS)
    output = model(**{"input_ids": IDS, "labels": IDS, **TAKEN[case]})
    torch.testing.assert_close((output.loss, output.logits), (expected.loss, expected.logits))


def test_tokens_beyond_the_end_of_a_decoder_mask_are_padding():
    model, batch = tiny_model(), tiny_batch()
    short = torch.tensor([[1] * 7, [0] + [1] * 6, [1] * 7, [1] * 7])
    padded = torch.nn.functional.pad(short, (0, 4))
    a, b = (model(**batch, decoder_attention_mask=mask) for mask in (short, padded))
    torch.testing.assert_close((a.loss, a.logits), (b.loss, b.logits), rtol=0, atol=0)
    assert a.decoder_router_logits[0][:, 7:].eq(0).all()


def test_one_encoded_sequence_serves_all_targets(model):
    targets = tiny_batch(batch=3)["labels"].clamp(min=2)
    one, all_three = model.get_encoder()(IDS[:1]), model.get_encoder()(IDS[:1].expand(3, -1))
    a, b = (
        model(encoder_outputs=encoded, decoder_input_ids=targets) for encoded in (one, all_three)
    )
    torch.testing.assert_close(a.logits, b.logits)
    assert a.decoder_router_logits[0].shape == (3, 11, 7)


def test_a_batch_without_targets_may_count_none(model):
    output = model(
        input_ids=IDS, labels=torch.full_like(IDS, -100), num_items_in_batch=torch.tensor(0)
    )
    assert output.loss == 0


def test_embeddings_become_the_type_of_the_model(model):
    vectors = model.get_input_embeddings()(IDS).detach()
    a, b = (model(inputs_embeds=x, labels=IDS).logits for x in (vectors, vectors.double()))
    torch.testing.assert_close(a, b)


def test_padding_of_packed_inputs_is_not_seen_by_the_decoder(model):
    ids, segments = tiny_batch()["input_ids"].clamp(min=2), torch.ones(4, 13, dtype=torch.int64)
    segments[:, 9:] = 0
    packed = {"segment_ids": segments, "decoder_segment_ids": torch.ones(4, 11, dtype=torch.int64)}
    labels = tiny_batch()["labels"].clamp(min=2)
    a = model(input_ids=ids, labels=labels, **packed).logits
    b = model(input_ids=ids, labels=labels, attention_mask=segments).logits
    torch.testing.assert_close(a, b)


def test_the_logits_of_some_positions_are_those_of_all(model):
    ids = tiny_batch()["labels"].clamp(min=2)
    inputs = {"input_ids": tiny_batch()["input_ids"], "decoder_input_ids": ids}
    logits = model(**inputs).logits
    torch.testing.assert_close(model(**inputs, logits_to_keep=3).logits, logits[:, -3:])
    places = torch.tensor([0, 7, 2])
    torch.testing.assert_close(model(**inputs, logits_to_keep=places).logits, logits[:, places])


def test_values_on_other_devices_are_not_looked_at():
    """Tensors without numbers stand for a GPU's: whoever asked them for one would fail."""
    model = tiny_model().to("meta")
    ids = torch.empty(2, 5, dtype=torch.int64, device="meta")
    assert model.get_encoder().embed(ids, None).shape == (2, 5, 29)
    assert model.prepare_decoder_input_ids_from_labels(ids).shape == ids.shape
