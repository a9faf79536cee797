"""Random numbers of tensor-parallel ranks: their own where they hold shards, the same elsewhere.

Ranks of `tp` see the same tokens, so that their default generators have the same state: what every
one of them computes, such as the dropout of the residual stream, drops the same numbers. Of hidden
units and heads each rank has others, which must not be dropped together.
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
    """Returns a context in which each tensor-parallel rank draws numbers of its own.

    Its seed is one number of the CPU's default generator plus the rank. Behind the context
    generators are where that one draw left them, on all ranks alike. So there is no further state
    to save: activation checkpointing and a resumed run, which restore or seed the default
    generators, draw the same again. A compiled graph breaks here.

    Args:
        group: Tensor-parallel ranks; None for one process, which draws as it does without this.
        device: Where the numbers are drawn.
        rate: Dropout inside the context; 0 draws nothing.

    Source:
        Megatron-LM `CudaRNGStatesTracker.fork`. Differs: the tracker keeps a generator state for
        each rank, which checkpoints must hold.
    """
    if group is None or not rate:
        return contextlib.nullcontext()
    return _own_random_numbers(group, device)


@torch.compiler.disable()
@contextlib.contextmanager
def _own_random_numbers(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    seed = int(torch.randint(_MAX_SEED, (), device="cpu")) + dist.get_rank(group)
    with seeded_random_numbers(seed, device):
        yield


@contextlib.contextmanager
def seeded_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the default generators of the CPU and of a device, and restores them at the end."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield
