"""Overlap of a task's examples with a training corpus, and the scores without those examples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moe.data.corpus import load_corpus
from stmoe_eval.answers.predict import Predicted
from stmoe_eval.reports.overlap import measure_overlap
from stmoe_eval.reports.records import CleanScores, Contamination
from stmoe_eval.reports.task_summary import TaskExamples, score_system


class TrainingText(NamedTuple):
    """The text that a model was trained on.

    Attributes:
        folder: Folder of the corpus.
        texts: Its training documents.
    """

    folder: Path
    texts: Sequence[str]


def load_training_text(folder: Path) -> TrainingText:
    """Returns the training documents of a corpus, without those held out.

    Raises:
        DataError: When the folder is not a corpus, or is damaged.
    """
    return TrainingText(folder, load_corpus(folder).train["text"])


def task_contamination(
    asked: TaskExamples, answers: Mapping[tuple[str, str], Predicted], training_text: TrainingText
) -> Contamination:
    """Returns the overlap of examples with a training text, and the scores on the clean examples.

    An example is clean if no run of 8 words of its input occurs in the text; shorter inputs are
    clean, too.

    Args:
        asked: The examples.
        answers: By system and mode.
        training_text: Text that the models may have been trained on.
    """
    task = asked.task
    inputs = [example.inputs for example in asked.examples]
    overlaps = measure_overlap(task.name, asked.split, inputs, training_text.texts)

    # The smallest n-grams find the most.
    _, is_shared = overlaps[0]
    clean = [number for number, shared in enumerate(is_shared) if not shared]
    clean_examples = [asked.examples[number] for number in clean]

    # Each model's answers to the clean examples, scored like all answers.
    clean_scores = []
    for (name, mode), predicted in answers.items():
        if clean:
            outputs = [predicted.outputs[number] for number in clean]
            scored = score_system(task, clean_examples, outputs, name, mode)
            clean_scores.append(CleanScores(name, mode, scored.result.scores))

    return Contamination(
        corpus=str(training_text.folder),
        overlaps=[overlap for overlap, _ in overlaps],
        num_clean=len(clean_examples),
        clean_scores=clean_scores,
    )
