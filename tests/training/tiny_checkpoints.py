"""Checkpoints of a model small enough to save dozens of them in a second."""

import torch

from moe.checkpoint.run_state import RunState
from moe.checkpoint.writer import CheckpointWriter, load_checkpoint
from moe.distributed.mesh import MeshConfig
from moe.models.parallelize import model_layouts
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import parameter_groups
from tests.models.tiny import tiny_batch, tiny_model


def adafactor(model):
    """Returns Adafactor that factors most matrices of so small a model, not only the experts'."""
    return Adafactor(parameter_groups(model), lr=0.01, min_dim_size_to_factor=5)


def trained(seed=0, build=adafactor, **changes):
    model = tiny_model(seed, **changes).train()
    optimizer = build(model)
    take_step(model, optimizer)
    return model, optimizer


def take_step(model, optimizer):
    model(**tiny_batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def layouts(model):
    return model_layouts(model, model.config, MeshConfig())


def load(path, model, optimizer, **options):
    load_checkpoint(path, model, optimizer, layouts(model), **options)


def state(step, **changes):
    return RunState(
        **{"step": step, "fingerprint": "abc", "recipe": {"optim": {"lr": 0.1}}, **changes}
    )


def save(folder, step, keep=2, **changes):
    model, optimizer = trained(**changes)
    with CheckpointWriter(folder, keep=keep) as writer:
        path = writer.save(model, optimizer, layouts(model), state(step))
    return model, optimizer, path


def assert_same(model, optimizer, other, other_optimizer):
    for a, b in zip(
        (*model.parameters(), *model.buffers()),
        (*other.parameters(), *other.buffers()),
        strict=True,
    ):
        assert torch.equal(a, b)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        ours, theirs = optimizer.state[a], other_optimizer.state[b]
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert type(value) is type(theirs[name])
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name]))


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def content_of(folder):
    """Returns the bytes of every file below a folder, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
