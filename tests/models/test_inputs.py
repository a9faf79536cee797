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


@pytest.fixture(scope="module")
def model() -> STMoEForConditionalGeneration:
    return tiny_model(eval_capacity_factor=None)


def with_value(value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[1, 3] = value
    return ids


ONE_MASK = {"attention_mask": ONES[:1]}
SHORT_MASK = {"decoder_attention_mask": ONES[:, :3], "past_key_values": DynamicCache()}
NARROW = {"input_ids": None, "inputs_embeds": VECTORS[..., :28]}
REFUSED = [
    ({"input_ids": with_value(131)}, r"input_ids holds 131 at \[1, 3\].* from 0 to 130"),
    ({"input_ids": IDS.float()}, r"input_ids is a tensor <float32>\[2, 5\]"),
    ({"input_ids": IDS.tolist()}, r"input_ids is \[\[7, 7.* \(list\)"),
    ({"input_ids": IDS[:0]}, r"input_ids .*\[0, 5\]; .* at least one"),
    ({"labels": with_value(-1)}, r"labels holds -1 at \[1, 3\].* -100 for no target"),
    ({"input_ids": None}, "neither were given"),
    ({"inputs_embeds": VECTORS}, "both were given"),
    (NARROW, r"inputs_embeds .*\[2, 5, 28\]; .* 29"),
    ({"attention_mask": ADDITIVE}, r"attention_mask holds -inf at \[0, 3\].*\(mask == 0\)"),
    (ONE_MASK, r"attention_mask .*\[1, 5\]; expected a mask \[2, 5\]"),
    (SHORT_MASK, r"decoder_attention_mask .*\[2, 3\]; expected a mask \[2, 5\]"),
    ({"attention_mask": torch.ones(2, 1, 5, 5)}, "none for each pair.*segment_ids"),
    ({"segment_ids": IDS[:, :4]}, "segment_ids is .* one number for each token"),
    ({"encoder_outputs": (None,)}, r"encoder_outputs is \(None,\) \(tuple\)"),
    ({"lables": IDS}, "'lables'.*'labels'"),
    ({"position_ids": IDS}, "'position_ids'.* segment_ids"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_no_input_is_refused_with_its_value(model, given, message):
    with pytest.raises(MoEError, match=message):
        model(**{"input_ids": IDS, "labels": IDS, **given})


def test_the_encoder_alone_has_the_same_doors(model):
    encoder = STMoEEncoderModel(model.config).eval()
    for name in ("input_ids", "attention_mask", "typo"):
        for module in (encoder, encoder.encoder):
            with pytest.raises((DataError, ConfigError), match=name):
                module(**{"input_ids": IDS, name: with_value(131)})


TAKEN = [
    {"input_ids": IDS.int(), "labels": IDS.int()},
    {"attention_mask": ONES, "decoder_attention_mask": ONES},
    {"attention_mask": ONES.bool(), "decoder_attention_mask": ONES.byte()},
    {"head_mask": None, "position_ids": None, "cache_position": None},
    {"cache_position": torch.arange(5)},  # they follow from the cache
    {"past_key_values": DynamicCache()},
    {"num_items_in_batch": None, "loss_counts": None},
]


def test_other_ways_to_give_the_same_change_nothing(model):
    expected = model(input_ids=IDS, labels=IDS)
    for given in TAKEN:
        output = model(**{"input_ids": IDS, "labels": IDS, **given})
        torch.testing.assert_close((output.loss, output.logits), (expected.loss, expected.logits))


def test_one_encoded_sequence_serves_all_targets(model):
    targets = tiny_batch(batch=3)["labels"].clamp(min=2)
    encode = model.get_encoder()
    a = model(encoder_outputs=encode(IDS[:1]), decoder_input_ids=targets)
    b = model(encoder_outputs=encode(IDS[:1].expand(3, -1)), decoder_input_ids=targets)
    torch.testing.assert_close(a.logits, b.logits)
    assert a.decoder_router_logits[0].shape == (3, 11, 7)


def test_a_batch_without_targets_may_count_none(model):
    nothing = torch.full_like(IDS, -100)
    assert model(input_ids=IDS, labels=nothing, num_items_in_batch=torch.tensor(0)).loss == 0


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
