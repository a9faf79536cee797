"""A corpus as one long array of token ids."""

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from moe.errors import DataError


def tokenize_corpus(
    documents: datasets.Dataset, tokenizer: PreTrainedTokenizerFast
) -> NDArray[np.int32]:
    """Returns <int32>[N]: the tokens of all documents one after the other, without special tokens.

    Raises:
        DataError: When there is no token at all.

    Source:
        T5 preprocessors.py `unsupervised` at e081111: documents are concatenated. Differs: each
        document whole and once per epoch, where T5 takes a random chunk of 65,536 tokens.
    """
    encoded = tokenizer(
        list(documents["text"]), add_special_tokens=False, split_special_tokens=True, verbose=False
    )
    parts = [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
    tokens = np.concatenate([*parts, np.empty(0, dtype=np.int32)])
    if tokens.size == 0:
        raise DataError("The corpus has no token. Give documents with text.")
    return tokens
