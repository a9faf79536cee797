"""How the ranks of an evaluation share the batches and gather the answers.

A batch is never split: a sparse model routes the tokens of a batch together, so a split batch would
give other predictions. The mesh of a model that is split over ranks is built here too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from moe.distributed.collectives import gather_or_raise
from moe.distributed.launch import World
from moe.distributed.mesh import Mesh, MeshConfig, build_mesh, check_mesh
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.parallelize import mesh_limits
from stmoe_eval.answers.inference import read_config

T = TypeVar("T")


class DataRanks(NamedTuple):
    """The ranks of an evaluation, seen from one of them.

    Ranks along `tp` hold parts of one model and answer the same batch; they are one data rank.

    Attributes:
        world: All ranks, and which of them this is.
        mesh_config: Sizes of the mesh axes.
        mesh: Mesh over which models are sharded; None if every rank holds whole models.
    """

    world: World
    mesh_config: MeshConfig
    mesh: Mesh | None

    @property
    def in_lockstep(self) -> bool:
        """Whether every rank must enter every forward pass, since its experts serve all ranks."""
        return self.mesh_config.ep > 1

    def rounds(self, batches: Sequence[list[T]]) -> list[list[list[T]]]:
        """Returns the batches in rounds of one for each data rank; the last may have fewer."""
        size = self.mesh_config.num_data_ranks
        starts = range(0, len(batches), size)
        return [list(batches[start : start + size]) for start in starts]

    def own_batch(self, batches: list[list[T]]) -> list[T]:
        """Returns this rank's batch of a round, empty when there are fewer batches than ranks."""
        data_rank = self.world.rank // self.mesh_config.tp
        return batches[data_rank] if data_rank < len(batches) else []

    def num_reusable(self, num_answered: int, num_batches: int) -> int:
        """Returns how many of the answered batches a resumed run can keep.

        Ranks in lockstep compute the products of their experts together, whose last bits depend on
        all batches of a round. They keep whole rounds only.
        """
        if num_answered == num_batches or not self.in_lockstep:
            return num_answered

        # Batches after the last whole round are answered again.
        size = self.mesh_config.num_data_ranks
        return num_answered // size * size

    def max_in_lockstep(self, number: int) -> int:
        """Returns the largest number of any rank; without lockstep this rank's own."""
        return max(gather_or_raise(lambda: number)) if self.in_lockstep else number

    def gather(self, items: list[T]) -> list[T]:
        """Returns the items of all data ranks, in the order of ranks; every rank must call it."""
        # Ranks of one tp answered the same batch; the first one's answers count.
        is_first_of_tp = self.world.rank % self.mesh_config.tp == 0
        gathered: list[T] = []
        for part in gather_or_raise(lambda: items if is_first_of_tp else []):
            gathered += part
        return gathered


SINGLE_PROCESS = DataRanks(World(0, 1, 0, "cpu"), MeshConfig(), None)


def arrange_ranks(world: World, ep: int, tp: int, folders: Iterable[Path]) -> DataRanks:
    """Returns the ranks arranged for the models in `folders`, before any of them is loaded.

    Args:
        world: All ranks, and which of them this is.
        ep: Ranks over which the experts of a layer are sharded.
        tp: Ranks over which attention heads and hidden units are sharded.
        folders: Checkpoints.

    Raises:
        CheckpointError: When a folder holds no model. With both sizes 1, nothing is read here;
            loading the model reports errors.
        ConfigError: When the ranks, or the sizes of a model, cannot be divided in this way.
    """
    # Ranks beyond ep * tp are replicas.
    mesh_config = MeshConfig(ep=ep, tp=tp)
    num_replicas = max(1, world.size // mesh_config.num_ranks)
    mesh_config = replace(mesh_config, dp_replicate=num_replicas)
    if ep * tp == 1:
        return DataRanks(world, mesh_config, None)

    # The models are checked before a rank waits for others in building the mesh.
    for folder in folders:
        _check_divisible(folder, mesh_config, world)
    return DataRanks(world, mesh_config, build_mesh(mesh_config, world.device_type))


def _check_divisible(folder: Path, mesh_config: MeshConfig, world: World) -> None:
    """Raises when the model in `folder` cannot be sharded over this mesh."""
    config = read_config(folder)
    if not isinstance(config, STMoEConfig):
        raise ConfigError(
            f"{folder} holds a model of type {config.model_type}, which cannot be sharded over "
            f"--ep {mesh_config.ep} and --tp {mesh_config.tp}. Leave both out: each rank then "
            "holds the whole model."
        )
    try:
        check_mesh(mesh_config, mesh_limits(config, world.size))
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error} Choose --ep and --tp from one of them.") from error
