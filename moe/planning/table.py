"""Plans as text."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from moe.checks import check
from moe.planning.plan import Plan, seconds_of
from moe.planning.traffic import group_size

_BYTES_BY_UNIT = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def parse_quantity(text: str, units: Mapping[str, float]) -> float:
    """Returns the value of a text with a number and a unit; 0 for any other text.

    Args:
        text: E.g. `80GiB` or `3h`.
        units: Size of each unit by its name; names in capitals are case-insensitive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text, flags=re.ASCII)
    if match is None:
        return 0.0
    return float(match[1]) * units.get(match[2], units.get(match[2].upper(), 0))


def parse_bytes(text: str) -> int:
    """Returns the bytes for a text like `80GiB`.

    Raises:
        ConfigError: If it is not a size.
    """
    num_bytes = parse_quantity(text, _BYTES_BY_UNIT)
    expected = "a number above 0 and a unit, e.g. 80GiB"
    check(0 < num_bytes < math.inf, "A size of memory", text, expected)
    return int(num_bytes)


def show_bytes(number: float) -> str:
    """Returns bytes in the largest binary unit that gives at least 1, e.g. `1.50 GiB`."""
    for unit in ("GiB", "MiB", "KiB"):
        size = _BYTES_BY_UNIT[unit.upper()]
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} B"


def show_plan(plan: Plan, title: str, memory: int | None) -> str:
    """Returns a plan as a table.

    Args:
        plan: The plan.
        title: Name of the planned run.
        memory: Bytes of a device; None for no verdict.
    """
    transfers = "\n".join(_transfer_lines(plan))
    return f"{show_needs(plan, title, memory)}\n\n{transfers}"


def show_needs(plan: Plan, title: str, memory: int | None) -> str:
    """Returns the plan and the memory of a rank; see `show_plan` for the arguments."""
    lines = list(_summary_lines(plan, title))
    lines.append("")
    lines += _memory_lines(plan, memory)
    return "\n".join(lines)


def _summary_lines(plan: Plan, title: str) -> Iterator[str]:
    """Yields what is planned."""
    work = plan.workload
    rows = work.rows_of_rank(plan.mesh)
    rows_of_pass = work.rows_of_pass(plan.mesh)
    lengths = f"{work.inputs_length} + {work.targets_length}"
    checkpointing = ", activation checkpointing" if work.activation_checkpointing else ""

    yield f"{title} on {plan.mesh}: {plan.mesh.num_ranks:,} ranks"
    yield (
        f"parameters            {plan.num_parameters:,}; "
        f"a token uses {plan.num_active_parameters:,}"
    )
    yield f"update                {work.batch_size:,} sequences of {lengths} tokens"
    yield f"each data rank        {rows:,} sequences, {rows_of_pass:,} in a pass"
    yield f"precision             {work.precision}, {work.optimizer}{checkpointing}"
    yield f"training FLOPs/token  {plan.flops_per_token:.4g}{_show_repeated(plan)}"
    yield f"forward FLOPs/seq.    {plan.forward_flops / work.batch_size:.4g}"


def _show_repeated(plan: Plan) -> str:
    if not plan.repeated_flops:
        return ""
    return f", and {plan.repeated_flops / plan.num_tokens:.4g} that are repeated"


def _memory_lines(plan: Plan, memory: int | None) -> Iterator[str]:
    """Yields the bytes of a rank, and whether they fit."""
    kept = plan.activations
    bytes_by_part = {
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "gathered for a while": plan.gathered,
        "activations": kept.saved + kept.held,
        "one block again": kept.recomputed,
    }
    yield "memory of a rank"
    for name, num_bytes in bytes_by_part.items():
        if num_bytes:
            yield f"  {name:<22}{show_bytes(num_bytes):>12}"

    # The sum, and whether it fits if the device is known.
    verdict = ""
    if memory is not None:
        fits = "fits into" if plan.memory <= memory else "does NOT fit into"
        verdict = f"  {fits} {show_bytes(memory)}"
    yield f"  {'in all':<22}{show_bytes(plan.memory):>12}{verdict}"


def _transfer_lines(plan: Plan) -> Iterator[str]:
    """Yields the bytes that a rank sends per update over each axis, and the time at assumed speeds."""
    yield f"{'a rank sends in an update':<28}{'over':<18}{'ranks':>7}{'bytes':>14}{'seconds':>10}"

    # The most bytes first.
    total = 0.0
    for transfer in sorted(plan.transfers, key=attrgetter("num_bytes"), reverse=True):
        total += transfer.num_bytes
        size = group_size(transfer.axis, plan.mesh)
        amount = show_bytes(transfer.num_bytes)
        seconds = seconds_of(transfer, plan.mesh)
        kind = f"  {transfer.what:<26}{transfer.axis:<18}"
        yield f"{kind}{size:>7,}{amount:>14}{seconds:>10.3g}"

    yield f"  {'in all':<51}{show_bytes(total):>14}{plan.seconds:>10.3g}"


MOST_SUGGESTIONS = 10
"""Meshes that a table shows."""

MESH_HEADING = f"{'dp_replicate':>12}{'dp_shard':>10}{'ep':>6}{'tp':>6}{'rows/pass':>11}{'memory':>13}{'fits':>6}"
"""Columns of `show_mesh`."""


def show_mesh(plan: Plan, memory: int) -> str:
    """Returns a mesh and its requirements, as the first cells of a table row."""
    mesh = plan.mesh
    fits = "yes" if plan.memory <= memory else "no"
    sizes = f"{mesh.dp_replicate:>12}{mesh.dp_shard:>10}{mesh.ep:>6}{mesh.tp:>6}"
    return f"{sizes}{plan.workload.rows_of_pass(mesh):>11}{show_bytes(plan.memory):>13}{fits:>6}"


def show_suggestions(plans: Sequence[Plan], memory: int) -> str:
    """Returns plans, the best first, as a table.

    Args:
        plans: In display order.
        memory: Bytes of a device.
    """
    lines = [f"{MESH_HEADING}{'seconds':>10}"]
    for plan in plans[:MOST_SUGGESTIONS]:
        lines.append(f"{show_mesh(plan, memory)}{plan.seconds:>10.3g}")

    # Count those that are not shown, too.
    num_fitting = sum(plan.memory <= memory for plan in plans)
    lines.append(f"{len(plans):,} meshes, of which {num_fitting:,} fit into {show_bytes(memory)}.")
    return "\n".join(lines)
