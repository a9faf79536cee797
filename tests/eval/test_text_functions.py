"""T5's text functions at their edges, beside the cases of tests/conformance. Oracles: what T5's and
t5_cbqa's source and tests say, on other texts.
"""

import pytest

from moe import DataError
from stmoe_eval.text import postprocess
from stmoe_eval.text.preprocess import glue, glue_task, multirc, record, stsb
from stmoe_eval.text.questions import pad_punctuation, squad
from stmoe_eval.text.wsc import definite_pronoun_resolution_simple, wsc_simple

# ---- classification ----


def test_fields_are_in_alphabetical_order_unless_listed_and_their_text_is_kept_to_the_letter():
    row = {"q3": " Who? ", "q1": "How  so?", "q2": "", "idx": 5, "label": 1}
    (example,) = glue("quiz", ["no", "yes"])(row)
    assert example == {"inputs": "quiz q1: How  so? q2:  q3:  Who? ", "targets": "yes", "idx": 5}
    (example,) = glue("quiz", ["no", "yes"], ["q3", "q1"])(row)
    assert example["inputs"] == "quiz q3:  Who?  q1: How  so?"


NLI = ["entailment", "neutral", "contradiction"]
TWO = ["entailment", "not_entailment"]


@pytest.mark.parametrize(
    ("name", "fields", "inputs", "targets"),
    [
        ("cola", "sentence", "cola sentence: 0", ["unacceptable", "acceptable"]),
        (
            "mrpc",
            "sentence1 sentence2",
            "mrpc sentence1: 0 sentence2: 1",
            ["not_equivalent", "equivalent"],
        ),
        (
            "qqp",
            "question1 question2",
            "qqp question1: 0 question2: 1",
            ["not_duplicate", "duplicate"],
        ),
        ("mnli_matched", "premise hypothesis", "mnli hypothesis: 1 premise: 0", NLI),
        ("ax", "premise hypothesis", "mnli hypothesis: 1 premise: 0", NLI),
        ("qnli", "question sentence", "qnli question: 0 sentence: 1", TWO),
        ("wnli", "sentence1 sentence2", "wnli sentence1: 0 sentence2: 1", TWO[::-1]),
    ],
)
def test_every_task_has_its_prompt_and_its_own_order_of_labels(name, fields, inputs, targets):
    row = {field: str(number) for number, field in enumerate(fields.split())}
    for label, target in [*enumerate(targets), (-1, "<unk>")]:
        expected = {"inputs": inputs, "targets": target, "idx": 3}
        assert glue_task(name)({**row, "idx": 3, "label": label}) == [expected]


def test_multirc_loses_breaks_and_bold_and_record_parts_highlights_by_their_punctuation():
    row = {"paragraph": "<br>a<b>b</b><B>c<br/>", "question": "<b>q</b>", "answer": "x<br>y"}
    idx = {"paragraph": 2, "question": 3, "answer": 5}
    (example,) = multirc({**row, "label": -1, "idx": idx})
    assert example["inputs"] == "multirc question: q answer: x y paragraph:  ab<B>c<br/>"

    ends = ["a.", "b?", "c!", 'd"', "e'", "f", "g)"]
    passage = "".join(f"{end}\n@highlight\n" for end in ends) + "end"
    row = {"passage": passage, "query": "q", "entities": ["Z", "A"], "answers": ["Z", "A"]}
    examples = record({**row, "idx": {"passage": 2, "query": 3}})
    assert [example["targets"] for example in examples] == ["Z", "A"]
    text = "record query: q entities: Z, A passage: a. b? c! d\" e' f. g). end"
    assert {example["inputs"] for example in examples} == {text}


def test_similarity_is_rounded_to_fifths_half_to_even():
    for label, text in {2.5: "2.4", 2.499: "2.4", 1.5: "1.6", 0.1: "0.0", -1.0: "-1.0"}.items():
        (example,) = stsb({"sentence1": "a", "sentence2": "b", "idx": 0, "label": label})
        assert example["targets"] == text


# ---- pronouns ----

SCHEMA = {"text": "Ada told Bo that she won , so she ran .", "label": 1, "idx": 7}
SCHEMA |= {"span1_index": 0, "span1_text": "Ada", "span2_text": "she"}


@pytest.mark.parametrize(
    ("text", "index", "marked"),
    [
        (SCHEMA["text"], 8, "Ada told Bo that she won , so *she* ran ."),
        ("Ada  told Bo that she", 5, "Ada  told Bo that *she* "),  # T5 joins what follows: nothing
    ],
)
def test_the_pronoun_at_the_index_is_marked_and_training_keeps_right_referents(text, index, marked):
    row = {**SCHEMA, "text": text, "span2_index": index}
    expected = {"inputs": f"wsc: {marked}", "targets": "Ada", "label": 1, "idx": 7}
    assert wsc_simple(row) == wsc_simple(row, correct_referent_only=True) == [expected]
    assert wsc_simple({**row, "label": 0}, correct_referent_only=True) == []
    for other in (3, 99):
        with pytest.raises(DataError, match=rf"span2_index {other} of WSC row 7"):
            wsc_simple({**row, "span2_index": other})


def test_the_two_rows_with_a_wrong_index_are_marked_all_the_same():
    text = (
        "The boy continued to whip the pony , and eventually the pony threw him over. John laughed "
        'out quite loud. "Good for him," he said. '
    )
    row = {"text": text, "span1_index": 0, "span1_text": "The boy", "label": 0, "idx": 1}
    (example,) = wsc_simple({**row, "span2_text": "him", "span2_index": 22})
    assert example["inputs"].endswith('laughed out quite loud. "Good for *him* ," he said.')
    text = (
        "When they had eventually calmed down a bit , and had gotten home, Mr. Farley put the "
        "magic pebble in an iron safe . Some day they might want to use it , but really for now, "
        "what more could they wish for?"
    )
    row = {"text": text, "span1_index": 18, "span1_text": "safe", "label": 1, "idx": 2}
    (example,) = wsc_simple({**row, "span2_text": "it", "span2_index": 28})
    assert "they might want to use *it* , but really for now" in example["inputs"]


@pytest.mark.parametrize(
    ("sentence", "marked"),
    [
        ("He said that he, he, won.", "He said that *he*, he, won."),
        # Neither is between a space and one of space, full stop, comma.
        ("he won; so he!", "he won; so he!"),
    ],
)
def test_the_first_occurrence_of_a_pronoun_between_delimiters_is_marked(sentence, marked):
    row = {"sentence": sentence, "pronoun": "he", "candidates": ["Bo", "Al"], "label": 0}
    expected = {"inputs": f"wsc: {marked}", "targets": "Bo"}
    assert definite_pronoun_resolution_simple(row) == [expected]


# ---- questions ----


def test_ascii_punctuation_is_padded_and_a_question_without_answers_has_a_hidden_target():
    expected = {
        '"It  was (1845-1986) ".': ' " It was ( 1845 - 1986 ) " . ',
        "a_b\t\n'c\u2019": "a _ b ' c\u2019",
    }
    assert {text: pad_punctuation(text) for text in expected} == expected

    row = {"id": "x", "question": "Who?", "context": "U.S. law", "answers": {"text": []}}
    (example,) = squad(row, include_context=False)
    assert example["inputs"] == "squad trivia question: Who ? "
    assert (example["targets"], example["answers"]) == ("<unk>", [])


# ---- postprocessors ----


@pytest.mark.parametrize(
    ("answer", "referent", "value"),
    [
        ("THE cat", "cat", 1),
        ("Bob's", "Bob's hat", 1),
        ("fuzzy cat", "fuzzy bunny", 0),
        ("the", "cup", -1),
        ("cup  cup", "cup", 1),
    ],
)
def test_an_answer_names_the_referent_when_the_words_of_one_are_among_the_others(
    answer, referent, value
):
    fields = {"targets": referent, "label": 1}
    assert postprocess.wsc_simple(answer, fields, False) == value
    assert postprocess.wsc_simple(answer, fields, True) == 1


def test_labels_are_matched_to_the_letter_and_numbers_read_as_python_reads_them():
    index = postprocess.label_index(["one", "two", "one"])
    expected = {"one": 0, "two": 1, "One": -1, "one ": -1, "": -1}
    assert {text: index(text, {}, False) for text in expected} == expected

    read = postprocess.string_to_float(-7.0)
    expected = {"10.": 10.0, " 2.5 ": 2.5, "-1e1": -10.0, "ten": -7.0, "": -7.0, "1,5": -7.0}
    assert {text: read(text, {}, False) for text in expected} == expected


def test_a_question_of_multirc_is_known_by_its_paragraph_too_when_the_row_has_it():
    assert postprocess.multirc("True", {"idx/question": 3}, True) == {"value": 1, "group": 3}
    fields = {"idx/paragraph": 2, "idx/question": 3}
    assert postprocess.multirc("False", fields, True) == {"value": 0, "group": (2, 3)}
    fields = {"answers": ["a", "b"], "idx/passage": 2, "idx/query": 3}
    assert postprocess.record("x", fields, True) == {"value": ["a", "b"], "group": (2, 3)}
