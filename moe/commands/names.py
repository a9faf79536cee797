"""stmoe names: writes names of places, languages, scripts and currencies as pairs of texts.

stmoe names --out runs/names
stmoe names --out runs/names --languages el bg uk --new ast mk

A pair is `el: Côte d’Ivoire` and `Ακτή Ελεφαντοστού`. Files: `train.jsonl`, `dev.jsonl` and `test.jsonl`; `seen.jsonl`,
2,000 names of `train.jsonl`; for each language of `--new`, which those leave out, `new-LANGUAGE-train.jsonl` and
`new-LANGUAGE-test.jsonl`; `languages.json`, their English names and families; and LICENSE, Unicode's licence.
"""

import json
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path

from moe.cli import Parser, integer
from moe.data.names import (
    LANGUAGES,
    LANGUAGES_FILE,
    NEW,
    SPLITS,
    Name,
    all_names,
    by_family,
    describe_language,
    english_name,
    family_of,
    licence_text,
    read_names,
    source_sentence,
)
from moe.errors import ConfigError
from moe.files import output_path, register_folder_kind, whole_folder, write_text

FEW = 250
SEEN = 2_000

NAMES = register_folder_kind(
    "names",
    markers=["train.jsonl", LANGUAGES_FILE],
    parts=[
        "train.jsonl",
        "dev.jsonl",
        "test.jsonl",
        "seen.jsonl",
        "new-*.jsonl",
        LANGUAGES_FILE,
        "LICENSE",
    ],
)


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe names", description="Writes names in many languages as pairs.")
    parser.add_argument("--out", help="folder to write")
    parser.add_argument("--list", action="store_true", help="list the languages, and write nothing")
    parser.add_argument(
        "--languages",
        nargs="+",
        default=LANGUAGES,
        help="CLDR's codes, or `all` (12 languages of 10 families)",
    )
    parser.add_argument(
        "--new", nargs="*", default=NEW, help=f"languages that are held out whole ({' '.join(NEW)})"
    )
    parser.add_argument(
        "--few",
        type=integer(least=1),
        default=FEW,
        help=f"names of a new language to train on ({FEW})",
    )
    return parser


def main(argv: list[str]) -> None:
    """Writes the folder, or lists the languages."""
    options = build_parser().parse_args(argv)
    if options.list:
        for language in by_family(all_names()):
            print(f"{language:10} {english_name(language)}, {family_of(language)}")
        return
    if options.out is None:
        raise ConfigError("--out is missing; expected a folder, or --list for the languages.")

    # Everything is read and checked before the folder is begun.
    out = output_path(options.out)
    chosen = all_names() if options.languages == ["all"] else dict.fromkeys(options.languages)
    languages = [language for language in chosen if language not in options.new]
    if not languages:
        raise ConfigError(f"--new {' '.join(options.new)} holds out all of --languages.")
    names = read_names(languages)
    parts = {**split_names(names), **split_new_languages(options.new, options.few)}

    with whole_folder(out, kind=NAMES) as partial:
        for file, part in parts.items():
            write_names(partial / file, part)
        described = {code: describe_language(code) for code in by_family(languages)}
        text = json.dumps({"languages": described}, ensure_ascii=False, indent=1)
        write_text(partial / LANGUAGES_FILE, f"{text}\n")
        write_text(partial / "LICENSE", licence_text())
    print(
        f"Wrote {len(names):,} names in {len(languages)} languages to {out}: {source_sentence()}."
    )


def split_names(names: Sequence[Name]) -> dict[str, list[Name]]:
    """Returns the names of each split, and some to train on as a test of recall, by file."""
    by_split: dict[str, list[Name]] = {split: [] for split in SPLITS}
    for name in names:
        by_split[name.split].append(name)

    # Where a name lies in [0, 1) is as good as a random draw.
    train = by_split["train"]
    seen = sorted(train, key=attrgetter("place"))[:SEEN]
    return {
        "train.jsonl": train,
        "dev.jsonl": by_split["validation"],
        "test.jsonl": by_split["test"],
        "seen.jsonl": seen,
    }


def split_new_languages(languages: Sequence[str], few: int) -> dict[str, list[Name]]:
    """Returns `few` names to train on and the others of each language, by file.

    Raises:
        ConfigError: When a language is unknown, or `few` leaves no name to test on.
    """
    files = {}
    for language in languages:
        names = sorted(read_names([language], "train"), key=attrgetter("place"))
        if few >= len(names):
            raise ConfigError(
                f"--few {few} leaves no name of {language} to test on; expected less than {len(names)}."
            )
        files[f"new-{language}-train.jsonl"] = names[:few]
        files[f"new-{language}-test.jsonl"] = names[few:]
    return files


def write_names(path: Path, names: Iterable[Name]) -> None:
    """Writes names as lines of JSON, as `stmoe finetune --train` reads them."""
    with path.open("w", encoding="utf-8") as file:
        for name in names:
            row = {"inputs": name.inputs, "targets": name.name, "group": name.english}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
