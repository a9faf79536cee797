"""Warnings of a training run: experts that die, routers that saturate, drops that rise.

The training loop and RouterStatsCallback tell it what they log; each layer is warned of once for
each kind.
"""

import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe.sparse.editing import LayerKey
from moe.sparse.stats import RouterStats
from moe.tracing.trace import layer_name

logger = logging.getLogger(__name__)

INTERVALS = 10
"""Logs in a row without a token after which an expert counts as dead; drops are compared over as many."""

FAIR_SHARE = 20
"""Choices that an even share of those logs must hold: by chance an expert then misses all of them once in e^20."""

MAX_LOGIT = 128.0
"""Largest |logit| of a healthy router. From 128 on, bfloat16 steps by 1 and takes 128.5 for 128, which moves the
largest probability among ten by a third (ST-MoE, arXiv:2202.08906, footnote 7)."""

DROPPED = 0.15
"""Share of dropped tokens that costs little (ST-MoE, table 5: 10 to 15 %)."""

RISE = 1.1
"""Factor by which the mean drops of INTERVALS logs must exceed those of as many logs before."""

STANDARD_ERRORS = 4
"""How many of them the rise must be; the spread between logs tells it from noise."""

Kind = Literal["dead", "saturated", "drops"]


class _LayerLog(NamedTuple):
    """What one log says of one layer.

    Attributes:
        dropped: Share of the tokens that reached no expert.
        load: <int64>[E] choices that asked for each expert.
    """

    dropped: float
    load: Tensor


class RouterHealth:
    """Watches the sparse layers of a model that is trained, and warns through Python's logging.

    Args:
        layers: Names of the sparse layers, the encoder's first.
    """

    def __init__(self, layers: Sequence[LayerKey]) -> None:
        self._layers = layers
        self._warned: set[tuple[LayerKey, Kind]] = set()
        self._logs: dict[LayerKey, deque[_LayerLog]] = defaultdict(
            lambda: deque(maxlen=2 * INTERVALS)
        )

    def observe(self, step: int, stats: Sequence[RouterStats]) -> None:
        """Looks at the statistics of a log.

        Args:
            step: Updates so far.
            stats: Statistics of each layer in training, over one update or several.
        """
        # All layers are read from the device at once.
        rows = []
        for layer in stats:
            counts = torch.stack([layer.num_tokens, layer.dropped_tokens])
            rows.append(torch.cat([counts, layer.expert_load]))
        sizes = [row.numel() for row in rows]
        by_layer = torch.cat(rows).cpu().split(sizes) if rows else ()

        for key, row in zip(self._layers, by_layer, strict=True):
            num_tokens, num_dropped = row[:2].tolist()
            dropped = num_dropped / max(1, num_tokens)
            logs = self._logs[key]
            logs.append(_LayerLog(dropped, row[2:]))
            self._look_for_dead_experts(key, list(logs)[-INTERVALS:], step)
            self._look_for_rising_drops(key, [log.dropped for log in logs], step)

    def observe_logits(self, step: int, max_logits: Mapping[LayerKey, float]) -> None:
        """Looks at the largest |logit| of each layer."""
        for key, value in max_logits.items():
            if value > MAX_LOGIT:
                text = (
                    f"the router of {layer_name(key)} saturates: its largest |logit| is {value:.1f} after step "
                    f"{step:,}, above {MAX_LOGIT:g}, where bfloat16 takes 128.5 for 128. Raise router_z_loss_weight "
                    "or lower the learning rate."
                )
                self._warn_once(key, "saturated", text)

    def _look_for_dead_experts(self, key: LayerKey, logs: Sequence[_LayerLog], step: int) -> None:
        load = torch.stack([log.load for log in logs]).sum(dim=0)  # [E]
        share = float(load.sum()) / load.numel()
        dead = (load == 0).nonzero().flatten().tolist()
        if len(logs) < INTERVALS or share < FAIR_SHARE or not dead:
            return

        numbers = ", ".join(map(str, dead))
        text = (
            f"{len(dead)} of {load.numel()} experts of {layer_name(key)} got no token in the last {INTERVALS} logs "
            f"until step {step:,}, where an even share is {share:,.0f}: {numbers}, counted from 0. They learn nothing. "
            "Raise load_balance_loss_weight, or train fewer experts."
        )
        self._warn_once(key, "dead", text)

    def _look_for_rising_drops(self, key: LayerKey, dropped: Sequence[float], step: int) -> None:
        if len(dropped) < 2 * INTERVALS:
            return

        earlier = dropped[:INTERVALS]
        later = dropped[INTERVALS:]
        before = statistics.fmean(earlier)
        now = statistics.fmean(later)
        variance = (statistics.variance(earlier) + statistics.variance(later)) / INTERVALS
        is_rise = now > RISE * before and now - before > STANDARD_ERRORS * math.sqrt(variance)
        if now > DROPPED and is_rise:
            text = (
                f"{layer_name(key)} drops more and more tokens: {now:.1%} in the last {INTERVALS} logs until step "
                f"{step:,}, {before:.1%} in those before; up to {DROPPED:.0%} costs little. Raise "
                "load_balance_loss_weight or capacity_factor."
            )
            self._warn_once(key, "drops", text)

    def _warn_once(self, key: LayerKey, kind: Kind, text: str) -> None:
        if (key, kind) not in self._warned:
            self._warned.add((key, kind))
            logger.warning("%s", text[0].upper() + text[1:])
