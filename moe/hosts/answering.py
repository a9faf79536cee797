"""Loads a model with its tokenizer, to answer texts."""

from pathlib import Path
from typing import Any

import torch

from moe.convert.formats import find_tokenizer_files
from moe.data.tokenizer import load_tokenizer
from moe.files import find_model
from moe.hosts.all_hosts import load_model
from moe.serving.batch_generator import BatchGenerator
from moe.serving.languages import read_languages


def load(source: Path | str, **settings: Any) -> BatchGenerator:
    """Returns a model that answers texts, on the fastest device.

    Example:
        from moe import load
        names = load("names")
        print(*names(["el: New Zealand"]))

    Args:
        source: `names`, which comes with the library, a folder, or a name of the hub.
        settings: Settings of `BatchGenerator`.

    Raises:
        CheckpointError: When there is no model, or it is damaged.
        DataError: When the tokenizer is missing or damaged.
    """
    source = find_model(source)
    model = load_to_answer(source)
    tokenizer = next((path.parent for path in find_tokenizer_files(source, {}).values()), source)
    return BatchGenerator(
        model, load_tokenizer(tokenizer), languages=read_languages(source), **settings
    )


def load_to_answer(source: Path | str, *, mmap: bool = False) -> Any:
    """Returns a model whose experts drop nothing, on the fastest device that it may use."""
    model = load_model(source, dropless=True, mmap=mmap).eval()
    return model.to("cuda" if torch.cuda.is_available() and not mmap else "cpu")
