"""Random numbers on tensor-parallel ranks: independent for shards, equal for everything else.

Ranks of `tp` see the same tokens, and their default generators have the same state, so that dropout
of the residual stream is equal on all of them. Each rank has different hidden units and attention
heads, whose dropout must be independent.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_MAX_SEED = 2**62


def tp_random_numbers(
    group: ProcessGroup | None, device: torch.device, rate: float
) -> AbstractContextManager[None]:
    """Returns a context in which each tensor-parallel rank draws its own random numbers.

    A rank seeds its default generators with one draw of the CPU's generator plus its rank, and
    restores them afterwards. All ranks leave the context in the same state, and no further state must
    be saved: activation checkpointing and resumed runs, which restore or seed the default generators,
    draw the same numbers again. torch.compile breaks the graph here.

    Args:
        group: Tensor-parallel ranks; None for one process, for which nothing changes.
        device: Device of the activations.
        rate: Dropout rate inside the context; nothing changes for 0.

    Source:
        Megatron-LM `CudaRNGStatesTracker.fork`. Differs: the tracker keeps a second generator
        state on each rank, which checkpoints have to hold.
    """
    if group is None or not rate:
        return contextlib.nullcontext()
    return _own_random_numbers(group, device)


@torch.compiler.disable()
@contextlib.contextmanager
def _own_random_numbers(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    seed = int(torch.randint(_MAX_SEED, (), device="cpu")) + dist.get_rank(group)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield
