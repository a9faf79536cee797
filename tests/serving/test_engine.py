"""Continuous batching: every answer is that of the request alone, whatever else runs."""

import random

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moe import ConfigError
from moe.data.tokenizer import train_byte_tokenizer
from moe.errors import DataError
from moe.serving.batch_generator import BatchGenerator, Request
from moe.serving.engine import Engine
from moe.serving.sampling import Sampling, kept_probs, sample
from moe.sparse.all_routers import load_routers
from tests.models.tiny import tiny_model
from tests.serving.tiny_words import MODELS, V, ours, texts, word_tokenizer

TOKENIZER = word_tokenizer()
LONGEST = 19


def alone(model, text, max_new_tokens=LONGEST):
    """Returns the tokens of transformers' own generation for one text."""
    inputs = TOKENIZER(text, return_tensors="pt")
    mask = inputs["attention_mask"]
    tokens = model.generate(
        inputs["input_ids"], attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False
    )
    return tokens[0, 1:].tolist()


def requests(number=31, seed=0):
    """Returns texts with lengths of their own, some of which leave at once."""
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 3, 5, 11, LONGEST]) for _ in range(number)]
    return [
        Request(text, Sampling(max_new_tokens=length))
        for text, length in zip(texts(number, seed=seed), lengths, strict=True)
    ]


@pytest.mark.parametrize("router", load_routers().names())
def test_answers_of_every_router_are_those_of_each_request_alone(router):
    model = ours(router)
    asked = requests(13)
    expected = [alone(model, request.text, request.sampling.max_new_tokens) for request in asked]
    for max_batch in (1, 3, 13):
        answers = list(BatchGenerator(model, TOKENIZER, max_batch=max_batch).map(asked))
        assert [answer.tokens for answer in answers] == expected
        assert [answer.number for answer in answers] == list(range(len(asked)))


@pytest.mark.parametrize("name", MODELS)
def test_answers_of_every_model_of_transformers_are_those_of_each_request_alone(name):
    model = MODELS[name]()
    asked = requests(17)
    expected = [alone(model, request.text, request.sampling.max_new_tokens) for request in asked]
    answers = BatchGenerator(model, TOKENIZER, max_batch=5).map(asked)
    assert [answer.tokens for answer in answers] == expected


@pytest.mark.parametrize("setting", ["suppress_tokens", "bad_words_ids"])
def test_suppressed_tokens_which_fine_tuned_models_and_marian_have_are_never_chosen(setting):
    model = ours()
    asked = requests(9)
    free = [alone(model, request.text) for request in asked]
    tokens = sorted({tokens[0] for tokens in free} - {1})
    is_words = setting == "bad_words_ids"
    setattr(model.generation_config, setting, [[token] for token in tokens] if is_words else tokens)
    expected = [alone(model, request.text, request.sampling.max_new_tokens) for request in asked]
    answers = BatchGenerator(model, TOKENIZER, max_batch=4).map(asked)
    assert [answer.tokens for answer in answers] == expected
    assert all(before[:1] != after[:1] for before, after in zip(free, expected, strict=True))
    if is_words:
        model.generation_config.bad_words_ids = [[3, 4]]
        with pytest.raises(ConfigError, match="words of one token"):
            BatchGenerator(model, TOKENIZER)


def test_answers_follow_the_token_that_is_forced_first():
    model = MODELS["bart"]()
    model.generation_config.forced_bos_token_id = 5
    expected = [alone(model, text) for text in texts(7)]
    answers = BatchGenerator(model, TOKENIZER, max_batch=3, max_new_tokens=LONGEST - 1).map(
        texts(7)
    )
    assert [[5, *answer.tokens] for answer in answers] == expected


def test_the_cache_moves_to_the_front_again_and_again_without_a_trace():
    # 400 steps in columns that are allocated for 64.
    model = ours()
    asked = [Request(text, Sampling(max_new_tokens=7)) for text in texts(120)]
    engine = Engine(model, TOKENIZER, max_batch=2)
    for number, request in enumerate(asked):
        engine.submit(number, TOKENIZER(request.text)["input_ids"], request.sampling)
    answers = {}
    while not engine.is_idle:
        answers |= {piece.number: piece.answer for piece in engine.step() if piece.answer}
    for number in (0, 59, 118, 119):
        assert answers[number].tokens == alone(model, asked[number].text, 7)


def test_a_long_answer_outgrows_its_columns():
    model = ours()
    model.generation_config.eos_token_id = V - 1
    model.lm_head.weight.data[V - 1] = 0
    asked = [Request("w3 w4", Sampling(max_new_tokens=150)), Request("w5")]
    first, _ = BatchGenerator(model, TOKENIZER, max_batch=2).map(asked)
    assert len(first.tokens) == 150
    assert first.tokens == alone(model, "w3 w4", 150)


def test_requests_that_arrive_later_join_the_running_ones_and_cancelled_ones_leave():
    model = ours()
    engine = Engine(model, TOKENIZER, max_batch=4)
    sampling = Sampling(max_new_tokens=LONGEST)
    answers = {}
    for step in range(60):
        if step < 18 and step % 2 == 0:
            engine.submit(step, TOKENIZER(texts(20)[step])["input_ids"], sampling)
        if step == 9:
            engine.cancel(4)
        for piece in engine.step():
            assert piece.number != 4 or step < 9
            if piece.answer:
                answers[piece.number] = piece.answer
    assert engine.is_idle and sorted(answers) == [0, 2, 6, 8, 10, 12, 14, 16]
    for number, answer in answers.items():
        assert answer.tokens == alone(model, texts(20)[number])


def test_draws_depend_on_the_seed_and_the_request_but_not_on_the_batch():
    model = ours()
    drawn = {}
    for seed, max_batch in ((0, 1), (0, 16), (1, 16)):
        generator = BatchGenerator(
            model, TOKENIZER, max_batch=max_batch, temperature=0.9, top_p=0.95, seed=seed
        )
        drawn[seed, max_batch] = [answer.tokens for answer in generator.map(["w3 w4"] * 5)]
    assert drawn[0, 1] == drawn[0, 16] != drawn[1, 16]
    assert len(set(map(tuple, drawn[0, 1]))) == 5


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"temperature": 0.7, "top_p": 0.8}])
def test_the_distribution_is_that_of_the_warpers_of_transformers(fields):
    sampling = Sampling(**{"temperature": 1.0, **fields})
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    warpers.append(TopPLogitsWarper(sampling.top_p))
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(0)) * 2
    expected = warpers(torch.zeros(7, 1).long(), logits.clone()).softmax(-1)

    probs, tokens = kept_probs(logits, [sampling] * 7)
    ours_by_token = torch.zeros(7, V).double().scatter(1, tokens, probs)
    ours_by_token /= ours_by_token.sum(-1, keepdim=True)
    torch.testing.assert_close(ours_by_token.float(), expected, rtol=1e-4, atol=1e-6)

    # The quantiles of a row draw each token as often as it is likely.
    uniform = (torch.arange(1_000) + 0.5) / 1_000
    drawn = sample(logits[:1].expand(1_000, -1), [sampling] * 1_000, uniform)
    shares = torch.bincount(drawn, minlength=V) / 1_000
    torch.testing.assert_close(shares, expected[0], rtol=0, atol=1.1e-3)


def test_a_stop_string_ends_an_answer_before_it_and_streamed_pieces_never_show_it():
    model = ours()
    (plain,) = BatchGenerator(model, TOKENIZER, max_new_tokens=LONGEST).map(["w3 w4 w5"])
    words = plain.text.split()
    stop = f"{words[3]} {words[4]}"
    pieces = []
    generator = BatchGenerator(
        model, TOKENIZER, max_new_tokens=LONGEST, stop=(stop,), on_piece=pieces.append
    )
    (stopped,) = generator.map(["w3 w4 w5"])
    assert stopped.finish == "stop" and stopped.text == plain.text.split(stop)[0]
    assert "".join(piece.text for piece in pieces) == stopped.text
    assert [piece.token for piece in pieces] == stopped.tokens
    with pytest.raises(ConfigError, match=r"stop is '\\n\\n'.*vocabulary"):
        BatchGenerator(model, TOKENIZER, stop=("\n\n",))


def test_what_cannot_be_answered_is_refused_alone():
    # One long word is two tokens, but megabytes are refused without counting them.
    asked = ["w3", "", " \n", "w4 " * 40, None, DataError("line 9: no text"), "w4" * 1000, "w5"]
    answers = list(BatchGenerator(ours(), TOKENIZER, max_input=13).map(asked))
    assert [answer.error is None for answer in answers] == [True] + [False] * 6 + [True]
    assert "2000 characters" in answers[6].error and "832" in answers[6].error
    assert "41 tokens" in answers[3].error and "13" in answers[3].error
    assert answers[5].error == "line 9: no text"
    assert list(BatchGenerator(ours(), TOKENIZER).map([])) == []


def test_small_requests_take_turns_with_the_answers_of_a_large_one():
    model = ours()
    engine = Engine(model, TOKENIZER, max_batch=4)
    sampling = Sampling(max_new_tokens=3)
    for number in range(80):
        # Of several lengths, so that rows become free one at a time.
        lengths = Sampling(max_new_tokens=3 + number % 4)
        engine.submit(number, [2 + number, 1], lengths, client=0)
    ended = []
    for step in range(200):
        if step == 3:
            for number in range(80, 85):
                engine.submit(number, [2 + number] * (number - 79) + [1], sampling)
        ended += [piece.number for piece in engine.step() if piece.answer]
        if engine.is_idle:
            break
    assert sorted(ended) == list(range(85))
    # The running requests of the large one count as its turns: few of its others come before.
    assert max(ended.index(number) for number in range(80, 85)) < 12
    # The large one keeps a row.
    assert ended[:80] != sorted(ended[:80]) and ended.index(8) < 20


def test_after_a_failed_step_the_running_requests_have_errors_and_the_waiting_ones_answers():
    model = ours()
    engine = Engine(model, TOKENIZER, max_batch=2)
    for number, tokens in enumerate(([V + 7, 1], [3, 1], [4, 1])):
        engine.submit(number, tokens, Sampling(max_new_tokens=LONGEST))
    with pytest.raises(DataError) as caught:
        engine.step()
    failed = {piece.number: piece.answer.error for piece in engine.abort(caught.value)}
    assert list(failed) == [0, 1] and "DataError: input_ids holds 138" in failed[1]
    answers = []
    while not engine.is_idle:
        answers += [piece.answer for piece in engine.step() if piece.answer]
    assert [answer.tokens for answer in answers] == [alone(model, "w4")]


def test_a_temperature_near_0_takes_the_likeliest_token():
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    uniform = torch.full([3], 0.999)
    assert sample(logits, [Sampling(temperature=5e-324)] * 3, uniform).equal(logits.argmax(-1))


def test_an_endless_source_is_read_as_it_is_needed():
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield f"w{2 + read % 100}"

    answers = BatchGenerator(ours(), TOKENIZER, max_batch=2, max_new_tokens=3).map(endless())
    for number in range(50):
        assert next(answers).number == number
    assert read < 50 + 2 * 64


def test_models_whose_answers_would_differ_are_refused_with_the_setting():
    for name, value in (("num_beams", 4), ("repetition_penalty", 1.3), ("eos_token_id", None)):
        model = ours()
        setattr(model.generation_config, name, value)
        with pytest.raises(ConfigError, match=name):
            Engine(model, TOKENIZER)
    with pytest.raises(ConfigError, match="eval_capacity_factor=None"):
        Engine(tiny_model(), TOKENIZER)


def test_a_character_of_several_tokens_is_streamed_whole(tmp_path):
    """Tokens are bytes here: a character is shown when its last byte is there, as in the whole text."""
    tokenizer = train_byte_tokenizer(["el: Greece"], 359, tmp_path / "tokenizer")
    model = tiny_model(vocab_size=359, eval_capacity_factor=None)
    pieces = []
    sampling = {"max_new_tokens": 61, "temperature": 3.0}
    generator = BatchGenerator(model, tokenizer, on_piece=pieces.append, **sampling)
    answers = list(generator.map(["el: Greece"] * 7))
    for answer in answers:
        streamed = [piece.text for piece in pieces if piece.number == answer.number]
        assert "".join(streamed) == answer.text
        assert len(streamed) == len(answer.tokens)
