"""WinoGrande: which of two nouns fills the blank of a sentence.

There are five sizes of training data and a debiased one. Neither T5 nor the paper has a prompt for
it. The tasks' own is T5's rule for GLUE; the variants of the largest size are published ones.
GPT-3's partial scoring is not supported: its choices differ in the model's input, and `rank`
compares outputs.
"""

from dataclasses import replace

from stmoe_eval.scores.metrics import ACCURACY
from stmoe_eval.source import HubData
from stmoe_eval.task import Features, Postprocess, Preprocess, Row, Task, register_task
from stmoe_eval.text.postprocess import label_index, lower_text, unchanged
from stmoe_eval.text.preprocess import HIDDEN_LABEL, HIDDEN_TARGET, glue

OPTIONS = ("option1", "option2")

_LABELS = {"1": 0, "2": 1, "": HIDDEN_LABEL}
_ask_name = glue("winogrande", OPTIONS, id_field=None)


def ask_name(row: Row) -> list[Features]:
    """Maps `winogrande option1: A option2: B sentence: S` to option1 or option2."""
    return _ask_name(
        {
            "option1": row["option1"],
            "option2": row["option2"],
            "sentence": row["sentence"],
            "label": _LABELS[row["answer"]],
        }
    )


def unifiedqa(row: Row) -> list[Features]:
    """Maps sentence and options to the text of one, all in lower case.

    Source:
        UnifiedQA (github.com/allenai/unifiedqa) encode_datasets.py and tasks.py; the parts are
        separated by a backslash and an n. Differs: no.
    """
    choices = (row["option1"].lower(), row["option2"].lower())
    inputs = f"{row['sentence']} \\n (A) {row['option1']} (B) {row['option2']}".lower()
    return [_features(row, inputs, choices)]


def rainbow(row: Row) -> list[Features]:
    """Maps the fields between tags to 1 or 2.

    Source:
        Rainbow (github.com/allenai/rainbow) src/rainbow/preparation/rainbow.py. Differs: no.
    """
    tagged = [f"<{name}>{row[name]}</{name}>" for name in ("sentence", *OPTIONS)]
    inputs = "\n".join(["[winogrande]:", *tagged])
    return [_features(row, inputs, ("1", "2"))]


def flan(row: Row) -> list[Features]:
    """Maps the sentence up to the blank, and two ends, to one of them.

    Source:
        FLAN (github.com/google-research/FLAN) flan/tasks.py and the first of the templates in
        flan/templates.py.
        Differs: no.
    """
    start, _, rest = row["sentence"].partition("_")
    choices = (row["option1"] + rest, row["option2"] + rest)
    options = "\n- ".join(choices)
    inputs = f"How does the sentence end?\n\n{start}\n\nOPTIONS:\n- {options}"
    return [_features(row, inputs, choices)]


def _features(row: Row, inputs: str, choices: tuple[str, str]) -> Features:
    """Returns an example whose target is one of `choices`."""
    label = _LABELS[row["answer"]]
    target = HIDDEN_TARGET if label == HIDDEN_LABEL else choices[label]
    return {"inputs": inputs, "targets": target, "choices": choices}


def choices_of_row(features: Features) -> tuple[str, ...]:
    """Returns the choices of an example, each once."""
    return tuple(dict.fromkeys(features["choices"]))


def _register_size(size: str, num_train: int) -> Task:
    """Registers the task of one size of training data, and returns it."""
    # All sizes share the rows that are evaluated.
    return register_task(
        Task(
            name=f"winogrande_{size}",
            version=1,
            description="A sentence with a blank and two options, to option1 or option2.",
            licence="CC BY",
            source=HubData(
                "allenai/winogrande",
                f"winogrande_{size}",
                counts={"train": num_train, "validation": 1267, "test": 1767},
                columns={"sentence": str, "option1": str, "option2": str, "answer": str},
                labels={"answer": ("1", "2")},
                hidden=("test",),
                hidden_values={"answer": ""},
            ),
            preprocess=ask_name,
            postprocess=label_index(OPTIONS),
            metrics=(ACCURACY,),
            choices=OPTIONS,
            prompt_source="this library",
            family="WinoGrande",
        )
    )


# Sizes with the number of rows to train on.
_register_size("xs", 160)
_register_size("s", 640)
_register_size("m", 2558)
_register_size("l", 10234)
_xl = _register_size("xl", 40398)
_register_size("debiased", 9248)


def _register_variant(
    prompt_source: str, end: str, preprocess: Preprocess, postprocess: Postprocess
) -> None:
    """Registers a published prompt on the rows of the largest size.

    Args:
        prompt_source: Where the prompt is from.
        end: What an answer is, for the description.
        preprocess: See `Task`.
        postprocess: See `Task`.
    """
    task = replace(
        _xl,
        name=f"{_xl.name}.{prompt_source.lower()}",
        description=f"A sentence with a blank and two options, to {end}.",
        preprocess=preprocess,
        postprocess=postprocess,
        choices=choices_of_row,
        prompt_source=prompt_source,
        variant_of=_xl.name,
    )
    register_task(task)


_register_variant("UnifiedQA", "the text of one in lower case", unifiedqa, lower_text)
_register_variant("Rainbow", "the number of one", rainbow, unchanged)
_register_variant("FLAN", "the end of the sentence", flan, unchanged)
