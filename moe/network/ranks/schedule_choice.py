"""The schedule named by a recipe: an algorithm, a grid of ranks, its dead ranks, the wire format.

    ring                                        a ring of all ranks
    torus 4x4                                   ranks numbered row by row on a grid of 4 rows of 4
    row_pair_clients_1 4x4 without 1,2,5,6      the 12 live ranks of 16
    torus 4x4 in bfloat16                       messages are rounded, sums stay float32

The ranks of a group are the live ranks of the grid in their order.
"""

import math
import re
from dataclasses import dataclass

from moe.checks import check
from moe.errors import ConfigError
from moe.network.algorithms import Algorithm
from moe.network.schedule import Schedule
from moe.network.topology import Topology, grid
from moe.registry import Registry

_PATTERN = re.compile(
    r"(?P<algorithm>[a-z]\w*)"
    r"( (?P<shape>\d{1,4}(x\d{1,4})*)( without (?P<dead>\d{1,7}(, ?\d{1,7})*))?)?"
    r"( in (?P<wire>bfloat16))?"
)


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule by its algorithm and grid.

    Attributes:
        name: Name of the setting, for messages.
        text: Text of the user.
        algorithm: Algorithm that builds it.
        shape: Size of each axis of the grid, slowest first; empty for one ring of all ranks.
        dead: Ranks of the grid that have failed.
        bfloat16: Whether messages are rounded to bfloat16.
    """

    name: str
    text: str
    algorithm: Algorithm
    shape: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    bfloat16: bool = False

    def check_group(self, size: int, what: str) -> None:
        """Raises unless the schedule can be built for a group of ranks.

        Args:
            size: Ranks of the group.
            what: Name of the group, used in messages.

        Raises:
            ConfigError: If the grid has other ranks, or the algorithm does not fit it.
        """
        num_live = math.prod(self.shape) - len(self.dead) if self.shape else size
        if num_live != size:
            raise ConfigError(
                f"{self.name} is {self.text!r}, a grid with {num_live} live ranks, but {what} has "
                f"{size}. Choose a grid of {size} live ranks, or none for one ring of all."
            )

        network = self.topology(size)
        reason = self.algorithm.unfit(network)
        if reason:
            raise ConfigError(
                f"{self.name} is {self.text!r}, which cannot be built for {what} ({network.name}): "
                f"{reason} Choose another algorithm or grid."
            )

    def topology(self, size: int) -> Topology:
        """Returns a network of `size` ranks: the grid, or a ring without one. Its rates do not matter."""
        shape = self.shape or (size,)
        whole = grid(shape, wraps=True, bandwidth=1.0, latency=0.0)
        return whole.without(self.dead) if self.dead else whole

    def build(self, size: int, num_units: int) -> Schedule:
        """Returns the schedule for a group of `size` ranks."""
        return self.algorithm.build(self.topology(size), num_units)


def parse_schedule(name: str, text: str, registry: Registry[Algorithm]) -> ScheduleChoice:
    """Returns the schedule that a text names; see the module.

    Args:
        name: Name of the setting, for messages.
        text: Text of the user.
        registry: Algorithms to choose from.

    Raises:
        ConfigError: If the text cannot be read, or the algorithm does not exist.
    """
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        expected = "null, or a text such as ring, torus 4x4, or ring 4x4 without 5,6 in bfloat16"
        raise ConfigError(f"{name} is {text!r}; expected {expected}.")

    # A grid, and ranks of it.
    shape = tuple(_numbers(match["shape"], "x"))
    dead = tuple(_numbers(match["dead"], ","))
    check(all(shape), name, text, "sizes above 0")
    is_known = len(set(dead)) == len(dead) and all(rank < math.prod(shape) for rank in dead)
    check(is_known, name, text, f"different dead ranks from 0 to {math.prod(shape) - 1}")

    return ScheduleChoice(
        name=name,
        text=text,
        algorithm=registry.get(match["algorithm"]),
        shape=shape,
        dead=dead,
        bfloat16=match["wire"] is not None,
    )


def _numbers(text: str | None, separator: str) -> list[int]:
    return [int(part) for part in text.split(separator)] if text else []
