"""Network plans as text: schedule and time of every collective, comparisons and assumptions."""

from collections.abc import Iterable, Iterator, Sequence

from moe.network.planner.timing import NetworkPlan, TimedCollective
from moe.planning.plan import Plan
from moe.planning.table import show_bytes
from moe.planning.traffic import group_size

_MOST_RANKS_SHOWN = 16
_LEAST_SHARE = 0.005
"""Smallest share of the time of a call that is named."""


def _parts_by_use(timed: NetworkPlan) -> dict[str, list[TimedCollective]]:
    """Returns the collectives by the first cells of their row: purpose, axis and kind.

    The slowest rows come first, and in each the smallest payload.
    """
    parts_by_use: dict[str, list[TimedCollective]] = {}
    for part in sorted(timed.parts, key=lambda part: part.collective.payload_bytes):
        collective = part.collective
        use = f"  {collective.what:<26}{collective.axis:<18}{collective.kind:<16}"
        parts_by_use.setdefault(use, []).append(part)
    return dict(sorted(parts_by_use.items(), key=lambda item: -_seconds(item[1])))


def _seconds(parts: Iterable[TimedCollective]) -> float:
    return sum(part.seconds for part in parts)


def _schedules(parts: Sequence[TimedCollective]) -> str:
    """Returns the schedules of a row, each once, from the largest payload down."""
    return ", ".join(dict.fromkeys(part.algorithm for part in reversed(parts)))


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
    for use, parts in _parts_by_use(timed).items():
        num_calls = sum(part.collective.num_calls for part in parts)
        payloads = show_bytes(parts[0].collective.payload_bytes)
        if len(parts) > 1:
            payloads += f" to {show_bytes(parts[-1].collective.payload_bytes)}"
        amount = f"{num_calls:>6,}{payloads:>26}"
        yield f"{use}{amount}{_seconds(parts):>10.3g}  {_schedules(parts)}"
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
    for parts in _parts_by_use(timed).values():
        largest = parts[-1]
        collective = largest.collective
        amount = show_bytes(collective.payload_bytes)
        yield f"  {collective.kind} of {amount} over {collective.axis}: {_reason(largest)}"

        # The simulated ones, the next one, and the names of the rest.
        names = []
        for candidate in largest.candidates:
            name = f"    {candidate.name:<24}{candidate.steps:>6,} steps"
            bound = f"busiest link {candidate.bound * 1e3:.4g}"
            if candidate.timing is not None:
                yield f"{name}{candidate.timing.seconds * 1e3:>11.4g}  ({bound})"
                continue
            if not names:
                estimate = f"{candidate.estimate * 1e3:.4g}: not simulated"
                yield f"{name}{'':>11}  ({bound}, estimate {estimate})"
            names.append(candidate.name)
        if len(names) > 1:
            yield f"    not simulated, with longer estimates: {', '.join(names[1:])}"


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
    alike: dict[str, str] = {}
    for part in timed.parts:
        num_groups = len(part.groups.ranks)
        axis = part.collective.axis
        if part.num_simulated < num_groups:
            alike.setdefault(axis, f"{part.num_simulated} of {num_groups} over {axis}")
    if alike:
        shown = ", ".join(alike.values())
        notes.append(f"Of groups that are alike one was simulated, of others the slowest: {shown}.")
    yield "assumed"
    for note in notes:
        yield f"  - {note}"


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
    whole_parts = _parts_by_use(healthy)
    for use, parts in _parts_by_use(broken).items():
        whole = _seconds(whole_parts[use])
        seconds = _seconds(parts)
        times = f"{whole:>10.3g}{seconds:>10.3g}{seconds / whole:>8.2f}"
        lines.append(f"{use}{times}  {_schedules(parts)}")

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
    if mesh.dp_replicate == mesh.num_ranks:
        yield "  Every rank holds the whole model: the survivors continue with their own rows."
    elif mesh.dp_replicate == 1:
        yield (
            "  Every parameter is held once (mesh.dp_replicate 1): the run continues from a checkpoint, "
            "on a smaller mesh."
        )
    else:
        yield (
            f"  Every parameter is held {mesh.dp_replicate:,} times (mesh.dp_replicate): replicas with a "
            "dead rank stop, or the run continues from a checkpoint."
        )
    yield "  The times are of the routes: the survivors exchange the same bytes around the hole."
