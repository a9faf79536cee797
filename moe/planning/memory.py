"""Bytes that a rank holds beside activations: parameters, gradients, optimizer state, and what FSDP
gathers.
"""

import inspect
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout
from moe.optim.adafactor import Adafactor

_WIDE = 4
"""Bytes of a number in parameters, gradients and states: float32."""

_BLOCK = re.compile(r"(.*\.blocks\.\d+)\.")


class Unit(NamedTuple):
    """Parameters that FSDP gathers and reduces together.

    Attributes:
        name: Of the module.
        root: Whether it is the root, which stays gathered from its forward to its backward pass.
        layouts: Of its parameters.
        gathered_bytes: Of a number as it is gathered; gradients are reduced in float32 all the
            same.
    """

    name: str
    root: bool
    layouts: tuple[Layout, ...]
    gathered_bytes: int

    @property
    def num_shards(self) -> int:
        """Ranks among which it is cut."""
        return self.layouts[0].num_shards

    def shard_numel(self, mesh: MeshConfig) -> int:
        """Returns the numbers of a shard; FSDP pads all of them to the size of the largest."""
        return sum(math.prod(layout.local_shape(mesh)) for layout in self.layouts)

    def numel(self, mesh: MeshConfig) -> int:
        """Returns the numbers of the gathered unit with its padding."""
        return self.shard_numel(mesh) * self.num_shards


def fsdp_units(layouts: Mapping[str, Layout], mesh: MeshConfig, *, bfloat16: bool) -> list[Unit]:
    """Returns the units of FSDP as `moe.models.parallelize` makes them; none when there is one data
    rank.

    Args:
        layouts: By name of parameter.
        mesh: Sizes.
        bfloat16: Whether blocks and experts are gathered in bfloat16; their routers are units of
            their own then.
    """
    if mesh.num_data_ranks == 1:
        return []
    members: dict[tuple[str, str], list[Layout]] = {}
    for name, layout in layouts.items():
        block = _BLOCK.match(name)
        if layout.expert and mesh.dp_replicate * mesh.dp_shard == 1:
            continue  # its rank is the only one that holds it
        kind = (
            "experts" if layout.expert else "router" if bfloat16 and layout.rule == "router" else ""
        )
        members.setdefault((block[1] if block else "", kind), []).append(layout)
    return [
        Unit(
            f"{block}.{kind}".strip("."),
            not block,
            tuple(own),
            2 if bfloat16 and block and kind != "router" else 4,
        )
        for (block, kind), own in members.items()
    ]


def parameter_bytes(layouts: Mapping[str, Layout], mesh: MeshConfig) -> int:
    """Returns the bytes of a rank's parameters, and of their gradients at the end of an update.

    It is the rank with the first shards, which are the largest where a size does not divide.
    """
    return _WIDE * sum(math.prod(layout.local_shape(mesh)) for layout in layouts.values())


def optimizer_bytes(layouts: Mapping[str, Layout], mesh: MeshConfig, optimizer: str) -> int:
    """Returns the bytes of a rank's optimizer state."""
    if optimizer != "adafactor":
        return 2 * parameter_bytes(layouts, mesh)
    total = 0
    for layout in layouts.values():
        local, batch = layout.local_shape(mesh), int(layout.expert)
        if is_factored(layout):
            total += math.prod(local[:-1]) + math.prod((*local[:batch], local[-1]))
        else:
            total += math.prod(local)
    return _WIDE * total


def is_factored(layout: Layout) -> bool:
    """Returns whether Adafactor keeps the moments of rows and columns instead of all of a
    parameter's.
    """
    batch = int(layout.expert)
    own, least = (
        layout.shape[batch:],
        inspect.signature(Adafactor).parameters["min_dim_size_to_factor"].default,
    )
    return len(own) >= 2 and (batch > 0 or min(math.prod(own[:-1]), own[-1]) >= least)


def gathered_bytes(
    layouts: Mapping[str, Layout], mesh: MeshConfig, *, bfloat16: bool, accumulates: bool
) -> int:
    """Returns the bytes of whole parameters and gradients that a rank holds for a while.

    Under FSDP: the root and its gradient; of the largest block its parameters, those of the block
    that is gathered ahead, its gradient, and the copy of that which is reduced; with accumulation
    the gradients of all units, whole and in float32, since they are reduced once, in the last
    backward pass. Without FSDP, or where it does not reach, bfloat16 costs a copy of the weights of
    all products, as autocast keeps it.

    Args:
        layouts: By name of parameter.
        mesh: Sizes.
        bfloat16: Whether products are in bfloat16.
        accumulates: Whether an update has several backward passes.
    """
    units = fsdp_units(layouts, mesh, bfloat16=bfloat16)
    reached = {id(layout) for unit in units if not unit.root for layout in unit.layouts}
    alone = (
        layout
        for layout in layouts.values()
        if id(layout) not in reached and _is_multiplied(layout)
    )
    total = 2 * sum(math.prod(layout.gathered_shape(mesh)) for layout in alone) if bfloat16 else 0
    blocks: dict[str, int] = {}
    for unit in units:
        numel = unit.numel(mesh)
        if accumulates:
            total += _WIDE * numel
        if unit.root:
            total += _WIDE * numel * (1 if accumulates else 2)
        else:
            block = _BLOCK.match(f"{unit.name}.")
            assert block is not None, "every unit but the root lies in a block"
            blocks[block[1]] = blocks.get(block[1], 0) + numel * (3 * unit.gathered_bytes + _WIDE)
    return total + max(blocks.values(), default=0)


def _is_multiplied(layout: Layout) -> bool:
    """Returns whether a parameter stands in a product that autocast brings to bfloat16."""
    return layout.rule not in ("embedding", "norm", "router", "position bias")
