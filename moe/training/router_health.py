"""Warnings of a training run: experts that die, drops that rise.

The training loop and RouterStatsCallback pass it what they log; each layer is reported once for each
kind of trouble.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from moe.models.configuration import STMoEConfig
from moe.sparse.editing import LayerKey
from moe.sparse.stats import RouterStats
from moe.tracing.trace import layer_name

logger = logging.getLogger(__name__)

# Number of consecutive logs without a token after which an expert counts as dead; drops are
# compared over the same number.
NUM_LOGS = 10

# Expected choices per expert above which an unused expert is not due to chance: if all experts were
# equally probable, one would be unused with probability e^-20.
FAIR_SHARE = 20

# Share of dropped tokens that costs little.
# Source: ST-MoE (arXiv:2202.08906), table 5: 10 to 15 %.
TOLERATED_DROPS = 0.15

# How much drops must rise: by this factor, and by this many standard errors of the mean, estimated
# from the spread between logs.
RISE = 1.1
STANDARD_ERRORS = 4

_MOST_NAMED = 8

_REPORTED = ("load_balance_loss", "router_z_loss", "fraction_dropped", "entropy")
_REPORTED_LOAD = ("load_cv", "max_over_mean", "dead_experts")

Trouble = Literal["dead", "drops"]


class RouterHealth:
    """Watches the sparse layers of a model in training, and warns through Python's logging.

    Args:
        layers: Names of the sparse layers, see `layer_keys`.
    """

    def __init__(self, layers: Sequence[LayerKey]) -> None:
        self._warned: set[tuple[LayerKey, Trouble]] = set()
        # For each log, the share of tokens that reached no expert and the load <int64>[E].
        self._logs: dict[LayerKey, deque[tuple[float, Tensor]]] = {}
        for key in layers:
            self._logs[key] = deque(maxlen=2 * NUM_LOGS)

    def observe(self, step: int, stats: Sequence[RouterStats]) -> None:
        """Checks the statistics of a log.

        Args:
            step: Updates so far.
            stats: Statistics of each layer in training, over one update or several.
        """
        new_logs = _read_logs(stats)
        for (key, logs), log in zip(self._logs.items(), new_logs, strict=True):
            logs.append(log)
            self._look_for_dead_experts(key, step)
            self._look_for_rising_drops(key, step)

    def _look_for_dead_experts(self, key: LayerKey, step: int) -> None:
        logs = list(self._logs[key])[-NUM_LOGS:]
        if len(logs) < NUM_LOGS:
            return

        # Experts without a token, if a fair share would make this unlikely.
        load = torch.stack([load for _, load in logs]).sum(dim=0)  # [E]
        num_experts = load.numel()
        fair_share = float(load.sum()) / num_experts
        dead = (load == 0).nonzero().flatten().tolist()
        if not dead or fair_share < FAIR_SHARE:
            return

        numbers = ", ".join(map(str, dead[:_MOST_NAMED]))
        more = " and others" if len(dead) > _MOST_NAMED else ""
        text = (
            f"{len(dead)} of {num_experts} experts of {layer_name(key)} are dead: "
            f"no token asked for them in the last {NUM_LOGS} logs until step {step:,}, "
            f"where an even share is {fair_share:,.0f}. "
            f"Counted from 0 they are {numbers}{more}. "
            "Raise load_balance_loss_weight, or train fewer experts."
        )
        self._warn_once(key, "dead", text)

    def _look_for_rising_drops(self, key: LayerKey, step: int) -> None:
        dropped = [dropped for dropped, _ in self._logs[key]]
        if len(dropped) < 2 * NUM_LOGS:
            return

        # The later half of the logs against the earlier.
        earlier = dropped[:NUM_LOGS]
        later = dropped[NUM_LOGS:]
        before = statistics.fmean(earlier)
        now = statistics.fmean(later)

        # Welch's standard error of the difference.
        variance = statistics.variance(earlier) + statistics.variance(later)
        standard_error = math.sqrt(variance / NUM_LOGS)
        is_rise = now > RISE * before and now - before > STANDARD_ERRORS * standard_error
        if now <= TOLERATED_DROPS or not is_rise:
            return

        text = (
            f"More and more tokens are dropped in {layer_name(key)}: "
            f"{now:.1%} in the last {NUM_LOGS} logs until step {step:,}, "
            f"{before:.1%} in those before; up to {TOLERATED_DROPS:.0%} costs little. "
            "Raise load_balance_loss_weight or capacity_factor."
        )
        self._warn_once(key, "drops", text)

    def _warn_once(self, key: LayerKey, trouble: Trouble, text: str) -> None:
        if (key, trouble) not in self._warned:
            self._warned.add((key, trouble))
            logger.warning("%s", text)


def layer_keys(config: STMoEConfig) -> list[LayerKey]:
    """Returns the names of the sparse layers of a model, the encoder's first."""
    keys: list[LayerKey] = []
    for layer in range(config.num_sparse_encoder_layers):
        keys.append(("encoder", layer))
    for layer in range(config.num_sparse_decoder_layers):
        keys.append(("decoder", layer))
    return keys


def _read_logs(stats: Sequence[RouterStats]) -> list[tuple[float, Tensor]]:
    """Returns dropped share and load of each layer; waits for the device once."""
    if not stats:
        return []

    # Two counts and a load [E] of each layer, in one transfer.
    rows = []
    for layer in stats:
        rows.append(
            torch.cat([torch.stack([layer.num_tokens, layer.dropped_tokens]), layer.expert_load])
        )
    sizes = [row.numel() for row in rows]

    logs = []
    for row in torch.cat(rows).cpu().split(sizes):
        num_tokens, num_dropped = row[:2].tolist()
        logs.append((num_dropped / max(1, num_tokens), row[2:]))
    return logs


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
