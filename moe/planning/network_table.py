"""Network plans as text: which schedule for what, how long, why, and what is assumed."""

from collections.abc import Iterable, Iterator

from moe.distributed.mesh import MeshConfig
from moe.planning.network import Candidate, NetworkPlan, TimedCollective
from moe.planning.plan import Plan
from moe.planning.table import show_bytes
from moe.planning.traffic import group_size

_MOST_RANKS_SHOWN = 16


def show_network_plan(plan: Plan, timed: NetworkPlan) -> str:
    """Returns the times of a plan's collectives on a network, what was compared, and what is assumed.

    Args:
        plan: The update.
        timed: Its collectives on the network.
    """
    lines = list(_place_lines(timed))
    lines.append("")
    lines += _time_lines(timed)
    lines.append("")
    lines += _step_lines(plan, timed)
    lines.append("")
    lines += _comparison_lines(timed)
    lines.append("")
    lines += _assumption_lines(timed)
    return "\n".join(lines)


def show_hole(healthy: NetworkPlan, broken: NetworkPlan) -> str:
    """Returns what dead ranks cost, by collective and for the whole update.

    Args:
        healthy: The plan on the whole network.
        broken: The plan around the dead ranks.
    """
    topology = healthy.network.topology
    dead = sorted(broken.dead)
    named = ", ".join(str(rank) for rank in dead[:_MOST_RANKS_SHOWN])
    if len(dead) > _MOST_RANKS_SHOWN:
        named += ", ..."
    lines = [f"{len(dead)} of {topology.num_ranks:,} ranks of {topology.name} dead: {named}"]
    lines += _lost_lines(broken)
    lines.append("")

    heading = (
        f"{'what for':<28}{'over':<18}{'collective':<15}{'whole':>10}{'broken':>10}{'ratio':>8}"
    )
    lines.append(f"{heading}  schedule")
    for before, after in zip(healthy.parts, broken.parts, strict=True):
        collective = after.collective
        kind = f"  {collective.what:<26}{collective.axis:<18}{collective.kind.name:<15}"
        seconds = f"{before.seconds:>10.3g}{after.seconds:>10.3g}"
        ratio = after.seconds / before.seconds
        change = after.algorithm
        if after.algorithm != before.algorithm:
            change = f"{after.algorithm} for {before.algorithm}"
        lines.append(f"{kind}{seconds}{ratio:>8.2f}  {change}")
    ratio = broken.seconds / healthy.seconds
    total = f"{healthy.seconds:>10.3g}{broken.seconds:>10.3g}{ratio:>8.2f}"
    lines.append(f"  {'in all, seconds':<59}{total}")
    return "\n".join(lines)


def _place_lines(timed: NetworkPlan) -> Iterator[str]:
    """Yields where the groups of every axis lie."""
    topology = timed.network.topology
    yield f"on {topology.name}, {topology.num_ranks:,} ranks; the mesh is placed {timed.placement}"
    yield f"  {'axis':<18}{'ranks':>7}{'groups':>8}  a group lies on"
    for axis in dict.fromkeys(part.collective.axis for part in timed.parts):
        groups = timed.placement.groups(axis)
        num_groups, size = groups.ranks.shape
        yield f"  {axis:<18}{size:>7,}{num_groups:>8,}  {groups.description}"


def _time_lines(timed: NetworkPlan) -> Iterator[str]:
    """Yields the time of every collective, the longest first."""
    yield (
        f"{'what for':<28}{'over':<18}{'collective':<15}{'calls':>7}{'payload':>13}"
        f"{'ms a call':>11}{'seconds':>10}  schedule"
    )
    for part in sorted(timed.parts, key=_longest_first):
        collective = part.collective
        kind = f"  {collective.what:<26}{collective.axis:<18}{collective.kind.name:<15}"
        amount = f"{collective.num_calls:>7,}{show_bytes(collective.payload_bytes):>13}"
        times = f"{part.timing.seconds * 1e3:>11.4g}{part.seconds:>10.3g}"
        yield f"{kind}{amount}{times}  {part.algorithm}"
    yield f"  {'in all':<90}{timed.seconds:>10.3g}"


def _longest_first(part: TimedCollective) -> float:
    return -part.seconds


def _step_lines(plan: Plan, timed: NetworkPlan) -> Iterator[str]:
    """Yields the bounds of a step, where the device's arithmetic is known."""
    flops = timed.network.device_flops
    if flops is None:
        yield f"network               {timed.seconds:.3g} s, if nothing overlaps"
        return

    products = plan.flops_per_rank / flops
    least = max(products, timed.seconds)
    most = products + timed.seconds
    yield f"products              {products:.3g} s at least, at {flops / 1e12:,.0f} TFLOP/s"
    yield f"network               {timed.seconds:.3g} s"
    yield f"a step                {least:.3g} s if all overlaps, {most:.3g} s if nothing does"


def _comparison_lines(timed: NetworkPlan) -> Iterator[str]:
    """Yields what was compared for every collective, and where the time of the best one goes."""
    yield "schedules compared, ms a call"
    for part in sorted(timed.parts, key=_longest_first):
        collective = part.collective
        amount = show_bytes(collective.payload_bytes)
        yield f"  {collective.kind.name} of {amount} over {collective.axis}: {_reason(part)}"
        ranking = ", ".join(_compared(candidate) for candidate in part.candidates)
        yield f"    {ranking}"


def _reason(part: TimedCollective) -> str:
    """Returns where the time of the best schedule goes."""
    timing = part.timing
    shares = []
    for seconds, name in (
        (timing.bandwidth, "sending"),
        (timing.latency, "latency"),
        (timing.waiting, "waiting for links"),
    ):
        share = seconds / timing.seconds
        if share >= 0.005:
            shares.append(f"{share:.0%} {name}")
    return f"{part.algorithm}, {', '.join(shares)}, {part.candidates[0].steps:,} steps"


def _compared(candidate: Candidate) -> str:
    """Returns an algorithm with its time, or why that was not needed."""
    if candidate.timing is not None:
        return f"{candidate.name} {candidate.timing.seconds * 1e3:.4g}"
    return f"{candidate.name} not simulated (about {candidate.estimate * 1e3:.3g})"


def _assumption_lines(timed: NetworkPlan) -> Iterator[str]:
    """Yields what all numbers rest on."""
    notes = list(timed.network.notes)
    notes += [
        "Links work at the bandwidth and latency of the file, both ways at once; nothing else uses them.",
        "All groups of an axis start together. Collectives follow each other, with no arithmetic between "
        "or beside them: what overlaps with products comes off the sum.",
        "A call sends its payload as soon as links and data allow; a rank spends no time on sums and copies.",
        "Groups of an axis share a link in proportion to what each sends over it.",
        "Rows are spread evenly over experts.",
    ]
    alike = _alike(timed.parts)
    if alike:
        notes.append(f"Of groups that are alike one was simulated: {alike}.")
    yield "assumed"
    for note in notes:
        yield f"  - {note}"


def _alike(parts: Iterable[TimedCollective]) -> str:
    """Returns how many groups stand for all of an axis."""
    texts = []
    for part in parts:
        num_groups = len(part.groups.ranks)
        if part.num_simulated < num_groups:
            texts.append(f"{part.num_simulated} of {num_groups} groups of {part.collective.axis}")
    return ", ".join(dict.fromkeys(texts))


def _lost_lines(broken: NetworkPlan) -> Iterator[str]:
    """Yields what the dead ranks take from the run besides links."""
    mesh = broken.placement.mesh
    dead_of_mesh = broken.dead.intersection(broken.placement.ranks.ravel().tolist())
    if not dead_of_mesh:
        yield "  None of them is in the mesh: they are missed as links only."
        return

    # Ranks that share one data rank's work.
    for axis in ("tp", "ep"):
        size = group_size(axis, mesh)
        if size > 1:
            groups = broken.placement.groups(axis).ranks
            num_hit = sum(not dead_of_mesh.isdisjoint(ranks) for ranks in groups.tolist())
            yield f"  {num_hit:,} of {len(groups):,} groups of {axis} lose a rank."
    yield f"  {_survival(mesh)}"
    yield "  The times are of the routes: the survivors exchange the same bytes around the hole."


def _survival(mesh: MeshConfig) -> str:
    """Returns what the other ranks can do without the dead ones."""
    if mesh.dp_replicate == mesh.num_ranks:
        return "Every rank holds the whole model: the survivors go on with their own rows."
    if mesh.dp_replicate == 1:
        return (
            "Every parameter is held once (mesh.dp_replicate 1): the run goes on from a checkpoint, "
            "on a smaller mesh."
        )
    return (
        f"Every parameter is held {mesh.dp_replicate:,} times (mesh.dp_replicate): replicas with a "
        "dead rank stand aside, or the run goes on from a checkpoint."
    )
