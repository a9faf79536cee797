"""Names of places, languages, scripts and currencies in 157 languages, from Unicode's CLDR by Babel.

Comes before `pair_files`: a name is a pair such as `el: Ivory Coast` and `Ακτή Ελεφαντοστού`. The
names that are held out depend on the text alone, so every subset of languages has the same split.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from moe.errors import ConfigError, DataError, did_you_mean

SPLITS = ("train", "validation", "test")
LEAST_NAMES = 500
"""Fewer names of a language are not a language to learn."""

TEST_SHARE = 0.06
VALIDATION_SHARE = 0.02

LANGUAGES = (  # noqa: SIM905, codes are easier to read in one line
    "ar az bg de el es fi fr he hi id it ja ka ko ms nl pt ru sv sw tr uk vi"
).split()
"""Languages of the demo and of the study: 13 families in 10 scripts."""

NEW = ("ast", "mk")
"""Asturian and Macedonian, which the demo holds out whole."""

FAMILIES = {
    "Germanic": "af da de fo frr fy gsw is ksh lb nds nl nn no sv",
    "Celtic": "br cy ga gd",
    "Romance": "ast ca es fr fur gl ht it kea lij lld oc pt rm ro sc scn vec",
    "Constructed": "eo ia ie",
    "Slavic": "be bg bs bs_Cyrl cs dsb hr hsb mk pl ru sk sl sr sr_Latn szl uk",
    "Baltic": "lt lv",
    "Greek": "el",
    "Albanian, Armenian": "hy sq",
    "Basque": "eu",
    "Uralic": "et fi hu smn",
    "Turkic": "az az_Cyrl cv kk kk_Arab ky tk tr tt ug uz uz_Cyrl",
    "Mongolic": "mn",
    "Caucasian": "ab ce ka",
    "Iranian": "bal_Latn bgn ckb fa ku mzn ps tg",
    "Indic": "as bn brx gu hi hi_Latn kok ks mai mr ne or pa sat sd si trw ur xnr",
    "Dravidian": "kn ml ta te",
    "Semitic": "am ar he mt ti",
    "Cushitic, Berber, Chadic": "ha kab so",
    "Niger-Congo": "ak ee ff_Adlm ig nqo sw wo xh yo zu",
    "English creole": "pcm",
    "Austronesian": "bew fil id jv mi ms to",
    "Vietic, Khmer": "km vi",
    "Tai": "lo th",
    "Sino-Tibetan": "dz my yue yue_Hans zh zh_Hant ccp",
    "Japanese, Korean": "ja ko",
    "American": "chr kgp qu yrl",
}
"""Languages by family, as neighbours in tables and pictures."""

_KINDS = ("territories", "languages", "scripts", "currency_names")
_SAME_NAMES = 0.95  # two locales with more equal names than this are one language
_SALT = "names-1"


class Name(NamedTuple):
    """What something is called in a language.

    Attributes:
        language: CLDR's code, e.g. `el` or `sr_Latn`.
        english: The English name.
        name: The name in that language.
    """

    language: str
    english: str
    name: str

    @property
    def inputs(self) -> str:
        """Text that a model sees."""
        return f"{self.language}: {self.english}"

    @property
    def place(self) -> float:
        """Number in [0, 1) that depends on language and English name alone, as if drawn."""
        digest = hashlib.sha256(f"{_SALT}/{self.language}/{self.english}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    @property
    def split(self) -> str:
        """Split to which the name belongs, in every subset of languages."""
        if self.place < TEST_SHARE:
            return "test"
        return "validation" if self.place < TEST_SHARE + VALIDATION_SHARE else "train"


@cache
def all_names() -> Mapping[str, Mapping[str, str]]:
    """Returns the names by language and English name, of languages with `LEAST_NAMES`.

    A locale whose names are those of another, e.g. `nb` and `no`, is left out, and so are the
    codes that stand for names that a language lacks.

    Raises:
        DataError: When Babel is not installed.
    """
    try:
        from babel import localedata
    except ImportError as error:
        raise DataError("Names need Babel: pip install babel.") from error

    # A language, or a language in another script; territories repeat the names of their language.
    identifiers = sorted(localedata.locale_identifiers(), key=lambda code: (len(code), code))
    english = localedata.load("en")
    found: dict[str, dict[str, str]] = {}
    for code in identifiers:
        language, _, variant = code.partition("_")
        if language in ("en", "root", "nb") or len(variant) not in (0, 4):
            continue
        names = _names_of(localedata.load(code), english)
        if len(names) >= LEAST_NAMES and not _repeats(names, found, language):
            found[code] = names
    return dict(sorted(found.items()))


def _names_of(locale: Mapping[str, Mapping], english: Mapping[str, Mapping]) -> dict[str, str]:
    """Returns the names of a locale by English name; the first of two equal English names counts."""
    names: dict[str, str] = {}
    for kind in _KINDS:
        for code, english_name in english[kind].items():
            name = locale.get(kind, {}).get(code)
            if name and name != code and english_name != code:
                names.setdefault(english_name, name)
    return names


def _repeats(
    names: Mapping[str, str], found: Mapping[str, Mapping[str, str]], language: str
) -> bool:
    """Returns whether another locale of the language has the same names."""
    for code, others in found.items():
        if code.partition("_")[0] == language:
            equal = sum(others.get(english) == name for english, name in names.items())
            if equal >= _SAME_NAMES * len(names):
                return True
    return False


def read_names(languages: Sequence[str] | None = None, split: str | None = None) -> list[Name]:
    """Returns the names of some languages, by language and then in CLDR's order.

    Args:
        languages: CLDR's codes; None for all.
        split: One of SPLITS; None for all.

    Raises:
        ConfigError: When a language is unknown or has fewer than `LEAST_NAMES` names.
        DataError: When Babel is not installed.
    """
    by_language = all_names()
    for language in languages or ():
        if language not in by_language:
            raise ConfigError(
                f"{language!r} is not a language with at least {LEAST_NAMES} names in CLDR."
                f"{did_you_mean(language, by_language)} `stmoe names --list` lists them."
            )
    names = []
    for language in languages or by_language:
        for english, name in by_language[language].items():
            names.append(Name(language, english, name))
    return [name for name in names if split in (None, name.split)]


@cache
def family_of(language: str) -> str:
    """Returns the family of a language, one of FAMILIES."""
    return next(family for family, codes in FAMILIES.items() if language in codes.split())


def by_family(languages: Iterable[str]) -> list[str]:
    """Returns languages in the order of FAMILIES."""
    order = " ".join(FAMILIES.values()).split()
    return sorted(languages, key=order.index)


def english_name(language: str) -> str:
    """Returns the English name of a language, e.g. `Serbian (Latin)`."""
    from babel import Locale

    return str(Locale.parse(language).get_display_name("en"))


def nearest_languages(languages: Sequence[str]) -> dict[str, list[str]]:
    """Returns the other languages by language, those with the largest share of equal training names first."""
    train = {
        language: {name.english: name.name for name in read_names([language], "train")}
        for language in languages
    }
    nearest = {}
    for language, names in train.items():

        def share(other: str, names: Mapping[str, str] = names) -> float:
            shared = names.keys() & train[other].keys()
            equal = sum(names[english] == train[other][english] for english in shared)
            return -equal / max(1, len(shared))

        nearest[language] = sorted((code for code in languages if code != language), key=share)
    return nearest


def source_sentence() -> str:
    """Returns where the names come from, and under which licence."""
    return f"Unicode CLDR, as in Babel {version('babel')}, under the licence Unicode-3.0"


def licence_text() -> str:
    """Returns Unicode's licence, which has to come with the names."""
    import babel

    return Path(babel.__file__).with_name("locale-data").joinpath("LICENSE.unicode").read_text()
