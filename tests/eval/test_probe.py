"""Linear probes: vectors of a frozen encoder do not depend on the batch, and classes are read off them."""

import numpy as np
import pytest

from eval.__main__ import main
from eval.answers.seq2seq import load_seq2seq
from eval.baselines.vector_classifier import classify_by_vectors
from eval.commands.probe import EncoderVectors
from eval.task import Example
from moe import ConfigError

WORDS = ("red", "green", "blue", "What colour is it?", "a much longer text than all of the others")


@pytest.fixture(scope="module")
def vectors(folders):
    return EncoderVectors(load_seq2seq(folders["t5"]), 16, "t5")


def test_a_text_has_the_same_vectors_alone_and_beside_longer_ones(vectors):
    for reduced in (vectors.mean, vectors.max):
        together = reduced(WORDS)
        alone = np.concatenate([reduced([word]) for word in WORDS])
        np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
    assert (vectors.mean(WORDS) <= vectors.max(WORDS)).all()


def test_classes_that_are_in_the_texts_are_read_off(vectors):
    examples = []
    for number in range(60):
        text = WORDS[number % 2] + " x" * (number % 5)
        examples.append(Example(str(number), str(number), text, "ab"[number % 2], ("a", "b"), {}))
    answers = classify_by_vectors(vectors, examples[:40], (), examples[40:], word_shares=())
    assert answers.outputs == [example.targets for example in examples[40:]]


def test_the_command_prints_a_row_for_each_encoder_and_number_of_labels(folders, capsys):
    models = ["--model", f"ours={folders['moe']}", "--also", f"t5={folders['t5']}"]
    main(["probe", *models, "--tasks", "unicode_category", "--train-examples", "40", "80"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:3] for line in lines if line.startswith("unicode_category")]
    assert rows == [["unicode_category", n, name] for n in ("40", "80") for name in ("ours", "t5")]


def test_a_task_without_classes_is_refused(folders):
    with pytest.raises(ConfigError, match="minimal_pairs, which is not a classification task"):
        main(["probe", "--model", str(folders["t5"]), "--tasks", "minimal_pairs"])
