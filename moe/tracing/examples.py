"""Batches to trace: of texts, masked or continued, and of pairs of texts.

Comes before `recorder`, which records a model's routing of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from moe.checks import check_integer
from moe.data.language_codes import for_pair
from moe.data.pairs import Sentinels, encode_pairs
from moe.data.span_corruption import Noise, corrupt, noise_mask, tokens_length
from moe.data.tokenizer import SpecialIds, input_frame, pad_and_eos, target_frame, text_ids
from moe.errors import DataError
from moe.models.configuration import STMoEConfig
from moe.tracing.recorder import TracedBatch, evaluation_mode
from moe.tracing.trace import Trace

_NOT_A_TARGET = -100
_PADDING = 0  # of inputs, where no tokenizer says it; masked, so that any id would do
_SHORTEST = 4  # tokens of a text that are worth a mask or a continuation


class SourceText(NamedTuple):
    """A text to trace.

    Attributes:
        text: The text, or the input of a pair.
        target: Target of a pair; empty for a text alone.
        document: Number of its document: texts of one document are not independent.
        domain: Name of its kind.
        languages: Codes of the languages of both texts; empty for the tokenizer's.
    """

    text: str
    target: str
    document: int
    domain: str
    languages: tuple[str | None, ...] = ()


class _Row(NamedTuple):
    """An example in tokens <int>[L] and <int>[T], and where it is from."""

    inputs: NDArray[np.integer]
    targets: NDArray[np.integer]
    source: SourceText


def pretraining_noise(config: STMoEConfig, density: float | None = None) -> Noise:
    """Returns how to mask text for a model: as in its pre-training, else as in the paper.

    Args:
        config: Config of the model, which may say how pre-training masked text.
        density: Share of tokens to mask; None uses the settings of pre-training.
    """
    paper = Noise()
    return Noise(
        density or config.noise_density or paper.density,
        config.mean_noise_span_length or paper.mean_span_length,
    )


def describe_noise(noise: Noise, config: STMoEConfig) -> str:
    """Returns how much text is masked, and how that compares with a model's pre-training."""
    text = (
        f"{100 * noise.density:g} % of the tokens masked, in spans of {noise.mean_span_length:g} "
        "on average"
    )
    if config.noise_density is None:
        return f"{text} (the model does not say how its pre-training masked text; the paper masks 15 %)"
    if noise.density == config.noise_density:
        return f"{text}, as in pre-training"
    return f"{text} ({100 * config.noise_density:g} % in pre-training)"


def corrupted_batches(
    texts: Iterable[SourceText],
    tokenizer: PreTrainedTokenizerFast,
    *,
    inputs_length: int,
    batch_size: int,
    noise: Noise,
    most_examples: int | None = None,
    seed: int = 0,
) -> Iterator[TracedBatch]:
    """Yields batches in which spans of the texts are masked, as in pre-training.

    Each text is cut into separate examples, in order. Of more than `most_examples`, evenly spaced
    ones are used.

    Args:
        texts: Texts without targets.
        tokenizer: Tokenizer of the model.
        inputs_length: Maximum number of encoder tokens of an example.
        batch_size: Examples in a batch; the last one may have fewer.
        noise: How much is masked; see `pretraining_noise`.
        most_examples: Most examples in all; None for all.
        seed: Seed of the masks.

    Raises:
        DataError: When no text has at least four tokens.
    """
    # Chunks of as many tokens as corruption shortens to the inputs' length.
    ids = SpecialIds.of(tokenizer)
    length = tokens_length(inputs_length, noise, ids.num_sentinels)
    chunks = _chunks(texts, tokenizer, length)

    # The mask of an example follows from its number, regardless of the other examples.
    def masked_rows() -> Iterator[_Row]:
        for number in _evenly(len(chunks), most_examples):
            chunk, source = chunks[number]
            rng = np.random.default_rng([seed, number])
            inputs, targets = corrupt(chunk, noise_mask(chunk.size, noise, rng), ids)
            yield _Row(inputs, targets, source)

    return _batches(masked_rows(), batch_size, ids.pad)


def continued_batches(
    texts: Iterable[SourceText],
    tokenizer: PreTrainedTokenizerFast,
    *,
    inputs_length: int,
    batch_size: int,
    most_examples: int | None = None,
) -> Iterator[TracedBatch]:
    """Yields batches in which the decoder continues the text that the encoder reads.

    For tokenizers without sentinels, which cannot mask spans. Each text gets an end token and is
    cut into chunks: the first half of a chunk is the input, the second half the target.

    Args:
        texts: Texts without targets.
        tokenizer: Tokenizer of the model; the special tokens that it adds surround each input.
        inputs_length: Maximum number of encoder tokens of an example.
        batch_size: Examples in a batch; the last one may have fewer.
        most_examples: Most examples in all, evenly spaced; None for all.

    Raises:
        ConfigError: When `inputs_length` has no room for two tokens of text.
        DataError: When no text has at least four tokens.

    Source:
        google-research/text-to-text-transfer-transformer@2bb1732 t5/data/preprocessors.py,
        prefix_lm. Differs: a chunk is divided in halves, not at random.
    """
    pad, eos = pad_and_eos(tokenizer)
    start, end = input_frame(tokenizer)
    num_special = len(start) + len(end)
    check_integer("inputs_length", inputs_length, least=num_special + _SHORTEST // 2)
    chunks = _chunks(texts, tokenizer, 2 * (inputs_length - num_special), end=[eos])

    rows = []
    for number in _evenly(len(chunks), most_examples):
        chunk, source = chunks[number]
        half = chunk.size // 2
        inputs = np.asarray([*start, *chunk[:half], *end])
        rows.append(_Row(inputs, chunk[half:], source))
    return _batches(rows, batch_size, pad)


def _chunks(
    texts: Iterable[SourceText],
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    end: Sequence[int] = (),
) -> list[tuple[NDArray[np.int32], SourceText]]:
    """Returns chunks <int32>[at most length] of each text followed by `end`, and their texts.

    Raises:
        DataError: When no chunk has `_SHORTEST` tokens.
    """
    chunks = []
    for source in texts:
        (ids,) = text_ids(tokenizer, [source.text])
        tokens = np.asarray([*ids, *end], dtype=np.int32)
        for start in range(0, tokens.size, length):
            chunk = tokens[start : start + length]
            if chunk.size >= _SHORTEST:
                chunks.append((chunk, source))
    if not chunks:
        raise DataError(
            f"There is nothing to trace: no text has {_SHORTEST} tokens. Give more text."
        )
    return chunks


def paired_batches(
    pairs: Sequence[SourceText],
    tokenizer: PreTrainedTokenizerFast,
    *,
    inputs_length: int,
    targets_length: int,
    batch_size: int,
    most_examples: int | None = None,
    sentinels: Sentinels = "none",
) -> Iterator[TracedBatch]:
    """Yields batches of pairs, as in fine-tuning; texts that are too long are truncated.

    Args:
        pairs: Texts with targets.
        tokenizer: Tokenizer of the model.
        inputs_length: Most encoder tokens of an example.
        targets_length: Maximum number of decoder tokens of an example.
        batch_size: Examples in a batch; the last one may have fewer.
        most_examples: Maximum number of examples, evenly spaced; None for all.
        sentinels: The model's fine-tuning setting; see `PairSource`.

    Raises:
        DataError: When there is no pair.
    """
    if not pairs:
        raise DataError("There is nothing to trace: no pairs were given.")

    # Truncation and sentinels are those of fine-tuning.
    chosen = [pairs[number] for number in _evenly(len(pairs), most_examples)]
    texts = [(pair.text, pair.target, *pair.languages) for pair in chosen]
    encoded = encode_pairs(texts, tokenizer, (inputs_length, targets_length), sentinels)
    rows = []
    for (inputs, targets), source in zip(encoded, chosen, strict=True):
        rows.append(_Row(np.asarray(inputs), np.asarray(targets), source))
    given, _ = target_frame(for_pair(tokenizer, chosen[0].languages))
    batches = _batches(rows, batch_size, pad_and_eos(tokenizer)[0])
    return (batch._replace(num_given=len(given)) for batch in batches)


def _evenly(number: int, most: int | None) -> list[int]:
    """Returns at most `most` of the numbers below `number`, evenly spaced."""
    if most is None or most >= number:
        return list(range(number))
    return [index * number // most for index in range(most)]


def _batches(rows: Iterable[_Row], batch_size: int, padding: int) -> Iterator[TracedBatch]:
    """Yields batches of rows, each padded to its longest."""
    remaining = iter(rows)
    while collected := list(islice(remaining, batch_size)):
        yield _collate(collected, padding)


def _collate(rows: Sequence[_Row], padding: int) -> TracedBatch:
    inputs = [torch.from_numpy(row.inputs.astype(np.int64)) for row in rows]
    targets = [torch.from_numpy(row.targets.astype(np.int64)) for row in rows]
    masks = [torch.ones_like(row) for row in inputs]
    batch = {
        "input_ids": pad_sequence(inputs, batch_first=True, padding_value=padding),  # [B, L]
        "attention_mask": pad_sequence(masks, batch_first=True),  # [B, L]
        "labels": pad_sequence(targets, batch_first=True, padding_value=_NOT_A_TARGET),  # [B, T]
    }
    documents = [row.source.document for row in rows]
    return TracedBatch(batch, documents, [row.source.domain for row in rows])


def batches_of(trace: Trace, batch_size: int) -> Iterator[TracedBatch]:
    """Yields the examples of a trace again, e.g. for another model.

    Args:
        trace: The recorded trace.
        batch_size: Examples in a batch; where experts have a capacity, routing depends on it.
    """
    # The decoder's inputs follow from the targets.
    inputs = trace.encoder.ids.split(trace.encoder.starts.diff().tolist())
    targets = trace.decoder.targets.split(trace.decoder.starts.diff().tolist())
    sources = zip(trace.document.tolist(), trace.domain.tolist(), strict=True)

    rows = []
    for of_inputs, of_targets, (document, domain) in zip(inputs, targets, sources, strict=True):
        source = SourceText("", "", document, trace.facts.domains[domain])
        rows.append(_Row(of_inputs.numpy(), of_targets.numpy(), source))
    return _batches(rows, batch_size, _PADDING)


def generated_batches(
    model: Any, batches: Iterable[TracedBatch], *, max_tokens: int
) -> Iterator[TracedBatch]:
    """Yields the batches with the model's own greedy answers instead of their labels.

    Args:
        model: Ours or a host; its training mode is restored.
        batches: Batches whose answers begin with the first `num_given` labels.
        max_tokens: Maximum number of tokens of an answer.
    """
    ends = torch.tensor(model.generation_config.eos_token_id, device=model.device)
    for traced in batches:
        # Greedily, so that the same answer comes again.
        inputs = {name: value for name, value in traced.batch.items() if name != "labels"}
        if traced.num_given:
            given = traced.batch["labels"][:, : traced.num_given]
            start = torch.full_like(given[:, :1], model.generation_config.decoder_start_token_id)
            inputs["decoder_input_ids"] = torch.cat([start, given], dim=1)
        options = {"max_new_tokens": max_tokens, "do_sample": False, "num_beams": 1}
        with evaluation_mode(model):
            answers = model.generate(**inputs, **options)

        # Only padding follows the first end token.
        labels = answers[:, 1:]  # [B, T]
        is_end = torch.isin(labels, ends)
        has_ended = is_end.cumsum(dim=1) - is_end.long() > 0
        labels = labels.masked_fill(has_ended, _NOT_A_TARGET)
        yield traced._replace(batch={**traced.batch, "labels": labels})
