"""ANLI: natural language inference that people wrote against models, in three rounds.

Neither T5 nor the paper has a prompt for it. The tasks' own is T5's rule for GLUE; the variants are
published ones. Labels are in the order of MNLI, not in the order of CB.
"""

from dataclasses import replace

from stmoe_eval.scores.metrics import ACCURACY
from stmoe_eval.source import HubData
from stmoe_eval.task import Features, Row, Task, register_task
from stmoe_eval.text.postprocess import label_index
from stmoe_eval.text.preprocess import THREE_WAY, glue

YES_OR_NO = ("Yes", "It's impossible to say", "No")
TRUE_OR_FALSE = ("True", "Neither", "False")


def flan(row: Row) -> list[Features]:
    """Maps premise, question and three answers to Yes, It's impossible to say or No.

    Source:
        FLAN (github.com/google-research/FLAN) flan/tasks.py and the first of the templates in
        flan/templates.py.
        Differs: no.
    """
    question = f'Based on the paragraph above can we conclude that "{row["hypothesis"]}"?'
    options = "\n- ".join(YES_OR_NO)
    inputs = f"{row['premise']}\n\n{question}\n\nOPTIONS:\n- {options}"
    return [{"uid": row["uid"], "inputs": inputs, "targets": YES_OR_NO[row["label"]]}]


def gpt3(row: Row) -> list[Features]:
    """Maps premise and question to True, Neither or False.

    Source:
        lm-evaluation-harness lm_eval/tasks/anli, after GPT-3 (arXiv:2005.14165) appendix G.
        Differs: no.
    """
    inputs = f"{row['premise']}\nQuestion: {row['hypothesis']} True, False, or Neither?\nAnswer:"
    return [{"uid": row["uid"], "inputs": inputs, "targets": TRUE_OR_FALSE[row["label"]]}]


def _register_round(number: int, *, num_train: int, num_eval: int) -> None:
    """Registers a round and its variants.

    Args:
        number: Number of the round, from 1.
        num_train: Rows to train on.
        num_eval: Rows of the validation split, and as many of the test split.
    """
    name = f"anli_r{number}"
    task = register_task(
        Task(
            name=name,
            version=1,
            description="Whether a paragraph entails a sentence: entailment, neutral or contradiction.",
            licence="CC BY-NC 4.0",
            source=HubData(
                "facebook/anli",
                "plain_text",
                counts={"train": num_train, "validation": num_eval, "test": num_eval},
                columns={"uid": str, "premise": str, "hypothesis": str, "label": int},
                labels={"label": range(3)},
                hub_splits={
                    "train": f"train_r{number}",
                    "validation": f"dev_r{number}",
                    "test": f"test_r{number}",
                },
            ),
            preprocess=glue(name, THREE_WAY, ("hypothesis", "premise"), id_field="uid"),
            postprocess=label_index(THREE_WAY),
            metrics=(ACCURACY,),
            choices=THREE_WAY,
            ids=("idx",),
            split="test",
            prompt_source="this library",
            family="ANLI",
        )
    )

    # Published prompts for the same rows.
    variants = (
        ("FLAN", "flan", flan, "Yes, It's impossible to say or No", YES_OR_NO),
        ("GPT-3", "gpt3", gpt3, "True, Neither or False", TRUE_OR_FALSE),
    )
    for prompt_source, suffix, preprocess, answers, labels in variants:
        variant = replace(
            task,
            name=f"{name}.{suffix}",
            description=f"Whether a paragraph entails a sentence: {answers}.",
            preprocess=preprocess,
            postprocess=label_index(labels),
            choices=labels,
            ids=("uid",),
            prompt_source=prompt_source,
            variant_of=name,
        )
        register_task(variant)


_register_round(1, num_train=16946, num_eval=1000)
_register_round(2, num_train=45460, num_eval=1000)
_register_round(3, num_train=100459, num_eval=1200)
