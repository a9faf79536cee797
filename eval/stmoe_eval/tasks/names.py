"""Names of places, languages, scripts and currencies, from English to 157 languages.

The rows are those of `moe.data.names`: names are held out by language and English name, so a model
has seen what a thing is called in other languages. `stmoe names --languages` writes the names of
some languages as pairs, for `stmoe eval run --pairs`.
"""

from moe.data.names import read_names
from moe.data.tokenizer import written
from stmoe_eval.scores.metrics import exact_matches, mean_of
from stmoe_eval.scores.translation import CHRF
from stmoe_eval.source import BuiltIn
from stmoe_eval.task import Decoding, Features, Row, Task, register_task


def _read(split: str) -> list[Row]:
    rows: list[Row] = []
    for name in read_names(split=split):
        rows.append({"inputs": name.inputs, "targets": name.name, "english": name.english})
    return rows


def _preprocess(row: Row) -> list[Features]:
    return [dict(row)]


def _postprocess(text: str, fields: Features, is_target: bool) -> str:
    return written(text)


register_task(
    Task(
        name="names",
        version=1,
        description=(
            "The English name of a place, language, script or currency after the code of one of 157 languages, to its "
            "name in that language, from Unicode's CLDR in Babel."
        ),
        licence="Unicode-3.0",
        source=BuiltIn(_read, origin="Babel"),
        preprocess=_preprocess,
        postprocess=_postprocess,
        metrics=(mean_of("exact_match", exact_matches), CHRF),
        ids=("inputs",),
        # What is hard to name in one language is hard in others, and often has the same name.
        groups=("english",),
        inputs_length=64,
        targets_length=128,
        decoding=Decoding(max_tokens=128),
        split="test",
        prompt_source="this library",
        family="Names",
    )
)
