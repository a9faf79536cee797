"""The functions of the library as doors: one for each name of the files of cases."""

from pathlib import Path
from typing import Any

from moe.data.tokenizer import load_tokenizer


def value_of(text: str) -> Any:
    """Returns what a name of the files of cases stands for here; a text that is none stays."""
    return text


def moe_data_load_tokenizer(folder: str) -> Any:
    return load_tokenizer(Path(folder))
