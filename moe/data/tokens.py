"""The tokens of a corpus, kept beside it for the next run.

Comes after `corpus` and `tokenizer`, before `pipeline`.
"""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from moe.errors import DataError
from moe.files import whole_file

if TYPE_CHECKING:
    import datasets

_TENSOR = "tokens"
_DIGEST = "sha256"  # of the tokens' bytes
_BATCH = 1_000  # documents


def tokenize_corpus(
    documents: "datasets.Dataset", tokenizer: PreTrainedTokenizerFast
) -> NDArray[np.int32]:
    """Returns <int32>[N]: the tokens of all documents one after the other, without special tokens.

    For a corpus on disk they are kept in its folder, as 55M characters take more than a minute. A
    folder that cannot be written to keeps none.

    Raises:
        DataError: When there is no token at all.

    Source:
        T5 preprocessors.py `unsupervised` at e081111: documents are concatenated. Differs: each
        document whole and once per epoch, where T5 takes a random chunk of 65,536 tokens.
    """
    kept = _kept_file(documents, tokenizer)
    tokens = None if kept is None else _read_tokens(kept)
    if tokens is None:
        tokens = _encode(documents, tokenizer)
        if kept is not None:
            _keep_tokens(tokens, kept)

    if tokens.size == 0:
        raise DataError("The corpus has no token. Give documents with text.")
    return tokens


def _kept_file(documents: "datasets.Dataset", tokenizer: PreTrainedTokenizerFast) -> Path | None:
    """Returns where the tokens are kept; None for documents that lie in memory.

    The name tells these texts and this tokenizer from all others.
    """
    if not documents.cache_files:
        return None
    digest = hashlib.sha256(tokenizers.__version__.encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for text in documents["text"]:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8))
        digest.update(encoded)

    folder = Path(documents.cache_files[0]["filename"]).parent
    return folder / f"tokens-{digest.hexdigest()[:16]}.safetensors"


def _read_tokens(path: Path) -> NDArray[np.int32] | None:
    """Returns the tokens of a file; None where it is missing or damaged."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            tokens = file.get_tensor(_TENSOR)
            digest = (file.metadata() or {}).get(_DIGEST)
    except (OSError, safetensors.SafetensorError):
        return None
    return tokens if digest == hashlib.sha256(tokens.tobytes()).hexdigest() else None


def _keep_tokens(tokens: NDArray[np.int32], path: Path) -> None:
    """Writes the tokens to a file, where that is possible."""
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    with suppress(OSError, DataError), whole_file(path) as partial:
        save_file({_TENSOR: tokens}, partial, metadata={_DIGEST: digest})


def _encode(documents: "datasets.Dataset", tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int32]:
    """Returns the tokens <int32>[N] of all documents."""
    parts = [np.empty(0, dtype=np.int32)]
    starts = range(0, len(documents), _BATCH)
    for start in tqdm(starts, desc="tokenize", unit_scale=_BATCH, unit=" documents", delay=2):
        texts = documents[start : start + _BATCH]["text"]
        encoded = tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        parts += [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
    return np.concatenate(parts)
