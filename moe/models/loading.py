"""Loading a model that must be complete: every weight is the folder's, or the folder is refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from moe.errors import CheckpointError

_SHOWN = 5


def load_complete(model_class: Any, folder: Path | str, **options: Any) -> Any:
    """Returns the model of a folder, each of whose weights fits.

    `from_pretrained` alone draws weights that the folder lacks at random and leaves out those that it does not know,
    with a warning: right for giving a model a new head, wrong for whoever trains on or measures what was saved.

    Args:
        model_class: Any class of transformers with `from_pretrained`, an Auto class too.
        folder: A model saved by `save_pretrained`.
        options: Further arguments of `from_pretrained`.

    Raises:
        CheckpointError: When the folder holds no such model, or weights are missing, unexpected or of another shape;
            lists them.
    """
    check_model_folder(folder)
    asked = {**options, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, info = model_class.from_pretrained(folder, **asked)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"The model in {folder} cannot be loaded: {error}") from error
    if text := describe_misfits(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"]):
        raise CheckpointError(
            f"{folder} is no complete {type(model).__name__}. Weights {text}. Copy the whole folder again from where "
            "it was saved, or give another; if config.json was edited, undo that."
        )
    return model


def check_model_folder(folder: Path | str) -> None:
    """Raises when there is no model in `folder`.

    Raises:
        CheckpointError: When it has no config.json.
    """
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds no model: it has no config.json. Give a folder made by save_pretrained, e.g. the model/ "
            "folder of a run."
        )


def describe_misfits(
    missing: Iterable[str], unexpected: Iterable[str], reshaped: Iterable[tuple[str, Iterable[int], Iterable[int]]]
) -> str:
    """Returns how many weights of a file do not fit a model, with the first names; an empty string when all fit.

    Args:
        missing: Names that the model has and the file has not.
        unexpected: Names that the file has and the model has not.
        reshaped: Names that both have, with the shape in the file and the shape in the model.
    """
    shapes = [f"{name} {tuple(saved)} instead of {tuple(own)}" for name, saved, own in reshaped]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    return "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, found in kinds if (names := sorted(found)))


def _some(names: list[str]) -> str:
    """Returns the first few names and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
