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
from moe.checkpoint.run_state import load_state
from moe.checkpoint.writer import CheckpointWriter
from moe.checksums import read_sums
from tests.training.tiny_checkpoints import (
    adafactor,
    assert_same,
    content_of,
    flip_a_bit,
    layouts,
    load,
    save,
    state,
    tiny_model,
    trained,
)

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
    "binary checksums": (lambda path: (path / "SHA256SUMS").write_bytes(b"\xff\0\n"), "SHA256SUMS has no checksum"),
    "a folder of checksums": (
        lambda path: [(path / "SHA256SUMS").unlink(), (path / "SHA256SUMS").mkdir()],
        "SHA256SUMS cannot be read",
    ),
    "a flipped bit in the checksums": (lambda path: flip_a_bit(path / "SHA256SUMS"), ""),
    "no state": (lambda path: (path / "state.json").unlink(), "state.json cannot be read: No such file"),
    "a torn state": (lambda path: shorten(path / "state.json"), ""),
    "a binary state": (lambda path: (path / "state.json").write_bytes(b"\xff\xfe\0"), "state.json is not UTF-8"),
    "a list for a state": (lambda path: (path / "state.json").write_text("[1]"), "state.json its content is [1]"),
    "an edited fingerprint": (lambda path: change_state(path, fingerprint="abd"), "state.json has "),
    "a step that is text": (lambda path: change_state(path, step="20"), "state.json step is '20'"),
    "a step that is negative": (lambda path: change_state(path, step=-20), "state.json step is -20"),
    "a step that is huge": (lambda path: change_state(path, step=10**400), "state.json "),
    "another step": (lambda path: change_state(path, step=21), "state.json says step 21, and its folder is"),
    "no step": (lambda path: change_state(path, step=None), "state.json step is missing"),
    "no sizes": (lambda path: change_state(path, sizes=None), "state.json sizes is missing"),
    "sizes that are a list": (lambda path: change_state(path, sizes=[1]), "state.json sizes is [1]"),
    "a file outside": (lambda path: change_state(path, sizes={"../../x\0": 1}), r"'../../x\x00' is missing"),
    "settings that are text": (lambda path: change_state(path, recipe="x"), "state.json recipe is 'x'"),
    "a later format": (lambda path: change_state(path, format=99), "state.json format is 99, of a later version"),
    "an unknown field": (lambda path: change_state(path, formal=2), "state.json formal is 2"),
    "no folder": (replace_by_a_file, "step_00000020 is no folder"),
    "an empty folder": (lambda path: [shutil.rmtree(path), path.mkdir()], "state.json cannot be read"),
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


@pytest.mark.parametrize("number", range(7))
def test_a_bit_that_flips_anywhere_is_noticed(two_checkpoints, tmp_path, number):
    path = tmp_path / "step_00000020"
    shutil.copytree(two_checkpoints / "step_00000020", path)
    assert first_damage(path) is None
    for name in FILES:
        whole = (path / name).read_bytes()
        position = len(whole) * number // 7
        (path / name).write_bytes(
            whole[:position] + bytes([whole[position] ^ 1 << number]) + whole[position + 1 :]
        )
        assert first_damage(path) is not None, (name, position)
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
    assert str(raised.value).startswith(
        f"Every checkpoint in {folder} is damaged (step_00000020: state.json cannot be"
    )
    assert "; step_00000010: __0_0.distcp has another SHA-256" in str(raised.value)
    assert str(raised.value).endswith("Nothing was changed. Do this.")
    assert content_of(folder) == before
    assert capsys.readouterr().err == ""


def test_there_are_no_checkpoints_before_the_first(tmp_path):
    (tmp_path / ".step_00000010.partial").mkdir()
    (tmp_path / "step_of_another").mkdir()
    assert newest_whole_checkpoint(tmp_path, advice="") == (None, {})
    assert newest_whole_checkpoint(tmp_path / "none", advice="") == (None, {})


def test_a_checkpoint_has_a_checksum_of_each_file(two_checkpoints):
    path = two_checkpoints / "step_00000020"
    assert sorted(read_sums(path)) == sorted(
        {file.name for file in path.iterdir()} - {"SHA256SUMS"}
    )


def test_a_rank_that_had_nothing_to_write_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    write = FileSystemWriter.write_data

    def write_beside_an_idle_rank(self, plan, planner):
        (Path(self.path) / "__1_0.distcp").touch()
        return write(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_beside_an_idle_rank)
    path = save(tmp_path, 7)[2]
    assert "__1_0.distcp" in read_sums(path)
    assert first_damage(path) is None


def test_a_checkpoint_of_before_the_checksums_is_held_to_its_sizes(two_checkpoints, tmp_path):
    path = tmp_path / "step_00000020"
    shutil.copytree(two_checkpoints / "step_00000020", path)
    (path / "SHA256SUMS").unlink()
    change_state(path, format=None)
    assert newest_whole_checkpoint(tmp_path, advice="") == (path, {})
    assert load_state(path) == state(20)
    model, optimizer = trained()
    other = tiny_model(1)
    other_optimizer = adafactor(other)
    load(path, other, other_optimizer)
    assert_same(model, optimizer, other, other_optimizer)
    shorten(path / "__0_0.distcp")
    with pytest.raises(
        CheckpointError, match=r"step_00000020: __0_0\.distcp has [\d,]+ bytes instead of"
    ):
        newest_whole_checkpoint(tmp_path, advice="")


# ---- the next saves ----


def names_below(folder):
    return sorted(path.name for path in folder.iterdir())


def save_at(folder, *steps, keep, damaged=()):
    model, optimizer = trained()
    with CheckpointWriter(folder, keep=keep, damaged=damaged) as writer:
        for step in steps:
            writer.save(model, optimizer, layouts(model), state(step))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoints_do_not_count_among_those_that_stay(tmp_path, keep):
    save_at(tmp_path, 7, 14, 21, keep=3)
    damaged = [tmp_path / "step_00000014", tmp_path / "step_00000021"]
    for path in damaged:
        flip_a_bit(path / "__0_0.distcp")

    save_at(tmp_path, 10, keep=keep, damaged=damaged)  # with checkpoints more often than before
    whole = ["step_00000007", "step_00000010"][-keep:]
    assert names_below(tmp_path) == [*whole, "step_00000014", "step_00000021"]

    save_at(tmp_path, 20, 21, 30, keep=keep, damaged=damaged)
    assert names_below(tmp_path) == ["step_00000020", "step_00000021", "step_00000030"][-keep:]


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
    save_at(tmp_path, 2, 3, 4, keep=1)
    assert names_below(tmp_path) == ["step_00000001", "step_00000004", "step_of_mine"]
    assert (tmp_path / "step_00000001" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("after_files", range(6))  # the last is the marker of the work folder
def test_a_kill_while_an_old_checkpoint_is_removed_leaves_none_that_is_broken(
    tmp_path, after_files
):
    save_at(tmp_path, 7, 14, keep=2)
    child = os.fork()
    if child == 0:  # removes as the background thread does, and dies in the middle of it
        unlinked = iter(range(after_files))
        remove = os.unlink

        def unlink(*arguments, **options):
            if next(unlinked, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            remove(*arguments, **options)

        os.unlink = unlink
        from moe.files import remove_folder

        remove_folder(tmp_path / "step_00000007")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) == (after_files < 5)

    path, damaged = newest_whole_checkpoint(tmp_path, advice="")
    assert (path, damaged) == (tmp_path / "step_00000014", {})
    save_at(tmp_path, 21, keep=2)
    assert names_below(tmp_path) == ["step_00000014", "step_00000021"]


def test_a_removed_checkpoint_is_hidden_before_a_file_of_it_goes(tmp_path, monkeypatch):
    save_at(tmp_path, 7, keep=1)
    removed = []
    monkeypatch.setattr("moe.work_folder.shutil.rmtree", lambda path, **_: removed.append(path))
    save_at(tmp_path, 14, keep=1)
    assert {path.parent.name for path in removed} == {".step_00000007.partial"}


def test_a_file_that_changes_under_its_writer_is_never_taken_for_whole(tmp_path, monkeypatch):
    real = torch.save

    def spoilt(tensor, stream, **options):
        real(tensor + 1 if tensor.is_floating_point() else tensor, stream, **options)

    save_at(tmp_path, 7, keep=2)
    whole = content_of(tmp_path / "step_00000007")
    monkeypatch.setattr(torch, "save", spoilt)
    save_at(tmp_path, 14, keep=2)
    name = "__0_0.distcp"
    (tmp_path / "step_00000007" / name).write_bytes(
        (tmp_path / "step_00000014" / name).read_bytes()
    )
    assert (
        first_damage(tmp_path / "step_00000007").name == name
    )  # of another checkpoint, and as long
    (tmp_path / "step_00000007" / name).write_bytes(whole[name])
    assert first_damage(tmp_path / "step_00000007") is None
