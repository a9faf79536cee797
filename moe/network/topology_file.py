"""Networks as files: YAML that a person writes, JSON that a measurement writes, the same keys in both.

    name: my cluster
    two_level: {nodes: 4, per_node: 8, inside: {bandwidth: 450 GB/s, latency: 3 us}, across: ...}
    device_flops: 989 TFLOP/s              # peak of a rank; optional
    notes: [what was measured, and how]    # printed with every plan; optional

One of `grid`, `switch`, `two_level` and `links` describes the network. Bandwidths are per
direction: `70 GB/s`, `400 Gb/s`, or a number of bytes a second; latencies `1.5 us`, or seconds.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from moe.checks import check, check_integer
from moe.errors import ConfigError
from moe.network.topology import Links, Rate, Topology, grid, switch, two_level
from moe.parsing import read_json, read_yaml, to_record

_MOST_RANKS = 8_192
_MOST_LINKS = 1_000_000
_ADVICE = "Correct it; recipes/networks has examples."
_NUMBER = re.compile(
    r"\s*(\d{1,15}(?:\.\d{1,15})?(?:e[+-]?\d{1,2})?)\s*([A-Za-z]+(?:/s)?)\s*", re.I | re.ASCII
)

_BANDWIDTH_UNITS = {
    "B/s": 1.0,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "Mb/s": 1e6 / 8,
    "Gb/s": 1e9 / 8,
    "Tb/s": 1e12 / 8,
}
_LATENCY_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_FLOPS_UNITS = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}


@dataclass(frozen=True)
class Network:
    """A network, and the content of its file.

    Attributes:
        topology: Links and routes.
        notes: Sentences to print with every result, e.g. the source of the numbers.
        device_flops: Peak operations a second of a rank; None if unknown.
    """

    topology: Topology
    notes: tuple[str, ...] = ()
    device_flops: float | None = None


def read_network(path: Path) -> Network:
    """Returns the network of a file: JSON if its name ends in .json, else YAML.

    Raises:
        ConfigError: If the file cannot be read, a key is unknown or missing, or a value impossible;
            names the file and the key.
    """
    return parse_network(read_content(path), where=str(path))


def read_content(path: Path) -> Any:
    """Returns the content of a network file, unchecked.

    Raises:
        ConfigError: If it cannot be read, or is neither YAML nor JSON.
    """
    if path.suffix.lower() == ".json":
        advice = "Give the path of a network file."
        return read_json(path, advice=advice, error=ConfigError)
    return read_yaml(path)


def parse_network(content: Any, *, where: str = "the network") -> Network:
    """Returns the network that a mapping describes; see the module.

    Args:
        content: The mapping.
        where: Name of the network in messages, e.g. its file.

    Raises:
        ConfigError: If a key is unknown or missing, or a value impossible.
    """
    record = to_record(_NetworkFile, content, where=where, advice=_ADVICE, error=ConfigError)
    forms = [form for form in (record.grid, record.switch, record.two_level, record.links) if form]
    try:
        check(len(forms) == 1, "the form of a network", len(forms), f"exactly one of {_FORMS}")
        topology = forms[0].topology(record.name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Network(topology, tuple(record.notes), record.device_flops)


# ---------------------------------------------------------------------------
# The parts of a file


def _unit(units: Mapping[str, float], example: str) -> BeforeValidator:
    """Returns a validator that also accepts a text with a unit as a number."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = _NUMBER.fullmatch(value)
        if match is None or match[2] not in units:
            raise ValueError(
                f"expected a number with one of the units {', '.join(units)}, e.g. {example}"
            )
        return float(match[1]) * units[match[2]]

    return BeforeValidator(read)


_Bandwidth = Annotated[float, Field(gt=0, le=1e18), _unit(_BANDWIDTH_UNITS, "400 Gb/s")]
_Latency = Annotated[float, Field(ge=0, le=1e3), _unit(_LATENCY_UNITS, "1.5 us")]
_Flops = Annotated[float, Field(gt=0, lt=math.inf), _unit(_FLOPS_UNITS, "989 TFLOP/s")]
_Count = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    """A mapping without unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _RatePart(_Part):
    bandwidth: _Bandwidth
    latency: _Latency

    @property
    def rate(self) -> Rate:
        return Rate(self.bandwidth, self.latency)


class _Grid(_RatePart):
    """A grid; `wraps` is true for a torus, false for a mesh, or a list with one value an axis."""

    shape: Annotated[list[_Count], Field(min_length=1, max_length=8)]
    wraps: bool | list[bool]

    def topology(self, name: str) -> Topology:
        _check_ranks(math.prod(self.shape))
        return grid(
            self.shape, wraps=self.wraps, bandwidth=self.bandwidth, latency=self.latency, name=name
        )


class _Switch(_RatePart):
    """Ranks around one switch."""

    ranks: _Count

    def topology(self, name: str) -> Topology:
        _check_ranks(self.ranks)
        return switch(self.ranks, self.rate, name=name)


class _TwoLevel(_Part):
    """Nodes of ranks."""

    nodes: _Count
    per_node: _Count
    inside: _RatePart
    across: _RatePart
    shared_card: bool = False

    def topology(self, name: str) -> Topology:
        _check_ranks(self.nodes * self.per_node)
        return two_level(
            self.nodes,
            self.per_node,
            inside=self.inside.rate,
            across=self.across.rate,
            shared_card=self.shared_card,
            name=name,
        )


class _Link(_RatePart):
    source: Annotated[int, Field(alias="from", ge=0)]
    destination: Annotated[int, Field(alias="to", ge=0)]


class _Links(_Part):
    """Any network: `table` has a row for each link; nodes beyond the ranks are switches."""

    ranks: _Count
    switches: Annotated[int, Field(ge=0)] = 0
    both_ways: bool = False
    table: Annotated[list[_Link], Field(min_length=1, max_length=_MOST_LINKS)]

    def topology(self, name: str) -> Topology:
        num_nodes = self.ranks + self.switches
        _check_ranks(num_nodes)

        # Each link once, or both ways.
        rates: dict[tuple[int, int], Rate] = {}
        for link in self.table:
            ends = (link.source, link.destination)
            reason = f"{self.ranks} ranks, then {self.switches} switches"
            check_integer("an end in links.table", max(ends), most=num_nodes - 1, reason=reason)
            check(ends[0] != ends[1], "a link of links.table", ends, "two different nodes")
            backwards = (link.destination, link.source)
            for pair in (ends, backwards) if self.both_ways else (ends,):
                check(pair not in rates, "a link of links.table", pair, "each link once")
                rates[pair] = link.rate
        pairs = np.array(list(rates), np.int64)
        return Topology(
            name=name or f"{self.ranks:,} ranks",
            num_ranks=self.ranks,
            num_nodes=num_nodes,
            links=Links(
                source=pairs[:, 0],
                destination=pairs[:, 1],
                bandwidth=np.array([rate.bandwidth for rate in rates.values()]),
                latency=np.array([rate.latency for rate in rates.values()]),
            ),
        )


class _NetworkFile(_Part):
    name: str = ""
    notes: list[str] = []
    device_flops: _Flops | None = None
    grid: _Grid | None = None
    switch: _Switch | None = None
    two_level: _TwoLevel | None = None
    links: _Links | None = None


_FORMS = "grid, switch, two_level, links"


def _check_ranks(num_ranks: int) -> None:
    reason = "more take minutes and much memory to time"
    check_integer("ranks of the network", num_ranks, most=_MOST_RANKS, reason=reason)
