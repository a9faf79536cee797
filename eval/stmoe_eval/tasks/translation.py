"""English to German, French and Romanian: T5's tasks of WMT.

The headline is BLEU as T5 computes it, with the tokenizer `intl`; it is reported with BLEU with
`13a`, as WMT reports it, and chrF. Answers are searched with the beams that T5 reports.
"""

from collections.abc import Mapping

from stmoe_eval.scores.translation import BLEU, BLEU_13A, CHRF
from stmoe_eval.source import EXPORT, MAIN, HubData
from stmoe_eval.task import Decoding, Features, Preprocess, Row, Task, register_task
from stmoe_eval.text.postprocess import unchanged
from stmoe_eval.text.preprocess import translate

_DECODING = Decoding(max_tokens=128, num_beams=4, alpha=0.6)
_LENGTH = 512


def _translate_pair(language: str) -> Preprocess:
    """Returns T5's preprocessor for rows that hold both texts in the column `translation`."""
    preprocess = translate("en", language)

    def preprocess_pair(row: Row) -> list[Features]:
        return preprocess(row["translation"])

    return preprocess_pair


def _register(language: str, description: str, repository: str, counts: Mapping[str, int]) -> None:
    """Adds the task from English to a language, given by its code."""
    register_task(
        Task(
            name=f"wmt_en_{language}",
            version=1,
            description=description,
            licence="unknown; texts of WMT's sources",
            source=HubData(
                repository,
                f"{language}-en",
                counts=counts,
                columns={"translation": {"en": str, language: str}},
                revisions=(EXPORT, MAIN),
            ),
            preprocess=_translate_pair(language),
            postprocess=unchanged,
            metrics=(BLEU, BLEU_13A, CHRF),
            # T5's settings.
            inputs_length=_LENGTH,
            targets_length=_LENGTH,
            decoding=_DECODING,
            split="test",
            family="Translation",
        )
    )


_register(
    "de",
    "An English sentence, to German: newstest2014, validation newstest2013 (T5: wmt_t2t_ende).",
    "wmt/wmt14",
    {"train": 4508785, "validation": 3000, "test": 3003},
)
_register(
    "fr",
    "An English sentence, to French: newsdiscusstest2015 (T5: wmt15_enfr).",
    "wmt/wmt15",
    {"train": 40853137, "validation": 4503, "test": 1500},
)
_register(
    "ro",
    "An English sentence, to Romanian: newstest2016, validation newsdev2016 (T5: wmt16_enro).",
    "wmt/wmt16",
    {"train": 610320, "validation": 1999, "test": 1999},
)
