"""What a training run says of its routers: their numbers in logs, and a warning of experts that die.

The training loop and RouterStatsCallback pass it what they log.
"""

import logging
from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from moe.sparse.editing import LayerKey
from moe.sparse.stats import RouterStats
from moe.tracing.trace import layer_name

logger = logging.getLogger(__name__)

# Number of consecutive logs without a token after which an expert counts as dead.
NUM_LOGS = 10

# Expected choices per expert above which an unused expert is not due to chance: if all experts were
# equally probable, one would be unused with probability e^-20.
FAIR_SHARE = 20

_REPORTED = ("load_balance_loss", "router_z_loss", "fraction_dropped", "entropy")
_REPORTED_LOAD = ("load_cv", "max_over_mean", "dead_experts")


class DeadExperts:
    """Warns once of each sparse layer some of whose experts receive no tokens, through Python's logging.

    Args:
        layers: Names of the sparse layers, see `sparse_layers`.
    """

    def __init__(self, layers: Collection[LayerKey]) -> None:
        self._layers = list(layers)
        self._warned: set[LayerKey] = set()
        # For each log, the loads <int64>[E] of all layers one after the other.
        self._loads: deque[Tensor] = deque(maxlen=NUM_LOGS)

    def observe(self, step: int, stats: Sequence[RouterStats]) -> None:
        """Checks the statistics of a log.

        Args:
            step: Updates so far.
            stats: Statistics of each layer in training, over one update or several.
        """
        if not stats:
            return
        self._loads.append(torch.cat([layer.expert_load for layer in stats]).cpu())
        if len(self._loads) < NUM_LOGS:
            return

        # Experts without a token, if a fair share would make this unlikely.
        sizes = [layer.expert_load.numel() for layer in stats]
        loads = torch.stack(list(self._loads)).sum(dim=0).split(sizes)
        for key, load in zip(self._layers, loads, strict=True):
            dead = (load == 0).nonzero().flatten().tolist()
            fair_share = float(load.sum()) / len(load)
            if dead and fair_share >= FAIR_SHARE and key not in self._warned:
                self._warned.add(key)
                logger.warning(
                    f"{len(dead)} of {len(load)} experts of {layer_name(key)} are dead: they received no token in the "
                    f"last {NUM_LOGS} logs until step {step:,}, where an even share is {fair_share:,.0f}. Counted "
                    f"from 0 they are {', '.join(map(str, dead))}. Raise load_balance_loss_weight, or train fewer "
                    "experts."
                )


def router_values(stack: str, stats: RouterStats) -> dict[str, float]:
    """Returns `router/{stack}/...`: the numbers of a stack's routers that every training run reports.

    Args:
        stack: `encoder` or `decoder`.
        stats: Summed over the layers of the stack, see `RouterStats.sum`. Without a common load its
            numbers are left out.
    """
    summary = stats.summary()
    has_load = stats.expert_load.numel() > 0
    reported = (*_REPORTED, *_REPORTED_LOAD) if has_load else _REPORTED
    return {f"router/{stack}/{name}": summary[name] for name in reported}
