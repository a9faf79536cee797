"""The frame of every surgery: measure a model, write a changed one, measure that, and report both.

A command supplies its options and the function that writes the changed model.
"""

import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from moe.checkpoint.loading import empty_model, find_class, load_model
from moe.cli import Parser, model_name
from moe.commands.convert import new_model_folder
from moe.commands.routing_inputs import (
    InspectedModel,
    add_inputs,
    describe_inputs,
    read_batches,
    with_tokenizer,
)
from moe.commands.served_model import add_mmap_option
from moe.commands.surgery_report import SurgeryResult, compare, measure, write_report
from moe.convert.formats import find_tokenizer
from moe.convert.t5x import is_t5x
from moe.errors import ConfigError
from moe.files import whole_folder
from moe.tracing.recorder import TracedBatch

Operate = Callable[[Path, Sequence[TracedBatch]], SurgeryResult]
"""Writes the changed model into an empty folder, given the examples; there are none without text."""


def add_surgery_options(parser: Parser, what: str) -> None:
    """Adds the options for the model before, the folder of the model after, and the data of both.

    Args:
        parser: The parser.
        what: Description of the model before, for the help text.
    """
    parser.add_argument("--from", dest="source", type=model_name, required=True, help=what)
    parser.add_argument("--to", required=True, help="the folder to make")
    add_inputs(parser, required=False)
    add_mmap_option(parser)


def load_source(options: Namespace) -> InspectedModel:
    """Returns the model before, with its tokenizer."""
    model = load_model(options.source, mmap=options.mmap)
    return with_tokenizer(find_tokenizer(options.source), model, options.source)


def perform_surgery(
    verb: str,
    argv: Sequence[str],
    options: Namespace,
    operate: Operate,
    *,
    needs_text: bool = False,
    check: Callable[[nn.Module], object] | None = None,
) -> None:
    """Changes a model, and prints and saves what the change did to it.

    Args:
        verb: Name of the command.
        argv: Its arguments, for the report.
        options: Parsed options, among them those of `add_surgery_options`.
        operate: Writes the changed model.
        needs_text: Whether the change itself depends on data.
        check: Raises a ConfigError for a model, without memory, that cannot be changed this way.

    Raises:
        ConfigError: When data is missing, or the target exists.
        CheckpointError: When the model before is missing or damaged.
        DataError: When the data is missing, or not text.
    """
    start = time.perf_counter()
    if is_t5x(options.source):
        raise ConfigError(
            f"--from {options.source} is a checkpoint of T5X. Convert it first: "
            f"stmoe convert --from {options.source} --to MODEL"
        )
    if check is not None:
        config = find_class(options.source).config_class.from_pretrained(options.source)
        check(empty_model(config))
    has_text = bool(options.corpus or options.text or options.pairs or options.task)
    if needs_text and not has_text:
        raise ConfigError(
            f"stmoe {verb} needs text, from which it measures the experts. Give --corpus, --text, "
            "--pairs or --task."
        )
    inputs = [options.source, options.corpus, options.pairs]
    target = new_model_folder(options.to, inputs)

    # One model in memory at a time.
    with whole_folder(target, kind="model") as folder:
        before = None
        text = ""
        batches: list[TracedBatch] = []
        if has_text:
            inspected = load_source(options)
            text = describe_inputs(options, inspected)
            batches = list(read_batches(options, inspected))
            before = measure(inspected.model, batches)
            del inspected

        result = operate(folder, batches)

        effects = None
        if before is not None:
            model = load_model(folder, mmap=options.mmap)
            effects = compare(before, measure(model, batches), result.origins)
            del model
        report = write_report(
            folder,
            command=shlex.join(["stmoe", verb, *argv]),
            sources=[options.source],
            text=text,
            effects=effects,
            tables=result.tables,
            start=start,
        )

    print(report)
    print(f"The model is in {target}.")
