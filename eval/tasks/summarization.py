"""Summaries of news: XSum, one sentence each, and CNN/Daily Mail, a few.

ROUGE is without stemming, with T5's ` . ` rule: a predicted sentence ends at ` . `, since T5's
vocabulary has no newline. The headline is ROUGE-2, which the paper prints.
"""

from collections.abc import Mapping
from typing import Any

from eval.scores.metrics import ROUGE1, ROUGE2, ROUGELSUM
from eval.source import EXPORT, MAIN, HubData
from eval.task import TASKS, Decoding, Task
from eval.text.postprocess import unchanged
from eval.text.preprocess import summarize


def _add(
    name: str,
    description: str,
    licence: str,
    source: HubData,
    text: str,
    summary: str,
    **fields: Any,
) -> None:
    """Adds a task; beams and lengths are T5's for summaries."""
    TASKS.add(
        name,
        Task(
            name=name,
            version=1,
            description=description,
            licence=licence,
            source=source,
            preprocess=summarize(text, summary),
            postprocess=unchanged,
            metrics=(ROUGE2, ROUGE1, ROUGELSUM),
            inputs_length=512,
            targets_length=512,
            decoding=Decoding(max_tokens=128, num_beams=4, alpha=0.6),
            split="test",
            family="Summarization",
            **fields,
        ),
    )


def _counts(train: int, validation: int, test: int) -> Mapping[str, int]:
    """Returns counts by split."""
    return {"train": train, "validation": validation, "test": test}


_add(
    "xsum",
    "An article of the BBC, to its first sentence, which the article lacks. T5 has no task for it: this is T5's prompt "
    "for summaries.",
    "unknown; texts of the BBC",
    HubData(
        "EdinburghNLP/xsum",
        "default",
        counts=_counts(204045, 11332, 11334),
        columns={"document": str, "summary": str},
        revisions=(EXPORT, MAIN),
    ),
    "document",
    "summary",
)
_add(
    "cnn_dailymail",
    "An article of CNN or the Daily Mail, to its highlights, one on each line.",
    "Apache-2.0 for the scripts; texts of CNN and Daily Mail",
    HubData(
        "abisee/cnn_dailymail",
        "3.0.0",
        counts=_counts(287113, 13368, 11490),
        columns={"article": str, "highlights": str},
    ),
    "article",
    "highlights",
)
