"""Loads the optimizer's state of an earlier run for fine-tuning.

The paper calls it the optimizer's slots, and finds that keeping it is better than fresh state.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from moe.checkpoint.index import read_into, read_shapes
from moe.checkpoint.integrity import newest_whole_checkpoint
from moe.checkpoint.run_state import load_state
from moe.checkpoint.train_state import optimizer_tensors, parameter_of, prepare_state, set_numbers
from moe.checkpoint.writer import refuse_misfits
from moe.distributed.sharding import Layout
from moe.errors import CheckpointError

_ADVICE = "or start without optimizer state: --optimizer_state reset."


def load_optimizer_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: Mapping[str, Layout],
    name: str,
) -> None:
    """Loads the final optimizer state of an earlier run, for the parameters that train.

    This includes Adafactor's count of steps: with a count of 0 it would discard its moments in one
    step.

    Args:
        folder: Checkpoints of that run.
        model: Model with the run's final weights, on any mesh; every rank must call it.
        optimizer: Optimizer of the parameters that train.
        layouts: Layout of each parameter.
        name: Name of the optimizer, as in a recipe.

    Raises:
        CheckpointError: When there is no checkpoint of the run's last step, or it is of another
            optimizer or model.

    Source:
        ST-MoE (arXiv:2202.08906) table 20: 86.9 with slots kept and 85.9 with new ones, for the
        best sparse setting.
    """
    advice = f"Restore their files from a copy, {_ADVICE}"
    path = newest_whole_checkpoint(folder, advice=advice)
    if path is None:
        raise CheckpointError(
            f"{folder} has no checkpoint whose optimizer state could be kept. Give the model/ folder of a run that "
            f"still has its checkpoints beside it, {_ADVICE}"
        )
    _check_settings(path, name)

    # State of parameters that are frozen now stays in the file.
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    shapes = read_shapes(path)
    saved = {key: shape for key, shape in shapes.items() if parameter_of(key) in trained}
    if not saved:
        raise CheckpointError(
            f"{path} has no optimizer state of any parameter that trains now. Train others, {_ADVICE}"
        )

    # Names and shapes are checked before the first number is read.
    prepare_state(model, optimizer, {parameter_of(key) for key in saved})
    state = optimizer_tensors(model, optimizer, layouts)
    refuse_misfits(path, "optimizer", saved, state)
    read_into(path, state)
    set_numbers(model, optimizer, state)


def _check_settings(path: Path, name: str) -> None:
    """Raises a CheckpointError unless a checkpoint is of its run's last step and of this optimizer."""
    state = load_state(path)
    steps = state.recipe["training"]["steps"]
    if steps != state.step:
        raise CheckpointError(
            f"{path} is not from the last step, {steps}, but the model is. Finish that run, {_ADVICE}"
        )
    earlier_name = state.recipe["optim"]["optimizer"]
    if earlier_name != name:
        raise CheckpointError(
            f"{path} has optimizer state of {earlier_name}, not of {name}. Set optim.optimizer to {earlier_name}, "
            f"{_ADVICE}"
        )
