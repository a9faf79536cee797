"""Docstring -> the part of Python's standard library it documents, a task that pre-training can help.

Files that are tested hold other words than those that are trained on: the common features of a
topic must be learnt from unlabelled text.
"""

import platform
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from eval.corpora.kept_rows import kept_on_disk
from eval.scores.metrics import ACCURACY
from eval.source import BuiltIn
from eval.task import SPLITS, Decoding, Features, Row, Task, register_task
from eval.text.postprocess import label_index
from moe.data.docstrings import docstrings, package_folder, python_files
from moe.data.prose import letters, prose_paragraphs

MAX_WORDS = 60
"""Words of a docstring that are kept: what a model sees within `inputs_length`, and baselines too."""

MIN_WORDS = 4


class Topic(NamedTuple):
    """A part of the standard library: names of modules, divided into the three splits.

    A package covers all its modules that are not listed separately. A module that a version
    of Python lacks has no rows. Modules that some distributions package separately, such as
    distutils, are used for training only, so that the test split does not depend on them.
    """

    train: str
    validation: str
    test: str


TOPICS = {
    "archives and compression": Topic(
        train="tarfile bz2 lzma compression _compression zipapp", validation="gzip", test="zipfile"
    ),
    "asynchronous programming": Topic(
        train="asyncio",
        validation="asyncio.exceptions asyncio.runners asyncio.timeouts",
        test="asyncio.locks asyncio.queues asyncio.streams",
    ),
    "command lines": Topic(
        train="optparse cmd curses", validation="getopt rlcompleter", test="argparse getpass"
    ),
    "containers": Topic(
        train="collections _collections_abc weakref _weakrefset",
        validation="copy",
        test="graphlib heapq",
    ),
    "dates and times": Topic(
        train="datetime _pydatetime _strptime", validation="zoneinfo", test="calendar"
    ),
    "debugging and profiling": Topic(
        train="bdb pdb cProfile profile profiling pstats tracemalloc",
        validation="trace",
        test="timeit traceback",
    ),
    "email": Topic(
        train="email mailbox mailcap",
        validation="email.header email.policy",
        test=(
            "email._parseaddr email.generator email.headerregistry email.parser email.utils mimetypes"
        ),
    ),
    "files and streams": Topic(
        train="_pyio io pathlib shutil ntpath posixpath genericpath nturl2path",
        validation="linecache stat",
        test="filecmp fileinput fnmatch glob tempfile",
    ),
    "functions and contexts": Topic(train="contextlib operator", validation="", test="functools"),
    "importing modules": Topic(
        train="importlib imp",
        validation="compileall importlib._abc py_compile",
        test="importlib.util modulefinder pkgutil runpy zipimport",
    ),
    "inspecting code": Topic(
        train="inspect ast _ast_unparse annotationlib pydoc symtable keyword opcode",
        validation="code",
        test="codeop dis pyclbr tabnanny tokenize",
    ),
    "installation and platform": Topic(
        train="distutils ensurepip sysconfig site os _osx_support _aix_support",
        validation="_android_support _ios_support",
        test="platform venv",
    ),
    "logging": Topic(train="logging", validation="warnings _py_warnings", test="logging.config"),
    "network protocols": Topic(
        train="ftplib imaplib netrc nntplib smtpd telnetlib", validation="poplib", test="smtplib"
    ),
    "numbers": Topic(
        train="_pydecimal decimal numbers statistics",
        validation="bisect colorsys",
        test="fractions random",
    ),
    "processes": Topic(
        train="multiprocessing",
        validation="concurrent.futures.process multiprocessing.util",
        test="pty subprocess",
    ),
    "sockets and addresses": Topic(
        train="asynchat asyncore ipaddress ssl", validation="selectors", test="socket"
    ),
    "stored data": Topic(
        train="configparser copyreg dbm pickle pickletools shelve sqlite3 xdrlib",
        validation="tomllib",
        test="csv json plistlib",
    ),
    "text encodings": Topic(
        train="codecs encodings stringprep",
        validation="encodings.punycode",
        test="base64 quopri uu",
    ),
    "text processing": Topic(
        train="difflib gettext locale re reprlib", validation="pprint string", test="shlex textwrap"
    ),
    "threads": Topic(
        train="threading concurrent", validation="_threading_local", test="queue sched"
    ),
    "types and classes": Topic(
        train="enum typing", validation="types", test="_py_abc abc dataclasses"
    ),
    "unit testing": Topic(
        train="doctest unittest", validation="unittest.runner unittest.suite", test="unittest.mock"
    ),
    "web clients": Topic(
        train="http urllib xmlrpc",
        validation="webbrowser",
        test="http.cookies urllib.parse urllib.robotparser",
    ),
    "web servers": Topic(
        train="cgi cgitb http.server socketserver wsgiref xmlrpc.server",
        validation="wsgiref.headers",
        test="wsgiref.handlers",
    ),
    "XML and HTML": Topic(
        train="xml _markupbase",
        validation="xml.dom.domreg xml.dom.xmlbuilder",
        test="html xml.dom.minidom xml.dom.pulldom xml.sax.expatreader xml.sax.saxutils",
    ),
}
"""The classes. Small modules about one thing are one class; those with few docstrings are in none."""


# ---------------------------------------------------------------------------
# Rows


class _Place(NamedTuple):
    """Split and topic of a module's rows."""

    topic: str
    split: str


def _rows(split: str) -> list[Row]:
    return _all_rows()[split]


@lru_cache(maxsize=1)
@kept_on_disk("stdlib")
def _all_rows() -> dict[str, list[Row]]:
    """Returns the rows of every split; equal texts occur once, in the test split if they are there."""
    folder = package_folder("stdlib")
    places = _places()

    # The files of each split, so that the rows of the test split do not depend on other files.
    files: dict[str, list[tuple[Path, str]]] = {split: [] for split in SPLITS}
    for path in python_files(folder):
        place = _place_of_module(_module_name(path.relative_to(folder)), places)
        if place is not None:
            files[place.split].append((path, place.topic))

    # The test split first: of equal texts, the first is kept.
    splits: dict[str, list[Row]] = {}
    seen: set[str] = set()
    for split in reversed(SPLITS):
        splits[split] = []
        for path, topic in files[split]:
            for row in _rows_of_file(path, path.relative_to(folder), topic):
                key = letters(row["text"])
                if key not in seen:
                    seen.add(key)
                    splits[split].append(row)
    return splits


def _places() -> dict[str, _Place]:
    """Returns the topic and split of each module in TOPICS."""
    places: dict[str, _Place] = {}
    for name, topic in TOPICS.items():
        for split in SPLITS:
            for module in getattr(topic, split).split():
                assert module not in places, f"{module} has two places"
                places[module] = _Place(name, split)
    return places


def _module_name(relative: Path) -> str:
    """Returns the name of the module in a file, e.g. `email.mime.text`."""
    parts = relative.with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _place_of_module(module: str, places: dict[str, _Place]) -> _Place | None:
    """Returns where a module belongs, by its own name or by the package that it is in."""
    # The most specific name counts.
    while module:
        if module in places:
            return places[module]
        module = module.rpartition(".")[0]
    return None


def _rows_of_file(path: Path, relative: Path, topic: str) -> Iterator[Row]:
    """Yields a row for each docstring of a source file that has enough prose."""
    file = f"stdlib/{relative.as_posix()}"
    module_words = _module_words(_module_name(relative))
    for number, docstring in enumerate(docstrings(path), start=1):
        prose = " ".join(prose_paragraphs(docstring))

        # Without the words that would reveal the module.
        words = module_words.sub(" ", prose).split()[:MAX_WORDS]
        if len(words) >= MIN_WORDS:
            text = " ".join(words)
            yield {"id": f"{file}#{number}", "file": file, "text": text, "topic": topic}


def _module_words(module: str) -> re.Pattern[str]:
    """Returns a pattern that matches the words of a module's name in a text, with and without underscores."""
    names = {re.escape(name.strip("_")) for name in module.split(".")}
    pattern = "|".join(sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<!\w)_*(?:{pattern})(?!\w)", re.IGNORECASE)


# ---------------------------------------------------------------------------
# The task


def _preprocess(row: Row) -> list[Features]:
    return [{**row, "inputs": f"docstring topic: {row['text']}", "targets": row["topic"]}]


_CHOICES = tuple(TOPICS)

register_task(
    Task(
        name="docstring_topic",
        version=1,
        description=(
            f"Given the first {MAX_WORDS} words of a docstring's prose, name the part of Python "
            f"{platform.python_version()}'s standard library that it documents, one of "
            f"{len(TOPICS)}. The text does not contain the module's own name; equal texts occur "
            "once. The split is by file: no module of the test split is trained on."
        ),
        licence="PSF-2.0",
        source=BuiltIn(_rows),
        preprocess=_preprocess,
        postprocess=label_index(_CHOICES),
        metrics=(ACCURACY,),
        choices=_CHOICES,
        ids=("id",),
        groups=("file",),
        inputs_length=128,
        targets_length=16,
        decoding=Decoding(max_tokens=16),
        split="test",
        prompt_source="this library",
    )
)
