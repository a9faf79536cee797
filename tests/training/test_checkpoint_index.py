"""The index of a checkpoint is a pickle: what would run is refused by name, what is damaged is one
message.
"""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe import CheckpointError
from moe.checkpoint.index import read_index, read_into, read_shapes
from tests.training.tiny_checkpoints import load, save, trained


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved"), 1)[2]


@pytest.fixture
def path(saved, tmp_path):
    """Returns a copy of a checkpoint whose files may be replaced."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints" / "step_00000001"))


def replace_index(path, content):
    """Writes an index, and the sizes of all files: who makes a file to run code can do that too."""
    (path / ".metadata").write_bytes(content)
    state = json.loads((path / "state.json").read_text())
    state["sizes"] = {name: (path / name).stat().st_size for name in state["sizes"]}
    (path / "state.json").write_text(json.dumps(state))


def refused(read):
    with pytest.raises(CheckpointError) as raised:
        read()
    return str(raised.value)


@pytest.fixture(scope="module")
def resume():
    """Returns what reads a checkpoint into a model, which it leaves as it is."""
    model, optimizer = trained()
    return lambda path: load(path, model, optimizer)


def test_an_index_that_would_run_code_is_refused_by_name_and_nothing_runs(path, tmp_path, resume):
    trace = tmp_path / "ran"
    for function, arguments in (
        (os.system, (f"touch {trace}",)),
        (exec, (f"open({str(trace)!r}, 'w')",)),
        (torch.load, (str(trace),)),
    ):
        replace_index(path, pickle.dumps(Calls(function, *arguments)))
        for read in (resume, lambda path: read_into(path, {"x": torch.zeros(3)})):
            text = refused(lambda read=read: read(path))
            assert f".{function.__name__}, which never occurs in the index of a checkpoint" in text
            assert not trace.exists()


def test_code_inside_an_entry_of_bytes_is_refused(path, tmp_path, resume):
    trace = tmp_path / "ran"
    index = read_index(path)
    first = next(iter(index.state_dict_metadata))
    index.state_dict_metadata[first] = BytesStorageMetadata()
    index.storage_data = {MetadataIndex(first): _StorageInfo("__0_0.distcp", 0, 100)}
    (path / "__0_0.distcp").write_bytes(pickle.dumps(Calls(os.system, f"touch {trace}")))
    replace_index(path, pickle.dumps(index))
    assert "BytesStorageMetadata" in refused(lambda: resume(path))
    assert not trace.exists()


def test_code_inside_a_shard_is_not_run(path, tmp_path, resume):
    trace = tmp_path / "ran"
    stream = io.BytesIO()
    torch.save(Calls(os.system, f"touch {trace}"), stream)
    shard = path / "__0_0.distcp"
    whole = shard.read_bytes()
    content = stream.getvalue()
    shard.write_bytes(content + whole[len(content) :])
    index = read_index(path)
    for place in index.storage_data.values():
        place.offset = 0
        place.length = len(content)
    replace_index(path, pickle.dumps(index))
    assert "could not be read: rank 0 failed" in refused(lambda: resume(path))
    assert not trace.exists()


def change(path, edit):
    index = read_index(path)
    edit(index)
    replace_index(path, pickle.dumps(index))


def first_place(index):
    return next(iter(index.storage_data.values()))


ODDITIES = {
    "a shard elsewhere": (lambda index: setattr(first_place(index), "relative_path", "../../secret"), "secret"),
    "an entry that is none": (lambda index: index.state_dict_metadata.update(x=None), "x is not a tensor"),
    "no places": (lambda index: setattr(index, "storage_data", None), "AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), ODDITIES.values(), ids=ODDITIES)
def test_an_index_that_says_odd_things_is_one_message(path, resume, edit, message):
    change(path, edit)
    assert message in refused(lambda: resume(path))


def test_an_index_that_is_torn_is_one_message(path):
    whole = (path / ".metadata").read_bytes()
    for content in (
        b"",
        b"(" * 10_000,
        pickle.dumps({"a": 1}),
        whole[:-1],
        whole[: len(whole) // 2],
    ):
        (path / ".metadata").write_bytes(content)
        assert "step_00000001" in refused(lambda: read_index(path)), content[:40]


def test_every_dtype_is_admitted(tmp_path):
    path = tmp_path / "step_00000001"
    path.mkdir()
    entries = {}
    for dtype in ("float32", "bfloat16", "float16", "int8", "bool", "float8_e4m3fn"):
        properties = TensorProperties(dtype=getattr(torch, dtype))
        entries[dtype] = TensorStorageMetadata(properties, torch.Size([3]), [])
    index = Metadata(entries, storage_data={})
    (path / ".metadata").write_bytes(pickle.dumps(index))
    assert read_shapes(path) == dict.fromkeys(entries, (3,))
