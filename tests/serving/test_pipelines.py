"""The tasks that transformers 5 removed, with every answer that of the model's own `generate`."""

import pytest
from transformers import pipeline

from moe import ConfigError, DataError
from moe.serving.pipelines import TEXT_KEYS
from tests.serving.tiny_words import ours, t5, texts, word_tokenizer


@pytest.mark.parametrize("task", TEXT_KEYS)
def test_a_list_a_generator_and_a_text_give_what_the_model_generates(task):
    tokenizer = word_tokenizer()
    for model in (t5(), ours()):
        pipe = pipeline(task, model=model, tokenizer=tokenizer, prefix="w9 ")
        expected = []
        for text in texts(7):
            inputs = tokenizer("w9 " + text, return_tensors="pt")["input_ids"]
            tokens = model.generate(inputs, max_new_tokens=5, do_sample=False)
            answer = tokenizer.decode(tokens[0], skip_special_tokens=True)
            expected.append({TEXT_KEYS[task]: answer})
        assert pipe(texts(7), max_new_tokens=5) == expected
        assert list(pipe((text for text in texts(7)), max_new_tokens=5)) == expected
        assert pipe(texts(7)[0], max_new_tokens=5) == expected[0]


def test_a_folder_with_a_capacity_loads_with_its_remedy_and_options_are_checked(tmp_path):
    model = ours()
    model.config.eval_capacity_factor = 2.0
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="eval_capacity_factor=None"):
        pipeline("summarization", model=str(tmp_path))(["w3"])
    pipe = pipeline(
        "summarization", model=str(tmp_path), model_kwargs={"eval_capacity_factor": None}
    )
    assert pipe(["w3"], max_new_tokens=2)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        pipe(["w3"], max_new_token=2)
    with pytest.raises(DataError, match="Text 1"):
        pipe(["w3", ""])


def test_the_prefix_of_the_task_is_put_before_each_text():
    model, tokenizer = t5(), word_tokenizer()
    given = pipeline("summarization", model=model, tokenizer=tokenizer, prefix="w9 ")
    expected = given(texts(5), max_new_tokens=5)
    model.config.task_specific_params = {"summarization": {"prefix": "w9 "}}
    pipe = pipeline("summarization", model=model, tokenizer=tokenizer)
    assert pipe(texts(5), max_new_tokens=5) == expected
    assert pipe(texts(5)[0], max_new_tokens=5) == expected[0]
    assert pipe(texts(5), max_new_tokens=5, prefix="") != expected


def test_other_options_of_generate_are_answered_by_generate():
    tokenizer = word_tokenizer()
    for model in (t5(), ours()):
        pipe = pipeline("summarization", model=model, tokenizer=tokenizer)
        for options in (
            {"max_length": 6},
            {"max_length": 6, "do_sample": False},
            {"max_new_tokens": 5, "num_beams": 3},
            {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2},
        ):
            expected = []
            for text in texts(3):
                inputs = tokenizer(text, return_tensors="pt")["input_ids"]
                tokens = model.generate(inputs, **options)
                answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
                results = [{"summary_text": answer} for answer in answers]
                expected.append(results if len(results) > 1 else results[0])
            assert pipe(texts(3), **options) == expected
            assert pipe(texts(3)[0], **options) == expected[0]
        with pytest.raises(ValueError, match="seed"):  # which generate() does not have
            pipe(texts(3), num_beams=2, seed=3)
