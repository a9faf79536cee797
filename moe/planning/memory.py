"""Bytes of a rank besides activations: parameters, gradients, optimizer state, gathered units."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout
from moe.optim.optimizers import OPTIMIZERS
from moe.planning.workload import FLOAT32_BYTES

_BFLOAT16_BYTES = 2
_BLOCK = re.compile(r"(.*\.blocks\.\d+)\.")


class Unit(NamedTuple):
    """Parameters that FSDP gathers and reduces together.

    Attributes:
        block: Name of its block; empty for the root, which stays gathered from its forward to its
            backward pass.
        layouts: Layouts of its parameters.
        gathered_bytes: Bytes of a number as it is gathered; gradients are reduced in float32 all
            the same.
    """

    block: str
    layouts: tuple[Layout, ...]
    gathered_bytes: int

    @property
    def is_root(self) -> bool:
        """Whether this is the root unit."""
        return not self.block

    @property
    def num_shards(self) -> int:
        """Ranks over which the unit is sharded."""
        return self.layouts[0].num_shards

    def shard_numel(self, mesh: MeshConfig) -> int:
        """Returns the numbers of a shard; FSDP pads all of them to the size of the largest."""
        return sum(math.prod(layout.local_shape(mesh)) for layout in self.layouts)

    def numel(self, mesh: MeshConfig) -> int:
        """Returns the numbers of the gathered unit with its padding."""
        return self.shard_numel(mesh) * self.num_shards


def fsdp_units(layouts: Mapping[str, Layout], mesh: MeshConfig, *, bfloat16: bool) -> list[Unit]:
    """Returns the units of FSDP as `moe.models.parallelize` makes them; none for one data rank.

    Args:
        layouts: Layouts by name of parameter.
        mesh: Sizes.
        bfloat16: Whether blocks and experts are gathered in bfloat16; their routers are then
            separate units.
    """
    if mesh.num_data_ranks == 1:
        return []

    members: dict[tuple[str, str], list[Layout]] = {}
    for name, layout in layouts.items():
        if layout.expert and mesh.dp_replicate * mesh.dp_shard == 1:
            continue  # its rank is the only one that holds it

        # The experts of a block are a unit inside the block's; a float32 router another.
        unit_name = ""
        if layout.expert:
            unit_name = "experts"
        elif bfloat16 and layout.rule == "router":
            unit_name = "router"
        block = _BLOCK.match(name)
        block_name = block[1] if block else ""
        members.setdefault((block_name, unit_name), []).append(layout)

    units: list[Unit] = []
    for (block_name, unit_name), unit_layouts in members.items():
        in_bfloat16 = bfloat16 and block_name != "" and unit_name != "router"
        gathered_bytes = _BFLOAT16_BYTES if in_bfloat16 else FLOAT32_BYTES
        units.append(Unit(block_name, tuple(unit_layouts), gathered_bytes))
    return units


def parameter_bytes(layouts: Mapping[str, Layout], mesh: MeshConfig) -> int:
    """Returns the bytes of a rank's parameters, and of their gradients at the end of an update.

    It is the rank with the first shards, which are the largest where a size does not divide.
    """
    numel = sum(math.prod(layout.local_shape(mesh)) for layout in layouts.values())
    return FLOAT32_BYTES * numel


def optimizer_bytes(
    layouts: Mapping[str, Layout], mesh: MeshConfig, optimizer: str, options: Mapping[str, Any]
) -> int:
    """Returns the bytes of a rank's optimizer state.

    Args:
        layouts: Layouts by name of parameter.
        mesh: Sizes.
        optimizer: A name in OPTIMIZERS.
        options: Options of that optimizer by name.
    """
    spec = OPTIMIZERS.get(optimizer)
    numel = sum(spec.state_elements(layout, mesh, **options) for layout in layouts.values())
    return FLOAT32_BYTES * numel


def gathered_bytes(
    layouts: Mapping[str, Layout], mesh: MeshConfig, *, bfloat16: bool, accumulates: bool
) -> int:
    """Returns the bytes of whole parameters and gradients that a rank holds for a while.

    Args:
        layouts: Layouts by name of parameter.
        mesh: Sizes.
        bfloat16: Whether matrix products are in bfloat16.
        accumulates: Whether an update has several backward passes.
    """
    units = fsdp_units(layouts, mesh, bfloat16=bfloat16)
    total = _autocast_copies(layouts, units, mesh) if bfloat16 else 0

    bytes_by_block: dict[str, int] = {}
    for unit in units:
        numel = unit.numel(mesh)

        # Gradients are reduced once, in the last backward pass: until then they are kept whole.
        if accumulates:
            total += FLOAT32_BYTES * numel

        # The root and its gradient.
        if unit.is_root:
            total += FLOAT32_BYTES * numel * (1 if accumulates else 2)
            continue

        # Parameters of the block and of the next one, which is prefetched, its gradient, and the
        # copy of that which is reduced.
        block_bytes = numel * (3 * unit.gathered_bytes + FLOAT32_BYTES)
        bytes_by_block[unit.block] = bytes_by_block.get(unit.block, 0) + block_bytes

    # One block runs at a time.
    return total + max(bytes_by_block.values(), default=0)


def _autocast_copies(layouts: Mapping[str, Layout], units: list[Unit], mesh: MeshConfig) -> int:
    """Returns the bytes of bfloat16 copies of weights that no block's unit gathers in bfloat16.

    Autocast keeps a copy of the weights of all products.
    """
    gathered_in_bfloat16: set[int] = set()
    for unit in units:
        if not unit.is_root:
            gathered_in_bfloat16.update(id(layout) for layout in unit.layouts)

    numel = 0
    for layout in layouts.values():
        if _is_multiplied(layout) and id(layout) not in gathered_in_bfloat16:
            numel += math.prod(layout.gathered_shape(mesh))
    return _BFLOAT16_BYTES * numel


def _is_multiplied(layout: Layout) -> bool:
    return layout.rule not in ("embedding", "norm", "router", "position bias")
