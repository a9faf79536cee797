"""The optimizer's slots of an earlier run, kept for fine-tuning; the paper finds that better than fresh ones."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from moe.distributed.sharding import Layout
from moe.errors import CheckpointError
from moe.training.checkpoint import latest_checkpoint, load_state, owner, read_into, read_shapes, refuse_misfits
from moe.training.snapshot import fresh_state, optimizer_state, put_numbers


def load_slots(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Layout], name: str
) -> None:
    """Gives a new optimizer the state that an earlier run ended with, for the parameters that train now.

    Adafactor's count of steps comes with its moments: at a count of 0 it would forget them in one step.

    Args:
        folder: The checkpoints of that run.
        model: With the weights that the run ended with, on any mesh; every rank must call it.
        optimizer: Of the parameters that train.
        layouts: Where each parameter lies.
        name: Of the optimizer, as in a recipe.

    Raises:
        CheckpointError: When there is no checkpoint of the run's last step, or it is of another optimizer or model.

    Source:
        ST-MoE (arXiv:2202.08906) table 20: 86.9 with slots kept and 85.9 with new ones, for the best sparse setting.
    """
    path = latest_checkpoint(folder)
    advice = "or start without slots: --optimizer_slots reset."
    if path is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint whose optimizer slots could be kept. Give the model/ folder of a run that "
            f"still has its checkpoints beside it, {advice}"
        )
    step, _, recipe = load_state(path)
    if (steps := recipe["training"]["steps"]) != step:
        raise CheckpointError(f"{path} is not of the last step, {steps}, as the model is. Finish that run, {advice}")
    if (before := recipe["optim"]["optimizer"]) != name:
        raise CheckpointError(f"{path} has slots of {before}, not of {name}. Set optim.optimizer to {before}, {advice}")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    saved = {key: shape for key, shape in read_shapes(path).items() if owner(key) in trained}
    if not saved:
        raise CheckpointError(f"{path} has no slots of any parameter that trains now. Train others, {advice}")
    with fresh_state(model, optimizer, {owner(key) for key in saved}):
        state = optimizer_state(model, optimizer, layouts)
        refuse_misfits(path, "optimizer", "Its state:", saved, state)
        read_into(path, state)
    put_numbers(model, optimizer, state)
