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
