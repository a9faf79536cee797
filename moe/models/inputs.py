"""Checks the inputs of a forward once, before anything is computed.

Types and shapes are always checked. Values are checked where that is free: in CPU tensors, outside of
compiling and tracing. Only masks of floating-point numbers make a GPU wait.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache

from moe.checks import check, shown
from moe.errors import ConfigError, DataError, did_you_mean
from moe.kernels.torch_private import is_plain
from moe.sparse.inputs import can_read_values

IGNORED_LABEL = -100
"""Label of a position that has no target, as everywhere in transformers."""

_ID_DTYPES = (torch.int64, torch.int32)
_INTEGER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


# ---------------------------------------------------------------------------
# Arguments


def refuse_unknown_arguments(further: dict[str, Any], forward: Callable[..., Any]) -> None:
    """Raises for keyword arguments that a forward does not have.

    Args:
        further: Arguments that are not in the signature.
        forward: The method with that signature.

    Raises:
        ConfigError: With the closest name.
    """
    for name, value in further.items():
        # Callers pass None for arguments of other models. The position in the cache follows from it.
        if name == "cache_position" or value is None:
            continue
        raise ConfigError(
            f"The model was given an argument {name!r}, which it does not "
            f"have.{did_you_mean(name, signature(forward).parameters)} Leave it out or correct "
            "its name. Packed examples are told apart by segment_ids and decoder_segment_ids; a tokenizer omits "
            "types of tokens with return_token_type_ids=False."
        )


# ---------------------------------------------------------------------------
# Tokens and vectors


def check_token_ids(name: str, ids: Tensor, vocab_size: int, *, ignored: int | None = None) -> None:
    """Raises unless given token ids <int64 or int32>[B, L] of the vocabulary.

    Args:
        name: Name of the argument.
        ids: Value of the argument.
        vocab_size: V; ids are from 0 to V - 1.
        ignored: Another accepted value, the label of positions without a target.

    Raises:
        DataError: With the value and its position.
    """
    is_matrix = isinstance(ids, Tensor) and ids.dtype in _ID_DTYPES and ids.dim() == 2
    if not is_matrix or ids.shape[0] == 0 or ids.shape[1] == 0:
        _refuse(name, ids, "token ids <int64>[batch, length], at least one")
    if not can_read_values(ids):
        return

    # One pass over the values shows whether a search is needed.
    known = ids if ignored is None else ids.masked_fill(ids == ignored, 0)
    least, most = known.aminmax()
    if int(least) < 0 or int(most) >= vocab_size:
        expected = (
            f"a token id from 0 to {vocab_size - 1}{'' if ignored is None else f', or {ignored} for no target'}. Use "
            "the model's tokenizer, or enlarge the vocabulary with resize_token_embeddings"
        )
        _refuse_values(name, ids, (known < 0) | (known >= vocab_size), expected)


def check_vectors(name: str, vectors: Tensor, d_model: int) -> None:
    """Raises unless given embedded or encoded tokens <float>[B, L, D].

    Raises:
        DataError: With the type and shape that were given.
    """
    are_vectors = isinstance(vectors, Tensor) and vectors.dim() == 3 and vectors.is_floating_point()
    if not are_vectors or vectors.shape[-1] != d_model or 0 in vectors.shape[:2]:
        _refuse(
            name, vectors, f"floating point numbers [batch, length, {d_model}], d_model at the end"
        )


# ---------------------------------------------------------------------------
# Masks and segments


def check_segments(name: str, segments: Tensor | None, shape: tuple[int, int]) -> None:
    """Raises unless given numbers of packed examples <int64>[B, L], one for each token.

    Args:
        name: Name of the argument.
        segments: Value of the argument; None for nothing packed.
        shape: B and L.

    Raises:
        DataError: With the type and shape that were given.
    """
    if segments is None:
        return
    if not isinstance(segments, Tensor) or segments.dtype not in _INTEGER_DTYPES:
        expected = "integers [batch, length], the number of each token's example, 0 for padding"
        _refuse(name, segments, expected)
    is_one_each = segments.dim() == 2 and segments.shape[0] == shape[0]
    if not is_one_each or segments.shape[1] != shape[1]:
        expected = f"one number for each token, {list(shape)}; a cache cannot be used with them"
        _refuse(name, segments, expected)


def real_tokens(name: str, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Returns a mask as <bool>[B, keys]: which tokens are real; None if all tokens are real.

    Args:
        name: Name of the argument.
        mask: <bool, integer or float>[B, keys], 1 or True for a token and 0 or False for
            padding.
        shape: B and the number of keys.

    Raises:
        DataError: When it has another shape, or values that are not known to mean a token, such as
            the 0 and -inf of a mask that is added to attention scores.
    """
    if mask is None:
        return None

    # Compared one by one: in a compiled graph, `in` does not find a dynamic size in a tuple.
    batch, num_keys = shape
    is_mask = isinstance(mask, Tensor) and not mask.is_complex() and mask.dim() == 2
    if not is_mask or mask.shape[0] != batch or mask.shape[1] != num_keys:
        expected = (
            f"a mask [{batch}, {num_keys}], 1 for a token and 0 for padding: one row for each sequence and one column "
            "for each key, with a cache also of earlier calls, with a static cache all of its positions. There is none "
            "for each pair of tokens; packed examples are told apart by segment_ids and decoder_segment_ids"
        )
        _refuse(name, mask, expected)

    _check_ones_and_zeros(name, mask)
    return mask.bool()


def pad_decoder_mask(mask: Tensor | None, num_tokens: int) -> Tensor | None:
    """Returns a decoder mask <any>[B, T]; tokens beyond the end of a shorter mask are padding.

    transformers treats short masks in this way.

    Args:
        mask: <any>[B, at most T] or any other value, which is returned unchanged.
        num_tokens: T, number of the decoder's tokens.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return mask
    if mask.shape[1] == 0 or mask.shape[1] >= num_tokens:
        return mask
    return F.pad(mask, (0, num_tokens - mask.shape[1]))  # [B, T]


def _check_ones_and_zeros(name: str, mask: Tensor) -> None:
    """Raises a DataError if a mask <any real>[B, keys] is known to hold another number."""
    if mask.dtype == torch.bool:
        return

    # A compiled graph cannot look at values. In a mask of floats, 0 means padding in one convention
    # and a token in the other, so this must be checked.
    floating = mask.is_floating_point()
    if torch.compiler.is_compiling():
        if floating:
            expected = (
                "a mask of integers or bool, 1 for a token and 0 for padding, in a compiled model"
            )
            _refuse(name, mask, expected)
        return

    # For the same reason a mask of floats is checked on any device with values.
    if can_read_values(mask) or (floating and is_plain(mask) and not mask.is_meta):
        invalid = (mask != 0) & (mask != 1)
        if bool(invalid.any()):
            expected = (
                "1 for a token and 0 for padding. Of a mask that is added to scores, 0 and "
                "-inf, give (mask == 0)"
            )
            _refuse_values(name, mask, invalid, expected)


# ---------------------------------------------------------------------------
# Encoder outputs and caches


def encoder_hidden_states(encoder_outputs: Any) -> Tensor:
    """Returns the encoder's last hidden states <float>[B, M, D] of a record, tuple or list.

    Raises:
        DataError: When there are none.
    """
    memory = getattr(encoder_outputs, "last_hidden_state", None)
    if isinstance(encoder_outputs, tuple | list) and encoder_outputs:
        memory = encoder_outputs[0]
    if not isinstance(memory, Tensor):
        expected = "what the encoder returned, or a tuple that begins with its last_hidden_state"
        _refuse("encoder_outputs", encoder_outputs, expected)
    return memory


def encoder_decoder_cache(past_key_values: Cache | None) -> EncoderDecoderCache | None:
    """Returns a cache for a decoder with cross-attention; wraps one for self-attention."""
    if past_key_values is None or isinstance(past_key_values, EncoderDecoderCache):
        return past_key_values
    return EncoderDecoderCache(past_key_values, DynamicCache())


# ---------------------------------------------------------------------------
# Shared by the checks


def _refuse_values(name: str, tensor: Tensor, invalid: Tensor, expected: str) -> NoReturn:
    """Raises a DataError that names the first of the invalid values <bool>[B, L]."""
    position = invalid.nonzero()[0].tolist()
    value = tensor[tuple(position)].item()
    raise DataError(f"{name} holds {value} at {position}; expected {expected}.")


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    """Raises a DataError with the given and the expected value."""
    given = f"{' '.join(shown(value).split())} ({type(value).__name__})"
    if isinstance(value, Tensor):
        given = f"a tensor <{str(value.dtype).removeprefix('torch.')}>{list(value.shape)}"
    raise DataError(f"{name} is {given}; expected {expected}.")


def check_reads_texts(model_class: Any) -> None:
    """Raises a ConfigError for a model of sounds where texts are given."""
    inputs = model_class.main_input_name
    expected = "input_ids: texts are given"
    check(inputs == "input_ids", f"The input of {model_class.__name__}", inputs, expected)
