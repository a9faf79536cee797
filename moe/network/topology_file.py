"""Networks as files: YAML that a person writes, JSON that a measurement writes, the same keys in both.

    name: my cluster
    two_level: {nodes: 4, per_node: 8, inside: {bandwidth: 450 GB/s, latency: 3 us}, across: ...}
    device_flops: 989 TFLOP/s              # of a rank, at most; optional
    notes: [what was measured, and how]    # printed with every plan; optional

One of `grid`, `switch`, `two_level` and `links` describes the network. Bandwidths are those of one
direction: `70 GB/s`, `400 Gb/s`, or a number of bytes a second; latencies `1.5 us`, or seconds.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe.checks import check, check_flag, check_integer, check_number, shown
from moe.errors import ConfigError, did_you_mean
from moe.network.topology import Links, Rate, Topology, grid, switch, two_level
from moe.parsing import read_json, read_yaml

_MOST_RANKS = 8_192
_WHY_MOST_RANKS = "more take minutes and much memory to time"
_MOST_AXES = 8
_MOST_LINKS = 1_000_000
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
    """A network, and what its file says beside it.

    Attributes:
        topology: Links and routes.
        notes: Sentences to print with every result, as where numbers are from.
        device_flops: Operations a second that a rank does at most; None where unknown.
    """

    topology: Topology
    notes: tuple[str, ...] = ()
    device_flops: float | None = None


def read_network(path: Path) -> Network:
    """Returns the network of a file: JSON when its name ends so, else YAML.

    Raises:
        ConfigError: When the file cannot be read, a key is unknown or missing, or a value
            impossible; names the file and the key.
    """
    content = read_content(path)
    try:
        return parse_network(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_content(path: Path) -> Any:
    """Returns what stands in the file of a network, unchecked.

    Raises:
        ConfigError: When it cannot be read, or is no YAML or JSON.
    """
    if path.suffix.lower() == ".json":
        advice = "Give the path of a network file."
        return read_json(path, advice=advice, error=ConfigError, pipe=True)
    return read_yaml(path)


def parse_network(content: Any) -> Network:
    """Returns the network that a mapping describes; see the module.

    Raises:
        ConfigError: When a key is unknown or missing, or a value impossible.
    """
    known = {"name", "notes", "device_flops", *FORMS}

    # Exactly one form.
    settings = _mapping("a network", content, known)
    forms = [form for form in FORMS if form in settings]
    names = ", ".join(FORMS)
    check(len(forms) == 1, "the form of a network", forms, f"exactly one of {names}")

    # What is said beside the links.
    name = settings.get("name", "")
    check(isinstance(name, str), "name", name, "a text")
    notes = settings.get("notes", [])
    is_text = isinstance(notes, list) and all(isinstance(note, str) for note in notes)
    check(is_text, "notes", notes, "a list of texts")
    flops = settings.get("device_flops")
    if flops is not None:
        flops = _quantity("device_flops", flops, _FLOPS_UNITS, "989 TFLOP/s")
        check_number("device_flops", flops, above=0)

    # The form itself.
    form = forms[0]
    topology = FORMS[form](settings[form], name=name)
    return Network(topology, tuple(notes), flops)


def _parse_grid(content: Any, *, name: str) -> Topology:
    """Returns a grid; `wraps` is true for a torus, false for a mesh, or a list with one an axis."""
    # Sizes of the axes.
    settings = _mapping("grid", content, ("shape", "wraps", "bandwidth", "latency"))
    shape = _required("grid", settings, "shape")
    is_list = isinstance(shape, list) and 0 < len(shape) <= _MOST_AXES
    expected = f"a list of 1 to {_MOST_AXES} sizes, slowest first, e.g. [32, 32]"
    check(is_list, "grid.shape", shape, expected)
    for size in shape:
        check_integer("a size of grid.shape", size, least=1)
    _check_ranks("grid.shape", int(np.prod(shape, dtype=object)))

    # One flag for all axes, or one each.
    wraps = _required("grid", settings, "wraps")
    ends = wraps if isinstance(wraps, list) else [wraps] * len(shape)
    for end in ends:
        check_flag("grid.wraps", end)
    check(len(ends) == len(shape), "grid.wraps", wraps, f"one for each of {len(shape)} axes")

    rate = _rate("grid", settings)
    return grid(shape, wraps=ends, bandwidth=rate.bandwidth, latency=rate.latency, name=name)


def _parse_switch(content: Any, *, name: str) -> Topology:
    """Returns ranks around one switch."""
    # Ranks and one rate.
    settings = _mapping("switch", content, ("ranks", "bandwidth", "latency"))
    num_ranks = _required("switch", settings, "ranks")
    check_integer("switch.ranks", num_ranks, least=1)
    _check_ranks("switch.ranks", num_ranks)
    return switch(num_ranks, _rate("switch", settings), name=name)


def _parse_two_level(content: Any, *, name: str) -> Topology:
    """Returns nodes of ranks."""
    known = ("nodes", "per_node", "inside", "across", "shared_card")
    settings = _mapping("two_level", content, known)
    num_nodes = _required("two_level", settings, "nodes")
    per_node = _required("two_level", settings, "per_node")
    check_integer("two_level.nodes", num_nodes, least=1)
    check_integer("two_level.per_node", per_node, least=1)
    _check_ranks("two_level", num_nodes * per_node)

    # Two rates: inside and across.
    shared_card = settings.get("shared_card", False)
    check_flag("two_level.shared_card", shared_card)
    rates = {}
    for level in ("inside", "across"):
        part = f"two_level.{level}"
        value = _required("two_level", settings, level)
        rates[level] = _rate(part, _mapping(part, value, ("bandwidth", "latency")))
    return two_level(num_nodes, per_node, **rates, shared_card=shared_card, name=name)


def _parse_links(content: Any, *, name: str) -> Topology:
    """Returns any network: `table` has a row for each link, nodes beyond the ranks are switches."""
    settings = _mapping("links", content, ("ranks", "switches", "both_ways", "table"))
    num_ranks = _required("links", settings, "ranks")
    num_switches = settings.get("switches", 0)
    check_integer("links.ranks", num_ranks, least=1)
    check_integer("links.switches", num_switches, least=0)

    # Switches are numbered after the ranks.
    num_nodes = num_ranks + num_switches
    _check_ranks("links.ranks", num_nodes)
    both_ways = settings.get("both_ways", False)
    check_flag("links.both_ways", both_ways)

    # Each link once, or both ways.
    table = _required("links", settings, "table")
    is_list = isinstance(table, list) and 0 < len(table) <= _MOST_LINKS
    check(is_list, "links.table", table, f"a list of 1 to {_MOST_LINKS:,} links")
    rows: dict[tuple[int, int], Rate] = {}
    for index, item in enumerate(table):
        part = f"links.table[{index}]"
        link = _mapping(part, item, ("from", "to", "bandwidth", "latency"))

        # Nodes that there are.
        ends = (_required(part, link, "from"), _required(part, link, "to"))
        for end in ends:
            reason = f"{num_ranks} ranks, then {num_switches} switches"
            check_integer(f"{part} end", end, least=0, most=num_nodes - 1, reason=reason)
        check(ends[0] != ends[1], part, f"from {ends[0]} to itself", "two different nodes")

        directions = (ends, ends[::-1]) if both_ways else (ends,)
        for pair in directions:
            check(pair not in rows, part, pair, "a link that is not in the table yet")
            rows[pair] = _rate(part, link)

    # In the order of the file.
    pairs = np.array(list(rows), np.int64)
    for column, way in ((0, "from"), (1, "to")):
        missing = np.setdiff1d(np.arange(num_ranks), pairs[:, column])
        if len(missing):
            raise ConfigError(
                f"links.table has no link {way} rank {missing[0]}, so that rank can take part in no "
                f"collective. Add one: each of the {num_ranks:,} ranks needs a link from it and one "
                "to it (both_ways: true adds both)."
            )
    return Topology(
        name=name or f"{num_ranks:,} ranks",
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        links=Links(
            source=pairs[:, 0],
            destination=pairs[:, 1],
            bandwidth=np.array([rate.bandwidth for rate in rows.values()]),
            latency=np.array([rate.latency for rate in rows.values()]),
        ),
    )


FORMS: dict[str, Callable[..., Topology]] = {
    "grid": _parse_grid,
    "switch": _parse_switch,
    "two_level": _parse_two_level,
    "links": _parse_links,
}
"""What reads each form of a network."""


# ---------------------------------------------------------------------------
# Values


def _mapping(name: str, value: Any, known: Iterable[str]) -> Mapping[str, Any]:
    """Returns a mapping all of whose keys are known."""
    check(isinstance(value, Mapping), name, value, "a mapping of keys to values")
    for key in value:
        if key not in known:
            expected = ", ".join(known)
            closest = did_you_mean(key, known)
            raise ConfigError(f"{name} has no key {shown(key)}.{closest} Its keys are {expected}.")
    return value


def _required(name: str, settings: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key that must be there."""
    if key not in settings:
        raise ConfigError(f"{name} has no {key}, which it needs. Add the key.")
    return settings[key]


def _check_ranks(name: str, num_ranks: int) -> None:
    bounds = {"least": 1, "most": _MOST_RANKS, "reason": _WHY_MOST_RANKS}
    check_integer(f"ranks of {name}", num_ranks, **bounds)


def _rate(name: str, settings: Mapping[str, Any]) -> Rate:
    """Returns bandwidth and latency of a part."""
    bandwidth = parse_bandwidth(f"{name}.bandwidth", _required(name, settings, "bandwidth"))
    latency = parse_latency(f"{name}.latency", _required(name, settings, "latency"))
    return Rate(bandwidth, latency)


def _quantity(name: str, value: Any, units: Mapping[str, float], example: str) -> float:
    """Returns a number, or the number that a text with a unit means.

    Raises:
        ConfigError: When it is neither.
    """
    if not isinstance(value, str):
        check_number(name, value)
        return float(value)

    # A number and a unit that is known.
    match = _NUMBER.fullmatch(value)
    unit = match[2] if match is not None else ""
    known = ", ".join(units)
    check(unit in units, name, value, f"a number and one of {known}, e.g. {example}")
    assert match is not None
    return float(match[1]) * units[unit]


def parse_bandwidth(name: str, value: Any) -> float:
    """Returns bytes a second of one direction, above 0."""
    number = _quantity(name, value, _BANDWIDTH_UNITS, "400 Gb/s")
    check(
        0 < number <= 1e18, name, value, "a bandwidth above 0, and no more than 1e18 bytes a second"
    )
    return number


def parse_latency(name: str, value: Any) -> float:
    """Returns seconds, 0 or more."""
    number = _quantity(name, value, _LATENCY_UNITS, "1.5 us")
    check(0 <= number <= 1e3, name, value, "a latency of 0 or more, and no more than 1,000 seconds")
    return number
