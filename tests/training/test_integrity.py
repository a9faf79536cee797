"""Damaged checkpoints: named, passed over, never loaded, and never a reason to lose what is whole."""

import os
import re
import shutil
import signal

import pytest

from moe import CheckpointError
from moe.checkpoint.integrity import newest_whole_checkpoint
from moe.checkpoint.writer import CheckpointWriter
from moe.files import remove_folder
from tests.training.tiny_checkpoints import content_of, layouts, save, state, trained


def shorten(file):
    file.write_bytes(file.read_bytes()[:-9])


def set_format(path):
    file = path / "state.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 99'))


DAMAGES = {
    "a short shard": (lambda path: shorten(path / "__0_0.distcp"), "__0_0.distcp has .* instead of"),
    "a missing shard": (lambda path: (path / "__0_0.distcp").unlink(), "No such file.*__0_0.distcp"),
    "no state": (lambda path: (path / "state.json").unlink(), "state.json cannot be read: No such"),
    "a later format": (set_format, "state.json: format is 99"),
}  # fmt: skip


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 10)
    save(folder, 20)
    return folder


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    two_checkpoints, tmp_path, capsys, damage, message
):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    damage(folder / "step_00000020")

    assert newest_whole_checkpoint(folder, advice="") == folder / "step_00000010"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "warning: going on from step_00000010" in said
    assert re.search(f"step_00000020 is damaged: .*{message}", said)


def test_when_all_are_damaged_they_are_listed_and_nothing_changes(
    two_checkpoints, tmp_path, capsys
):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    shorten(folder / "step_00000010" / "__0_0.distcp")
    (folder / "step_00000020" / "state.json").unlink()
    before = content_of(folder)
    with pytest.raises(CheckpointError) as raised:
        newest_whole_checkpoint(folder, advice="Do this.")
    text = str(raised.value)
    assert f"Every checkpoint in {folder} is damaged. Nothing was changed. Do this. (" in text
    assert re.search(
        r"step_00000020 is damaged: .*step_00000010 is damaged: __0_0.distcp has ", text
    )
    assert content_of(folder) == before
    assert capsys.readouterr().err == ""


def test_there_are_no_checkpoints_before_the_first(tmp_path):
    (tmp_path / ".step_00000010.partial").mkdir()
    (tmp_path / "step_of_another").mkdir()
    assert newest_whole_checkpoint(tmp_path, advice="") is None
    assert newest_whole_checkpoint(tmp_path / "none", advice="") is None


# ---- the next saves ----


def names_below(folder):
    return sorted(path.name for path in folder.iterdir())


def save_at(folder, *steps, keep):
    model, optimizer = trained()
    with CheckpointWriter(folder, keep=keep) as writer:
        for step in steps:
            writer.save(model, optimizer, layouts(model), state(step))


def test_damaged_checkpoints_do_not_count_among_those_that_stay(two_checkpoints, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    shorten(folder / "step_00000020" / "__0_0.distcp")

    save_at(folder, 30, keep=2)
    assert names_below(folder) == ["step_00000010", "step_00000020", "step_00000030"]

    save_at(folder, 15, keep=1)  # with checkpoints more often than before
    assert names_below(folder) == ["step_00000015", "step_00000020", "step_00000030"]

    save_at(folder, 40, keep=2)
    assert names_below(folder) == ["step_00000030", "step_00000040"]


def test_what_is_no_checkpoint_is_never_removed(tmp_path):
    for name in ("step_00000001", "step_of_mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    save_at(tmp_path, 3, 4, keep=1)
    assert names_below(tmp_path) == ["step_00000001", "step_00000004", "step_of_mine"]
    assert (tmp_path / "step_00000001" / "thesis.txt").read_text() == "years of work"


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_none_that_is_broken(
    two_checkpoints, tmp_path
):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    child = os.fork()
    if child == 0:  # removes as the background thread does, and dies in the middle of it
        unlinked = iter(range(2))
        remove = os.unlink

        def unlink(*arguments, **options):
            if next(unlinked, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            remove(*arguments, **options)

        os.unlink = unlink
        remove_folder(folder / "step_00000010")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)

    assert newest_whole_checkpoint(folder, advice="") == folder / "step_00000020"
    with CheckpointWriter(folder, keep=2):
        pass
    assert names_below(folder) == ["step_00000020"]
