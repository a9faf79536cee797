"""Inputs of the verbs of `stmoe inspect`: a model, texts or pairs to trace, or a trace and its model."""

import hashlib
import json
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from moe.checkpoint.loading import find_class, load_model
from moe.checksums import model_fingerprint
from moe.cli import Parser, integer, model_path, path, real, word
from moe.commands.served_model import add_language_options
from moe.data.language_codes import with_languages
from moe.data.pair_files import COLUMNS, read_pairs
from moe.data.rows import parse_columns
from moe.data.span_corruption import DENSEST
from moe.data.tokenizer import has_sentinels, load_tokenizer, sentinel
from moe.errors import ConfigError, DataError
from moe.hosts.model import SparseHost
from moe.models.inputs import check_reads_texts
from moe.registry import load_entry_point
from moe.sparse.editing import sparse_layers
from moe.tracing.examples import (
    SourceText,
    continued_batches,
    corrupted_batches,
    describe_noise,
    generated_batches,
    paired_batches,
    pretraining_noise,
)
from moe.tracing.recorder import TracedBatch
from moe.tracing.texts import corpus_texts, file_texts
from moe.tracing.trace import Trace

TaskReader = Callable[[str, str], list[SourceText]]
"""Returns the pairs of a split of a task, by its name."""

_LONGEST_TARGET = 256
_LONGEST_ANSWER = 64
_SAY_WHERE = (
    "say where it is now: --traced-model in compare, --model in the other verbs of stmoe inspect."
)


class InspectedModel(NamedTuple):
    """A model with routers, ours or a host, and its tokenizer."""

    folder: Path
    model: Any
    tokenizer: PreTrainedTokenizerFast


def load_inspected(folder: Path, *, dropless: bool = False, hosts: bool = True) -> InspectedModel:
    """Returns the model of a folder and its tokenizer.

    Args:
        folder: Folder of a model with its tokenizer.
        dropless: Whether experts have unlimited capacity, regardless of the config.
        hosts: Whether hosts are supported.

    Raises:
        CheckpointError: When the model is missing or damaged.
        ConfigError: When it is a host, and hosts are not supported.
        DataError: When it has no router, or the tokenizer is missing or of another model.
    """
    if not hosts and issubclass(model_class := find_class(folder), SparseHost):
        raise ConfigError(
            f"stmoe inspect report, replay and compare do not support the {model_class.__name__} in "
            f"{folder}, only models of this library. Use record, view or ablate."
        )
    model = load_model(folder, dropless=dropless)
    if not sparse_layers(model):
        raise DataError(
            f"The model in {folder} has no sparse layer, so there is no router to explain. "
            "Give another."
        )
    return with_tokenizer(folder, model, folder)


def with_tokenizer(folder: Path, model: Any, source: Path | str) -> InspectedModel:
    """Returns a model with the tokenizer of its folder.

    Args:
        folder: Folder with the tokenizer.
        model: The model.
        source: Where the tokenizer comes from, for messages.

    Raises:
        ConfigError: When the model does not read texts.
        DataError: When the tokenizer is missing, damaged or of another model.
    """
    check_reads_texts(type(model))
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > model.config.vocab_size:
        raise DataError(
            f"The tokenizer in {source} has {len(tokenizer):,} tokens, its model "
            f"{model.config.vocab_size:,}: the tokenizer belongs to another model. Put the right "
            "tokenizer.json beside the model."
        )
    return InspectedModel(folder, model, tokenizer)


def add_inputs(parser: Parser, *, required: bool = True) -> None:
    """Adds the options for what is traced, and by which model.

    Args:
        parser: The parser.
        required: Whether the routing of --model is traced; else a model is measured, perhaps on
            nothing, and reads the targets with the capacity of its config.
    """
    if required:
        parser.add_argument(
            "--model", type=model_path, required=True, help="folder of a model with its tokenizer"
        )
    sources = parser.add_mutually_exclusive_group(required=required)
    sources.add_argument(
        "--corpus",
        type=path,
        help="held-out text of a folder made by stmoe corpus, masked if the tokenizer has sentinels",
    )
    sources.add_argument(
        "--text",
        nargs="+",
        help="your files, as for stmoe corpus --data, or NAME=FILE for each kind of text; their spans are masked",
    )
    sources.add_argument(
        "--pairs", type=path, help="a table of pairs, as for stmoe finetune --train"
    )
    sources.add_argument("--task", type=word, help="a task of `stmoe eval list`; see --split")

    # Amount and processing.
    parser.add_argument(
        "--columns", nargs="+", default=[], help="columns of --pairs, e.g. inputs=question"
    )
    add_language_options(parser)
    parser.add_argument("--split", default="validation", help="split of the task (validation)")
    if required:
        parser.add_argument(
            "--by-prefix",
            action="store_true",
            help="the kind of a pair is the text before `: ` of its inputs, e.g. a language",
        )
        parser.add_argument(
            "--generate",
            action="store_true",
            help="let the decoder read the model's own greedy answers instead of the targets",
        )
    else:
        parser.set_defaults(generate=False, by_prefix=False)
    parser.add_argument(
        "--examples", type=integer(least=1), default=1024, help="most examples, taken evenly (1024)"
    )
    parser.add_argument(
        "--inputs-length",
        type=integer(least=4),
        default=64,
        help="most encoder tokens of an example (64)",
    )
    parser.add_argument(
        "--noise-density",
        type=real(above=0, most=DENSEST),
        help="share of the tokens to mask (that of the model's pre-training, 0.15 if unknown)",
    )
    add_batches(parser, dropless=required)


def add_batches(parser: Parser, *, dropless: bool = True) -> None:
    """Adds the options for how a model reads examples, with or without --dropless."""
    parser.add_argument(
        "--batch-size",
        type=integer(least=1),
        default=32,
        help="examples of a batch, which share the experts' slots (32)",
    )
    if dropless:
        parser.add_argument(
            "--dropless", action="store_true", help="give every expert room for all tokens"
        )


def command_text(verb: str, argv: Sequence[str]) -> str:
    """Returns the command of a verb as the user typed it, for the files that it writes."""
    return shlex.join(["stmoe", "inspect", verb, *argv])


def describe_inputs(options: Namespace, inspected: InspectedModel) -> str:
    """Returns a description of the traced inputs."""
    masks = "the second half of each piece predicted from the first"
    if has_sentinels(inspected.tokenizer):
        config = inspected.model.config
        masks = describe_noise(pretraining_noise(config, options.noise_density), config)
    if options.corpus:
        text = f"held-out text of {options.corpus}, {masks}"
    elif options.text:
        text = f"{' '.join(options.text)}, {masks}"
    elif options.pairs:
        text = f"pairs of {options.pairs}"
    else:
        text = f"{options.split} split of {options.task}"
    return text + (", the model's own answers" if options.generate else "")


def read_batches(
    options: Namespace, inspected: InspectedModel, sides: Sequence[str] = ("source", "target")
) -> Iterator[TracedBatch]:
    """Yields the batches for the options of `add_inputs`.

    Args:
        options: Parsed options.
        inspected: The model that reads the batches.
        sides: Texts of a pair that must be in the language of the options.

    Raises:
        ConfigError: When a task is given where there are none, a number is out of range, or text
            cannot be masked as asked.
        DataError: When a file is missing or not text.
    """
    model = inspected.model
    languages = (options.source_language, options.target_language)
    tokenizer = with_languages(inspected.tokenizer, *languages)
    lengths = {
        "inputs_length": options.inputs_length,
        "batch_size": options.batch_size,
        "most_examples": options.examples,
    }

    # Spans of texts are masked; pairs are as in fine-tuning, with its sentinel if it used one.
    if options.corpus or options.text:
        texts = corpus_texts(options.corpus) if options.corpus else file_texts(options.text)
        if has_sentinels(tokenizer):
            noise = pretraining_noise(model.config, options.noise_density)
            batches = corrupted_batches(texts, tokenizer, noise=noise, **lengths)
        elif options.noise_density is None:
            batches = continued_batches(texts, tokenizer, **lengths)
        else:
            raise ConfigError(
                f"--noise-density {options.noise_density:g} is not supported: the tokenizer of "
                f"{inspected.folder} has no {sentinel(0)} to mask spans with, so text is continued "
                "instead. Leave it out."
            )
    else:
        pairs = _read_pairs(options, sides)
        forced = model.generation_config.forced_bos_token_id if model.generation_config else None
        has_sentinel = forced is not None and forced == tokenizer.get_vocab().get(sentinel(0))
        batches = paired_batches(
            pairs,
            tokenizer,
            targets_length=_LONGEST_TARGET,
            sentinels="one" if has_sentinel else "none",
            **lengths,
        )

    # The decoder reads the model's own answers.
    if options.generate:
        batches = generated_batches(model, batches, max_tokens=_LONGEST_ANSWER)
    return batches


def _read_pairs(options: Namespace, sides: Sequence[str]) -> list[SourceText]:
    """Returns the pairs of a file or of a task; see `read_batches`.

    Raises:
        DataError: When no pair has the languages of the options.
    """
    if options.pairs:
        sources = []
        pairs = read_pairs(options.pairs, parse_columns(options.columns, COLUMNS))
        for name in (f"{side}_language" for side in sides):
            code = getattr(options, name)
            languages = {getattr(pair, name) for pair in pairs}
            if code is not None and languages.isdisjoint((code, None)):
                raise DataError(
                    f"{options.pairs} has no pairs whose {name} is {code!r}; expected one of "
                    f"{', '.join(sorted(languages))}."
                )
            pairs = [pair for pair in pairs if code is None or getattr(pair, name) in (code, None)]
        for number, pair in enumerate(pairs):
            prefix, separator, _ = pair.inputs.partition(": ")
            kind = "-".join(filter(None, pair.languages)) or options.pairs.stem
            if options.by_prefix:
                kind = prefix if separator else ""
            sources.append(SourceText(*pair.texts, number, kind, pair.languages))
        return sources
    return load_entry_point("stmoe.tasks", "read_pairs")(options.task, options.split)


# ---------------------------------------------------------------------------
# A trace


def add_trace(parser: Parser) -> None:
    """Adds the option for the trace."""
    parser.add_argument(
        "--trace", type=path, required=True, help="folder made by stmoe inspect record"
    )


def load_traced(
    trace: Trace, folder: Path | None, *, dropless: bool = False, hosts: bool = True
) -> InspectedModel:
    """Returns the model of a trace.

    Args:
        trace: The trace.
        folder: Where the model is now; None for where it was.
        dropless: See `load_inspected`.
        hosts: See `load_inspected`.

    Raises:
        ConfigError: When the model is a host, and hosts are not supported.
        DataError: When the model is gone from where it was or has changed there, or the folder has
            another tokenizer than the trace was made with.
    """
    is_where_it_was = folder is None
    if folder is None:
        folder = Path(trace.facts.model)
        if not trace.facts.model or not folder.is_dir():
            where = trace.facts.model or "memory"
            raise DataError(
                f"The traced model was saved in {where}, and is not there: {_SAY_WHERE}"
            )

    # The folder may contain another model by now, e.g. after further training.
    inspected = load_inspected(folder, dropless=dropless, hosts=hosts)
    recorded = trace.facts.model_fingerprint
    if is_where_it_was and recorded not in ("", model_fingerprint(folder)):
        raise DataError(
            f"The model in {folder} has changed since it was traced. Record the trace again, or, if the traced model "
            f"was moved, {_SAY_WHERE}"
        )

    # Token ids must mean the same.
    fingerprint = tokenizer_fingerprint(inspected.tokenizer)
    if trace.facts.tokenizer_fingerprint not in ("", fingerprint):
        raise DataError(
            f"The tokenizer of {inspected.folder} is {fingerprint}, but the trace used "
            f"{trace.facts.tokenizer_fingerprint}: the token ids would stand for different words. Use the traced "
            "model, or one with the same tokenizer."
        )
    return inspected


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns 16 hexadecimal digits that identify the meaning of a tokenizer's ids.

    Tokens that it appends to a text are ignored: fine-tuning may have changed them.
    """
    tokens = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]
