"""Damaged checkpoints: named, passed over, never loaded, and never a reason to lose what is whole."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from moe import CheckpointError
from moe.checkpoint.integrity import first_damage, newest_whole_checkpoint
from moe.checkpoint.writer import CheckpointWriter
from moe.checksums import read_sums
from moe.files import remove_folder
from tests.training.tiny_checkpoints import content_of, flip_a_bit, layouts, save, state, trained

FILES = (".metadata", "__0_0.distcp", "state.json", "SHA256SUMS")


def change_state(path, **changes):
    """Writes other values into state.json, None for no such field."""
    content = {**json.loads((path / "state.json").read_text()), **changes}
    content = {name: value for name, value in content.items() if value is not None}
    (path / "state.json").write_text(json.dumps(content))


def shorten(file):
    file.write_bytes(file.read_bytes()[:-1])


def forget_sum_of(path, name):
    lines = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
    (path / "SHA256SUMS").write_text(
        "".join(line for line in lines if not line.endswith(f"  {name}\n"))
    )


def replace_by_a_file(path):
    shutil.rmtree(path)
    path.write_text("no folder")


DAMAGES = {
    "a flipped bit in a shard": (lambda path: flip_a_bit(path / "__0_0.distcp"), "__0_0.distcp has another SHA-256"),
    "a flipped bit in the index": (lambda path: flip_a_bit(path / ".metadata"), ".metadata has another SHA-256"),
    "a short shard": (lambda path: shorten(path / "__0_0.distcp"), "__0_0.distcp has "),
    "a missing shard": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "no index": (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
    "no checksums": (lambda path: (path / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
    "empty checksums": (lambda path: (path / "SHA256SUMS").write_text(""), "SHA256SUMS has no checksum of .metadata"),
    "a checksum less": (lambda path: forget_sum_of(path, "__0_0.distcp"), "SHA256SUMS has no checksum of __0_0"),
    "no state": (lambda path: (path / "state.json").unlink(), "state.json cannot be read: No such file"),
    "a torn state": (lambda path: shorten(path / "state.json"), ""),
    "an edited fingerprint": (lambda path: change_state(path, fingerprint="abd"), "state.json has "),
    "another step": (lambda path: change_state(path, step=21), "state.json says step 21, and its folder is"),
    "no sizes": (lambda path: change_state(path, sizes=None), "state.json sizes is missing"),
    "a later format": (lambda path: change_state(path, format=99), "state.json format is 99"),
    "no folder": (replace_by_a_file, "step_00000020 is not a folder"),
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

    path, damaged = newest_whole_checkpoint(folder, advice="")
    assert path == folder / "step_00000010"
    assert list(damaged) == [folder / "step_00000020"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"step_00000020 is damaged: {message}" in said
    assert "Going on from the newest whole one, step_00000010." in said
    assert "\0" not in said


def test_a_bit_that_flips_anywhere_is_noticed(two_checkpoints, tmp_path):
    path = tmp_path / "step_00000020"
    shutil.copytree(two_checkpoints / "step_00000020", path)
    assert first_damage(path) is None
    for name in FILES:
        whole = (path / name).read_bytes()
        for bit in (0, 3, 6):
            flipped = bytearray(whole)
            flipped[len(whole) * bit // 7] ^= 1 << bit
            (path / name).write_bytes(flipped)
            assert first_damage(path) is not None, (name, bit)
        (path / name).write_bytes(whole)


def test_when_all_are_damaged_they_are_listed_and_nothing_changes(
    two_checkpoints, tmp_path, capsys
):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    flip_a_bit(folder / "step_00000010" / "__0_0.distcp")
    (folder / "step_00000020" / "state.json").unlink()
    before = content_of(folder)
    with pytest.raises(CheckpointError) as raised:
        newest_whole_checkpoint(folder, advice="Do this.")
    text = str(raised.value)
    assert f"Every checkpoint in {folder} is damaged (step_00000020: state.json cannot be" in text
    assert "; step_00000010: __0_0.distcp has another SHA-256" in text
    assert text.endswith("Nothing was changed. Do this.")
    assert content_of(folder) == before
    assert capsys.readouterr().err == ""


def test_there_are_no_checkpoints_before_the_first(tmp_path):
    (tmp_path / ".step_00000010.partial").mkdir()
    (tmp_path / "step_of_another").mkdir()
    assert newest_whole_checkpoint(tmp_path, advice="") == (None, {})
    assert newest_whole_checkpoint(tmp_path / "none", advice="") == (None, {})


def test_a_checkpoint_has_a_checksum_of_each_file(two_checkpoints):
    path = two_checkpoints / "step_00000020"
    assert {*read_sums(path), "SHA256SUMS"} == {file.name for file in path.iterdir()}


def test_a_rank_that_had_nothing_to_write_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    write = FileSystemWriter.write_data

    def write_beside_an_idle_rank(self, plan, planner):
        (Path(self.path) / "__1_0.distcp").touch()
        return write(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_beside_an_idle_rank)
    path = save(tmp_path, 7)[2]
    assert "__1_0.distcp" in read_sums(path)
    assert first_damage(path) is None


# ---- the next saves ----


def names_below(folder):
    return sorted(path.name for path in folder.iterdir())


def save_at(folder, *steps, keep, damaged=()):
    model, optimizer = trained()
    with CheckpointWriter(folder, keep=keep, damaged=damaged) as writer:
        for step in steps:
            writer.save(model, optimizer, layouts(model), state(step))


def test_damaged_checkpoints_do_not_count_among_those_that_stay(two_checkpoints, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    damaged = [folder / "step_00000020"]
    flip_a_bit(damaged[0] / "__0_0.distcp")

    save_at(folder, 15, keep=2, damaged=damaged)  # with checkpoints more often than before
    assert names_below(folder) == ["step_00000010", "step_00000015", "step_00000020"]

    save_at(folder, 20, 25, keep=2, damaged=damaged)
    assert names_below(folder) == ["step_00000020", "step_00000025"]


def test_what_an_earlier_version_left_of_a_removed_checkpoint_blocks_nothing(tmp_path):
    path = save(tmp_path, 7)[2]
    for name in ("state.json", ".metadata", "SHA256SUMS"):
        (path / name).unlink()
    save_at(tmp_path, 7, keep=2)
    assert first_damage(path) is None


def test_what_is_no_checkpoint_is_never_removed(tmp_path):
    for name in ("step_00000001", "step_of_mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    save_at(tmp_path, 3, 4, keep=1)
    assert names_below(tmp_path) == ["step_00000001", "step_00000004", "step_of_mine"]
    assert (tmp_path / "step_00000001" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("after_files", [0, 2, 5])  # the last is the marker of the work folder
def test_a_kill_while_an_old_checkpoint_is_removed_leaves_none_that_is_broken(
    two_checkpoints, tmp_path, after_files
):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    child = os.fork()
    if child == 0:  # removes as the background thread does, and dies in the middle of it
        unlinked = iter(range(after_files))
        remove = os.unlink

        def unlink(*arguments, **options):
            if next(unlinked, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            remove(*arguments, **options)

        os.unlink = unlink
        remove_folder(folder / "step_00000010")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) == (after_files < 5)

    assert newest_whole_checkpoint(folder, advice="") == (folder / "step_00000020", {})
    with CheckpointWriter(folder, keep=2):
        pass
    assert names_below(folder) == ["step_00000020"]


def test_a_removed_checkpoint_is_hidden_before_a_file_of_it_goes(tmp_path, monkeypatch):
    save_at(tmp_path, 7, keep=1)
    removed = []
    monkeypatch.setattr("moe.files.shutil.rmtree", lambda path, **_: removed.append(path))
    save_at(tmp_path, 14, keep=1)
    names = [path.name.split(".")[1] for path in removed if path.name.endswith(".partial")]
    assert set(names) >= {"step_00000007"}


def test_a_file_that_changes_under_its_writer_is_never_taken_for_whole(tmp_path, monkeypatch):
    real = torch.save

    def spoilt(tensor, stream, **options):
        real(tensor + 1 if tensor.is_floating_point() else tensor, stream, **options)

    save_at(tmp_path, 7, keep=2)
    whole = content_of(tmp_path / "step_00000007")
    monkeypatch.setattr(torch, "save", spoilt)
    save_at(tmp_path, 14, keep=2)
    name = "__0_0.distcp"
    path = tmp_path / "step_00000007"
    shutil.copy(tmp_path / "step_00000014" / name, path / name)
    assert first_damage(path).name == name  # of another checkpoint, and as long
    (path / name).write_bytes(whole[name])
    assert first_damage(path) is None
