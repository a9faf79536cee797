"""ANLI: natural language inference that people wrote against models, in three rounds.

Neither T5 nor the paper has a prompt for it. The tasks' own is T5's rule for GLUE; the variants are
published ones. Labels are in the order of MNLI, and not in that of CB.
"""

from dataclasses import replace
from typing import Any

from eval.scores.metrics import ACCURACY
from eval.source import HubData
from eval.task import TASKS, Row, Task
from eval.text.postprocess import label_index
from eval.text.preprocess import THREE_WAY, Preprocess, glue

YES_OR_NO = ("Yes", "It's impossible to say", "No")
TRUE_OR_FALSE = ("True", "Neither", "False")
_TRAIN_COUNTS = {1: 16946, 2: 45460, 3: 100459}
_EVAL_COUNTS = {1: 1000, 2: 1000, 3: 1200}


def flan(row: Row) -> list[dict[str, Any]]:
    """Returns the premise, a question and three answers to Yes, It's impossible to say or No.

    Source:
        FLAN (github.com/google-research/FLAN) flan/tasks.py and the first of the templates in
        flan/templates.py.
        Differs: no.
    """
    question = f'Based on the paragraph above can we conclude that "{row["hypothesis"]}"?'
    options = "\n- ".join(YES_OR_NO)
    inputs = f"{row['premise']}\n\n{question}\n\nOPTIONS:\n- {options}"
    return [{"uid": row["uid"], "inputs": inputs, "targets": YES_OR_NO[row["label"]]}]


def gpt3(row: Row) -> list[dict[str, Any]]:
    """Returns the premise and a question to True, Neither or False.

    Source:
        lm-evaluation-harness lm_eval/tasks/anli, after GPT-3 (arXiv:2005.14165) appendix G.
        Differs: no.
    """
    inputs = f"{row['premise']}\nQuestion: {row['hypothesis']} True, False, or Neither?\nAnswer:"
    return [{"uid": row["uid"], "inputs": inputs, "targets": TRUE_OR_FALSE[row["label"]]}]


def _add(round_: int) -> None:
    """Adds a round and its variants."""
    own = TASKS.add(
        f"anli_r{round_}",
        Task(
            name=f"anli_r{round_}",
            version=1,
            description="Whether a paragraph entails a sentence: entailment, neutral or contradiction.",
            licence="CC BY-NC 4.0",
            source=HubData(
                "facebook/anli",
                "plain_text",
                counts={
                    "train": _TRAIN_COUNTS[round_],
                    "validation": _EVAL_COUNTS[round_],
                    "test": _EVAL_COUNTS[round_],
                },
                columns={"uid": str, "premise": str, "hypothesis": str, "label": int},
                labels={"label": range(3)},
                hub_splits={
                    "train": f"train_r{round_}",
                    "validation": f"dev_r{round_}",
                    "test": f"test_r{round_}",
                },
            ),
            preprocess=glue(
                f"anli_r{round_}", THREE_WAY, ("hypothesis", "premise"), id_field="uid"
            ),
            postprocess=label_index(THREE_WAY),
            metrics=(ACCURACY,),
            choices=THREE_WAY,
            ids=("idx",),
            split="test",
            prompt_source="this library",
            family="ANLI",
        ),
    )
    published: tuple[tuple[str, str, Preprocess, tuple[str, ...]], ...] = (
        ("flan", "FLAN", flan, YES_OR_NO),
        ("gpt3", "GPT-3", gpt3, TRUE_OR_FALSE),
    )
    for name, source, preprocess, labels in published:
        variant = replace(
            own,
            name=f"{own.name}.{name}",
            description=f"Whether a paragraph entails a sentence: {', '.join(labels[:-1])} or {labels[-1]}.",
            preprocess=preprocess,
            postprocess=label_index(labels),
            choices=labels,
            ids=("uid",),
            prompt_source=source,
            variant_of=own.name,
        )
        TASKS.add(variant.name, variant)


for _round in _TRAIN_COUNTS:
    _add(_round)
