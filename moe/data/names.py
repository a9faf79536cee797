"""Names of places, languages, scripts and currencies in 157 languages, from Unicode's CLDR in Babel.

Comes before `pair_files`: a name is a pair such as `el: Côte d’Ivoire` and `Ακτή Ελεφαντοστού`. Its
split depends on the language and the English name alone, so it is the same in every subset of
languages, and a name that is held out in one language is trained on in most others.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from moe.errors import ConfigError, DataError, did_you_mean

SPLITS = ("train", "validation", "test")
LANGUAGES_FILE = "languages.json"
"""File beside names, and beside a model of names, that describes their languages."""

LEAST_NAMES = 500
"""Languages with fewer names in CLDR are left out."""

TEST_SHARE = 0.06
VALIDATION_SHARE = 0.02

LANGUAGES = (  # noqa: SIM905, codes are easier to read in one line
    "ar bg de el es fi hi ja ru sw tr uk"
).split()
"""Languages of the demo and of the study: 10 families in 6 scripts."""

NEW = ("ast", "mk")
"""Asturian and Macedonian, which the demo holds out whole."""

FAMILIES = {
    "Germanic": "af da de fo frr fy gsw is ksh lb nds nl nn no sv",
    "Celtic": "br cy ga gd",
    "Romance": "ast ca es fr fur gl it lij lld oc pt rm ro sc scn vec",
    "Creole": "ht kea pcm",
    "Constructed": "eo ia ie",
    "Baltic": "lt lv",
    "Slavic": "be bg bs bs_Cyrl cs dsb hr hsb mk pl ru sk sl sr sr_Latn szl uk",
    "Albanian": "sq",
    "Greek": "el",
    "Armenian": "hy",
    "Iranian": "bal_Latn bgn ckb fa ku mzn ps tg",
    "Indo-Aryan": "as bn ccp gu hi hi_Latn kok ks mai mr ne or pa sd si trw ur xnr",
    "Dravidian": "kn ml ta te",
    "Basque": "eu",
    "Uralic": "et fi hu smn",
    "Turkic": "az az_Cyrl cv kk kk_Arab ky tk tr tt ug uz uz_Cyrl",
    "Mongolic": "mn",
    "Northwest Caucasian": "ab",
    "Northeast Caucasian": "ce",
    "Kartvelian": "ka",
    "Semitic": "am ar he mt ti",
    "Berber": "kab",
    "Chadic": "ha",
    "Cushitic": "so",
    "Niger-Congo": "ak ee ff_Adlm ig nqo sw wo xh yo zu",
    "Austronesian": "bew fil id jv mi ms to",
    "Austroasiatic": "km sat vi",
    "Kra-Dai": "lo th",
    "Sino-Tibetan": "brx dz my yue yue_Hans zh zh_Hant",
    "Japonic": "ja",
    "Koreanic": "ko",
    "Iroquoian": "chr",
    "Macro-Jê": "kgp",
    "Quechuan": "qu",
    "Tupian": "yrl",
}
"""Languages by family, as neighbours in tables and pictures; of Indo-European and Afroasiatic, by branch."""

_FAMILY_OF = {code: family for family, codes in FAMILIES.items() for code in codes.split()}
_UNNAMED = {"lld": "Ladin"}  # languages without an English name in CLDR

_KINDS = ("territories", "languages", "scripts", "currency_names")
_SAME_NAMES = 0.95  # share of equal names from which two locales are one language
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
        place = self.place
        if place < TEST_SHARE:
            return "test"
        return "validation" if place < TEST_SHARE + VALIDATION_SHARE else "train"


@cache
def all_names() -> Mapping[str, Mapping[str, str]]:
    """Returns the names by language and English name, of languages with `LEAST_NAMES`.

    A locale that repeats another, as `nb` repeats `no`, is left out. So are names that are a code,
    which stands where a language has none.

    Raises:
        DataError: When Babel is not installed.
    """
    try:
        from babel import localedata
    except ImportError as error:
        raise DataError(
            "Names come from Babel, which is not installed: pip install 'stmoe[eval]'"
        ) from error

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
    chosen = list(by_language) if languages is None else languages
    for language in chosen:
        if language not in by_language:
            raise ConfigError(
                f"{language!r} is not a language with at least {LEAST_NAMES} names in CLDR."
                f"{did_you_mean(language, by_language)} `stmoe names --list` lists them."
            )
    names = []
    for language in chosen:
        for english, name in by_language[language].items():
            names.append(Name(language, english, name))
    return names if split is None else [name for name in names if name.split == split]


def family_of(language: str) -> str:
    """Returns the family of a language, one of FAMILIES, or `Other`."""
    return _FAMILY_OF.get(language, "Other")  # what a later CLDR adds


def by_family(languages: Iterable[str]) -> list[str]:
    """Returns languages in the order of FAMILIES; others come last."""
    order = {language: place for place, language in enumerate(_FAMILY_OF)}
    return sorted(languages, key=lambda language: order.get(language, len(order)))


def english_name(language: str) -> str:
    """Returns the English name of a language, e.g. `Serbian (Latin)`."""
    from babel import Locale

    return Locale.parse(language).get_display_name("en") or _UNNAMED.get(language, language)


def describe_language(code: str) -> dict[str, str]:
    """Returns the English name and the family of a language."""
    return {"name": english_name(code), "family": family_of(code)}


def describe_languages(codes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns name and family by code, in the order of FAMILIES.

    Empty where a code is not one of these languages, and without Babel, which has their names.
    """
    codes = set(codes)
    if find_spec("babel") is None or not codes <= _FAMILY_OF.keys():
        return {}
    return {code: describe_language(code) for code in by_family(codes)}


def source_sentence() -> str:
    """Returns where the names come from, and under which licence."""
    return f"Unicode CLDR, as in Babel {version('babel')}, under the licence Unicode-3.0"


def licence_text() -> str:
    """Returns Unicode's licence, which has to come with the names."""
    import babel

    return Path(babel.__file__).with_name("locale-data").joinpath("LICENSE.unicode").read_text()
