"""Plans as text."""

import re
from collections.abc import Iterator, Sequence

from moe.checks import check
from moe.planning.plan import Plan, seconds_of
from moe.planning.traffic import group_size

_UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_MOST_BYTES = 10**6 * 2**40


def parse_bytes(text: str) -> int:
    """Returns the bytes that a text like `80GiB` means.

    Raises:
        ConfigError: When it means none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", text, flags=re.IGNORECASE)
    known = match is not None and match[2].upper() in _UNITS
    num_bytes = float(match[1]) * _UNITS[match[2].upper()] if match is not None and known else 0.0
    expected = (
        "a number above 0 and a unit, e.g. 80GiB, of at most 1,000,000 TiB (no device has more)"
    )
    check(0 < num_bytes <= _MOST_BYTES, "A size of memory", text, expected)
    return int(num_bytes)


def show_bytes(number: float) -> str:
    """Returns bytes in the largest binary unit in which there is one at least, e.g. `1.50 GiB`."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if number >= _UNITS[unit.upper()]), "B")
    return f"{number / _UNITS[unit.upper()]:,.{0 if unit == 'B' else 2}f} {unit}"


def show_plan(plan: Plan, title: str, memory: int | None) -> str:
    """Returns a plan as a table; `memory` are the bytes of a device, None for no verdict."""
    return "\n".join((*_head(plan, title), "", *_memory(plan, memory), "", *_transfers(plan)))


def _head(plan: Plan, title: str) -> Iterator[str]:
    """Yields what is planned."""
    work, rows = plan.workload, plan.workload.rows_of_rank(plan.mesh)
    checkpointing = ", activation checkpointing" if work.activation_checkpointing else ""
    yield f"{title} on {plan.mesh}: {plan.mesh.num_ranks:,} ranks"
    yield f"parameters            {plan.num_parameters:,}; a token uses {plan.num_active_parameters:,}"
    yield f"update                {work.batch_size:,} sequences of {work.inputs_length} + {work.targets_length} tokens"
    yield f"each data rank        {rows:,} sequences, {work.rows_of_pass(plan.mesh):,} in a pass"
    yield f"precision             {work.precision}, {work.optimizer}{checkpointing}"
    yield f"training FLOPs/token  {plan.flops_per_token:.4g}"
    yield f"forward FLOPs/seq.    {plan.flops_per_sequence:.4g}"


def _memory(plan: Plan, memory: int | None) -> Iterator[str]:
    """Yields the bytes of a rank, and whether they fit."""
    kept = plan.activations
    yield "memory of a rank"
    for name, number in {
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "gathered for a while": plan.gathered,
        "activations": kept.saved + kept.held,
        "one block again": kept.recomputed,
    }.items():
        if number:
            yield f"  {name:<22}{show_bytes(number):>12}"
    verdict = ""
    if memory is not None:
        fits = plan.memory <= memory
        verdict = f"  {'fits into' if fits else 'does NOT fit into'} {show_bytes(memory)}"
    yield f"  {'in all':<22}{show_bytes(plan.memory):>12}{verdict}"


def _transfers(plan: Plan) -> Iterator[str]:
    """Yields what a rank sends in an update, by axis, and how long at assumed speeds."""
    yield f"{'a rank sends in an update':<28}{'over':<18}{'ranks':>7}{'bytes':>14}{'seconds':>10}"
    for transfer in sorted(plan.transfers, key=lambda item: -item.num_bytes):
        size, seconds = group_size(transfer.axis, plan.mesh), seconds_of(transfer, plan.mesh)
        amount = show_bytes(transfer.num_bytes)
        yield f"  {transfer.what:<26}{transfer.axis:<18}{size:>7,}{amount:>14}{seconds:>10.3g}"
    total = sum(transfer.num_bytes for transfer in plan.transfers)
    yield f"  {'in all':<51}{show_bytes(total):>14}{plan.seconds:>10.3g}"


def show_suggestions(plans: Sequence[Plan], memory: int, most: int = 10) -> str:
    """Returns plans, the best first, as a table of at most so many lines, for devices of so many
    bytes.
    """
    lines = [
        f"{'dp_replicate':>12}{'dp_shard':>10}{'ep':>6}{'tp':>6}{'rows/pass':>11}{'memory':>13}{'fits':>6}{'seconds':>10}"
    ]
    for plan in plans[:most]:
        mesh, rows = plan.mesh, plan.workload.rows_of_pass(plan.mesh)
        fits = "yes" if plan.memory <= memory else "no"
        sizes = f"{mesh.dp_replicate:>12}{mesh.dp_shard:>10}{mesh.ep:>6}{mesh.tp:>6}"
        lines.append(
            f"{sizes}{rows:>11}{show_bytes(plan.memory):>13}{fits:>6}{plan.seconds:>10.3g}"
        )
    fitting = sum(plan.memory <= memory for plan in plans)
    lines.append(f"{len(plans):,} meshes, of which {fitting:,} fit into {show_bytes(memory)}.")
    return "\n".join(lines)
