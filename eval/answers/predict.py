"""A model's predictions, written as they are made: from requests, which never hold the reference,
to a JSONL file.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from eval.answers.beam import generate_beams, generate_greedily
from eval.answers.data_ranks import ALONE, Ranks
from eval.answers.likelihood import Choice, Memory, Scoring, target_log_probs
from eval.answers.predictions_file import (
    Batch,
    Header,
    Journal,
    Mode,
    Prediction,
    ScoringFields,
    Stack,
)
from eval.task import Task
from moe import (
    CheckpointError,
    ConfigError,
    RouterOutput,
    RouterStats,
    STMoEConfig,
    STMoEForConditionalGeneration,
    add_stats,
    check_model_folder,
    gather_or_raise,
    load_complete,
    load_model_on_mesh,
    summarize,
    total_stats,
)
from moe.checks import shown
from moe.data.tokenizer import check_tokenizer_files

MODES: tuple[Mode, ...] = get_args(Mode)
_ROWS = {"generate": 128, "rank": 128}
_TOKENS = 1 << 14  # most tokens of a batch's inputs, padding and beams included
_FEW = {
    "generate": 8,
    "rank": 4,
}  # rows of a batch whatever their lengths; of more, each input has at least ...
_ALIKE = 0.8  # ... this share of the longest's tokens
_CHUNK = 1 << 24  # bytes


class RouterSummary(NamedTuple):
    """What the routers of a stack did; see `moe.sparse.stats.summarize`. Padding is not counted.

    Attributes:
        fraction_dropped: Share of the tokens that reached no expert.
        load_cv: Standard deviation over mean of the expert load.
        max_over_mean: Largest over mean expert load.
        dead_experts: Experts that no token asked for.
        expert_load: How often each expert was asked for.
    """

    fraction_dropped: float
    load_cv: float
    max_over_mean: float
    dead_experts: float
    expert_load: list[int]


class Request(NamedTuple):
    """What a model is asked: the example without its reference."""

    id: str
    inputs: str
    choices: tuple[str, ...] = ()


class Predicted(NamedTuple):
    """What a model answered to all requests.

    Attributes:
        predictions: One for each request, in their order.
        router: By stack, what its routers did with all inputs and answers. None for a dense model.
    """

    predictions: list[Prediction]
    router: dict[Stack, RouterSummary] | None


class Seq2Seq(NamedTuple):
    """A checkpoint that is ready to predict.

    Attributes:
        model: On a mesh this rank's part.
        tokenizer: Its own.
        fingerprint: Of the checkpoint's files; known to rank 0 only.
        ranks: Who predicts with it.
    """

    model: Any
    tokenizer: Any
    fingerprint: str
    ranks: Ranks = ALONE

    @property
    def sparse(self) -> bool:
        """Whether the model says what its routers do."""
        return isinstance(self.model, STMoEForConditionalGeneration) and bool(
            self.model.sparse_layers()
        )

    @property
    def start(self) -> list[int]:
        """Tokens that every answer begins with: the decoder's start, and the sentinel of a model
        that learnt one.
        """
        config, generation = self.model.config, self.model.generation_config
        first, forced = generation.decoder_start_token_id, generation.forced_bos_token_id
        first = next(
            token for token in (first, config.decoder_start_token_id, self.pad) if token is not None
        )
        return [first] if forced is None else [first, forced]

    @property
    def pad(self) -> int:
        """Token that fills short rows."""
        return next(
            t
            for t in (self.tokenizer.pad_token_id, self.model.config.pad_token_id, 0)
            if t is not None
        )

    def tokenize(self, texts: Sequence[str], length: int) -> tuple[list[list[int]], list[bool]]:
        """Returns the tokens of each text, and whether they were cut; what the tokenizer ends them
        with is kept.

        Args:
            texts: Inputs.
            length: Most tokens; the tokenizer's own limit may be lower.
        """
        length = min(length, self.tokenizer.model_max_length)
        whole = self.tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
        cut = [len(tokens) > length for tokens in whole]
        for number, too_long in enumerate(cut):
            if too_long:
                whole[number] = self.tokenizer(texts[number], truncation=True, max_length=length)[
                    "input_ids"
                ]
        return [tokens or [self.tokenizer.eos_token_id] for tokens in whole], cut


class Question(NamedTuple):
    """A request that is ready for the model.

    Attributes:
        request: What is asked.
        tokens: Of its inputs.
        truncated: Whether they were cut.
    """

    request: Request
    tokens: list[int]
    truncated: bool


def load_seq2seq(folder: Path, ranks: Ranks = ALONE) -> Seq2Seq:
    """Returns any sequence-to-sequence checkpoint with its tokenizer: of this library or of
    transformers.

    How it generates is the task's to say: of the checkpoint's own habits (beams, least lengths,
    penalties) only the special tokens stay.

    Args:
        folder: The checkpoint.
        ranks: Who will predict with it; those of a mesh read their parts only.

    Raises:
        CheckpointError: When the folder is missing, or holds no such model with all its weights and
            a tokenizer.
    """
    check_model_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The config.json in {folder} cannot be read: {error}") from error
    if not config.is_encoder_decoder:
        raise CheckpointError(
            f"{folder} holds a model of type {config.model_type!r}, which has no encoder and decoder. Give a "
            "sequence-to-sequence checkpoint, e.g. of this library, T5 or BART."
        )
    if ranks.mesh is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_complete(AutoModelForSeq2SeqLM, folder).eval().to(device)
    else:
        # Fixed slots would need batches of one shape on all ranks; which token goes where is the
        # same either way.
        config = STMoEConfig.from_pretrained(folder, dispatch="ragged")
        model, _ = load_model_on_mesh(folder, ranks.mesh, config=config, gather=False)
    try:
        check_tokenizer_files(folder, advice="Restore the file.")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise CheckpointError(f"The tokenizer in {folder} cannot be loaded: {error}") from error
    files = list(dict.fromkeys(type(tokenizer).vocab_files_names.values()))  # none for bytes
    if files and not any(
        (folder / name).is_file() for name in files
    ):  # transformers may make one up
        raise CheckpointError(
            f"{folder} holds no tokenizer: none of {', '.join(files)} is there. Put that of the model beside it, with "
            "the tokenizer's save_pretrained."
        )
    names = (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
    )
    special = {name: getattr(model.generation_config, name) for name in names}
    if special["eos_token_id"] is None:
        special["eos_token_id"] = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(**special)
    return Seq2Seq(model, tokenizer, fingerprint(folder) if ranks.world.rank == 0 else "", ranks)


def fingerprint(folder: Path) -> str:
    """Returns 16 hexadecimal digits that tell a checkpoint from others."""
    digest = hashlib.sha256()
    for path in [
        *sorted(folder.glob("*.safetensors")),
        *sorted(folder.glob("*.bin")),
        folder / "config.json",
    ]:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def modes_of(task: Task) -> tuple[str, ...]:
    """Returns those of MODES that a task can be asked in: `rank` needs choices."""
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

    Predictions are appended to `path` as they are made, by rank 0. A sparse model drops tokens by
    group, so a prediction may depend on the requests beside it; the batches are therefore a
    function of all requests, and not of the ranks that share them. An interrupted run that goes on,
    on as many ranks or not, reads back the batches that
    the file holds whole and makes the others again: its file equals, byte for byte, that of a run
    that was never stopped on the same machine. A file of another model, task, mode, decoding or
    list of requests is replaced. One of another scoring is scored anew, without the model.

    Args:
        system: The model.
        task: Gives the most tokens of an input and how answers are generated.
        requests: What to ask; every id once.
        mode: `generate`, as `task.decoding` says, or `rank` (log-probability of each choice).
        path: JSONL file; see `eval.answers.predictions_file`.
        scoring: What decides between choices.

    Raises:
        ConfigError: When there is no such mode, or it is `rank` and a request has no choices.
        DataError: When the file cannot be written.
    """
    _check(task, requests, mode)
    ranks = system.ranks
    tokens, cut = system.tokenize([request.inputs for request in requests], task.inputs_length)
    questions = [Question(*parts) for parts in zip(requests, tokens, cut, strict=True)]
    num_beams = task.decoding.num_beams if mode == "generate" else 1
    batches = cut_batches(
        questions, max(1, _ROWS[mode] // num_beams), _TOKENS // num_beams, _FEW[mode]
    )
    header = Header(
        model=system.fingerprint,
        task=task.name,
        version=task.version,
        mode=cast(Mode, mode),
        decoding=task.decoding if mode == "generate" else None,
        batches=hashlib.sha256(json.dumps(batches).encode()).hexdigest()[:16],
        scoring=ScoringFields(scoring.include_eos, scoring.normalize),
    )
    leads = ranks.world.rank == 0
    journal = Journal(path if leads else None, header)
    ids = [[question.request.id for question in batch] for batch in batches]
    made = gather_or_raise(
        lambda: journal.open(ids, lambda number: ranks.whole_rounds(number, len(batches)))
    )[0]
    num_read = sum(len(batch.predictions) for batch in made)
    label = f"{task.name} {mode}"
    with tqdm(
        total=len(requests), initial=num_read, desc=label, mininterval=1.0, disable=not leads
    ) as bar:
        for dealt in ranks.deal(batches[len(made) :]):
            batch = ranks.share(dealt)
            fresh = ranks.collect(
                [_answer(system, task, batch, mode, scoring)] if batch or ranks.in_step else []
            )
            fresh = fresh[: len(dealt)]  # what ranks in step did without a batch is nothing
            _check_scores(fresh, header)
            gather_or_raise(lambda fresh=fresh: journal.append(fresh))
            made += fresh
            bar.update(sum(len(batch.predictions) for batch in fresh))
    by_id = {prediction.id: prediction for batch in made for prediction in batch.predictions}
    return Predicted([by_id[request.id] for request in requests], sum_routers(made))


def _check_scores(batches: Sequence[Batch], header: Header) -> None:
    """Raises when a model's log-probabilities are no numbers: of such choices the first would win.

    Raises:
        CheckpointError: When one is NaN.
    """
    for prediction in (prediction for batch in batches for prediction in batch.predictions):
        for text, choice in (prediction.choices or {}).items():
            if math.isnan(choice.log_prob + choice.eos_log_prob):
                raise CheckpointError(
                    f"The model {header.model} gives the choice {shown(text)} of {header.task} {prediction.id} a "
                    "log-probability that is NaN. Its weights are broken; take an earlier checkpoint."
                )


def cut_batches(
    questions: Sequence[Question], rows: int, tokens: int, few: int
) -> list[list[Question]]:
    """Returns all questions in batches, the longest first, so that a batch needs little padding.

    Padding costs what tokens cost, above all where the encoder is most of the work: a batch of more
    than a few holds no input that is much shorter than its longest.

    Args:
        questions: Each with an id of its own.
        rows: Most questions of a batch.
        tokens: Most tokens of a batch, padding included; a single longer question is a batch.
        few: Questions that may share a batch whatever their lengths. More of them decode together;
            fewer pad less.
    """
    ordered = sorted(questions, key=lambda question: (-len(question.tokens), question.request.id))
    batches = []
    while ordered:
        longest = len(ordered[0].tokens)
        alike = sum(len(question.tokens) >= _ALIKE * longest for question in ordered[:rows])
        size = max(1, min(rows, tokens // longest, max(few, alike)))
        batches.append(ordered[:size])
        ordered = ordered[size:]
    return batches


def sum_routers(batches: Sequence[Batch]) -> dict[Stack, RouterSummary] | None:
    """Returns what the routers did in all batches together; see `Predicted.router`."""
    summaries = {}
    for stack in batches[0].routers if batches else ():
        every = [batch.routers[stack] for batch in batches]
        total = reduce(
            add_stats,
            (
                RouterStats(*(torch.tensor(b.get(name, 0.0)) for name in RouterStats._fields))
                for b in every
            ),
        )
        summary = summarize(total)
        summaries[stack] = RouterSummary(
            fraction_dropped=summary["fraction_dropped"],
            load_cv=summary["load_cv"],
            max_over_mean=summary["max_over_mean"],
            dead_experts=summary["dead_experts"],
            expert_load=total.expert_load.tolist(),
        )
    return summaries or None


def _check(task: Task, requests: Sequence[Request], mode: str) -> None:
    """Raises a ConfigError when the task cannot be asked so."""
    if mode not in MODES:
        raise ConfigError(f"There is no mode {mode!r}. Choose from {', '.join(MODES)}.")
    if mode not in modes_of(task):
        raise ConfigError(f"{task.name} has no choices to rank. Choose the mode generate.")
    if mode == "rank" and (bare := [request.id for request in requests if not request.choices]):
        raise ConfigError(
            f"{len(bare)} requests of {task.name} have no choices to rank, the first is {bare[0]!r}. Leave them out, "
            "or choose the mode generate."
        )


@torch.inference_mode()
def _answer(
    system: Seq2Seq, task: Task, batch: Sequence[Question], mode: str, scoring: Scoring
) -> Batch:
    """Returns the predictions of a batch; of none, on ranks in step, what keeps the others going."""
    rows = [question.tokens for question in batch] or [[system.pad]]
    longest = max(map(len, rows))
    ids = torch.tensor(
        [row + [system.pad] * (longest - len(row)) for row in rows], device=system.model.device
    )
    lengths = torch.tensor([len(row) for row in rows] if batch else [0], device=ids.device)
    mask = (torch.arange(longest, device=ids.device) < lengths[:, None]).long()
    options = {"output_router_logits": True} if system.sparse else {}
    output = system.model.get_encoder()(input_ids=ids, attention_mask=mask, **options)
    memory = Memory(output, mask)
    answer = _generate if mode == "generate" else _rank
    predictions, decoder = answer(system, task, batch, memory, options)
    encoder = getattr(output, "encoder_router_outputs", None)
    routers: dict[Stack, Sequence[RouterOutput] | None] = {"encoder": encoder, "decoder": decoder}
    stats: dict[Stack, dict[str, Any]] = {}
    for stack, outputs in routers.items():
        if outputs:
            stats[stack] = _counts(total_stats(outputs))
    return Batch([prediction.scored(scoring) for prediction in predictions], stats)


def _generate(
    system: Seq2Seq, task: Task, batch: Sequence[Question], memory: Memory, options: dict[str, Any]
) -> tuple[list[Prediction], list[RouterOutput]]:
    """Returns generated answers; on ranks in step, all go on until the last of them is done."""
    decoding, eos = task.decoding, system.model.generation_config.eos_token_id
    ends = [eos] if isinstance(eos, int) else list(eos)
    shared = {
        "max_tokens": decoding.max_tokens,
        "eos": ends,
        "pad": system.pad,
        "ranks": system.ranks,
    }
    if decoding.num_beams > 1:
        beams = {"num_beams": decoding.num_beams, "alpha": decoding.alpha}
        tokens = generate_beams(system.model, memory, system.start, **beams, **shared)
        routers = _routers_of_answers(system, memory, tokens, ends) if options else []
    else:
        tokens, routers = generate_greedily(system.model, memory, system.start, **shared, **options)
    texts = system.tokenizer.batch_decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    predictions = [
        Prediction(question.request.id, text, None, truncated=question.truncated)
        for question, text in zip(batch, texts, strict=False)
    ]
    return predictions, routers


def _routers_of_answers(
    system: Seq2Seq, memory: Memory, tokens: Tensor, ends: list[int]
) -> list[RouterOutput]:
    """Returns what the decoder's routers did with the answers <int64>[N, T], seen again at once.

    In the search itself the beams that lost would count.
    """
    inputs = tokens[:, :-1]
    ended = torch.isin(inputs, torch.tensor(ends, device=inputs.device))
    ended[:, 0] = False  # the start
    real = (ended.cumsum(dim=1) == 0) & memory.mask.any(dim=1, keepdim=True)
    output = system.model.model(
        **memory.inputs,
        decoder_input_ids=inputs,
        decoder_attention_mask=real.long(),
        decoder_drop_tokens=False,
        output_router_logits=True,
    )
    return list(output.decoder_router_outputs or ())


def _rank(
    system: Seq2Seq, task: Task, batch: Sequence[Question], memory: Memory, options: dict[str, Any]
) -> tuple[list[Prediction], list[RouterOutput]]:
    """Returns the log-probabilities of the choices of each request."""
    eos, (first, *forced) = system.tokenizer.eos_token_id, system.start
    texts = list(
        dict.fromkeys(text for question in batch for text in question.request.choices)
    ) or [""]
    tokens = dict(
        zip(texts, system.tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True)
    )
    choices = [list(dict.fromkeys(question.request.choices)) for question in batch] or [texts]
    targets = [[[*forced, *tokens[text], eos] for text in own] for own in choices]
    found, _, routers = target_log_probs(
        system.model, memory, first, targets, system.ranks, **options
    )
    predictions = []
    for question, own, log_probs in zip(batch, choices, found, strict=False):
        made = {
            text: Choice(float(sum(one[:-1])), one[-1], len(one) - 1)
            for text, one in zip(own, log_probs, strict=True)
        }
        predictions.append(Prediction(question.request.id, "", {}, made, question.truncated))
    return predictions, routers


def _counts(stats: RouterStats) -> dict[str, Any]:
    """Returns the counts among statistics as JSON can hold them: unlike sums, they are the same on
    any ranks.
    """
    return {
        name: value.tolist()
        for name, value in stats._asdict().items()
        if not value.is_floating_point()
    }
