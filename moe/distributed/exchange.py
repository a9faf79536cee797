"""Exchanges between ranks; with one rank, or without torch.distributed, they change nothing."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sum_over_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns the sum of <any>[...] over the ranks of a group, the same on each; carries no gradient.

    Args:
        x: This rank's part; left as it is.
        group: Ranks that take part; None for all.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return x
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total
