"""The end of a run: a folder with the model and its tokenizer, for `from_pretrained`, whole or
absent.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from moe.checkpoint.sharded_weights import write_model
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.mesh import Mesh
from moe.distributed.sharding import Layout
from moe.distributed.verification import gather_damage
from moe.errors import DataError
from moe.files import whole_folder
from moe.models.modeling import STMoEForConditionalGeneration
from moe.parsing import read_json


def damage_of_model(folder: Path) -> str | None:
    """Returns why the model in a folder is not whole, so that its run is not finished; None when it
    is.

    Every rank must call it: each reads a share of the weights.
    """
    if (missing := broadcast_from_rank_zero(lambda: _missing_part(folder))) is not None:
        return missing
    damaged = gather_damage(folder)
    return str(damaged[0]) if damaged else None


def _missing_part(folder: Path) -> str | None:
    """Returns what a folder lacks of a model and its tokenizer; None when all is there."""
    if not (folder / CONFIG_NAME).is_file():
        return f"{CONFIG_NAME} is missing"
    try:
        read_json(folder / CONFIG_NAME)
    except DataError:
        return f"{CONFIG_NAME} is not JSON"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "spiece.model")):
        return "the tokenizer is missing"
    if not any((folder / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        return f"{SAFE_WEIGHTS_NAME} is missing"
    return None


def export_model(
    model: STMoEForConditionalGeneration,
    layouts: Mapping[str, Layout],
    mesh: Mesh | None,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Writes model and tokenizer to `folder`, which all ranks must see and every rank must call;
    see `write_model`.

    Raises:
        DataError: When something else lies there.
        OSError: When the disk is full or fails on any rank.
    """
    with ExitStack() as opened:
        partial = broadcast_from_rank_zero(
            lambda: opened.enter_context(whole_folder(folder, kind="model"))
        )
        write_model(model, layouts, partial, mesh)

        def finish() -> None:
            tokenizer.save_pretrained(str(partial))
            opened.close()

        broadcast_from_rank_zero(finish)
