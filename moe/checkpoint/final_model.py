"""The final model of a run: a folder with model and tokenizer, for `from_pretrained`.

It is whole or absent. The best model (best_model.py) is written by the same function.
"""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME

from moe.checkpoint.sharded_weights import write_model
from moe.distributed.collectives import broadcast_from_rank_zero, enter_on_rank_zero
from moe.distributed.mesh import Mesh
from moe.distributed.sharding import Layout
from moe.distributed.verification import gather_damage
from moe.files import whole_folder
from moe.models.modeling import STMoEForConditionalGeneration


def damage_of_model(folder: Path) -> str | None:
    """Returns why the model in a folder is incomplete; None if its run is complete.

    Every rank must call it: each reads a share of the weights.
    """
    if not broadcast_from_rank_zero((folder / CONFIG_NAME).is_file):
        return f"{CONFIG_NAME} is missing"
    damaged = gather_damage(folder)
    return str(damaged[0]) if damaged else None


def save_model_on_mesh(
    model: STMoEForConditionalGeneration,
    layouts: Mapping[str, Layout],
    mesh: Mesh | None,
    folder: Path | str,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    sections: Mapping[str, str] | None = None,
) -> None:
    """Writes a folder as `save_pretrained` does; every rank must call it, and none holds the whole model.

    The folder appears when it is complete, and replaces an earlier model there.

    Args:
        model: Whole model, or sharded by `shard_model` or `shard_host`.
        layouts: Layout of each parameter.
        mesh: Mesh that the model is sharded over; None for one process.
        folder: Folder on a file system that all ranks share.
        tokenizer: Saved next to the model; None for no tokenizer.
        sections: Sections of the model card, see `model_card`; those of rank zero count.

    Raises:
        DataError: When something else is there.
        OSError: When the disk is full or fails on any rank.
    """
    with enter_on_rank_zero(lambda: whole_folder(Path(folder), kind="model")) as partial:
        write_model(model, layouts, partial, mesh, sections=sections)
        if tokenizer is not None:
            broadcast_from_rank_zero(lambda: tokenizer.save_pretrained(str(partial)))
