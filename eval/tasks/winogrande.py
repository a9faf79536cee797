"""WinoGrande: which of two nouns fills the blank of a sentence. Five sizes of training data and a
debiased one.

Neither T5 nor the paper has a prompt for it. The tasks' own is T5's rule for GLUE; the variants of
the largest size are published ones. GPT-3's partial scoring is none of them: there the choices
differ in what the model reads, and `rank` compares what it writes.
"""

from dataclasses import replace
from typing import Any

from eval.scores.metrics import ACCURACY
from eval.source import HubData
from eval.task import TASKS, Row, Task
from eval.text.postprocess import Postprocess, label_index, lower_text, unchanged
from eval.text.preprocess import HIDDEN_TARGET, Preprocess, glue

OPTIONS = ("option1", "option2")
_TRAIN_COUNTS = {"xs": 160, "s": 640, "m": 2558, "l": 10234, "xl": 40398, "debiased": 9248}
_NUMBERS = {"1": 0, "2": 1, "": -1}


def by_name(row: Row) -> list[dict[str, Any]]:
    """Returns `winogrande option1: A option2: B sentence: S` to option1 or option2."""
    fields = {name: row[name] for name in (*OPTIONS, "sentence")}
    return glue("winogrande", OPTIONS, id_field=None)({**fields, "label": _NUMBERS[row["answer"]]})


def unifiedqa(row: Row) -> list[dict[str, Any]]:
    """Returns the sentence and both options to the text of one, all in lower case.

    Source:
        UnifiedQA (github.com/allenai/unifiedqa) encode_datasets.py and tasks.py; between the parts
        stand a backslash and an n. Differs: no.
    """
    choices = tuple(row[name].lower() for name in OPTIONS)
    inputs = f"{row['sentence']} \\n (A) {row['option1']} (B) {row['option2']}".lower()
    return [_choose(row, inputs, choices)]


def rainbow(row: Row) -> list[dict[str, Any]]:
    """Returns the fields between tags to 1 or 2.

    Source:
        Rainbow (github.com/allenai/rainbow) src/rainbow/preparation/rainbow.py. Differs: no.
    """
    fields = "\n".join(f"<{name}>{row[name]}</{name}>" for name in ("sentence", *OPTIONS))
    return [_choose(row, f"[winogrande]:\n{fields}", ("1", "2"))]


def flan(row: Row) -> list[dict[str, Any]]:
    """Returns the sentence up to the blank, with two ends, to one of them.

    Source:
        FLAN (github.com/google-research/FLAN) flan/tasks.py and the first of the templates in
        flan/templates.py.
        Differs: no.
    """
    start, _, rest = row["sentence"].partition("_")
    choices = tuple(row[name] + rest for name in OPTIONS)
    ends = "\n- ".join(choices)
    return [_choose(row, f"How does the sentence end?\n\n{start}\n\nOPTIONS:\n- {ends}", choices)]


def _choose(row: Row, inputs: str, choices: tuple[str, ...]) -> dict[str, Any]:
    """Returns an example whose target is one of `choices`."""
    number = _NUMBERS[row["answer"]]
    return {
        "inputs": inputs,
        "targets": HIDDEN_TARGET if number < 0 else choices[number],
        "choices": choices,
    }


def _add_variant(
    name: str, source: str, preprocess: Preprocess, postprocess: Postprocess, target: str
) -> None:
    """Adds a published prompt of the largest size."""
    own = TASKS.get("winogrande_xl")
    TASKS.add(
        f"{own.name}.{name}",
        replace(
            own,
            name=f"{own.name}.{name}",
            description=f"A sentence with a blank and two options, to {target}.",
            preprocess=preprocess,
            postprocess=postprocess,
            choices=lambda fields: tuple(dict.fromkeys(fields["choices"])),
            prompt_source=source,
            variant_of=own.name,
        ),
    )


for _size, _count in _TRAIN_COUNTS.items():
    TASKS.add(
        f"winogrande_{_size}",
        Task(
            name=f"winogrande_{_size}",
            version=1,
            description="A sentence with a blank and two options, to option1 or option2.",
            licence="CC BY",
            source=HubData(
                "allenai/winogrande",
                f"winogrande_{_size}",
                counts={"train": _count, "validation": 1267, "test": 1767},
                columns={"sentence": str, "option1": str, "option2": str, "answer": str},
                labels={"answer": ("1", "2")},
                hidden=("test",),
            ),
            preprocess=by_name,
            postprocess=label_index(OPTIONS),
            metrics=(ACCURACY,),
            choices=OPTIONS,
            prompt_source="this library",
            family="WinoGrande",
        ),
    )

_add_variant("unifiedqa", "UnifiedQA", unifiedqa, lower_text, "the text of one in lower case")
_add_variant("rainbow", "Rainbow", rainbow, unchanged, "the number of one")
_add_variant("flan", "FLAN", flan, unchanged, "the end of the sentence")
