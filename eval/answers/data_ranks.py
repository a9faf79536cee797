"""An evaluation on several ranks: whole batches are dealt out to data ranks, and what they make
comes together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from transformers import AutoConfig

from moe import (
    CheckpointError,
    ConfigError,
    Mesh,
    MeshConfig,
    STMoEConfig,
    World,
    build_mesh,
    check_mesh,
    check_model_folder,
    gather_or_raise,
    mesh_limits,
)

T = TypeVar("T")


class Ranks(NamedTuple):
    """The ranks of an evaluation, as one of them sees them.

    Attributes:
        world: Them all.
        sizes: How they are arranged.
        mesh: What models are cut over; None when every rank holds whole ones.
    """

    world: World
    sizes: MeshConfig
    mesh: Mesh | None

    @property
    def in_step(self) -> bool:
        """Whether every rank must enter every forward pass, for its experts are the others' too."""
        return self.sizes.ep > 1

    def deal(self, batches: Sequence[list[T]]) -> list[list[list[T]]]:
        """Returns batches in rounds, one for each data rank; the last round may have fewer.

        Batches are never cut: tokens are routed with those that they would meet in one process.
        """
        parts = self.sizes.num_data_ranks
        return [list(batches[start : start + parts]) for start in range(0, len(batches), parts)]

    def whole_rounds(self, made: int, total: int) -> int:
        """Returns how many of the first `made` of `total` batches a later run can keep.

        Ranks in step share the experts' products, whose last bits depend on all batches of a round:
        they keep whole rounds.
        """
        size = self.sizes.num_data_ranks if self.in_step else 1
        return made if made == total else made // size * size

    def share(self, batches: list[list[T]]) -> list[T]:
        """Returns this rank's batch of a round, empty when none is left; ranks of one `tp` have the
        same.
        """
        part = self.world.rank // self.sizes.tp
        return batches[part] if part < len(batches) else []

    def most(self, number: int) -> int:
        """Returns the largest number that any rank in step has; this rank's own when ranks need no
        step.
        """
        return max(gather_or_raise(lambda: number)) if self.in_step else number

    def collect(self, made: list[T]) -> list[T]:
        """Returns what all data ranks made, in their order; every rank must call it."""
        speaks = self.world.rank % self.sizes.tp == 0
        return [item for part in gather_or_raise(lambda: made if speaks else []) for item in part]


ALONE = Ranks(World(0, 1, 0, "cpu"), MeshConfig(), None)


def arrange(world: World, ep: int, tp: int, folders: Iterable[Path]) -> Ranks:
    """Returns the ranks arranged for the models in `folders`, before any of them is loaded.

    Args:
        world: The ranks that there are.
        ep: Over how many the experts of a layer are spread.
        tp: Over how many heads and hidden units are spread.
        folders: Checkpoints.

    Raises:
        CheckpointError: When a folder holds no model; on one rank, or with both sizes 1, only
            loading it tells.
        ConfigError: When the ranks, or the sizes of a model, cannot be divided so.
    """
    sizes = MeshConfig(ep=ep, tp=tp)
    sizes = replace(sizes, dp_replicate=max(1, world.size // sizes.num_ranks))
    if sizes.ep * sizes.tp == 1:
        return Ranks(world, sizes, None)
    for folder in folders:
        check_model_folder(folder)
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"The config.json in {folder} cannot be read: {error}") from error
        if not isinstance(config, STMoEConfig):
            raise ConfigError(
                f"{folder} holds a model of type {config.model_type}, which cannot be cut over --ep {ep} and "
                f"--tp {tp}. Leave both out: each rank then holds the whole model."
            )
        try:
            check_mesh(sizes, mesh_limits(config, world.size))
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error} Choose --ep and --tp of one of them.") from error
    return Ranks(world, sizes, build_mesh(sizes, world.device_type))
