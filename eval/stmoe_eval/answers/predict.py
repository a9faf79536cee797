"""Requests in, predictions out: each batch is answered and written to a file at once.

seq2seq.py loads the model, batches.py groups the requests, data_ranks.py shares the batches over
ranks; beam.py and likelihood.py answer one batch, predictions_file.py keeps the answers.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from moe.checks import shown
from moe.data.tokenizer import text_ids
from moe.distributed.collectives import gather_or_raise
from moe.errors import CheckpointError
from moe.sparse.layer import RouterOutput
from moe.sparse.stats import RouterStats
from stmoe_eval.answers.batches import Request, TokenizedRequest, make_batches, pad_tokens
from stmoe_eval.answers.beam import generate_beams, generate_greedily
from stmoe_eval.answers.cost import Timed, Tokens, count_tokens
from stmoe_eval.answers.likelihood import ChoiceLikelihood, EncodedInputs, Scoring, target_log_probs
from stmoe_eval.answers.predictions_file import (
    Batch,
    Header,
    Mode,
    Prediction,
    PredictionsFile,
    RouterCounts,
    Stack,
)
from stmoe_eval.answers.seq2seq import Seq2Seq
from stmoe_eval.task import Task

MODES: tuple[Mode, ...] = get_args(Mode)
_MAX_ROWS = {"generate": 128, "rank": 128}
_MAX_TOKENS = 1 << 14  # of a batch's inputs, padding and beams included
_MIN_ROWS = {"generate": 8, "rank": 4}  # of a batch, whatever the lengths of its inputs

_NAMES_IN_FILE = {"dropped_by_choice": "dropped_by_place"}
"""Fields of `RouterStats` that have another name in predictions files."""


class RouterSummary(NamedTuple):
    """Routing statistics of a stack; see `RouterStats.summary`. Padding is not counted.

    In report.json, None stands for a number that is not finite.

    Attributes:
        fraction_dropped: Share of the tokens that reached no expert.
        load_cv: Standard deviation over mean of the expert load.
        max_over_mean: Largest over mean expert load.
        dead_experts: Number of experts that no token chose.
        expert_load: Number of tokens that chose each expert.
    """

    fraction_dropped: float | None
    load_cv: float | None
    max_over_mean: float | None
    dead_experts: float | None
    expert_load: list[int]


@dataclass(frozen=True)
class Predicted:
    """A model's answers to all requests.

    Attributes:
        predictions: One for each request, in their order.
        router: Routing statistics by stack, over all inputs and answers; None for a dense model.
        tokens: Tokens of all inputs and answers.
        timed: Cost of the answers that this run computed; None if all answers were read back.
            Ignored when two runs are compared.
    """

    predictions: list[Prediction]
    router: dict[Stack, RouterSummary] | None
    tokens: Tokens
    timed: Timed | None = field(compare=False)

    @property
    def outputs(self) -> list[str]:
        """The answers."""
        return [prediction.output for prediction in self.predictions]


class _Answers(NamedTuple):
    """A model's answers to one batch, before scoring.

    Attributes:
        predictions: One for each request.
        routers: Router outputs of the decoder's layers.
    """

    predictions: list[Prediction]
    routers: list[RouterOutput]


def modes_of(task: Task) -> tuple[Mode, ...]:
    """Returns the modes that a task supports: `rank` needs choices."""
    return MODES if task.choices else MODES[:1]


def predict(
    system: Seq2Seq,
    task: Task,
    requests: Sequence[Request],
    mode: str,
    path: Path,
    scoring: Scoring = Scoring(),  # noqa: B008  frozen
) -> Predicted:
    """Returns a prediction for every request, in their order, on every rank.

    Rank 0 appends the predictions to `path`. A resumed run, on any number of ranks, reads back the
    complete batches and answers the others: its file equals, byte for byte, that of an uninterrupted
    run on the same machine. A file for a different model, task, mode, decoding or list of requests is replaced. One
    with another scoring is rescored without the model.

    A sparse model drops tokens by group, so a prediction may depend on the other requests in its
    batch. The batches are therefore a function of all requests, and not of the ranks that share
    them.

    Args:
        system: The model.
        task: Defines the input length and the decoding.
        requests: Requests with unique ids.
        mode: One of `modes_of(task)`: `generate`, by `task.decoding`, or `rank` (log-probability of
            each choice).
        path: JSONL file; see `stmoe_eval.answers.predictions_file`.
        scoring: How choices are scored.

    Raises:
        CheckpointError: When the model gives a log-probability that is NaN.
        DataError: When the file cannot be read or written.
    """
    ranks = system.ranks
    is_writer = ranks.world.rank == 0

    # The same batches on every rank and in every run; the header contains their digest.
    num_beams = task.decoding.num_beams if mode == "generate" else 1
    batches = make_batches(
        system.tokenize(requests, task.inputs_length),
        max_rows=max(1, _MAX_ROWS[mode] // num_beams),
        max_tokens=_MAX_TOKENS // num_beams,
        min_rows=_MIN_ROWS[mode],
    )
    header = _header(system, task, mode, batches, scoring)
    file = PredictionsFile(path if is_writer else None, header)

    # Answers of an interrupted run; all ranks get them from rank 0.
    def num_reusable(num_answered: int) -> int:
        return ranks.num_reusable(num_answered, len(batches))

    answered = gather_or_raise(partial(file.resume, num_reusable))[0]

    # The rest in rounds: each rank answers one batch, and rank 0 writes them all.
    progress = tqdm(
        total=len(requests),
        initial=_num_predictions(answered),
        desc=f"{task.name} {mode}",
        mininterval=1.0,
        disable=not is_writer,
    )
    num_found = len(answered)
    started = time.perf_counter()
    with progress:
        for round_batches in ranks.rounds(batches[len(answered) :]):
            batch = ranks.own_batch(round_batches)
            takes_part = batch or ranks.in_lockstep
            of_rank = [_answer(system, task, batch, mode, scoring)] if takes_part else []

            # Ranks without a batch only kept the others in lockstep; they are the last.
            new = ranks.gather(of_rank)[: len(round_batches)]
            _check_scores(new, header)
            gather_or_raise(lambda new=new: file.append(new))
            answered += new
            progress.update(_num_predictions(new))

    seconds = time.perf_counter() - started

    # All tokens of the model, and those that this run computed.
    def tokens_from(first: int) -> Tokens:
        requests = list(chain.from_iterable(batches[first:]))
        predictions = list(chain.from_iterable(batch.predictions for batch in answered[first:]))
        return count_tokens(requests, predictions, system.tokenizer, num_beams)

    timed = Timed(seconds, tokens_from(num_found)) if num_found < len(answered) else None

    # In the order of the requests; the batches were sorted by length.
    by_id: dict[str, Prediction] = {}
    for batch in answered:
        for prediction in batch.predictions:
            by_id[prediction.id] = prediction
    return Predicted(
        predictions=[by_id[request.id] for request in requests],
        router=summarize_routers(answered),
        tokens=tokens_from(0),
        timed=timed,
    )


def summarize_routers(batches: Sequence[Batch]) -> dict[Stack, RouterSummary] | None:
    """Returns the routing statistics of each stack over all batches; None for a dense model."""
    if not batches[0].routers:
        return None

    summaries: dict[Stack, RouterSummary] = {}
    for stack in batches[0].routers:
        total = _to_stats(batches[0].routers[stack])
        for batch in batches[1:]:
            total = total + _to_stats(batch.routers[stack])
        numbers = total.summary()
        summaries[stack] = RouterSummary(
            fraction_dropped=numbers["fraction_dropped"],
            load_cv=numbers["load_cv"],
            max_over_mean=numbers["max_over_mean"],
            dead_experts=numbers["dead_experts"],
            expert_load=total.expert_load.tolist(),
        )
    return summaries


# ---------------------------------------------------------------------------
# Before and after the model


def _header(
    system: Seq2Seq,
    task: Task,
    mode: str,
    batches: Sequence[Sequence[TokenizedRequest]],
    scoring: Scoring,
) -> Header:
    """Returns the first line of the predictions file."""
    digest = hashlib.sha256(json.dumps(batches).encode()).hexdigest()
    return Header(
        model=system.fingerprint,
        task=task.name,
        version=task.version,
        mode=cast(Mode, mode),
        decoding=task.decoding if mode == "generate" else None,
        batches=digest[:16],
        scoring=scoring,
        inference=system.inference,
    )


def _check_scores(batches: Sequence[Batch], header: Header) -> None:
    """Raises a CheckpointError when a log-probability is NaN: the first choice would always win."""
    advice = "Its weights are broken; take an earlier checkpoint."
    if header.inference.dtype == "float16":
        advice = "Its numbers may be too large for float16; give --dtype bfloat16 or float32."
    for batch in batches:
        for prediction in batch.predictions:
            for text, choice in (prediction.choices or {}).items():
                if math.isnan(choice.log_prob + choice.eos_log_prob):
                    raise CheckpointError(
                        f"The model {header.model} gives the choice {shown(text)} of {header.task} "
                        f"{prediction.id} a log-probability that is NaN. {advice}"
                    )


def _num_predictions(batches: Sequence[Batch]) -> int:
    return sum(len(batch.predictions) for batch in batches)


# ---------------------------------------------------------------------------
# One batch


@torch.inference_mode()
def _answer(
    system: Seq2Seq, task: Task, batch: Sequence[TokenizedRequest], mode: str, scoring: Scoring
) -> Batch:
    """Returns the predictions of a batch; an empty one only keeps ranks in lockstep."""
    device = system.model.device

    # Inputs [N, L]; without a request, one row of padding.
    rows = [item.tokens for item in batch] or [[system.pad]]
    input_ids, mask = pad_tokens(rows, system.pad, device)
    if not batch:
        mask = torch.zeros_like(mask)

    # One pass of the encoder, whatever the mode.
    options = {"output_router_logits": True} if system.sparse else {}
    encoder_output = system.model.get_encoder()(input_ids=input_ids, attention_mask=mask, **options)
    encoded = EncodedInputs(encoder_output, mask)

    answer = _generate if mode == "generate" else _rank
    answers = answer(system, task, batch, encoded)

    # Routing statistics of both stacks; a dense model has none.
    routers: dict[Stack, RouterCounts] = {}
    encoder_routers = getattr(encoder_output, "encoder_router_outputs", None)
    if encoder_routers:
        routers["encoder"] = _to_counts(RouterStats.sum(router.stats for router in encoder_routers))
    if answers.routers:
        routers["decoder"] = _to_counts(RouterStats.sum(router.stats for router in answers.routers))
    return Batch(answers.predictions, routers).scored(scoring)


def _generate(
    system: Seq2Seq, task: Task, batch: Sequence[TokenizedRequest], encoded: EncodedInputs
) -> _Answers:
    """Returns generated answers, by beam search or greedily."""
    decoding = task.decoding
    arguments: dict[str, Any] = {
        "max_tokens": decoding.max_tokens,
        "eos": system.end_tokens,
        "pad": system.pad,
        "ranks": system.ranks,
    }
    if decoding.num_beams > 1:
        arguments |= {"num_beams": decoding.num_beams, "alpha": decoding.alpha}
        tokens = generate_beams(system.model, encoded, system.start, **arguments)
    else:
        arguments["masks_ended"] = system.sparse
        tokens = generate_greedily(system.model, encoded, system.start, **arguments)
    routers = _routers_of_answers(system, encoded, tokens) if system.sparse else []

    # Text as the metrics compare it; a row of padding has no request and is skipped.
    texts = system.tokenizer.batch_decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    predictions: list[Prediction] = []
    for item, text in zip(batch, texts, strict=False):
        predictions.append(Prediction(item.request.id, text, None, truncated=item.truncated))
    return _Answers(predictions, routers)


def _routers_of_answers(
    system: Seq2Seq, encoded: EncodedInputs, tokens: Tensor
) -> list[RouterOutput]:
    """Returns the decoder's router outputs for the answers <int64>[N, T], in one pass.

    Nothing is dropped, as in decoding. A beam search would count the discarded beams, too.
    """
    inputs = tokens[:, :-1]
    is_end = torch.isin(inputs, torch.tensor(system.end_tokens, device=inputs.device))
    is_end[:, 0] = False  # the start may be an end token
    has_input = encoded.mask.any(dim=1, keepdim=True)
    is_real = (is_end.cumsum(dim=1) == 0) & has_input  # [N, T - 1]

    output = system.model.model(
        **encoded.model_inputs(),
        decoder_input_ids=inputs,
        decoder_attention_mask=is_real.long(),
        decoder_drop_tokens=False,
        output_router_logits=True,
    )
    return list(output.decoder_router_outputs or ())


def _rank(
    system: Seq2Seq, task: Task, batch: Sequence[TokenizedRequest], encoded: EncodedInputs
) -> _Answers:
    """Returns the log-probabilities of the choices of each request."""
    # Each choice once; an empty batch, which only keeps ranks in lockstep, has an empty one.
    choices: list[list[str]] = []
    for item in batch:
        choices.append(list(dict.fromkeys(item.request.choices)))
    choices = choices or [[""]]
    tokens = _tokens_of_choices(system, choices)

    # A target is the decoder's output: a sentinel that the model learnt, the choice, the end.
    first, *forced = system.start
    eos = system.tokenizer.eos_token_id
    targets: list[list[list[int]]] = []
    for texts in choices:
        targets.append([[*forced, *tokens[text], eos] for text in texts])
    scored = target_log_probs(
        system.model, encoded, first, targets, system.ranks, report_routers=system.sparse
    )

    # The last log-probability of a target is that of the end token.
    predictions: list[Prediction] = []
    for item, texts, log_probs in zip(batch, choices, scored.log_probs, strict=False):
        likelihoods: dict[str, ChoiceLikelihood] = {}
        for text, (*of_tokens, of_eos) in zip(texts, log_probs, strict=True):
            likelihoods[text] = ChoiceLikelihood(
                log_prob=float(sum(of_tokens)), eos_log_prob=of_eos, num_tokens=len(of_tokens)
            )
        predictions.append(Prediction(item.request.id, "", {}, likelihoods, item.truncated))
    return _Answers(predictions, scored.routers)


def _tokens_of_choices(system: Seq2Seq, choices: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Returns the tokens of each choice, without an end token."""
    texts: dict[str, None] = {}
    for texts_of_request in choices:
        texts.update(dict.fromkeys(texts_of_request))
    tokens = text_ids(system.tokenizer, list(texts), markers=True)
    return dict(zip(texts, tokens, strict=True))


# ---------------------------------------------------------------------------
# Statistics of routers


def _to_counts(stats: RouterStats) -> RouterCounts:
    """Returns the counts among statistics as plain numbers.

    Unlike the floating-point sums, they do not depend on the number of ranks.
    """
    counts: RouterCounts = {}
    for name, value in stats._asdict().items():
        if not value.is_floating_point():
            counts[_NAMES_IN_FILE.get(name, name)] = value.tolist()
    return counts


def _to_stats(counts: RouterCounts) -> RouterStats:
    """Returns counts as statistics; the sums, which are not in the file, are 0."""
    values: dict[str, Tensor] = {}
    for name in RouterStats._fields:
        count = counts.get(_NAMES_IN_FILE.get(name, name), 0.0)
        values[name] = torch.tensor(count)
    return RouterStats(**values)
