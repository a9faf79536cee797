"""Folders that are whole or as they were, whatever moment a run is killed at."""

import os
import random
import shutil
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path

import pytest

from moe import DataError
from moe.checkpoint.best_model import BEST_MODEL
from moe.checkpoint.writer import CHECKPOINT
from moe.checksums import SUMS_FILE, find_damage, write_sums
from moe.data.corpus import CORPUS
from moe.data.tokenizer import TOKENIZER
from moe.files import (
    KIND_FILE,
    check_kind,
    check_replaceable,
    claim_folder,
    kind_of,
    remove_folder,
    remove_leftovers,
    whole_folder,
    work_folder,
    write_text,
)
from moe.tracing.trace_file import TRACE


def fill(target, text):
    with whole_folder(target, kind="corpus") as partial:
        (partial / "corpus.json").write_text(text)


def killed_in_work_folder(path, name):
    """Leaves a work folder that holds `path`, as a process does that is killed at its work."""
    child = os.fork()
    if not child:
        with work_folder(path, wait=False) as work:
            path.rename(work / name)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_run_killed_between_the_two_renames_loses_nothing(tmp_path):
    target = tmp_path / "thing"
    fill(target, "first")
    killed_in_work_folder(target, "replaced")
    with pytest.raises(RuntimeError), whole_folder(target, kind="corpus"):
        raise RuntimeError
    assert (target / "corpus.json").read_text() == "first"
    fill(target, "second")
    assert (target / "corpus.json").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_rename_that_fails_gives_the_earlier_folder_back(tmp_path, monkeypatch):
    target = tmp_path / "thing"
    fill(target, "first")
    rename = Path.rename

    def refuse_the_last(path, to):
        if path.name == "partial":
            raise OSError("no more names")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse_the_last)
    with pytest.raises(OSError, match="no more names"):
        fill(target, "second")
    assert (target / "corpus.json").read_text() == "first"


def test_a_folder_of_another_kind_is_never_replaced(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/love.txt").write_text("dear")
    with pytest.raises(DataError, match="holds something else"):
        fill(tmp_path / "letters", "x")
    assert (tmp_path / "letters/love.txt").read_text() == "dear"

    # One file that a model has too makes no model.
    (tmp_path / "letters/config.json").write_text("{}")
    with pytest.raises(DataError, match=r"'love\.txt' is not part of a model"):
        check_replaceable(tmp_path / "letters", kind="model")


@pytest.mark.parametrize("kind", ["training run", CORPUS])
def test_a_folder_of_one_kind_refuses_every_other(tmp_path, kind):
    with claim_folder(tmp_path / "mine", kind, in_use="taken"):
        assert kind_of(tmp_path / "mine") == kind
    for other in {"job", CORPUS, TOKENIZER, CHECKPOINT, BEST_MODEL, TRACE} - {kind}:
        message = f"holds an? {kind}, and a {other} would be mixed"
        with pytest.raises(DataError, match=message):
            check_replaceable(tmp_path / "mine", kind=other)
        refused = pytest.raises(DataError, match=message)
        with refused, claim_folder(tmp_path / "mine", other, in_use="taken"):
            pass


def test_a_finished_folder_of_a_kind_that_is_not_loaded_is_refused(tmp_path):
    (tmp_path / "pages.html").write_text("x")
    write_sums(tmp_path)
    with pytest.raises(DataError, match="holds a finished folder"):
        check_kind(tmp_path, "evaluation")


def test_a_forked_process_that_outlives_its_parent_holds_no_folder(tmp_path):
    # As those that make batches do for some seconds after a kill.
    has_begun, began = os.pipe()
    may_end, ends = os.pipe()
    kind = "training run"
    with claim_folder(tmp_path / "mine", kind, in_use="taken"):
        child = os.fork()
        if not child:
            os.write(began, b"1")
            os.close(ends)
            os.read(may_end, 1)
            os._exit(0)
        os.read(has_begun, 1)
        refused = pytest.raises(DataError, match="taken")
        with refused, claim_folder(tmp_path / "mine", kind, in_use="taken"):
            pass

    try:
        with claim_folder(tmp_path / "mine", kind, in_use="taken"):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.write(ends, b"1")
        os.waitpid(child, 0)


def test_a_tokenizer_does_not_replace_the_model_that_holds_one(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match="holds a model"):
        check_replaceable(tmp_path, kind="tokenizer")


def test_what_a_user_put_into_a_folder_of_ours_is_not_replaced(tmp_path):
    target = tmp_path / "thing"
    with whole_folder(target, kind="corpus") as partial:
        (partial / "corpus.json").write_text("first")
        write_sums(partial)
    (target / "notes.txt").write_text("dear")
    with pytest.raises(DataError, match=r"'notes\.txt' is not part of a corpus"):
        fill(target, "second")
    assert (target / "notes.txt").read_text() == "dear"


@pytest.mark.parametrize("sums", ["0" * 64 + "  model.safetensors\n", "damaged", ""])
def test_a_model_whose_settings_have_no_checksums_is_replaced_and_one_with_notes_is_not(
    tmp_path, sums
):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "SHA256SUMS").write_text(sums)
    check_replaceable(tmp_path, kind="model")
    (tmp_path / "notes.txt").write_text("dear")
    with pytest.raises(DataError, match=r"'notes\.txt' is not part of a model"):
        check_replaceable(tmp_path, kind="model")


def test_of_two_that_make_one_folder_the_second_is_refused_and_the_first_is_whole(tmp_path):
    target = tmp_path / "thing"
    with whole_folder(target, kind="corpus") as partial:
        (partial / "corpus.json").write_text("first")
        with pytest.raises(DataError, match="Another process is writing"):
            fill(target, "second")
    assert (target / "corpus.json").read_text() == "first"


def test_a_folder_being_removed_is_gone_under_its_name_at_once(tmp_path):
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "state.json").write_text("{}")

    child = os.fork()
    if not child:
        shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        remove_folder(tmp_path / "step_1")
    os.waitpid(child, 0)
    assert not (tmp_path / "step_1").exists()
    assert list(tmp_path.iterdir())
    remove_leftovers(tmp_path, "step_*")
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_a_missing_file_and_a_damaged_sum_are_found(tmp_path):
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_bytes(b"1234567")
    write_sums(tmp_path)
    assert find_damage(tmp_path) == []
    (tmp_path / "a").write_bytes(b"1234566")
    (tmp_path / "b").unlink()
    sums = (tmp_path / SUMS_FILE).read_text().replace("  c", "  C")
    (tmp_path / SUMS_FILE).write_text(sums)
    damages = [(damage.name, damage.reason.split()[1]) for damage in find_damage(tmp_path)]
    assert damages == [("C", "missing"), ("a", "another"), ("b", "missing")]


def test_a_device_or_a_pipe_is_never_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match=r"pipe is a pipe or a device, not a regular file"):
        write_text(pipe, "text")
    assert pipe.is_fifo()


# ---------------------------------------------------------------------------
# What is not ours


LINKS = {"link to a folder": "mine", "link to a file": "mine/thesis.txt"}
PLANTED = ("file", "folder", *LINKS)


def plant(path, kind, mine):
    """Puts something of the user's at `path`, or a link to it."""
    if kind == "file":
        path.write_text("years of work")
    elif kind == "folder":
        shutil.copytree(mine, path)
    else:
        path.symlink_to(mine.parent / LINKS[kind])


def content_below(folder):
    content = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            content[path.name] = path.readlink()
        else:
            content[path.name] = path.read_text() if path.is_file() else path.stat().st_ino
    return content


@pytest.fixture
def mine(tmp_path):
    """Returns a folder with the user's work."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    return tmp_path / "mine"


@pytest.mark.parametrize("kind", PLANTED[1:])
def test_a_lock_is_never_taken_through_a_link(tmp_path, mine, kind):
    (tmp_path / "run").mkdir()
    plant(tmp_path / "run/.lock", kind, mine)
    before = content_below(tmp_path)
    with (
        pytest.raises(OSError, match=r"symbolic links|directory"),
        claim_folder(tmp_path / "run", "training run", in_use="taken"),
    ):
        pass
    assert content_below(tmp_path) == before


@pytest.mark.parametrize("kind", PLANTED)
def test_what_has_the_name_of_the_lock_of_a_file_is_left_alone(tmp_path, mine, kind):
    plant(tmp_path / ".thing.lock", kind, mine)
    before = content_below(tmp_path)
    with suppress(OSError):
        write_text(tmp_path / "thing", "ours")
    (tmp_path / "thing").unlink(missing_ok=True)
    assert content_below(tmp_path) == before


def test_a_file_of_the_user_that_has_the_name_of_the_lock_keeps_its_content(tmp_path):
    (tmp_path / ".lock").write_text("years of work")
    with claim_folder(tmp_path, "training run", in_use="taken"):
        pass
    assert (tmp_path / ".lock").read_text() == "years of work"


def test_a_file_takes_the_place_of_a_link_and_not_of_what_is_behind_it(tmp_path):
    (tmp_path / "mine").write_text("years of work")
    (tmp_path / "page.html").symlink_to(tmp_path / "mine")
    write_text(tmp_path / "page.html", "ours")
    assert (tmp_path / "mine").read_text() == "years of work"
    assert (tmp_path / "page.html").read_text() == "ours"


def test_a_kind_that_cannot_be_read_is_none(tmp_path):
    (tmp_path / KIND_FILE).symlink_to(KIND_FILE)
    assert kind_of(tmp_path) is None


@pytest.mark.slow
def test_killed_at_any_moment_a_target_is_whole_and_the_next_run_cleans_up(tmp_path):
    texts = {None, *map(str, range(40))}
    draw = random.Random(0)
    for number in range(40):
        child = os.fork()
        if not child:
            for _ in range(100):
                write_text(tmp_path / "file", str(number) * 1000)
                fill(tmp_path / "folder", str(number))
            os._exit(0)
        time.sleep(draw.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        file = tmp_path / "file"
        assert not file.exists() or len(set(file.read_text())) <= 2
        remove_leftovers(tmp_path)
        facts = tmp_path / "folder/corpus.json"
        assert (facts.read_text() if facts.exists() else None) in texts
        assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_of_many_processes_that_make_one_folder_each_is_done_or_refused(tmp_path):
    children = []
    for number in range(8):
        child = os.fork()
        if not child:
            code = 1
            try:
                for _ in range(50):
                    with suppress(DataError):
                        fill(tmp_path / "folder", str(number))
                    write_text(tmp_path / "file", str(number))
                code = 0
            finally:
                traceback.print_exc()
                os._exit(code)
        children.append(child)
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
