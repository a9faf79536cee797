"""Tries one case: sets up what it damages, knocks, and says what came of it."""

import hashlib
import io
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

from moe.cli import run_main
from moe.errors import MoEError
from tests.doors.damage import DAMAGE, MARKER, edit

SECONDS = 20
"""A case that computes for longer hangs; so does one that waits for longer than PATIENCE."""

PATIENCE = 90

_MEMORY = 8 * 2**30
_LONGEST_MESSAGE = 3_000
_BARE = re.compile(
    r"\b(Key|Type|Attribute|Index|Value|Runtime|UnicodeDecode|UnicodeEncode|Recursion|Overflow|Memory|Assertion)Error\b"
    r"|Traceback"
)

_RAW_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

GOOD = ("clear", "accepted")
BAD = ("unclear", "traceback", "hang", "silent", "damage")


class Case(NamedTuple):
    """One knock on a door.

    Attributes:
        door: What is called.
        name: Of the case, for the message.
        knock: Calls the door; gets the function that turns names of the workspace into paths.
        spoil: Damages the copies; gets the same function.
        copied: Names of the workspace of which the case has a copy of its own.
        may_change: Of these, those that the door may change when it accepts.
        rewrites: Those that it makes anew whatever happens, as a report of what failed.
        expect: `refused`, `accepted`, or `either`.
        names: Texts of which a refusal must hold one.
        any_words: Whether a refusal may hold Python's own words.
    """

    door: str
    name: str
    knock: Callable[["Place"], Any]
    spoil: Callable[["Place"], None] = lambda place: None
    copied: tuple[str, ...] = ()
    may_change: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    expect: str = "refused"
    names: tuple[str, ...] = ()
    any_words: bool = False


class Outcome(NamedTuple):
    """What came of a case: one of GOOD or BAD, what was said, and how long it took."""

    case: Case
    kind: str
    text: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}: {self.case.door}: {self.case.name}: {self.text[:700]}"


class Place(NamedTuple):
    """Where a case finds things: the workspace, and a folder of its own with copies."""

    workspace: Path
    own: Path
    copied: tuple[str, ...]

    def path(self, name: str) -> Path:
        """Returns where the thing called `name` lies for this case."""
        top = name.split("/")[0]
        mine = top in self.copied or not (self.workspace / top).exists()
        return (self.own if mine else self.workspace) / name

    def fill(self, text: str) -> str:
        """Returns a text with the paths of all `{name}` in it."""
        return re.sub(r"\{([^{}]+)\}", lambda match: str(self.path(match[1])), text)


class Hang(BaseException):
    """A case took too long."""


def try_case(case: Case, workspace: Path) -> Outcome:
    """Returns what comes of a case; what it damages of the workspace is put back."""
    with tempfile.TemporaryDirectory(prefix="doors-") as folder:
        place = Place(workspace, Path(folder), case.copied)
        for name in case.copied:
            _copy(workspace / name, place.own / name)
        case.spoil(place)

        before = _snapshot(workspace) | _snapshot(place.own)
        start = time.process_time()
        kind, text = _knock(case, place)
        seconds = time.process_time() - start
        changed = _changed(before, _snapshot(workspace) | _snapshot(place.own))
        free = (*case.rewrites, *(case.may_change if kind == "accepted" else ()))
        allowed = tuple(str(place.own / name) for name in free)
        lost = [path for path in changed if not (allowed and path.startswith(allowed))]
        if any(path.startswith(str(workspace)) for path in lost):
            restore(workspace)
        if (place.own / MARKER).exists():
            return Outcome(case, "damage", f"code of a data file ran; then {kind}: {text}", seconds)
        if lost:
            return Outcome(
                case,
                "damage",
                f"{', '.join(lost[:3])} changed or vanished; then {kind}: {text}",
                seconds,
            )
        return Outcome(case, *_judge(case, kind, text), seconds)


def command(module: Any, argv: list[str]) -> None:
    """Runs a command as the shell does."""
    sys.argv = [module.__name__, *argv]
    run_main(module.main)


def spoiler(
    name: str, kinds: tuple[str, ...] = (), key: str = "", value: Any = None
) -> Callable[[Place], None]:
    """Returns what damages one file of a case's copies."""

    def spoil(place: Place) -> None:
        found = sorted(place.own.glob(name)) if "*" in name else [place.own / name]
        assert found, f"the workspace has no {name}"
        for path in found:
            for kind in kinds:
                DAMAGE[kind](path)
            if key:
                edit(path, key, value)

    return spoil


def restore(workspace: Path) -> None:
    """Puts the workspace back as it was made."""
    kept = workspace.with_suffix(".kept")
    for path in workspace.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copytree(kept, workspace, dirs_exist_ok=True, symlinks=True)


def _knock(case: Case, place: Place) -> tuple[str, str]:
    """Returns how the door answered: accepted, refused, traceback or hang; and what it said.

    A command shows no traceback of an exception that it did not expect, which counts as one here.
    """
    out, err = _Output(), _Output()
    try:
        with _surroundings(place.own), redirect_stdout(out), redirect_stderr(err):
            result = case.knock(place)
    except MoEError as error:
        return "refused", str(error)
    except OSError as error:
        if error.filename is None and not str(error):
            return "traceback", repr(error)
        return "refused", str(error)
    except SystemExit as end:
        if end.code in (None, 0):
            return "accepted", err.text() + out.text()
        if _RAW_CONTROL.search(err.text() + out.text()):
            return "traceback", f"control characters are shown raw: {err.text()!r}"
        message = err.text().rpartition("error: ")[2] or out.text()
        return ("traceback" if message.startswith("unexpected ") else "refused"), message
    except Hang:
        return "hang", f"after {SECONDS} seconds of work or {PATIENCE} of waiting"
    except Exception as error:
        return "traceback", f"{_where(error)}: {type(error).__name__}: {error}"
    if _RAW_CONTROL.search(err.text() + out.text()):
        return "traceback", f"control characters are shown raw: {out.text()!r}"
    return "accepted", out.text()[-300:] or type(result).__name__


class _Output(io.TextIOWrapper):
    """What a command prints, in a stream like that of a terminal."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="backslashreplace")

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode()


def _judge(case: Case, kind: str, text: str) -> tuple[str, str]:
    """Returns the outcome of an answer that left everything whole."""
    if kind == "accepted":
        return ("silent" if case.expect == "refused" else "accepted"), text
    if kind != "refused":
        return kind, text
    if case.expect == "accepted":
        return "unclear", f"refused, but it is right: {text}"
    if not text.strip():
        return "unclear", "refused without a word"
    if len(text) > _LONGEST_MESSAGE and not text.startswith(
        "usage:"
    ):  # argparse repeats what it is given
        return "unclear", f"{len(text):,} characters: {text}"
    if _BARE.search(text) and not case.any_words:
        return "unclear", f"Python's words: {text}"
    if case.names and not any(name.lower() in text.lower() for name in case.names):
        return "unclear", f"names none of {case.names}: {text}"
    return "clear", text


@contextmanager
def _surroundings(folder: Path) -> Iterator[None]:
    """Limits time and memory, and makes `folder` the working folder; then all is as before."""
    here, arguments = Path.cwd(), sys.argv
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = (
        int(Path("/proc/self/statm").read_text().split()[0])
        if Path("/proc/self/statm").exists()
        else 0
    )
    handler = signal.signal(signal.SIGALRM, _ring)
    if pages:
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY, limits[1])
        )
    profiler = signal.signal(signal.SIGPROF, _ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    remaining = signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, profiler)
        signal.setitimer(signal.ITIMER_REAL, *remaining)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        os.chdir(here)
        sys.argv = arguments


def _ring(number: int, frame: Any) -> None:
    """Ends a case that takes too long.

    Raises:
        Hang: Always.
    """
    raise Hang


def _where(error: BaseException) -> str:
    """Returns the last line of this repository in a traceback."""
    root, found = str(Path(__file__).parents[2]), ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith(root) and ".venv" not in name and "tests/doors" not in name:
            found = f"{name.removeprefix(root + '/')}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _copy(source: Path, target: Path) -> None:
    """Copies a file or folder."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    elif source.exists():
        shutil.copy2(source, target)


_HASHES: dict[tuple[str, int, int, int], str] = {}


def _snapshot(root: Path) -> dict[str, str]:
    """Returns what lies below a folder: the hash of each file, by path."""
    found = {}
    folders = [str(root)]  # texts: bytes that are no UTF-8 may be in a name
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:  # some case forbids to look
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    found[entry.path] = "folder"
                else:
                    found[entry.path] = _hash(entry)
    return found


def _hash(entry: "os.DirEntry[str]") -> str:
    """Returns the hash of a file's content, which is read once as long as it does not change."""
    if entry.is_symlink():
        return f"link to {os.readlink(entry.path)}"  # noqa: PTH115
    facts = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(facts.st_mode):
        return "pipe"
    key = (entry.path, facts.st_size, facts.st_mtime_ns, facts.st_ino)
    if key not in _HASHES:
        with open(entry.path, "rb") as file:  # noqa: PTH123
            _HASHES[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _HASHES[key]


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Returns the paths of `before` that are gone or hold something else."""
    return [path for path, content in before.items() if after.get(path) != content]
