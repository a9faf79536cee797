"""Model folders that a mesh reads and writes, against `from_pretrained` and `save_pretrained` of
the whole model.

What is written must be the same bytes; what is read the same tensors. How much a rank holds is
counted: elements read from files, bytes written to them, and the largest tensor that any operation
allocates.
"""

import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe import DataError
from moe.checkpoint import load_model
from moe.checkpoint.final_model import save_model_on_mesh
from moe.checkpoint.loading import load_model_on_mesh
from moe.checkpoint.sharded_weights import stored_tensors, write_model
from moe.distributed.collectives import gather_or_raise
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.distributed.sharding import local_shard
from tests.distributed.ranks import run_ranks, whole
from tests.distributed.stages import FIELDS, batch
from tests.distributed.test_checkpoints_on_a_mesh import say
from tests.models.tiny import tiny_model
from tests.training.tiny_checkpoints import flip_a_bit

MESHES = {
    "ep 2, tp 2": (1, 1, 2, 2),
    "dp_replicate 2, ep 2": (2, 1, 2, 1),
    "dp_shard 2, tp 2": (1, 2, 1, 2),
}
UNTIED = {**FIELDS, "tie_word_embeddings": False}
VARIANTS = {
    "tied, in one file": (FIELDS, torch.float32, "50GB"),
    "bfloat16, in many files": (UNTIED, torch.bfloat16, 2_000),
    "with a buffer": (
        {**UNTIED, "router": "bias_balanced", "router_options": None},
        torch.float32,
        "50GB",
    ),
}
CASES = [
    ("ep 2, tp 2", "bfloat16, in many files", True),
    ("dp_shard 2, tp 2", "with a buffer", True),
    ("dp_replicate 2, ep 2", "tied, in one file", False),
]
"""Mesh, variant, and whether FSDP shards the dense parameters."""


def build(name):
    """Returns a model with buffers that are not as they start."""
    fields, dtype, _ = VARIANTS[name]
    model = tiny_model(3, **fields).to(dtype)
    for number, buffer in enumerate(model.buffers()):
        buffer.copy_(torch.arange(buffer.numel()) + number)
    return model


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Counts(TorchDispatchMode):
    """Knows the most elements of any tensor that took memory on this rank, and how many were copied.

    Views of a mapped file take no memory, and bytes are messages between ranks.
    """

    def __init__(self):
        super().__init__()
        self.elements = self.copied = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again with the tensors of this rank
        result = function(*arguments, **(options or {}))
        if function is torch.ops.aten.copy_.default and not arguments[0].is_meta:
            self.copied += arguments[1].numel()
        is_view = any(returned.alias_info is not None for returned in function._schema.returns)
        for tensor in [] if is_view else tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not (
                tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.dtype == torch.uint8
            ):
                self.elements = max(self.elements, tensor.numel())
        return result


@contextmanager
def counted():
    """Gives bytes written by access, and what tensors took memory or were copied."""
    written, pwrite, counts = [], os.pwrite, Counts()
    os.pwrite = lambda file, data, place: (written.append(len(data)), pwrite(file, data, place))[1]
    try:
        with counts:
            yield written, counts
    finally:
        os.pwrite = pwrite


def differences(ours, theirs):
    """Returns what of a model on a mesh is not as in the whole one."""
    wrong = []
    expected = stored_tensors(theirs)
    for name, tensor in stored_tensors(ours).items():
        same_dtype = tensor.dtype == expected[name].dtype
        full = whole(tensor).reshape(expected[name].shape)
        if not same_dtype or not torch.equal(full, expected[name]):
            wrong.append(name)

    if ours.config.to_dict() != theirs.config.to_dict():
        wrong.append("config")
    if ours.generation_config != theirs.generation_config:
        wrong.append("generation config")
    if ours.training != theirs.training:
        wrong.append("training")
    is_tied = ours.lm_head.weight is ours.get_input_embeddings().weight
    if is_tied != ours.config.tie_word_embeddings:
        wrong.append("tied")
    return wrong


def make_folder(rank, folder):
    if rank == 0:
        folder.mkdir()
    gather_or_raise(lambda: None)


def read_and_write(rank, num_ranks, folder):
    """Returns by variant and mesh what came otherwise, and counts of this rank."""
    found = {}
    for mesh_name, variant, gather in CASES:
        mesh = build_mesh(MeshConfig(*MESHES[mesh_name]), "cpu")
        max_shard_size = VARIANTS[variant][2]
        source = folder / variant
        with counted() as (_, reading):
            ours, layouts = load_model_on_mesh(source, mesh, gather=gather)
        held = [local_shard(tensor).numel() for tensor in stored_tensors(ours).values()]
        counts = [reading.copied, sum(held), reading.elements, max(held)]
        theirs = load_model(source)
        wrong = differences(ours, theirs)

        target = folder / f"{variant} from {mesh_name}, {gather}"
        make_folder(rank, target)
        with counted() as (written, writing):
            write_model(ours, layouts, target, mesh, max_shard_size=max_shard_size)
        counts += [sum(written), writing.elements]

        # After a forward pass the root holds whole parameters: they must not be what is written.
        here = {key: value[mesh.rows(16)] for key, value in batch(0).items()}
        found[mesh_name, variant, gather] = wrong, counts, float(ours(**here).loss.isfinite())
        with torch.no_grad():
            ours(**here)
        again = folder / f"{target.name}, again"
        make_folder(rank, again)
        write_model(ours, layouts, again, mesh, max_shard_size=max_shard_size)
    return found


@pytest.mark.slow
def test_a_mesh_reads_and_writes_the_very_files_of_one_process(tmp_path):
    for name, (_, _, max_shard_size) in VARIANTS.items():
        build(name).save_pretrained(tmp_path / name, max_shard_size=max_shard_size)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    answers = run_ranks(read_and_write, 4, ranks, tmp_path)
    for mesh_name, name, gather in CASES:
        num_written = 0
        for answer in answers:
            wrong, counts, is_finite = answer[mesh_name, name, gather]
            read, held, largest_read, largest_held, written, largest_when_writing = counts
            assert wrong == [], (mesh_name, name)
            assert is_finite
            assert held <= read <= 1.5 * held  # FSDP copies shards that it pads
            assert largest_read <= largest_held
            assert largest_when_writing <= largest_held
            num_written += written

        expected = files(tmp_path / name)
        for again in ("", ", again"):
            assert files(tmp_path / f"{name} from {mesh_name}, {gather}{again}") == expected
        num_bytes = sum(tensor.nbytes for tensor in stored_tensors(build(name)).values())
        assert num_written == num_bytes  # nothing is written twice


def test_one_process_writes_what_save_pretrained_writes(tmp_path):
    for name, (_, _, max_shard_size) in VARIANTS.items():
        model, ours, theirs = build(name), tmp_path / f"our {name}", tmp_path / f"their {name}"
        ours.mkdir()
        model.save_pretrained(theirs, max_shard_size=max_shard_size)
        write_model(model, {}, ours, max_shard_size=max_shard_size)
        assert files(ours) == files(theirs)


# ---- what goes wrong ----


class Tokenizer:
    """Stands in for a tokenizer, which is a file beside the model."""

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


def refuse(rank, num_ranks, folder):
    """Returns the texts of both ways to load each damaged folder, and how exports end that cannot
    be.
    """
    mesh, said = build_mesh(MeshConfig(1, 1, 2, 1), "cpu"), {}
    for name in ("missing", "torn", "flipped"):
        theirs = say(lambda name=name: load_model(folder / name))
        said[name] = say(lambda name=name: load_model_on_mesh(folder / name, mesh)), theirs
    model, layouts = load_model_on_mesh(folder / "good", mesh)
    target = folder / "exported"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    said["disk"] = say(lambda: save_model_on_mesh(model, layouts, mesh, target, Tokenizer()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gather_or_raise(lambda: None)
    said["after the disk"] = [path.name for path in folder.iterdir() if "exported" in path.name]
    gather_or_raise(lambda: None)
    said["taken"] = say(
        lambda: save_model_on_mesh(model, layouts, mesh, folder / "ranks", Tokenizer())
    )
    save_model_on_mesh(model, layouts, mesh, target, Tokenizer())
    return said


@pytest.mark.slow
def test_what_cannot_be_read_or_written_is_one_message_on_every_rank(tmp_path):
    good = tmp_path / "good"
    tiny_model(**UNTIED).save_pretrained(good)
    for name in ("missing", "torn", "flipped"):
        shutil.copytree(good, tmp_path / name)
        if name != "flipped":  # the others are as if another tool had written them
            (tmp_path / name / "SHA256SUMS").unlink()
    weights = safetensors.torch.load_file(good / "model.safetensors")
    del weights["lm_head.weight"]
    safetensors.torch.save_file(weights, tmp_path / "missing/model.safetensors", {"format": "pt"})
    flip_a_bit(tmp_path / "flipped" / "model.safetensors")
    torn = tmp_path / "torn" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for said in run_ranks(refuse, 2, ranks, tmp_path):
        for name in ("missing", "flipped"):
            ours, theirs = said[name]
            assert ours == theirs
            assert ours.startswith("CheckpointError: ")
        assert "Weights 1 missing: lm_head.weight. Copy the whole folder" in said["missing"][0]
        assert "is damaged: model.safetensors has another SHA-256" in said["flipped"][0]
        assert f"The weights in {torn} cannot be read: " in said["torn"][0]
        assert said["disk"].startswith("OSError: [Errno 27] File too large: ")
        assert "model.safetensors" in said["disk"]
        assert said["after the disk"] == []
        assert DataError.__name__ in said["taken"]
        assert "ranks exists and holds something else" in said["taken"]
    expected = {**files(good), "tokenizer.json": b"{}"}
    assert files(tmp_path / "exported") == expected
