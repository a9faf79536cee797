"""The end of a run: a folder with the model and its tokenizer, for `from_pretrained`, whole or absent."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from moe.distributed.exchange import from_first_rank
from moe.distributed.mesh import Mesh
from moe.distributed.sharding import Layout
from moe.files import whole_folder
from moe.models.export import write_model
from moe.models.modeling import STMoEForConditionalGeneration

MODEL_MARKER = "config.json"


def export_model(
    model: STMoEForConditionalGeneration,
    layouts: Mapping[str, Layout],
    mesh: Mesh | None,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Writes model and tokenizer to `folder`, which all ranks must see and every rank must call; see `write_model`.

    Raises:
        DataError: When something else lies there.
        OSError: When the disk is full or fails on any rank.
    """
    with ExitStack() as opened:
        partial = from_first_rank(lambda: opened.enter_context(whole_folder(folder, kind="model")))
        write_model(model, layouts, partial, mesh)

        def finish() -> None:
            tokenizer.save_pretrained(str(partial))
            opened.close()

        from_first_rank(finish)
