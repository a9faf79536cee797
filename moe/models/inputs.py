"""The doors of the models: what a forward accepts, checked once and before anything is computed.

Types and shapes are always checked. Values are checked where that is free: in tensors that lie in
the memory of the host, outside of compiling and tracing. A GPU is never waited for, with one
exception: masks of floating point numbers.
"""

import math
from collections.abc import Callable
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache

from moe.checks import is_kind, shown
from moe.errors import ConfigError, DataError, did_you_mean

IGNORED_LABEL = -100
"""Label of a position that has no target, as everywhere in transformers."""

_IDS = (torch.int64, torch.int32)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_PACKING = "packed examples are told apart by segment_ids and decoder_segment_ids"
_POSITIONS = "positions follow from the order of the tokens, and " + _PACKING
_HEADS = "attention heads cannot be masked"
_WITHOUT_A_PLACE = {
    "position_ids": _POSITIONS,
    "decoder_position_ids": _POSITIONS,
    "cu_seq_lens_q": _PACKING,
    "cu_seq_lens_k": _PACKING,
    "max_length_q": _PACKING,
    "max_length_k": _PACKING,
    "seq_idx": _PACKING,
    "is_causal": "the encoder sees all tokens, the decoder those before",
    "token_type_ids": "the model has no types of tokens; a tokenizer omits them with return_token_type_ids=False",
    "head_mask": _HEADS,
    "decoder_head_mask": _HEADS,
    "cross_attn_head_mask": _HEADS,
    "shift_labels": "labels are not shifted; give them as labels",
}
"""Keyword arguments that models of transformers take, and why these do not; None may stand for any of them."""

_WITHOUT_EFFECT = ("cache_position",)  # it follows from the cache


def refuse_further(further: dict[str, Any], forward: Callable[..., Any]) -> None:
    """Refuses keyword arguments of a forward that it does not have.

    Args:
        further: What was given beside the arguments of the signature.
        forward: Whose signature it is.

    Raises:
        ConfigError: With the reason where transformers' models have the argument, else with the
            nearest name.
    """
    for name, value in further.items():
        if name in _WITHOUT_EFFECT or (name in _WITHOUT_A_PLACE and value is None):
            continue
        if name in _WITHOUT_A_PLACE:
            raise ConfigError(
                f"The model was given {name}, but {_WITHOUT_A_PLACE[name]}. Leave it out."
            )
        raise ConfigError(
            f"The model was given an argument {name!r}, which it does not have."
            f"{did_you_mean(name, signature(forward).parameters)} Leave it out or correct its name."
        )


def check_token_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Refuses what is not token ids <int64 or int32>[B, L] of the vocabulary.

    Args:
        name: Of the argument.
        ids: What was given.
        vocab_size: V; ids are from 0 to V - 1.

    Raises:
        DataError: With the value, and where it stands.
    """
    _check_integers(name, ids, "token ids")
    if not _values_are_free(ids):
        return

    least, most = (int(bound) for bound in ids.aminmax())
    if least < 0 or most >= vocab_size:
        _refuse_values(name, ids, (ids < 0) | (ids >= vocab_size), _vocabulary(vocab_size))


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Refuses what is not labels <int64 or int32>[B, T]: token ids, and -100 where there is no
    target.

    Raises:
        DataError: With the value, and where it stands.
    """
    _check_integers("labels", labels, "token ids, -100 for no target")
    if not _values_are_free(labels):
        return

    least, most = (int(bound) for bound in labels.masked_fill(labels == IGNORED_LABEL, 0).aminmax())
    if least < 0 or most >= vocab_size:
        strangers = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocab_size))
        _refuse_values(
            "labels",
            labels,
            strangers,
            f"{IGNORED_LABEL} for no target, or " + _vocabulary(vocab_size),
        )


def check_vectors(name: str, vectors: Tensor, d_model: int) -> None:
    """Refuses what is not embedded or encoded tokens <float>[B, L, D].

    Raises:
        DataError: With the type and shape that were given.
    """
    if not isinstance(vectors, Tensor) or vectors.dim() != 3 or not vectors.is_floating_point():
        _refuse(name, vectors, f"floating point numbers [batch, length, {d_model}]")
    if vectors.shape[-1] != d_model:
        _refuse(name, vectors, f"vectors of d_model, {d_model} numbers")
    if vectors.shape[0] == 0 or vectors.shape[1] == 0:
        _refuse_empty(name, vectors)


def check_segments(name: str, segments: Tensor | None, shape: tuple[int, int]) -> None:
    """Refuses what is not numbers of packed examples <int64>[B, L], one for each token.

    Args:
        name: Of the argument.
        segments: What was given; None for nothing packed.
        shape: B and L.

    Raises:
        DataError: With the type and shape that were given.
    """
    if segments is None:
        return
    if not isinstance(segments, Tensor) or segments.dtype not in _INTEGERS:
        _refuse(
            name,
            segments,
            "integers [batch, length], the number of each token's example, 0 for padding",
        )
    if tuple(segments.shape) != shape:
        _refuse(
            name,
            segments,
            f"one number for each token, {list(shape)}; a cache cannot be used with them",
        )


def real_tokens(name: str, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Returns a mask as <bool>[B, keys]: which tokens are real; None for None, which stands for
    all.

    Args:
        name: Of the argument.
        mask: <bool, integer or float>[B or 1, keys], 1 or True for a token and 0 or False for
            padding.
        shape: B and the number of keys.

    Raises:
        DataError: When it has another shape, or values of which nobody knows whether they mean a
            token, such as the 0 and -inf of a mask that is added to the scores of attention.
    """
    if mask is None:
        return None
    batch, keys = shape
    if not isinstance(mask, Tensor) or mask.is_complex():
        _refuse(name, mask, f"a mask [{batch}, {keys}], 1 for a token and 0 for padding")
    if mask.dim() != 2:
        _refuse(
            name,
            mask,
            f"a mask [{batch}, {keys}], one value for each token and not for each pair: it also says which tokens the "
            f"experts see. The decoder is causal by itself, and {_PACKING}",
        )
    if mask.shape[1] != keys or mask.shape[0] not in (1, batch):
        _refuse(
            name,
            mask,
            f"a mask [{batch}, {keys}], one column for each key: all tokens of this call and, with a cache, of earlier "
            "ones; with a static cache all of its places",
        )

    _check_ones_and_zeros(name, mask)
    return mask.bool().expand(batch, -1)


def read_memory(encoder_outputs: Any) -> Tensor:
    """Returns the encoder's last hidden states <float>[B, M, D] out of a record, or the first of a
    tuple or list.

    Raises:
        DataError: When there are none.
    """
    memory = getattr(encoder_outputs, "last_hidden_state", None)
    if isinstance(encoder_outputs, tuple | list) and encoder_outputs:
        memory = encoder_outputs[0]
    if not isinstance(memory, Tensor):
        _refuse(
            "encoder_outputs",
            encoder_outputs,
            "what the encoder returned, or a tuple that begins with its last_hidden_state",
        )
    return memory


def as_cache(past_key_values: Any) -> EncoderDecoderCache | None:
    """Returns a cache for a decoder with cross-attention; one for self-attention alone gets a
    partner.

    Raises:
        DataError: When it is no cache of transformers.
    """
    if past_key_values is None or isinstance(past_key_values, EncoderDecoderCache):
        return past_key_values
    if isinstance(past_key_values, Cache):
        return EncoderDecoderCache(past_key_values, DynamicCache())
    return _refuse(
        "past_key_values",
        past_key_values,
        "a cache, e.g. EncoderDecoderCache(DynamicCache(), DynamicCache())",
    )


def check_same_batch(decoder: Tensor, memory: Tensor) -> None:
    """Refuses a decoder whose sequences are not as many as those of the encoder, or one encoded for
    all.

    Args:
        decoder: <float>[B, T, D] embedded tokens.
        memory: <float>[B or 1, M, D] encoder output.

    Raises:
        DataError: With both numbers.
    """
    if memory.shape[0] not in (1, decoder.shape[0]):
        raise DataError(
            f"The decoder has {decoder.shape[0]} sequences and the encoder {memory.shape[0]}; expected as many, or one "
            "of the encoder for all. Give each target its input."
        )


def check_targets(labels: Tensor, decoder_inputs: Tensor) -> None:
    """Refuses labels <int64>[B, T] that are not one for each of the decoder's inputs [B, T] or [B,
    T, D].

    Raises:
        DataError: With both shapes.
    """
    if labels.shape != decoder_inputs.shape[:2]:
        raise DataError(
            f"labels is {list(labels.shape)}, but the decoder's inputs are {list(decoder_inputs.shape[:2])}; expected "
            "one label for each. Leave the decoder's inputs out to have them made of the labels."
        )


def check_num_items(num_items: Any, labels: Tensor) -> Tensor:
    """Returns the number of targets of a whole batch as a tensor <any>[] on the device of the
    labels <int64>[B, T].

    Args:
        num_items: A number, or a tensor that holds one. None of a batch without a target may be 0.
        labels: Of the part at hand.

    Raises:
        DataError: When it is no number, or not above 0 although there are targets.
    """
    expected = "the number of targets of the whole batch, an integer above 0"
    if isinstance(num_items, Tensor):
        holds = (
            num_items.numel() == 1 and not num_items.is_complex() and num_items.dtype != torch.bool
        )
        known = holds and _values_are_free(num_items)
    else:
        holds = known = is_kind(num_items, int)
    if not holds:
        _refuse("num_items_in_batch", num_items, expected)

    if known:
        value = float(num_items)
        without_target = _values_are_free(labels) and not (labels != IGNORED_LABEL).any()
        if not math.isfinite(value) or value < 0 or (value == 0 and not without_target):
            raise DataError(
                f"num_items_in_batch is {value:g}; expected {expected}: the losses are divided by it."
            )
    return torch.as_tensor(num_items, device=labels.device).reshape(())


def check_logits_to_keep(logits_to_keep: Any, labels: Tensor | None) -> None:
    """Refuses what does not say of which of the decoder's positions logits are wanted.

    Raises:
        DataError: When it is neither a number of last positions nor their indices, or there are
            labels, each of which needs its logits.
    """
    if isinstance(logits_to_keep, Tensor):
        holds = logits_to_keep.dim() == 1 and logits_to_keep.dtype in _IDS
        all_of_them = False
    else:
        holds = is_kind(logits_to_keep, int) and logits_to_keep >= 0
        all_of_them = logits_to_keep == 0
    if not holds:
        _refuse(
            "logits_to_keep",
            logits_to_keep,
            "a number of last positions, 0 for all, or indices <int64>[positions]",
        )
    if labels is not None and not all_of_them:
        raise DataError(
            "logits_to_keep and labels were both given, but the loss needs the logits of every label. Leave one out."
        )


def _check_integers(name: str, ids: Tensor, meaning: str) -> None:
    """Raises a DataError unless there are integers [B, L], and some."""
    if not isinstance(ids, Tensor) or ids.dtype not in _IDS:
        _refuse(name, ids, f"a tensor <int64>[batch, length] of {meaning}")
    if ids.dim() != 2:
        _refuse(name, ids, f"{meaning} of the shape [batch, length]")
    if ids.shape[0] == 0 or ids.shape[1] == 0:
        _refuse_empty(name, ids)


def _check_ones_and_zeros(name: str, mask: Tensor) -> None:
    """Raises a DataError when a mask <any real>[B, keys] holds another number, where that can be
    known.
    """
    if mask.dtype == torch.bool:
        return
    floating = mask.is_floating_point()
    if torch.compiler.is_compiling():
        if (
            floating
        ):  # 0 is padding in one convention and a token in the other: it must not go unseen
            _refuse(
                name,
                mask,
                "a mask of integers or bool, 1 for a token and 0 for padding, in a compiled model",
            )
        return

    if (floating and mask.device.type != "meta") or _values_are_free(mask):
        strangers = (mask != 0) & (mask != 1)
        if bool(strangers.any()):
            _refuse_values(
                name,
                mask,
                strangers,
                "1 for a token and 0 for padding. Of a mask that is added to scores, 0 and -inf, give (mask == 0)",
            )


def _values_are_free(tensor: Tensor) -> bool:
    """Returns whether looking at the values of a tensor costs and breaks nothing."""
    return (
        type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    )


def _vocabulary(vocab_size: int) -> str:
    """Returns what is expected of a token id, and what to do."""
    return (
        f"a token id from 0 to {vocab_size - 1}. Use the model's tokenizer, or enlarge the vocabulary with "
        "resize_token_embeddings"
    )


def _refuse_values(name: str, tensor: Tensor, strangers: Tensor, expected: str) -> NoReturn:
    """Raises a DataError that names the first of the values <bool>[B, L] that do not belong there."""
    place = strangers.nonzero()[0].tolist()
    value = tensor[tuple(place)].item()
    raise DataError(f"{name} holds {value} at {place}; expected {expected}.")


def _refuse_empty(name: str, tensor: Tensor) -> NoReturn:
    """Raises a DataError for a tensor without a token."""
    raise DataError(
        f"{name} is empty, {list(tensor.shape)}; expected at least one sequence of at least one token."
    )


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    """Raises a DataError that says what was given and what was expected."""
    if isinstance(value, Tensor):
        given = f"a tensor <{str(value.dtype).removeprefix('torch.')}>{list(value.shape)}"
    elif value is None:
        given = "None"
    else:
        given = f"{' '.join(shown(value).split())} ({type(value).__name__})"
    raise DataError(f"{name} is {given}; expected {expected}.")
