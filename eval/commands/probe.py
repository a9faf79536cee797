r"""python -m eval probe: what a frozen encoder knows, by a linear classifier on its output.

python -m eval probe --model runs/demo/pretrain/model --tasks docstring_topic --train-examples 250 1000 \
        [--also scratch=runs/other/model] [--baseline-text runs/demo/corpus]

Nothing is fine-tuned: a text is the mean of the encoder's output over its tokens, and a logistic
regression learns the classes from the labels. Its strength is chosen on dev. --baseline-text adds the
same classifier on word vectors. A probe has less variance than fine-tuning, and takes seconds.

Source:
    Linear probes (arXiv:1610.01644). Differs: the last layer only.
"""

import argparse
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from eval.answers.seq2seq import Seq2Seq, load_seq2seq
from eval.baselines.data import BaselineSettings, read_baseline_data
from eval.baselines.vector_classifier import TextVectors, classify_by_vectors
from eval.baselines.word_vectors import read_word_vectors
from eval.commands.run import parse_models
from eval.run import check_tasks
from eval.scores.intervals import score_answers, score_metrics, task_seed
from eval.task import Example, Task
from moe.cli import Parser, integer, path, word
from moe.data.tokenizer import prompt_ids
from moe.errors import ConfigError
from moe.inspection.formatting import format_interval, format_score
from moe.inspection.tables import format_table

_BATCH_SIZE = 64
_HEADER = ("task", "labels", "frozen", "accuracy (%)", "95 % interval")


class EncoderVectors:
    """A frozen encoder as vectors of texts; the same texts are encoded once.

    Attributes:
        source: Name of the model.
    """

    def __init__(self, system: Seq2Seq, max_tokens: int, source: str) -> None:
        """Takes a model and its tokenizer.

        Args:
            system: Model and tokenizer.
            max_tokens: Longer texts are cut.
            source: Name of the model.
        """
        self.source = source
        self._system = system
        self._max_tokens = max_tokens
        self._encoded = lru_cache(self._encode)

    def mean(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Returns <float32>[N, D] means of the encoder's output over the tokens of each text."""
        return self._encoded(tuple(texts))[0]

    def max(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Returns <float32>[N, D] the largest value of each dimension over the tokens of a text."""
        return self._encoded(tuple(texts))[1]

    @torch.no_grad()
    def _encode(self, texts: tuple[str, ...]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        encoder = self._system.model.get_encoder()
        means: list[NDArray[np.float32]] = []
        maxima: list[NDArray[np.float32]] = []
        for start in range(0, len(texts), _BATCH_SIZE):
            tokenizer = self._system.tokenizer
            rows = prompt_ids(tokenizer, texts[start : start + _BATCH_SIZE], self._max_tokens)
            batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
            mask = batch["attention_mask"]
            x = encoder(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state.float()
            is_token = mask[..., None].bool()  # [B, L, 1]
            means.append(((x * is_token).sum(dim=1) / is_token.sum(dim=1)).numpy())
            maxima.append(x.masked_fill(~is_token, -torch.inf).amax(dim=1).numpy())
        return np.concatenate(means), np.concatenate(maxima)


def build_parser() -> Parser:
    """Returns the parser of the command."""
    parser = Parser(prog="python -m eval probe", description="Probes frozen encoders.")
    parser.add_argument(
        "--model", type=word, required=True, help="checkpoint folder, or NAME=FOLDER to name it"
    )
    parser.add_argument(
        "--also", type=word, action="append", default=[], help="a further NAME=FOLDER"
    )
    parser.add_argument(
        "--tasks", type=word, required=True, help="names of classifications, separated by commas"
    )
    parser.add_argument(
        "--train-examples",
        type=integer(least=1),
        nargs="+",
        default=[250],
        help="numbers of labels (250)",
    )
    parser.add_argument(
        "--train-seed", type=integer(least=0), default=0, help="seed of their choice (0)"
    )
    parser.add_argument(
        "--baseline-text", type=path, help="corpus of whose words a further classifier has vectors"
    )
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Fits the classifiers, and prints their accuracy on the test split."""
    tasks = check_tasks(arguments.tasks.split(","), None, None)
    for task in tasks:
        if not task.is_classification:
            raise ConfigError(
                f"--tasks has {task.name}, which is not a classification task: it has no fixed choices. Leave it out."
            )
    models = parse_models([arguments.model, *arguments.also])

    vectors: dict[str, TextVectors] = {}
    for name, folder in models.items():
        longest = max(task.inputs_length for task in tasks)
        vectors[name] = EncoderVectors(load_seq2seq(folder), longest, name)
    if arguments.baseline_text:
        vectors["word vectors"] = read_word_vectors(arguments.baseline_text)

    rows: list[tuple[str, ...]] = []
    for task in tasks:
        test = task.examples(task.split)
        for num_labels in arguments.train_examples:
            settings = BaselineSettings(num_labels, arguments.train_seed)
            data = read_baseline_data(task, task.split, settings, None, None)
            assert data is not None, "a classification has training data"
            fit = partial(
                classify_by_vectors, train=data.train, dev=data.dev, test=test, word_shares=()
            )
            for name, source in vectors.items():
                value, interval = _scored(task, test, fit(source).outputs)
                rows.append((task.name, f"{len(data.train):,}", name, value, interval))
    print(format_table(_HEADER, rows))


def _scored(task: Task, examples: Sequence[Example], outputs: list[str]) -> tuple[str, str]:
    """Returns the headline score and its interval over groups of examples."""
    answers = score_answers(task.metrics, *task.values(examples, outputs))
    groups = [example.group for example in examples]
    scores, _ = score_metrics(answers, groups, task_seed(task.name))
    score = scores[task.metrics[0].name]
    return format_score(score.value), format_interval(score.low, score.high)
