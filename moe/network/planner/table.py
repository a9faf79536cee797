"""Network plans as text: schedule and time of every collective, comparisons and assumptions."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moe.distributed.mesh import MeshConfig
from moe.network.planner.timing import Candidate, NetworkPlan, TimedCollective
from moe.planning.plan import Plan
from moe.planning.table import show_bytes
from moe.planning.traffic import group_size

_MOST_RANKS_SHOWN = 16
_LEAST_SHARE = 0.005
"""Smallest share of the time of a call that is named."""


class Use(NamedTuple):
    """Purpose, axis and kind of collectives: a row of the tables.

    Attributes:
        what: Purpose, e.g. `parameter gathers`.
        axis: Axis of the mesh, see `traffic.AXES`.
        kind: Kind of collective.
    """

    what: str
    axis: str
    kind: str

    def __str__(self) -> str:
        return f"  {self.what:<26}{self.axis:<18}{self.kind:<16}"


class Row(NamedTuple):
    """All collectives with the same purpose, axis and kind.

    Attributes:
        largest: The collective with the largest payload.
        payloads: Range of their payloads, for tables.
        schedules: Names of their schedules, each once.
        num_calls: Calls of all of them.
        seconds: Seconds of all of them.
    """

    largest: TimedCollective
    payloads: str
    schedules: str
    num_calls: int
    seconds: float


def rows_by_use(timed: NetworkPlan) -> dict[Use, Row]:
    """Returns the collectives by purpose, the slowest first."""
    # All payloads of a use are one row.
    parts_by_use: dict[Use, list[TimedCollective]] = {}
    for part in timed.parts:
        collective = part.collective
        use = Use(collective.what, collective.axis, collective.kind)
        parts_by_use.setdefault(use, []).append(part)

    rows = {}
    for use, parts in parts_by_use.items():
        # The range of payloads, and the schedules from the largest down.
        parts.sort(key=lambda part: part.collective.payload_bytes)
        payloads = show_bytes(parts[0].collective.payload_bytes)
        if len(parts) > 1:
            payloads += f" to {show_bytes(parts[-1].collective.payload_bytes)}"
        names = dict.fromkeys(part.algorithm for part in reversed(parts))
        rows[use] = Row(
            largest=parts[-1],
            payloads=payloads,
            schedules=", ".join(names),
            num_calls=sum(part.collective.num_calls for part in parts),
            seconds=sum(part.seconds for part in parts),
        )
    return dict(sorted(rows.items(), key=lambda item: -item[1].seconds))


def show_network_plan(plan: Plan, timed: NetworkPlan) -> str:
    """Returns the times of a plan's collectives on a network, the comparison, and the assumptions.

    Args:
        plan: The update.
        timed: Its collectives on the network.
    """
    sections = (
        _place_lines(timed),
        _time_lines(timed),
        _step_lines(plan, timed),
        _comparison_lines(timed),
        _assumption_lines(plan, timed),
    )
    return "\n\n".join("\n".join(lines) for lines in sections)


def _place_lines(timed: NetworkPlan) -> Iterator[str]:
    """Yields the position of the groups of every axis."""
    # The network, then a line for each axis.
    topology = timed.network.topology
    yield f"on {topology.name}, {topology.num_ranks:,} ranks; the mesh is placed {timed.placement}"
    yield f"  {'axis':<18}{'ranks':>7}{'groups':>8}  a group lies on"
    for axis in dict.fromkeys(part.collective.axis for part in timed.parts):
        groups = timed.placement.groups(axis)
        num_groups, size = groups.ranks.shape
        yield f"  {axis:<18}{size:>7,}{num_groups:>8,}  {groups.description}"


def _time_lines(timed: NetworkPlan) -> Iterator[str]:
    """Yields the time of every use."""
    heading = f"{'what for':<28}{'over':<18}{'collective':<16}{'calls':>6}"
    yield f"{heading}{'payload of a call':>26}{'seconds':>10}  schedule"
    for use, row in rows_by_use(timed).items():
        amount = f"{row.num_calls:>6,}{row.payloads:>26}"
        yield f"{use}{amount}{row.seconds:>10.3g}  {row.schedules}"
    yield f"  {'in all':<92}{timed.seconds:>10.3g}"


def _step_lines(plan: Plan, timed: NetworkPlan) -> Iterator[str]:
    """Yields the bounds of a step, where the device's arithmetic is known."""
    yield f"network               {timed.seconds:.3g} s, if no collectives overlap"

    # Bounds of a step need the arithmetic of the device.
    flops = timed.network.device_flops
    if flops is None:
        return

    products = plan.flops_per_rank / flops
    least = max(products, timed.seconds)
    most = products + timed.seconds
    yield f"products              {products:.3g} s at least, at {flops / 1e12:,.0f} TFLOP/s"
    yield f"a step                {least:.3g} s if all overlaps, {most:.3g} s if nothing does"


def _comparison_lines(timed: NetworkPlan) -> Iterator[str]:
    """Yields the comparison for every use, and where the best schedule spends its time."""
    yield "schedules compared for the largest payload of each, ms a call"
    for row in rows_by_use(timed).values():
        part = row.largest
        collective = part.collective
        amount = show_bytes(collective.payload_bytes)
        yield f"  {collective.kind} of {amount} over {collective.axis}: {_reason(part)}"

        # The simulated ones, the next one, and the names of the rest.
        simulated = [one for one in part.candidates if one.timing is not None]
        others = part.candidates[len(simulated) :]
        for candidate in (*simulated, *others[:1]):
            yield f"    {_compared(candidate)}"
        if len(others) > 1:
            names = ", ".join(candidate.name for candidate in others[1:])
            yield f"    not simulated, with longer estimates: {names}"


def _reason(part: TimedCollective) -> str:
    """Returns where the best schedule spends its time."""
    # Shares of the critical path.
    timing = part.timing
    seconds_by_cause = {
        "sending": timing.bandwidth,
        "latency": timing.latency,
        "waiting for links": timing.waiting,
    }
    shares = []
    for name, seconds in seconds_by_cause.items():
        share = seconds / timing.seconds
        if share >= _LEAST_SHARE:
            shares.append(f"{share:.0%} {name}")
    return f"{part.algorithm}: {', '.join(shares)}"


def _compared(candidate: Candidate) -> str:
    """Returns an algorithm with its time, or the reason why it was not timed."""
    name = f"{candidate.name:<24}{candidate.steps:>6,} steps"
    bound = f"busiest link {candidate.bound * 1e3:.4g}"
    if candidate.timing is not None:
        return f"{name}{candidate.timing.seconds * 1e3:>11.4g}  ({bound})"
    return f"{name}{'':>11}  ({bound}, estimate {candidate.estimate * 1e3:.4g}: not simulated)"


def _assumption_lines(plan: Plan, timed: NetworkPlan) -> Iterator[str]:
    """Yields the assumptions of all numbers."""
    # Assumptions about the network, then about the model of it.
    notes = list(timed.network.notes)
    notes += [
        "Links work at the bandwidth and latency of the file, both ways at once, for this run alone.",
        "Collectives follow each other, and so do they and products: what overlaps comes off the sum.",
        "All groups of an axis start together, and share a link in proportion to what they send.",
        "A rank spends no time on sums and copies. Rows are spread evenly over experts.",
        "A chunk of a reduce-scatter stays at the rank that sums it; backwards it is the all-gather.",
        "Optimizer sums and statistics are one message on each axis.",
    ]

    # Products in addition to one forward and one backward pass.
    if plan.repeated_flops:
        share = plan.repeated_flops / plan.mesh.num_ranks / plan.flops_per_rank
        reason = "forward passes that count choices for the balance loss"
        if plan.workload.activation_checkpointing:
            reason = "blocks that activation checkpointing runs again in the backward pass"
        notes.append(f"{share:.0%} of the products are repeated: {reason}.")

    # How many groups represent all.
    alike = _alike(timed.parts)
    if alike:
        notes.append(f"Of groups that are alike one was simulated, of others the slowest: {alike}.")
    yield "assumed"
    for note in notes:
        yield f"  - {note}"


def _alike(parts: Iterable[TimedCollective]) -> str:
    """Returns how many groups represent all groups of an axis."""
    # Once for each axis.
    texts: dict[str, str] = {}
    for part in parts:
        num_groups = len(part.groups.ranks)
        axis = part.collective.axis
        if part.num_simulated < num_groups:
            texts.setdefault(axis, f"{part.num_simulated} of {num_groups} over {axis}")
    return ", ".join(texts.values())


def show_hole(healthy: NetworkPlan, broken: NetworkPlan) -> str:
    """Returns the cost of dead ranks, by use and for the whole update.

    Args:
        healthy: The plan on the whole network.
        broken: The plan around the dead ranks.
    """
    # The dead ranks, and the losses of the run.
    topology = healthy.network.topology
    dead = sorted(broken.dead)
    named = ", ".join(str(rank) for rank in dead[:_MOST_RANKS_SHOWN])
    if len(dead) > _MOST_RANKS_SHOWN:
        named += ", ..."
    lines = [f"{len(dead):,} of {topology.num_ranks:,} ranks of {topology.name} are dead: {named}"]
    lines += _lost_lines(broken)
    lines.append("")

    # Before and after, by use.
    heading = f"{'what for':<28}{'over':<18}{'collective':<16}"
    lines.append(f"{heading}{'whole':>10}{'broken':>10}{'ratio':>8}  schedule")
    whole_rows = rows_by_use(healthy)
    for use, row in rows_by_use(broken).items():
        whole = whole_rows[use]
        seconds = f"{whole.seconds:>10.3g}{row.seconds:>10.3g}{row.seconds / whole.seconds:>8.2f}"
        lines.append(f"{use}{seconds}  {row.schedules}")

    # The step.
    ratio = broken.seconds / healthy.seconds
    total = f"{healthy.seconds:>10.3g}{broken.seconds:>10.3g}{ratio:>8.2f}"
    lines.append(f"  {'in all, seconds of a step':<60}{total}")
    return "\n".join(lines)


def _lost_lines(broken: NetworkPlan) -> Iterator[str]:
    """Yields the losses of the run besides links."""
    # Dead ranks outside the mesh only cost links.
    mesh = broken.placement.mesh
    dead = broken.dead.intersection(broken.placement.ranks.ravel().tolist())
    if not dead:
        yield "  None of them is in the mesh: only their links are missed."
        return

    # Ranks that share one data rank's work, or the experts of a layer.
    for axis in ("tp", "ep"):
        if group_size(axis, mesh) > 1:
            groups = broken.placement.groups(axis).ranks.tolist()
            num_hit = sum(not dead.isdisjoint(ranks) for ranks in groups)
            yield f"  {num_hit:,} of {len(groups):,} groups of {axis} lose a rank."
    yield f"  {_survival(mesh)}"
    yield "  The times are of the routes: the survivors exchange the same bytes around the hole."


def _survival(mesh: MeshConfig) -> str:
    """Returns the remaining use of the other ranks without the dead ones."""
    if mesh.dp_replicate == mesh.num_ranks:
        return "Every rank holds the whole model: the survivors continue with their own rows."
    if mesh.dp_replicate == 1:
        return (
            "Every parameter is held once (mesh.dp_replicate 1): the run continues from a checkpoint, "
            "on a smaller mesh."
        )
    return (
        f"Every parameter is held {mesh.dp_replicate:,} times (mesh.dp_replicate): replicas with a "
        "dead rank stop, or the run continues from a checkpoint."
    )
