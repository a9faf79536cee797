"""Tokens of texts and of a corpus, cached on disk.

Comes after `corpus` and `tokenizer`, before `pairs` and `pipeline`. A file is mapped into memory:
processes that read the same one share its pages. Its format, safetensors, holds numbers only.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from moe.data.tokenizer import text_ids
from moe.errors import DataError
from moe.files import whole_file

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]
"""Arrays of a file, by name."""

_TOKENS = "tokens"
_BATCH = 1_000  # documents
_FORMAT = 2  # increase when the same texts give other tokens


def tokenize_corpus(
    documents: "datasets.Dataset", tokenizer: PreTrainedTokenizerFast
) -> NDArray[np.int32]:
    """Returns <int32>[N]: the tokens of all documents one after the other, without special tokens.

    For a corpus on disk they are kept in its folder, as 55M characters take more than a minute. A
    read-only folder keeps none.

    Raises:
        DataError: When there is no token at all.

    Source:
        T5 preprocessors.py `unsupervised` at e081111: documents are concatenated. Differs: each
        document whole and once per epoch, where T5 takes a random chunk of 65,536 tokens.
    """
    encode = partial(_encode, documents, tokenizer)
    path = None
    if documents.cache_files:  # others are in memory
        folder = Path(documents.cache_files[0]["filename"]).parent
        path = folder / tokens_name(documents["text"], tokenizer)
    tokens = kept_arrays(path, (_TOKENS,), encode)[_TOKENS]

    if tokens.size == 0:
        raise DataError("The corpus has no tokens. Give documents with text.")
    return tokens


def _encode(documents: "datasets.Dataset", tokenizer: PreTrainedTokenizerFast) -> Arrays:
    """Returns the tokens of all documents as one array."""
    parts = [np.empty(0, dtype=np.int32)]
    starts = range(0, len(documents), _BATCH)
    for start in tqdm(starts, desc="tokenize", unit_scale=_BATCH, unit=" documents", delay=2):
        parts += encode_texts(documents[start : start + _BATCH]["text"], tokenizer)
    return {_TOKENS: np.concatenate(parts)}


def encode_texts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast
) -> list[NDArray[np.int32]]:
    """Returns the tokens <int32>[N] of each text, none of them special."""
    return [np.asarray(ids, dtype=np.int32) for ids in text_ids(tokenizer, texts)]


def tokens_name(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerFast, settings: str = ""
) -> str:
    """Returns the name of a file of tokens, unique to these texts and this tokenizer.

    Args:
        texts: Texts to tokenize.
        tokenizer: Tokenizer.
        settings: Everything else that determines the tokens.
    """
    # An earlier call may have left its truncation and padding; ours have none.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()

    digest = hashlib.sha256(f"{_FORMAT} {tokenizers.__version__}".encode())
    digest.update(backend.to_str().encode())
    digest.update(settings.encode())
    for text in texts:
        encoded = text.encode(errors="surrogatepass")  # the tokenizer refuses them
        digest.update(len(encoded).to_bytes(8))
        digest.update(encoded)
    return f"tokens-{digest.hexdigest()[:16]}.safetensors"


def kept_arrays(path: Path | None, names: Sequence[str], make: Callable[[], Arrays]) -> Arrays:
    """Returns the arrays of a file; makes and writes them first if there is no complete file.

    One process computes them, and the others wait for its file. If the file cannot be written, they
    are computed each time.

    Args:
        path: The file; None for none.
        names: Names of the arrays.
        make: Makes the arrays.
    """
    if path is None:
        return make()
    arrays = _read_arrays(path, names)
    if arrays is not None:
        return arrays
    if path.is_file():
        logger.warning("%s is damaged or cannot be read, so it is made again.", path)

    # A read-only home folder, or a full disk, costs only time.
    with suppress(OSError, DataError, SafetensorError), whole_file(path) as unfinished:
        arrays = _read_arrays(path, names)  # another process may have been faster
        if arrays is None:
            arrays = make()
            save_file(arrays, unfinished)
    return make() if arrays is None else arrays


def _read_arrays(path: Path, names: Sequence[str]) -> Arrays | None:
    """Returns the arrays of a file, memory-mapped; None if it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        # torch's tensors are memory-mapped; numpy's would be copies.
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).numpy() for name in names}
    except (OSError, SafetensorError):
        return None
