"""The optimizer's slots of an earlier run, kept for fine-tuning; the paper finds that better than
fresh ones.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from typing_extensions import TypedDict

from moe.checkpoint.index import read_into, read_shapes
from moe.checkpoint.integrity import newest_whole_checkpoint
from moe.checkpoint.run_state import STATE_FILE, load_state
from moe.checkpoint.train_state import fresh_state, optimizer_state, put_numbers
from moe.checkpoint.writer import owner, refuse_misfits
from moe.distributed.sharding import Layout
from moe.errors import CheckpointError
from moe.parsing import to_record


class _Steps(TypedDict):
    """Of a recipe's `training`, what slots depend on."""

    steps: int


class _Optimizer(TypedDict):
    """Of a recipe's `optim`, likewise."""

    optimizer: str


class _Settings(TypedDict):
    """Of a recipe, likewise."""

    training: _Steps
    optim: _Optimizer


def load_optimizer_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: Mapping[str, Layout],
    name: str,
) -> None:
    """Gives a new optimizer the state that an earlier run ended with, for the parameters that train
    now.

    Adafactor's count of steps comes with its moments: at a count of 0 it would forget them in one
    step.

    Args:
        folder: The checkpoints of that run.
        model: With the weights that the run ended with, on any mesh; every rank must call it.
        optimizer: Of the parameters that train.
        layouts: Where each parameter lies.
        name: Of the optimizer, as in a recipe.

    Raises:
        CheckpointError: When there is no checkpoint of the run's last step, or it is of another
            optimizer or model.

    Source:
        ST-MoE (arXiv:2202.08906) table 20: 86.9 with slots kept and 85.9 with new ones, for the
        best sparse setting.
    """
    advice = "or start without slots: --optimizer_slots reset."
    path, _ = newest_whole_checkpoint(folder, advice=f"Restore their files from a copy, {advice}")
    if path is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint whose optimizer slots could be kept. Give the model/ folder of a run that "
            f"still has its checkpoints beside it, {advice}"
        )

    # They are of the run's last step, and of the same optimizer.
    state = load_state(path)
    where = f"{path / STATE_FILE}: recipe"
    settings = to_record(
        _Settings, state.recipe, where=where, advice=f"Restore it, {advice}", error=CheckpointError
    )
    steps = settings["training"]["steps"]
    if steps != state.step:
        raise CheckpointError(
            f"{path} is not of the last step, {steps}, as the model is. Finish that run, {advice}"
        )
    before = settings["optim"]["optimizer"]
    if before != name:
        raise CheckpointError(
            f"{path} has slots of {before}, not of {name}. Set optim.optimizer to {before}, {advice}"
        )

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    saved = {key: shape for key, shape in read_shapes(path).items() if owner(key) in trained}
    if not saved:
        raise CheckpointError(
            f"{path} has no slots of any parameter that trains now. Train others, {advice}"
        )
    with fresh_state(model, optimizer, {owner(key) for key in saved}):
        slots = optimizer_state(model, optimizer, layouts)
        refuse_misfits(path, "optimizer", "Its state:", saved, slots)
        read_into(path, slots)
    put_numbers(model, optimizer, slots)
