"""Experts of a prefix in a model. Oracles: models that have only the experts a text may use, and
each text alone.
"""

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from moe import ConfigError, DataError, STMoEConfig, STMoEForConditionalGeneration
from moe.convert.graphs import build_graphs
from moe.inspection.ablation.ablation_runs import run_ablated, run_unchanged
from moe.serving.batch_generator import BatchGenerator, Request
from moe.serving.sampling import Sampling
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.edits import DropExperts
from stmoe_eval.answers.likelihood import EncodedInputs, target_log_probs
from tests.models.tiny import DENSE, FIELDS, tiny_model
from tests.serving.tiny_words import word_tokenizer

MK = {"prefix": "mk:", "token_ids": [12, 7], "num_experts": 2}
XH = {"prefix": "xh:", "token_ids": [9], "num_experts": 3}
BASE = 7
SETTINGS = {"eval_capacity_factor": None, "capacity_factor": None}
ALIGNED = {"d_model": 32, "d_ff": 48, "eval_capacity_factor": 1.0, "min_expert_capacity": 1}
"""Rows of 64 bytes: products of others may depend on where an expert lies in memory."""
TEXTS = ([12, 7, 40, 41, 1], [9, 33, 1], [12, 50, 7, 1], [60, 9, 61, 62, 1], [12, 7, 9, 1])
NUMBERS = [1, 2, 0, 0, 1]


def model_of(*records, **changes):
    num_experts = BASE + sum(record["num_experts"] for record in records)
    fields = {**SETTINGS, "num_experts": num_experts, "prefix_experts": list(records) or None}
    return tiny_model(**{**fields, **changes})


def without(model, *records, experts):
    """Returns the model with the experts of fewer prefixes."""
    smaller = model_of(*records, **ALIGNED)
    weights = {}
    for name, weight in model.state_dict().items():
        is_cut = ".router." in name or ".experts." in name
        weights[name] = weight[experts] if is_cut else weight
    smaller.load_state_dict(weights)
    return smaller


def padded(texts, *, left=False):
    """Returns input ids and mask; padding has tokens that look like a prefix."""
    longest = max(map(len, texts)) + 2
    ids = torch.tensor([[12, 7] * longest] * len(texts))[:, :longest]
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        start = longest - len(text) if left else 0
        ids[row, start : start + len(text)] = torch.tensor(text)
        mask[row, start : start + len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def decoded(model, inputs):
    start = torch.tensor([[0, 5, 6]] * len(inputs["input_ids"]))
    with torch.no_grad():
        return model(**inputs, decoder_input_ids=start).logits


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# ---- which text has which prefix ----


def numbers_of(ids, **inputs):
    return model_of(MK, XH).get_encoder()(ids, **inputs).prefix_numbers


@pytest.mark.parametrize("left", [False, True])
def test_a_text_has_the_prefix_that_its_tokens_begin_with_whatever_its_padding_holds(left):
    inputs = padded(TEXTS, left=left)
    mask = inputs["attention_mask"]
    expected = torch.tensor(NUMBERS)[:, None] * mask
    assert torch.equal(numbers_of(inputs["input_ids"], attention_mask=mask), expected)


def test_a_prefix_ends_with_its_text_in_a_row_of_several():
    ids = torch.tensor([[12, 7, 9, 12, 7, 5, 12], [12, 12, 7, 9, 9, 0, 0], [3] * 6 + [12]])
    segments = torch.tensor([[1, 2, 2, 3, 3, 3, 4], [1, 2, 2, 2, 3, 0, 0], [1] * 6 + [2]])
    expected = torch.tensor([[0, 0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 2, 0, 0], [0] * 7])
    assert torch.equal(numbers_of(ids, segment_ids=segments), expected)
    assert numbers_of(torch.tensor([[12], [9]])).tolist() == [[0], [2]]


# ---- answers ----


def test_a_model_has_the_bits_of_one_without_the_experts_that_its_texts_may_not_use():
    model = model_of(MK, XH, **ALIGNED)
    smaller = {
        0: without(model, experts=[*range(BASE)]),
        1: without(model, MK, experts=[*range(BASE + 2)]),
        2: without(model, XH, experts=[*range(BASE), 9, 10, 11]),
    }
    for number, other in smaller.items():
        texts = [text for text, own in zip(TEXTS, NUMBERS, strict=True) if own == number] * 3
        assert torch.equal(decoded(model, padded(texts)), decoded(other, padded(texts)))
    of_prefix = padded([TEXTS[0]])
    assert not torch.equal(decoded(model, of_prefix), decoded(smaller[0], of_prefix))


def test_packed_and_padded_texts_have_the_logits_of_each_alone():
    model = model_of(MK, XH)
    rows = {False: decoded(model, padded(TEXTS)), True: decoded(model, padded(TEXTS, left=True))}
    packed = {"input_ids": [], "segment_ids": [], "decoder_segment_ids": []}
    for number, text in enumerate(TEXTS, start=1):
        packed["input_ids"] += text
        packed["segment_ids"] += [number] * len(text)
        packed["decoder_segment_ids"] += [number] * 3
    inputs = {name: torch.tensor([values]) for name, values in packed.items()}
    start = torch.tensor([[0, 5, 6] * len(TEXTS)])
    logits = model(**inputs, decoder_input_ids=start).logits.view(len(TEXTS), 3, -1)
    for row, text in enumerate(TEXTS):
        alone = decoded(model, {"input_ids": torch.tensor([text])})[0]
        close(rows[False][row], alone)
        close(logits[row], alone)
    close(rows[True][1], decoded(model, padded([TEXTS[1]], left=True))[0])


def test_embeddings_have_no_prefix_and_encoder_outputs_need_its_numbers():
    model = model_of(MK, XH, **ALIGNED)
    ids = torch.tensor([TEXTS[0]])
    vectors = model.get_input_embeddings()(ids)
    start = torch.tensor([[0, 5]])
    base = without(model, experts=[*range(BASE)])
    logits = model(inputs_embeds=vectors, decoder_input_ids=start).logits
    close(logits, base(input_ids=ids, decoder_input_ids=start).logits)

    encoded = model.get_encoder()(ids)
    given = model(encoder_outputs=encoded, decoder_input_ids=start).logits
    assert torch.equal(given, model(ids, decoder_input_ids=start).logits)
    for outputs in (encoded.to_tuple(), BaseModelOutput(encoded.last_hidden_state)):
        with pytest.raises(DataError, match=r"^encoder_outputs has no prefix_numbers"):
            model(encoder_outputs=outputs, decoder_input_ids=start)
    wrong = torch.ones(1, 3, dtype=torch.int64)
    for name in ("attention_mask", "segment_ids"):
        with pytest.raises(DataError, match=f"^{name} is a tensor"):
            model(ids, **{name: wrong}, decoder_input_ids=start)
    segments = {"segment_ids": torch.ones_like(ids), "decoder_segment_ids": wrong}
    with pytest.raises(DataError, match=r"^decoder_segment_ids is a tensor"):
        model(ids, **segments, decoder_input_ids=start)


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"do_sample": True, "num_beams": 2}], ids=str
)
def test_every_cache_generates_the_tokens_of_none(settings):
    model, inputs, tokens = model_of(MK, XH), padded(TEXTS), []
    for cache in ({"use_cache": False}, {}, {"cache_implementation": "static"}):
        torch.manual_seed(0)
        tokens.append(model.generate(**inputs, max_new_tokens=5, **settings, **cache))
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


def test_requests_that_enter_and_leave_a_running_batch_keep_the_prefixes_of_their_texts():
    model, tokenizer = model_of(MK, XH), word_tokenizer()
    texts = ["w12 w7 w40", "w9 w33", "w12 w50 w7", "w60 w9 w61", "w12 w7 w9", "w9", "w5"]
    asked, expected = [], []
    for number, text in enumerate(texts):
        length = 1 + number * 3 % 7
        asked.append(Request(text, Sampling(max_new_tokens=length)))
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        expected.append(model.generate(ids, max_new_tokens=length)[0, 1:].tolist())
    for max_batch in (1, 3, 7):
        answers = list(BatchGenerator(model, tokenizer, max_batch=max_batch).map(asked))
        assert [answer.tokens for answer in answers] == expected


def test_choices_have_the_log_probabilities_of_teacher_forcing():
    model, inputs = model_of(MK, XH), padded(TEXTS)
    targets = [[[5, 6, 1], [5, 8, 9, 1]], [[5, 2, 1]], [[5, 1]], [[5, 3, 1]], [[5, 6, 1], [5, 1]]]
    with torch.no_grad():
        encoded = EncodedInputs(model.get_encoder()(**inputs), inputs["attention_mask"])
        ours = target_log_probs(model, encoded, 0, targets).log_probs
        for text, choices, log_probs in zip(TEXTS, targets, ours, strict=True):
            for choice, scores in zip(choices, log_probs, strict=True):
                ids = torch.tensor([[0, *choice[:-1]]])
                logits = model(torch.tensor([text]), decoder_input_ids=ids).logits[0]
                expected = logits.log_softmax(-1).gather(1, torch.tensor(choice)[:, None])[:, 0]
                close(torch.tensor(scores), expected)


def test_an_ablated_decoder_keeps_the_prefixes_that_the_encoder_found():
    model = model_of(MK, XH)
    batch = {**padded(TEXTS), "labels": torch.tensor([[5, 6, 1]] * len(TEXTS))}
    unchanged = run_unchanged(model, batch)
    for key in sparse_layers(model):
        with edit_routing(model, {key: DropExperts(BASE)}):
            expected = run_unchanged(model, batch).losses - unchanged.losses
        ablation = edit_routing(model, {key: DropExperts(BASE)})
        changes = run_ablated(model, key, unchanged, ablation)[0]
        close(changes, expected)


# ---- files and compiled graphs ----


def test_a_saved_model_keeps_its_prefixes_and_has_no_graph(tmp_path):
    model = model_of(MK, XH)
    model.save_pretrained(tmp_path)
    loaded = STMoEForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.config.prefix_experts == [MK, XH]
    assert torch.equal(decoded(loaded, padded(TEXTS)), decoded(model, padded(TEXTS)))
    with pytest.raises(ConfigError, match=r"^A model with experts of a prefix cannot be exported"):
        build_graphs(model, nodes=True)


@pytest.mark.slow
def test_a_model_with_prefixes_compiles_into_one_graph():
    layers = {"num_layers": 1, "num_decoder_layers": 1, "dispatch": "static"}
    model = model_of(MK, XH, **layers, router="pools").train()
    inputs = {**padded(TEXTS), "labels": torch.tensor([[5, 6, 1]] * len(TEXTS))}
    torch.compiler.reset()
    losses = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        losses.append(run(**inputs).loss)
    torch.compiler.reset()
    close(*losses)


# ---- settings ----


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ("mk:", "prefix_experts is 'mk:'; expected a list"),
        (7, "prefix_experts is 7; expected a list"),
        (MK, "prefix_experts is .*; expected a list"),
        ([None], r"prefix_experts is \[None\]; expected a list"),
        (["mk:"], "prefix_experts is .*; expected a list"),
        ([[MK]], "prefix_experts is .*; expected a list"),
        ([], r"prefix_experts is \[\]; expected a list such as"),
        ([{"prefix": "mk:"}], r"prefix_experts\[0\] is .*; expected a list such as"),
        ([XH, {**MK, "more": 1}], r"prefix_experts\[1\] is .*; expected a list such as"),
        ([{**MK, "prefix": None}], r"prefix of prefix_experts\[0\] is None; expected a text"),
        ([{**MK, "prefix": ""}], r"prefix of prefix_experts\[0\] is ''; expected a text"),
        ([{**MK, "num_experts": 0}], r"num_experts of prefix_experts\[0\] is 0; .* least 1"),
        ([{**MK, "num_experts": True}], "is True; expected an integer"),
        ([{**MK, "num_experts": None}], "is None; expected an integer"),
        ([{**MK, "num_experts": 99}], "prefix_experts is .* at most 10 together"),
        ([{**MK, "token_ids": []}], r"token_ids of prefix_experts\[0\] is \[\]"),
        ([{**MK, "token_ids": 12}], "is 12; expected a list of token ids below vocab_size, 131"),
        ([{**MK, "token_ids": "12"}], "is '12'; expected a list of token ids"),
        ([{**MK, "token_ids": [12, 131]}], r"is \[12, 131\]; expected a list of token ids"),
        ([{**MK, "token_ids": [-1]}], r"is \[-1\]; expected a list of token ids"),
        ([{**MK, "token_ids": [True]}], r"is \[True\]; expected a list of token ids"),
        ([{**MK, "token_ids": ["a", None]}], "expected a list of token ids"),
        ([{**MK, "token_ids": [[12]]}], "expected a list of token ids"),
        ([MK, MK], "A text with the prefix 'mk:' begins with the tokens of the prefix 'mk:'"),
        ([{**XH, "token_ids": [12]}, MK], "prefix 'mk:' begins with .* the prefix 'xh:'"),
    ],
    ids=str,
)
def test_records_that_are_wrong_are_refused_in_one_line(records, message):
    with pytest.raises(ConfigError, match=message) as error:
        STMoEConfig(**{**FIELDS, "num_experts": 12, "prefix_experts": records})
    assert "\n" not in str(error.value)


def test_models_that_cannot_have_experts_of_a_prefix_are_refused():
    for fields, message in (
        (DENSE, r"num_experts is 0; expected .* at least 1 \(there are prefix_experts"),
        ({"router": "expert_choice"}, "'expert_choice' cannot have experts of a prefix"),
        ({"decoder_router": "bias_balanced"}, "'bias_balanced' cannot have experts of a prefix"),
    ):
        with pytest.raises(ConfigError, match=message):
            STMoEConfig(**{**FIELDS, "num_experts": 12, "prefix_experts": [MK], **fields})
