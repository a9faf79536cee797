"""stmoe names: writes names of places, languages, scripts and currencies as pairs of texts.

stmoe names --out runs/names
stmoe names --out runs/names --languages el bg uk --new ast mk

A pair is `el: Ivory Coast` and `Ακτή Ελεφαντοστού`. Files: `train.jsonl`, `dev.jsonl` and `test.jsonl`; `seen.jsonl`,
2,000 names of `train.jsonl`; for each language of `--new`, which those leave out, `new-LANGUAGE-train.jsonl` and
`new-LANGUAGE-test.jsonl`; `languages.json`; and LICENSE, Unicode's licence.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from moe.cli import Parser, integer
from moe.data.names import (
    LANGUAGES,
    NEW,
    Name,
    all_names,
    by_family,
    english_name,
    family_of,
    licence_text,
    read_names,
    source_sentence,
)
from moe.errors import ConfigError
from moe.files import output_path, register_folder_kind, whole_folder, write_text

LANGUAGES_FILE = "languages.json"
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
        help="CLDR's codes, or `all` (24 of 13 families)",
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
    """Writes the folder."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.list:
        for language in by_family(all_names()):
            print(f"{language:10} {english_name(language)}, {family_of(language)}")
        return
    if options.out is None:
        raise ConfigError("Give --out FOLDER, or --list.")

    every = options.languages == ["all"]
    languages = [
        code
        for code in (all_names() if every else dict.fromkeys(options.languages))
        if code not in options.new
    ]
    out = output_path(options.out)
    with whole_folder(out, kind=NAMES) as partial:
        names = read_names(languages)
        for file, split in (("train", "train"), ("dev", "validation"), ("test", "test")):
            of_split = (name for name in names if name.split == split)
            write_names(partial / f"{file}.jsonl", of_split)

        # Where a name lies in [0, 1) is as good as a random draw.
        train = sorted(
            (name for name in names if name.split == "train"), key=lambda name: name.place
        )
        write_names(partial / "seen.jsonl", train[:SEEN])
        for language in options.new:
            train = sorted(read_names([language], "train"), key=lambda name: name.place)
            write_names(partial / f"new-{language}-train.jsonl", train[: options.few])
            write_names(partial / f"new-{language}-test.jsonl", train[options.few :])
        described = {
            code: {"name": english_name(code), "family": family_of(code)}
            for code in by_family(languages)
        }
        write_text(
            partial / LANGUAGES_FILE,
            json.dumps({"languages": described}, ensure_ascii=False, indent=1) + "\n",
        )
        write_text(partial / "LICENSE", licence_text())
    print(
        f"Wrote {len(names):,} names in {len(languages)} languages to {out}: {source_sentence()}."
    )


def write_names(path: Path, names: Iterable[Name]) -> None:
    """Writes names as lines of JSON, as `stmoe finetune --train` reads them."""
    with path.open("w", encoding="utf-8") as file:
        for name in names:
            row = {"inputs": name.inputs, "targets": name.name, "group": name.english}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
