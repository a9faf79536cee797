"""What the verbs of `stmoe inspect` make of a trace: its model, its tokenizer, its batches."""

import hashlib
import json
from argparse import Namespace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from moe.checksums import model_fingerprint
from moe.cli import Parser, path
from moe.commands.routing_inputs import InspectedModel, load_inspected
from moe.errors import DataError
from moe.tracing.examples import batches_of
from moe.tracing.recorder import TracedBatch
from moe.tracing.trace import Trace

_SAY_WHERE = (
    "say where it is now: --traced-model in compare, --model in the other verbs of stmoe inspect."
)


def add_trace(parser: Parser) -> None:
    """Adds the options that say what is looked at."""
    parser.add_argument(
        "--trace", type=path, required=True, help="folder made by stmoe inspect record"
    )


def load_traced(trace: Trace, folder: Path | None, *, dropless: bool = False) -> InspectedModel:
    """Returns the model of a trace.

    Args:
        trace: What was recorded.
        folder: Where the model is now; None for where it was.
        dropless: Whether experts have room for every token, whatever the config says.

    Raises:
        DataError: When the model is gone from where it was or has changed there, or the folder has
            another tokenizer than the trace was made with.
    """
    is_where_it_was = folder is None
    if folder is None:
        folder = Path(trace.facts.model)
        if not trace.facts.model or not folder.is_dir():
            where = trace.facts.model or "memory"
            raise DataError(f"The traced model was in {where}, and is not there: {_SAY_WHERE}")

    # Where it was there may be another model by now, e.g. one that was trained further.
    inspected = load_inspected(folder, dropless=dropless)
    recorded = trace.facts.model_fingerprint
    if is_where_it_was and recorded not in ("", model_fingerprint(folder)):
        raise DataError(
            f"The model in {folder} has changed since it was traced. Record the trace again, or, if the traced model "
            f"was moved, {_SAY_WHERE}"
        )

    # A model with the same words.
    fingerprint = tokenizer_fingerprint(inspected.tokenizer)
    if trace.facts.tokenizer_fingerprint not in ("", fingerprint):
        raise DataError(
            f"The tokenizer of {inspected.folder} is {fingerprint}, that of the trace "
            f"{trace.facts.tokenizer_fingerprint}: the token ids would mean other words. Give the model that was "
            "traced, or one with its tokenizer."
        )
    return inspected


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns 16 hexadecimal digits that tell what the ids of a tokenizer mean from others.

    What it puts at the end of a text does not count: fine-tuning may have changed that.
    """
    tokens = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]


def read_again(trace: Trace, options: Namespace) -> list[TracedBatch]:
    """Returns the examples of a trace in batches, as the options of `add_batches` say."""
    return list(batches_of(trace, options.batch_size))
