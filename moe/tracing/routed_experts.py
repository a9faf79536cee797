"""Routed experts in vLLM's layout, int [L, layers, K] for each sequence: written from a trace, and read to be replayed.

Comes after `trace`, before `replay`. A file is a NumPy archive (.npz) with the arrays `encoder.0`,
`decoder.0`, `encoder.1` and so on, a pair for each example; a stack without sparse layers has none.

Source:
    vLLM's `CompletionOutput.routed_experts`. Differs: -1 is a choice that was not requested, as a second expert may be.
"""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moe.errors import DataError
from moe.files import whole_file
from moe.opening import open_to_read
from moe.parsing import reading
from moe.sparse.editing import Stack
from moe.tracing.trace import ACCEPTED, NOT_REQUESTED, STACKS, LayerTrace, StackTrace, Trace

NO_EXPERT = -1


def routed_experts(trace: Trace, stack: Stack) -> list[NDArray[np.int32]]:
    """Returns <int32>[L, layers, K] for each example: the experts of each token, -1 for a choice not requested.

    Layers with fewer choices are filled with -1. Choices that were refused for lack of capacity are
    there like all others.

    Raises:
        DataError: When the stack has no sparse layer.
    """
    part = trace.stack(stack)
    if not part.layers:
        raise DataError(f"The {stack} of the trace has no sparse layer. Choose the other stack.")

    most = _num_choices(part)
    columns: list[Tensor] = []
    for layer in part.layers:
        missing = most - layer.choices.shape[1]
        columns.append(F.pad(layer.choices.int(), (0, missing), value=NO_EXPERT))  # [N, K]
    experts = torch.stack(columns, dim=1)  # [N, layers, K]
    lengths = part.starts.diff().tolist()
    return [of_example.numpy() for of_example in experts.split(lengths)]


def with_routed_experts(trace: Trace, stack: Stack, experts: list[NDArray[np.int32]]) -> Trace:
    """Returns a trace of the same tokens with other choices, all of them accepted.

    Replay it with weights of the router (`weights="recompute"`): a trace of experts has none.

    Args:
        trace: A trace of the examples.
        stack: The stack whose choices are replaced.
        experts: <int>[L, layers, K] for each example, K as in the trace; -1 for no expert.

    Raises:
        DataError: When an array does not fit the trace.
    """
    part = trace.stack(stack)
    lengths = part.starts.diff().tolist()
    if len(experts) != len(lengths):
        raise DataError(
            f"There are routed experts of {len(experts)} examples, but the trace has {len(lengths)}. Give those of the "
            "same examples."
        )
    for number, (array, length) in enumerate(zip(experts, lengths, strict=True)):
        shape = (length, len(part.layers), _num_choices(part))
        if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
            raise DataError(
                f"The routed experts of example {number} in the {stack} are {array.dtype} {list(array.shape)}; "
                f"expected integers {list(shape)}."
            )

    # Other engines write unsigned integers, with which torch does not compute.
    signed = [array.astype(np.int64) for array in experts]
    chosen = torch.from_numpy(np.concatenate(signed))  # [N, layers, K]
    layers = tuple(
        _with_choices(layer, chosen[:, number]) for number, layer in enumerate(part.layers)
    )
    return trace._replace(**{stack: part._replace(layers=layers)})


def _num_choices(part: StackTrace) -> int:
    """Returns the most choices of a token in a layer, K."""
    return max(layer.expert.shape[1] for layer in part.layers)


def _with_choices(layer: LayerTrace, chosen: Tensor) -> LayerTrace:
    """Returns a layer with the choices <int>[N, K]."""
    chosen = chosen[:, : layer.expert.shape[1]]
    num_experts = layer.facts.num_experts
    smallest, largest = int(chosen.min()), int(chosen.max())
    if smallest < NO_EXPERT or largest >= num_experts:
        raise DataError(
            f"The routed experts of {layer.key} are from {smallest} to {largest}; expected 0 to {num_experts - 1}, or "
            "-1 for none."
        )
    in_order = chosen.sort(dim=1).values
    if ((in_order.diff(dim=1) == 0) & (in_order[:, 1:] != NO_EXPERT)).any():
        raise DataError(
            f"The routed experts of {layer.key} name the same expert twice for a token; expected different experts, or "
            "-1 for none."
        )
    is_chosen = chosen != NO_EXPERT
    state = torch.where(is_chosen, ACCEPTED, NOT_REQUESTED).to(layer.state.dtype)
    return layer._replace(
        expert=chosen.to(layer.expert.dtype).where(is_chosen, layer.expert),
        state=state,
        gate=torch.zeros(chosen.shape),
        first=chosen[:, 0].to(layer.first.dtype),
    )


def write_routed_experts(trace: Trace, path: Path) -> None:
    """Writes the routed experts of a trace to an .npz file, whole or not at all."""
    arrays: dict[str, NDArray[np.int32]] = {}
    for stack in STACKS:
        if trace.stack(stack).layers:
            for number, experts in enumerate(routed_experts(trace, stack)):
                arrays[f"{stack}.{number}"] = experts
    with whole_file(path) as partial, partial.open("wb") as file:
        cast(Any, np.savez_compressed)(file, **arrays)


def read_routed_experts(path: Path, trace: Trace) -> Trace:
    """Returns a trace with the choices of an .npz file; see `with_routed_experts`.

    Raises:
        DataError: When the file is missing or damaged, or belongs to other examples.
    """
    advice = "Give a file that `stmoe inspect record --routed-experts` wrote."
    with (
        reading(path, advice=advice, problem="cannot be read as routed experts"),
        open(path, "rb", opener=open_to_read) as file,
    ):
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        arrays = {name: archive[name] for name in archive.files}

    for stack in STACKS:
        if trace.stack(stack).layers:
            names = [f"{stack}.{number}" for number in range(trace.facts.num_examples)]
            missing = [name for name in names if name not in arrays]
            if missing:
                raise DataError(
                    f"{path} has no array {missing[0]!r}. Give the routed experts of the {trace.facts.num_examples} "
                    "examples of the trace."
                )
            try:
                trace = with_routed_experts(trace, stack, [arrays[name] for name in names])
            except DataError as error:
                raise DataError(f"{path}: {error}") from error
    return trace
