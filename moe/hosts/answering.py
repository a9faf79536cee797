"""Loads a model with its tokenizer, to answer texts."""

from pathlib import Path
from typing import Any

import torch

from moe.checkpoint.loading import load_model
from moe.convert.formats import find_tokenizer_files
from moe.data.tokenizer import load_tokenizer
from moe.distributed.mesh import Mesh
from moe.files import find_model
from moe.hosts import all_hosts  # noqa: F401  registers the hosts, which `load_model` then reads
from moe.serving.batch_generator import BatchGenerator
from moe.serving.languages import read_languages


def load(
    source: Path | str,
    *,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
    mmap: bool = False,
    **settings: Any,
) -> BatchGenerator:
    """Returns a model that answers texts, whose experts drop nothing.

    Example:
        from moe import load
        names = load("names")
        print(*names(["el: New Zealand"]))

    Args:
        source: `names`, which comes with the library, a folder, or a name of the hub.
        mesh: Ranks that share the experts, see `load_model`; `group` is then a setting.
        device: Device of the weights; None for the fastest.
        mmap: Whether weights stay in their files until they are used, on a CPU.
        settings: Settings of `BatchGenerator`.

    Raises:
        CheckpointError: When there is no model, or it is damaged.
        DataError: When the tokenizer is missing or damaged.
    """
    source = find_model(source)
    device = device or fastest_device()
    model = load_model(source, mesh=mesh, device=device, dropless=True, mmap=mmap)
    tokenizer = next((path.parent for path in find_tokenizer_files(source, {}).values()), source)
    languages = read_languages(source)
    return BatchGenerator(model, load_tokenizer(tokenizer), languages=languages, **settings)


def fastest_device() -> str:
    """Returns the type of the fastest device of this process."""
    return "cuda" if torch.cuda.is_available() else "cpu"
