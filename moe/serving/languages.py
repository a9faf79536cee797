"""What a model of names accepts: texts `CODE: NAME` in the languages of the languages.json beside it.

`stmoe names` writes that file. A model without it accepts any text.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moe.checks import check_integer, shown
from moe.data.names import LANGUAGES_FILE
from moe.errors import CheckpointError, DataError
from moe.models.checkpoint_formats import COPY_AGAIN, read_json_object
from moe.models.transformers_private import find_file
from moe.parsing import to_record


@dataclass(frozen=True)
class Languages:
    """The languages of a model of names.

    Attributes:
        names: English name of each language by its code.
        longest: Most tokens of a text that the model was trained on; None for any number.
    """

    names: Mapping[str, str]
    longest: int | None

    def read(self, text: str) -> str | DataError:
        """Returns a text with the spaces of `CODE: NAME`, or the error that refuses it."""
        code, colon, name = text.partition(":")
        code = code.strip()
        example = f"{next(iter(self.names))}: {text.strip()}"
        if not colon:
            return DataError(
                f"{shown(text)} names no language; expected CODE: NAME, e.g. {shown(example)}."
            )
        if code not in self.names:
            nearest = self._nearest(code)
            closest = f"; did you mean {nearest!r} ({self.names[nearest]})?" if nearest else "."
            return DataError(f"{shown(code)} is not a language of this model{closest}")
        if not name.strip():
            return DataError(f"{shown(text)} has no name after the language; expected CODE: NAME.")
        return f"{code}: {' '.join(name.split())}"

    def too_long(self, num_tokens: int) -> DataError:
        """Returns the error for a text with more tokens than any that the model was trained on."""
        return DataError(
            f"The name is too long: its text has {num_tokens} tokens, and this model was trained on "
            f"at most {self.longest}. Shorten it."
        )

    def _nearest(self, word: str) -> str | None:
        """Returns the code of the language whose code or English name is nearest; None for none."""
        codes = {name.casefold(): code for code, name in self.names.items()}
        codes |= {code.casefold(): code for code in self.names}
        word = word[:80].casefold()
        longer = [known for known in codes if word and known.startswith(word)]
        matches = longer or difflib.get_close_matches(word, codes, n=1, cutoff=0.5)
        return codes[min(matches, key=len)] if matches else None


def read_languages(source: Path | str) -> Languages | None:
    """Returns the languages of a model of names, in a folder or on the hub; None for another model.

    Raises:
        CheckpointError: When the file is damaged.
    """
    path = find_file(source, LANGUAGES_FILE)
    if path is None:
        return None
    content = read_json_object(path)
    read = partial(to_record, where=str(path), advice=COPY_AGAIN, error=CheckpointError)
    languages = read(dict[str, dict[str, Any]], content.get("languages"))
    names = read(dict[str, str], {code: fields.get("name") for code, fields in languages.items()})
    if not names:
        raise CheckpointError(f"{path}: languages is empty; expected names by code. {COPY_AGAIN}")
    longest = content.get("longest_name")
    if longest is not None:
        check_integer(f"longest_name in {path}", longest, least=1)
    return Languages(names, longest)
