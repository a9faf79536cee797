"""Exports the experts of a trace in vLLM's layout, int [L, layers, K] for each example.

A file is a NumPy archive (.npz) with the arrays `encoder.0`, `decoder.0`, `encoder.1` and so on, a pair
for each example; a stack without sparse layers has none.

Source:
    vLLM's `CompletionOutput.routed_experts`. Differs: -1 is a choice that was not requested, as a second expert may be.
"""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from moe.files import whole_file
from moe.tracing.trace import STACKS, StackTrace, Trace


def write_routed_experts(trace: Trace, path: Path) -> None:
    """Writes the routed experts of a trace to an .npz file, whole or not at all."""
    arrays: dict[str, NDArray[np.int32]] = {}
    for stack in STACKS:
        if trace.stack(stack).layers:
            for number, experts in enumerate(routed_experts(trace.stack(stack))):
                arrays[f"{stack}.{number}"] = experts
    with whole_file(path) as partial, partial.open("wb") as file:
        cast(Any, np.savez_compressed)(file, **arrays)


def routed_experts(part: StackTrace) -> list[NDArray[np.int32]]:
    """Returns <int32>[L, layers, K] for each example: the experts of each token, -1 for a choice not requested.

    Layers with fewer choices are filled with -1. Choices that were refused for lack of capacity are
    there like all others.

    Args:
        part: A stack with sparse layers.
    """
    most = max(layer.expert.shape[1] for layer in part.layers)
    columns = []
    for layer in part.layers:
        missing = most - layer.choices.shape[1]
        columns.append(F.pad(layer.choices.int(), (0, missing), value=-1))  # [N, K]
    experts = torch.stack(columns, dim=1)  # [N, layers, K]
    return [of_example.numpy() for of_example in experts.split(part.starts.diff().tolist())]
