"""The contract of transformers: what its T5 does in user code, ours does."""

import inspect

import pytest
import torch
import torch.utils._pytree as pytree
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForTextEncoding,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedTokenizerFast,
    pipeline,
)

from moe import (
    ConfigError,
    STMoEConfig,
    STMoEEncoderModel,
    STMoEForConditionalGeneration,
    STMoEModel,
)
from tests.models.t5 import as_t5
from tests.models.tiny import DENSE, FIELDS, tiny_batch, tiny_model

SPARSE = {"eval_capacity_factor": None, "num_decoder_layers": 2}
# As many blocks as the encoder; else T5's cache fails.
EQUAL_DEPTH = {**DENSE, "num_decoder_layers": 2}
CLASSES = [STMoEModel, STMoEForConditionalGeneration, STMoEEncoderModel]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def inputs_of(kind):
    batch = tiny_batch()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if kind is STMoEEncoderModel:
        return inputs
    return {**inputs, "decoder_input_ids": batch["labels"].clamp(min=2)}


def build(kind, **fields):
    torch.manual_seed(0)
    return kind(STMoEConfig(**{**FIELDS, **fields})).eval()


@pytest.mark.parametrize("kind", CLASSES)
def test_signatures_name_their_arguments_and_the_first_is_the_main_input(kind):
    parameters = inspect.signature(kind.forward).parameters
    assert list(parameters)[1] == kind.main_input_name == "input_ids"
    outputs = {"output_attentions", "output_hidden_states", "return_dict"}
    assert outputs | {"attention_mask", "inputs_embeds"} < set(parameters)
    kinds = {parameter.kind for parameter in parameters.values()}
    assert inspect.Parameter.VAR_POSITIONAL not in kinds


def tensors_in(value):
    """What transformers' common tests of outputs look at: tensors in lists, tuples and
    dictionaries.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


@pytest.mark.parametrize("kind", CLASSES)
def test_tuples_and_records_hold_the_same_numbers_and_none_is_a_truth_value(kind):
    model, inputs = build(kind), inputs_of(kind)
    wanted = {"output_attentions": True, "output_hidden_states": True, "output_router_logits": True}
    as_tuple = model(**inputs, **wanted, return_dict=False)
    as_record = model(**inputs, **wanted, return_dict=True)
    assert type(as_tuple) is tuple and len(as_tuple) == len(as_record.to_tuple())
    pairs = list(zip(tensors_in(as_tuple), tensors_in(as_record.to_tuple()), strict=True))
    assert len(pairs) > 5

    # As transformers writes it, which fails for tensors of bool.
    assert all((a - b).abs().max() < 1e-5 for a, b in pairs)


def test_records_of_routers_are_a_sequence_and_a_tree():
    records = tiny_model()(**tiny_batch()).encoder_router_outputs
    assert list(records) == list(records[:1]) == [records[0]]
    assert len(records) == 1 and "RouterRecords([RouterOutput" in repr(records)
    leaves, spec = pytree.tree_flatten(records)
    assert all(isinstance(leaf, torch.Tensor | int | None) for leaf in leaves)
    assert pytree.treespec_dumps(spec)
    assert isinstance(pytree.tree_unflatten(leaves, spec)[0], type(records[0]))


def test_the_configuration_says_whether_there_is_a_cache_and_the_argument_wins():
    inputs = inputs_of(STMoEModel)
    model = tiny_model()
    assert isinstance(model(**inputs).past_key_values, EncoderDecoderCache)
    assert model(**inputs, use_cache=False).past_key_values is None
    assert model.train()(**inputs).past_key_values is None
    model.eval().config.use_cache = False
    assert model(**inputs).past_key_values is None
    assert model(**inputs, use_cache=True).past_key_values is not None


def test_the_cache_of_the_configuration_changes_no_routing():
    model, inputs = tiny_model(eval_capacity_factor=0.5), inputs_of(STMoEModel)
    with_cache, without = model(**inputs), model(**inputs, use_cache=False)
    (cached,), (plain,) = with_cache.decoder_router_outputs, without.decoder_router_outputs
    assert plain.stats.dropped_tokens > 0
    assert torch.equal(cached.plan.expert_index, plain.plan.expert_index)
    assert torch.equal(cached.plan.accepted, plain.plan.accepted)
    close(with_cache.logits, without.logits)


@pytest.fixture(scope="module")
def tokenizer():
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())[:127]
    vocabulary = {
        piece: number for number, piece in enumerate(["<pad>", "</s>", "<s>", "<unk>", *pieces])
    }
    tool = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tool.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tool.decoder = decoders.ByteLevel()
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tool, **tokens)


def test_generation_takes_the_tokenizer_of_its_stop_strings(tokenizer):
    model = tiny_model()
    ids = tiny_batch()["input_ids"][:1]
    free = model.generate(ids, max_new_tokens=9)
    texts = [tokenizer.decode([token]) for token in free[0]]
    first = next(n for n, text in enumerate(texts) if text.isalnum())
    stopping = {"max_new_tokens": 9, "stop_strings": [texts[first]], "tokenizer": tokenizer}
    stopped = model.generate(ids, **stopping)
    assert torch.equal(stopped[0], free[0, : first + 1])
    assert model.generate(ids, **stopping, num_beams=2).shape[0] == 1


def test_a_short_decoder_mask_means_the_same_as_in_t5():
    ours, batch = tiny_model(**EQUAL_DEPTH), tiny_batch()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    inputs["decoder_input_ids"] = batch["labels"].clamp(min=2)
    inputs["decoder_attention_mask"] = torch.tensor([[1] * 7, [0] + [1] * 6, [1] * 7, [1] * 7])
    a, b = (model(**inputs).logits for model in (ours, as_t5(ours)))

    # The first token of the second sequence sees no key, itself included.
    seen = torch.ones(4, 11, dtype=torch.bool)
    seen[1, 0] = False
    close(a[seen], b[seen])


def test_the_encoder_is_the_model_for_encoding_texts_and_for_features(tmp_path, tokenizer):
    tiny_model(eval_capacity_factor=None).save_pretrained(tmp_path)
    model = AutoModelForTextEncoding.from_pretrained(tmp_path, output_router_logits=False)
    assert type(model) is STMoEEncoderModel

    # The pipeline takes an encoder as it takes T5's.
    extract = pipeline("feature-extraction", model=model, tokenizer=tokenizer, device="cpu")
    texts = ["abc", "d"]
    for batch_size in (1, 2):
        for text, feature in zip(texts, extract(texts, batch_size=batch_size), strict=True):
            hidden = model(tokenizer(text, return_tensors="pt").input_ids).last_hidden_state
            close(torch.tensor(feature)[:, : hidden.shape[1]], hidden)


def test_generation_computes_the_logits_of_the_last_position_alone():
    model, widths = tiny_model(), []
    model.lm_head.register_forward_hook(
        lambda module, inputs, output: widths.append(output.shape[1])
    )
    prompt = tiny_batch()["labels"].clamp(min=2)[:, :5]
    model.generate(tiny_batch()["input_ids"], decoder_input_ids=prompt, max_new_tokens=3)
    assert widths == [1, 1, 1]


def test_a_cache_of_self_attention_alone_is_extended_in_place():
    model, inputs = tiny_model(**SPARSE), inputs_of(STMoEModel)
    ids = inputs.pop("decoder_input_ids")
    expected = model(**inputs, decoder_input_ids=ids, decoder_drop_tokens=False).logits
    cache = DynamicCache()
    steps = [
        model(**inputs, decoder_input_ids=part, past_key_values=cache).logits
        for part in ids.split([4, 7], dim=1)
    ]
    close(torch.cat(steps, dim=1), expected)


def test_the_config_of_an_encoder_alone_is_for_the_encoder_alone(tmp_path):
    """T5EncoderModel has such a config, by which callers choose the names of its outputs."""
    encoder = build(STMoEEncoderModel, is_encoder_decoder=False)
    encoder.save_pretrained(tmp_path)
    loaded = STMoEEncoderModel.from_pretrained(tmp_path)
    assert not loaded.config.is_encoder_decoder
    inputs = inputs_of(STMoEEncoderModel)
    assert torch.equal(loaded(**inputs).last_hidden_state, encoder(**inputs).last_hidden_state)
    for kind in (STMoEModel, STMoEForConditionalGeneration):
        with pytest.raises(ConfigError, match="is_encoder_decoder is False"):
            kind(encoder.config)


@torch.no_grad()
def test_routers_of_a_model_in_float16_keep_their_numbers(tmp_path):
    model = tiny_model(eval_capacity_factor=None)
    model.save_pretrained(tmp_path)
    half = STMoEForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    for wide, narrow in zip(model.sparse_layers(), half.sparse_layers(), strict=True):
        assert torch.equal(narrow.router.gate, wide.router.gate)
        assert narrow.experts.gate_up_proj.dtype == torch.float16
        assert narrow.experts.down_proj.dtype == torch.float32  # as in transformers' T5
    assert half(**tiny_batch()).logits.isfinite().all()
