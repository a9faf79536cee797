"""One stage of a run that moves from mesh to mesh: a small model, its optimizer, and what both
hold.
"""

import torch

from moe.checkpoint.run_state import RunState, load_state
from moe.checkpoint.train_state import model_tensors, optimizer_tensors
from moe.checkpoint.writer import load_checkpoint
from moe.distributed.mesh import MeshConfig
from moe.models.parallelize import model_layouts, shard_model
from moe.optim.adafactor import Adafactor
from moe.optim.lamb import LAMB
from moe.optim.optimizers import build_adamw
from moe.optim.parameter_groups import parameter_groups
from moe.training.recipe import OptimRecipe, PretrainRecipe, TrainingRecipe
from tests.distributed.ranks import whole
from tests.models.tiny import tiny_model
from tests.training.one_step import train_step

FIELDS = {
    "vocab_size": 53,
    "d_model": 13,
    "d_kv": 1,  # two heads on a tp rank: over four data ranks two shards are empty
    "d_ff": 22,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "num_experts": 8,
    "num_shared_experts": 1,
    "group_size": 26,
    "tie_word_embeddings": True,
}
ROWS, LENGTH, TARGETS = 16, 13, 11
RECIPE = PretrainRecipe(
    optim=OptimRecipe(lr=0.1, warmup_steps=1, max_grad_norm=0.5),
    training=TrainingRecipe(steps=99, batch_size=ROWS),
)


def adafactor(model):
    """Returns Adafactor that factors most matrices of so small a model, not only the experts'."""
    return Adafactor(parameter_groups(model), min_dim_size_to_factor=5)


def adamw(model):
    """Returns AdamW as a run builds it: torch plans a fused step once, and that of each operation
    and shape otherwise, which takes seconds on a mesh of four axes.
    """
    return build_adamw(parameter_groups(model), weight_decay=0.01, epsilon=1e-3)


def lamb(model):
    return LAMB(parameter_groups(model), lr=0.01, weight_decay=0.1)


OPTIMIZERS = {"adafactor": adafactor, "adamw": adamw, "lamb": lamb}


def build(seed=0, **changes):
    return tiny_model(seed, **{**FIELDS, **changes}).double().train()


def batch(step, rows=ROWS):
    generator = torch.Generator().manual_seed(step)
    mask = (torch.rand(rows, LENGTH, generator=generator) > 0.2).long()
    labels = torch.randint(2, FIELDS["vocab_size"], (rows, TARGETS), generator=generator)
    ids = torch.randint(2, FIELDS["vocab_size"], (rows, LENGTH), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


class Stage:
    """A model and its optimizer on one mesh, or in one process."""

    def __init__(self, optimizer, mesh=None, **changes):
        self.model, self.mesh = build(**changes), mesh
        config = mesh.config if mesh else MeshConfig()
        self.layouts = (
            shard_model(self.model, mesh)
            if mesh
            else model_layouts(self.model, self.model.config, config)
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model)

    def step(self, number):
        """Returns the loss of one update."""
        data = batch(number)
        if self.mesh:
            data = {name: value[self.mesh.rows(ROWS)] for name, value in data.items()}
        return float(train_step(self.model, self.optimizer, RECIPE, data, number, self.mesh).loss)

    def content(self):
        """Returns every tensor whole, by the name that it has in a checkpoint."""
        parts = {**model_tensors(self.model, self.layouts), **self.state()}
        return {name: whole(part) for name, part in parts.items()}

    def state(self):
        return optimizer_tensors(self.model, self.optimizer, self.layouts)

    def load(self, path):
        load_checkpoint(path, self.model, self.optimizer, self.layouts)
        return load_state(path).step

    def save(self, writer, step):
        return writer.save(self.model, self.optimizer, self.layouts, RunState(step, "abc", {}))


def differing(ours, theirs):
    return sorted(
        name for name in ours.keys() | theirs.keys() if not same(ours.get(name), theirs.get(name))
    )


def same(a, b):
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)
