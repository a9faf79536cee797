"""Goodput of a planned run for each way to survive failures.

Once in every MTBF a failure costs idle time, and work that is redone or missing until the lost ranks
are back. Failures during the repair of another one are not counted.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from moe.checks import check
from moe.distributed.mesh import MeshConfig
from moe.planning.table import parse_quantity

_SECONDS_BY_UNIT = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_MINUTE = 60
_HOUR = 3600


class FailureCosts(NamedTuple):
    """Times around a failure, in seconds.

    Attributes:
        mtbf: Mean time between failures of all ranks of a mesh together.
        restart: Time from a failure until all ranks, or the ranks of a replica group, are back.
        checkpoint: Time from one checkpoint to the next.
        stall: Time from the loss of a replica group until the others continue.
        heal: Time for which the others wait for a group that comes back.
    """

    mtbf: float
    restart: float = 10 * _MINUTE
    checkpoint: float = 30 * _MINUTE
    stall: float = 10
    heal: float = 30


class Survival(NamedTuple):
    """A way to survive failures, and its goodput.

    Attributes:
        name: Name in tables.
        idle: Idle seconds for each failure.
        redone: Seconds of work that is redone or missing for each failure.
        spare_share: Share of all devices that are idle while nothing fails.
        goodput: Share of the time in which the devices do useful work, 0 to 1.
    """

    name: str
    idle: float
    redone: float
    spare_share: float
    goodput: float


def effective_time(lost: float, mtbf: float) -> float:
    """Returns the share of time that is left if each failure costs `lost`; 0 to 1.

    Args:
        lost: Time lost to each failure, in any unit.
        mtbf: Mean time between failures, in the same unit.
    """
    return max(0.0, 1 - lost / mtbf)


def survivals(mesh: MeshConfig, costs: FailureCosts) -> list[Survival]:
    """Returns the ways in which a mesh can survive failures, the plainest first.

    Replica groups need replicas: a mesh of one has a restart alone.
    """
    # Lost work: on average half of the time between two checkpoints.
    ways = [("full restart", costs.restart, costs.checkpoint / 2, 0.0)]
    replicas = mesh.dp_replicate
    if replicas > 1:
        # The others stall twice: when a group is lost, and when it is back. With constant work, one of
        # them has two shares of a batch, and the rest wait for it. With a spare no work is missing,
        # and one group in R + 1 is idle.
        idle = costs.stall + costs.heal
        slower = math.ceil(replicas / (replicas - 1))
        ways += [
            ("replica groups, constant work", idle, costs.restart * (1 - 1 / slower), 0.0),
            ("replica groups, shrink", idle, costs.restart / replicas, 0.0),
            ("replica groups and a spare", idle, 0.0, 1 / (replicas + 1)),
        ]

    survivals = []
    for name, idle, redone, spare_share in ways:
        goodput = effective_time(idle + redone, costs.mtbf) * (1 - spare_share)
        survivals.append(Survival(name, idle, redone, spare_share, goodput))
    return survivals


def parse_duration(name: str, text: str) -> float:
    """Returns the seconds of a text like `3h`, `18min` or `30s`.

    Args:
        name: Name of the setting, for the message.
        text: A number and a unit: s, min, h or d.

    Raises:
        ConfigError: If it is not a time.
    """
    seconds = parse_quantity(text, _SECONDS_BY_UNIT)
    expected = "a time above 0 with a unit, e.g. 3h, 18min, 30s or 2d"
    check(0 < seconds < math.inf, name, text, expected)
    return seconds


def show_duration(seconds: float) -> str:
    """Returns seconds as a text, e.g. `2 h 5 min`, `7 min 30 s` or `1.25 s`."""
    if round(seconds, 2) < _MINUTE:
        return f"{seconds:.2f} s"
    if round(seconds) < _HOUR:
        minutes, rest = divmod(round(seconds), _MINUTE)
        return f"{minutes} min {rest} s"
    hours, rest = divmod(round(seconds / _MINUTE), _MINUTE)
    return f"{hours:,} h {rest} min"


def show_survivals(mesh: MeshConfig, costs: FailureCosts, ways: Sequence[Survival]) -> str:
    """Returns a table of the ways to survive failures."""
    device = costs.mtbf * mesh.num_ranks / _HOUR
    lines = [
        f"goodput of {mesh.num_ranks:,} ranks with a failure every {show_duration(costs.mtbf)} "
        f"(a device fails every {device:,.0f} h)",
        f"{'':<31}{'idle':>12}{'work lost':>14}{'spare':>9}{'goodput':>10}",
    ]
    for way in ways:
        lines.append(
            f"  {way.name:<29}{show_duration(way.idle):>12}{show_duration(way.redone):>14}"
            f"{way.spare_share:>9.1%}{way.goodput:>10.1%}"
        )
    if len(ways) == 1:
        lines.append("  Replica groups need mesh.dp_replicate above 1.")
    return "\n".join(lines)
