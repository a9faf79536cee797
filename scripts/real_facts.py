"""Facts that every Python installation carries, as questions and answers, e.g. of Unicode and HTML.

Comes before `facts`, which writes them. A question begins with the kind of its fact.
"""

import errno
import html.entities
import http
import locale
import mimetypes
import unicodedata
from collections.abc import Sequence
from encodings.aliases import aliases
from zlib import crc32

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eval.tasks.unicode_category import NUMBERED_NAMES
from moe.data.tokenizer import EOS, PAD, UNK, sentinel

UNICODE_NAMES = 10_000
VOCAB_SIZE = 2_048


def real_facts() -> list[tuple[str, str]]:
    """Returns facts sorted by kind and question, the same for one version of Python.

    Kinds are `unicode` (name of a character: code point), `html` (entity: code points), `locale` (alias or Windows
    identifier: locale), `codec` (alias: codec), `mime` (extension: type), `errno` (name: number) and `http` (status:
    phrase).
    """
    facts = _unicode_facts()
    for name, text in html.entities.html5.items():
        # Few names exist also without the semicolon.
        if name.endswith(";"):
            facts.append((f"html: {name[:-1]}", " ".join(map(_code_point, text))))

    facts += [(f"locale: {alias}", name) for alias, name in locale.locale_alias.items()]
    facts += [(f"locale: {key:04x}", name) for key, name in locale.windows_locale.items()]
    facts += [(f"codec: {alias}", codec) for alias, codec in aliases.items()]
    types = mimetypes.MimeTypes(filenames=()).types_map[True]
    facts += [(f"mime: {extension}", kind) for extension, kind in types.items()]
    facts += [(f"errno: {name}", str(number)) for number, name in errno.errorcode.items()]
    facts += [(f"http: {status.value}", status.phrase) for status in http.HTTPStatus]
    return sorted(facts)


def _unicode_facts() -> list[tuple[str, str]]:
    """Returns the code points of a random sample of names, the same everywhere."""
    names = []
    for code in range(0x110000):
        name = unicodedata.name(chr(code), "")
        if name and not name.startswith(NUMBERED_NAMES):
            names.append(name)

    names.sort(key=lambda name: crc32(name.encode()))
    chosen = names[:UNICODE_NAMES]
    return [(f"unicode: {name.lower()}", _code_point(unicodedata.lookup(name))) for name in chosen]


def _code_point(character: str) -> str:
    return f"{ord(character):04x}"


def train_pieces(facts: Sequence[tuple[str, str]]) -> Tokenizer:
    """Returns a byte-level BPE tokenizer of the facts, in which digits and punctuation are separate."""
    pieces = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation()]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
    pieces.decoder = decoders.ByteLevel()

    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, EOS, UNK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator((text for fact in facts for text in fact), trainer)
    pieces.add_special_tokens([sentinel(0)])
    return pieces
