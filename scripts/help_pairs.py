"""Writes the paragraphs of LibreOffice's help as pairs of texts: English, and the same paragraph in another language.

    apt-get download libreoffice-help-en-us libreoffice-help-de libreoffice-help-fr
    python -m scripts.help_pairs --packages . --languages de fr --out runs/help

A pair is `de: Click OK` and `Klicken Sie auf OK`; its group is the English text. Files: `train.jsonl`, `dev.jsonl` and
`test.jsonl`; an English text is in the same file in all languages. The texts are under MPL-2.0. Comes before
`python -m scripts.study recipes/studies/help.yaml`.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import hashlib
import html
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moe.cli import Parser, integer, path, run_main
from moe.errors import ConfigError, DataError
from moe.files import output_path, register_folder_kind, whole_folder
from moe.parsing import reading

ENGLISH = "en-us"
SPLITS = ("dev", "test", "train")
DEV_SHARE = 0.04
TEST_SHARE = 0.04

FILES = [f"{split}.jsonl" for split in SPLITS]
KIND = register_folder_kind("help pairs", markers=FILES, parts=FILES)

_PAGES = "usr/share/libreoffice/help"
_PAGE = re.compile(rf"(?:\./)?{_PAGES}/[^/]+/text/(.+\.html)")
_PARAGRAPH = re.compile(r'<(p|h[1-6]) id="([^"]+)"[^>]*>(.*?)</\1>', re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


def main(argv: list[str]) -> None:
    """Writes the three files."""
    parser = Parser(prog="python -m scripts.help_pairs", description="Writes pairs of help texts.")
    parser.add_argument(
        "--packages",
        type=path,
        required=True,
        help="folder of libreoffice-help-LANGUAGE_*.deb, or of what they contain (usr/)",
    )
    parser.add_argument(
        "--languages", nargs="+", required=True, help="as in names of packages, e.g. de zh-cn"
    )
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument(
        "--most-characters",
        type=integer(least=1),
        default=10_000,
        help="leave out pairs with a longer text (10000)",
    )
    options = parser.parse_args(argv)
    if ENGLISH in options.languages:
        raise ConfigError(f"--languages has {ENGLISH}, the source of all pairs. Remove it.")
    out = output_path(options.out)

    rows = help_pairs(options.packages, options.languages, options.most_characters)
    with whole_folder(out, kind=KIND) as partial:
        for split in SPLITS:
            lines = [
                json.dumps(row, ensure_ascii=False) + "\n"
                for row in rows
                if split_of(row["group"]) == split
            ]
            (partial / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"Wrote {len(rows):,} pairs of {len(options.languages)} languages to {out}.")


def help_pairs(
    packages: Path, languages: Sequence[str], most_characters: int
) -> list[dict[str, str]]:
    """Returns the pairs of all languages: each once, without those whose texts are equal.

    Args:
        packages: Folder of the packages.
        languages: Languages as in the names of the packages.
        most_characters: Pairs with a longer text are left out.

    Raises:
        DataError: When a package is missing or cannot be read.
    """
    english = _paragraphs(packages, ENGLISH)
    rows = []
    for language in dict.fromkeys(languages):
        paragraphs = _paragraphs(packages, language)
        pairs = {
            (source, paragraphs[place])
            for place, source in english.items()
            if paragraphs.get(place, source) != source
        }
        rows += [
            {"inputs": f"{language}: {source}", "targets": target, "group": source}
            for source, target in sorted(pairs)
            if max(len(source), len(target)) <= most_characters
        ]
    return rows


def split_of(english: str) -> str:
    """Returns the split of an English text, which depends on nothing else."""
    digest = hashlib.sha256(english.encode()).digest()
    share = int.from_bytes(digest[:6], "big") / 2**48
    if share < DEV_SHARE:
        return "dev"
    return "test" if share < DEV_SHARE + TEST_SHARE else "train"


def _paragraphs(packages: Path, language: str) -> Mapping[tuple[str, str], str]:
    """Returns the texts of a language by the name of their page and their id."""
    texts = {}
    for name, page in _pages(packages, language):
        for _, identity, marked_up in _PARAGRAPH.findall(page):
            text = " ".join(html.unescape(_TAG.sub("", marked_up)).split())
            if text:
                texts.setdefault((name, identity), text)
    return texts


def _pages(packages: Path, language: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each page of a language.

    Raises:
        DataError: When the folder does not have its package once, or it cannot be read.
    """
    files = list(packages.glob(f"libreoffice-help-{language}_*.deb"))
    folders = [folder for folder in packages.glob(f"{_PAGES}/*") if folder.name.lower() == language]
    if len(files) + len(folders) != 1:
        raise DataError(
            f"{packages} has libreoffice-help-{language} {len(files) + len(folders)} times; expected it once. "
            f"To get it: apt-get download libreoffice-help-{language}"
        )

    for folder in folders:
        for file in sorted(folder.glob("text/**/*.html")):
            with reading(file, advice="Unpack the package again."):
                yield file.relative_to(folder / "text").as_posix(), file.read_text(encoding="utf-8")
    for file in files:
        advice = "Fetch it again, or unpack it (dpkg-deb -x) and give that folder."
        with reading(file, advice=advice, problem="cannot be unpacked"):
            yield from _unpack(file)


def _unpack(package: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each page in a Debian package.

    It is an `ar` archive, 60 bytes before each file; one of them, data.tar, is an archive, too.
    """
    with package.open("rb") as file:
        file.seek(len("!<arch>\n"))
        while not (header := file.read(60)).startswith(b"data.tar"):
            size = int(header[48:58])
            file.seek(size + size % 2, os.SEEK_CUR)

        with tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                page = _PAGE.fullmatch(member.name)
                content = archive.extractfile(member) if page and member.isfile() else None
                if page and content:
                    yield page[1], content.read().decode("utf-8")


if __name__ == "__main__":
    run_main(main)
