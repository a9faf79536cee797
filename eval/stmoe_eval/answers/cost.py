"""The cost of an answer: tokens, floating-point operations, and time.

Tokens and operations are the same on every machine and are part of report.json. Times are not; they
are in a separate file, timing.json.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from moe.data.tokenizer import text_ids
from moe.errors import DataError
from moe.models.configuration import STMoEConfig
from moe.parsing import read_json, to_record
from stmoe_eval.answers.batches import TokenizedRequest
from stmoe_eval.answers.predictions_file import Prediction

TIMING = "timing.json"

FLOPS_FORMULA = (
    "FLOPs per example = 2 × (P_enc × input tokens + P_dec × output tokens), where P_enc and P_dec are the "
    "active parameters of the encoder, and of the decoder with its head. Attention between tokens and "
    "embedding lookups are not counted; all beams and choices are."
)


class Tokens(NamedTuple):
    """Numbers of tokens that went through a model.

    Attributes:
        examples: Number of examples.
        inputs: Number of tokens of inputs, ends included.
        outputs: Number of tokens of answers or of choices, ends included; of every beam.
    """

    examples: int
    inputs: int
    outputs: int


class Timed(NamedTuple):
    """Work that a run did itself, without the answers it read back.

    Attributes:
        seconds: Time from the first batch to the last.
        tokens: Tokens that went through the model.
    """

    seconds: float
    tokens: Tokens


class Timing(NamedTuple):
    """The speed of a system on a task.

    Attributes:
        task: Name of the task.
        system: Name of the model.
        mode: How the system answered.
        model: Fingerprint of the checkpoint, and the options of its inference.
        device: Name of the device.
        ranks: Number of ranks.
        seconds: Time of the last run that computed answers.
        examples: Number of examples that it answered.
        tokens: Number of tokens of their inputs and answers.
        tokens_per_second: `tokens` over `seconds`.
    """

    task: str
    system: str
    mode: str
    model: str
    device: str
    ranks: int
    seconds: float
    examples: int
    tokens: int
    tokens_per_second: float


class Cost(NamedTuple):
    """Mean cost of an example.

    Attributes:
        input_tokens: Mean number of tokens of an input.
        output_tokens: Mean number of tokens of the answer, or of all choices.
        flops: Floating-point operations, see FLOPS_FORMULA; None for models of unknown form.
    """

    input_tokens: float
    output_tokens: float
    flops: float | None


class TokenFlops(NamedTuple):
    """Floating-point operations of an input token and of an output token."""

    of_input: int
    of_output: int


def count_tokens(
    requests: Sequence[TokenizedRequest],
    predictions: Sequence[Prediction],
    tokenizer: Any,
    num_beams: int,
) -> Tokens:
    """Returns the tokens of N inputs and of their answers, in any order."""
    texts: list[str] = []
    num_outputs = 0
    for prediction in predictions:
        if prediction.choices is None:
            texts.append(prediction.output)
        for choice in (prediction.choices or {}).values():
            num_outputs += choice.num_tokens + 1

    # A generated answer is counted in the tokens of its text, plus the end token.
    if texts:
        for tokens in text_ids(tokenizer, texts, markers=True):
            num_outputs += (len(tokens) + 1) * num_beams
    num_inputs = sum(len(request.tokens) for request in requests)
    return Tokens(len(predictions), num_inputs, num_outputs)


def token_flops(model: Any) -> TokenFlops | None:
    """Returns the operations of a token; None for a sparse model of another library."""
    config = model.config
    if isinstance(config, STMoEConfig):
        encoder = config.num_active_stack_parameters(decoder=False)
        decoder = config.num_active_stack_parameters(decoder=True)
        head = config.vocab_size * config.d_model
        return TokenFlops(2 * encoder, 2 * (decoder + head))
    if getattr(config, "num_experts", 0):
        return None

    # Other models: all parameters but embeddings, plus the head, which may share the embedding.
    head = model.get_output_embeddings()
    if head is None:
        return None
    encoder = _num_multiplied(model.get_encoder())
    decoder = _num_multiplied(model.get_decoder())
    return TokenFlops(2 * encoder, 2 * (decoder + head.weight.numel()))


def cost_of(tokens: Tokens, flops: TokenFlops | None) -> Cost:
    """Returns the mean cost of an example."""
    input_tokens = tokens.inputs / tokens.examples
    output_tokens = tokens.outputs / tokens.examples
    total = None
    if flops is not None:
        total = input_tokens * flops.of_input + output_tokens * flops.of_output
    return Cost(input_tokens, output_tokens, total)


def _num_multiplied(stack: nn.Module) -> int:
    """Returns the number of parameters of a stack, without embeddings."""
    total = 0
    for module in stack.modules():
        if not isinstance(module, nn.Embedding):
            total += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return total


def read_timings(folder: Path) -> list[Timing]:
    """Returns the timings of earlier runs in a folder; none when the file is missing or damaged."""
    path = folder / TIMING
    try:
        values = read_json(path)
        return [to_record(Timing, value, where=str(path)) for value in values]
    except (DataError, TypeError):
        return []


def merge_timings(earlier: Sequence[Timing], new: Sequence[Timing]) -> list[Timing]:
    """Returns the merged timings; a new one replaces an earlier one."""
    merged: dict[tuple[str, str, str], Timing] = {}
    for timing in (*earlier, *new):
        merged[timing.task, timing.system, timing.mode] = timing
    return list(merged.values())
