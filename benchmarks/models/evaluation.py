"""Evaluation: examples per second of `rank` and `generate` compared with lm-evaluation-harness.

Both get the same models in memory and the same task, and hand back an answer for every example:
each does its own tokenization, batching and padding.
"""

import dataclasses
import logging
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.machine import Columns, describe_machine, print_report, report_text, save_report
from benchmarks.timing import measure, measure_in_turn, median_ratio
from eval.answers.batches import Request
from eval.answers.likelihood import Scoring
from eval.answers.predict import predict
from eval.answers.predictions_file import Prediction
from eval.answers.seq2seq import Seq2Seq, load_seq2seq
from eval.commands.harness import require_harness
from eval.scores.metrics import ACCURACY
from eval.source import BuiltIn
from eval.task import Decoding, Task
from moe.data.tokenizer import train_tokenizer
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration

Row = dict[str, Any]
"""A row of the saved table."""

BARS = {"rank": 2.0, "generate": 1.0}
"""Times as many examples per second as lm-evaluation-harness that each mode has to reach."""


@dataclass(frozen=True)
class EvaluationCase:
    """Sizes: those of T5-1.1 small less two blocks, and of an 8-expert model with its backbone.

    Attributes:
        vocab_size: V.
        d_model: D.
        d_ff: F.
        num_heads: H, of 64 numbers each.
        num_layers: Blocks of the encoder and of the decoder.
        sparse_layers: Sparse ones of them, in each.
        num_experts: E, two for each token, without a capacity limit.
        num_examples: Examples of the task.
        words: Minimum and maximum number of words of an input; a word is about 2.7 tokens.
        new_tokens: Tokens of each generated answer.
        batches: Batch sizes to give lm-evaluation-harness; it is measured with the fastest.
    """

    vocab_size: int = 32128
    d_model: int = 512
    d_ff: int = 1024
    num_heads: int = 6
    num_layers: int = 6
    sparse_layers: int = 3
    num_experts: int = 8
    num_examples: int = 24
    words: tuple[int, int] = (8, 120)
    new_tokens: int = 8
    batches: tuple[int, ...] = (4, 8, 16)


@dataclass(frozen=True)
class EvaluationBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        rounds: How often everything is measured; results are medians.
        json: File to save to; None for none.
        case: Sizes.
    """

    rounds: int
    json: Path | None
    case: EvaluationCase = EvaluationCase()


def run_evaluation(benchmark: EvaluationBenchmark) -> None:
    """Measures, prints the table and saves it; results are saved as they come in.

    Raises:
        ConfigError: When lm-evaluation-harness is missing.
    """
    require_harness()
    # Its advice is for its command line.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    report = describe_machine(torch.device("cpu")) | {
        "rounds": benchmark.rounds,
        "case": dataclasses.asdict(benchmark.case),
        "rows": [],
    }
    task = make_task(benchmark.case)
    with TemporaryDirectory() as folder:
        predictions = Path(folder) / "predictions.jsonl"
        for name, system in build_systems(benchmark.case, Path(folder)).items():
            for mode in BARS:
                report["rows"] += measure_mode(benchmark, system, task, name, mode, predictions)
                save_report(report, benchmark.json)

    print_report(format_report(report), benchmark.json)


def make_task(case: EvaluationCase) -> Task:
    """Returns a task of made-up words, with inputs of mixed lengths.

    There are two to four answers of one or two words.
    """
    draw = random.Random(0)
    words = make_words()
    rows: list[Mapping[str, Any]] = []
    for number in range(case.num_examples):
        text = " ".join(draw.choices(words, k=draw.randint(*case.words)))

        # Answers have no word in common.
        answer_words = draw.sample(words, 8)
        answers: list[str] = []
        for index in range(draw.randint(2, 4)):
            num_words = draw.randint(1, 2)
            answers.append(" ".join(answer_words[2 * index :][:num_words]))

        rows.append(
            {
                "id": str(number),
                "inputs": text,
                "targets": draw.choice(answers),
                "answers": tuple(answers),
            }
        )
    return Task(
        name="made_up",
        version=1,
        description="Made-up words.",
        licence="CC0-1.0",
        source=BuiltIn(lambda split: rows),
        preprocess=lambda row: [dict(row)],
        postprocess=lambda text, fields, is_target: text,
        metrics=(ACCURACY,),
        choices=lambda fields: fields["answers"],
        ids=("id",),
        decoding=Decoding(max_tokens=case.new_tokens),
    )


def make_words() -> list[str]:
    """Returns different words of one to three syllables."""
    draw = random.Random(0)
    syllables: list[str] = []
    for consonant in "bdfgklmnprstvz":
        for vowel in "aeiou":
            syllables.append(consonant + vowel)

    # Drawn with repeats, which are then dropped.
    words: list[str] = []
    for _ in range(500):
        words.append("".join(draw.choices(syllables, k=draw.randint(1, 3))))
    return list(dict.fromkeys(words))


def build_systems(case: EvaluationCase, folder: Path) -> dict[str, Seq2Seq]:
    """Returns a dense T5 of transformers and a sparse model of ours, random, ready to predict."""
    sizes: dict[str, Any] = {
        "vocab_size": case.vocab_size,
        "d_model": case.d_model,
        "d_ff": case.d_ff,
        "num_layers": case.num_layers,
        "num_decoder_layers": case.num_layers,
        "num_heads": case.num_heads,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
    }
    sparse: dict[str, Any] = {
        "num_sparse_encoder_layers": case.sparse_layers,
        "num_sparse_decoder_layers": case.sparse_layers,
    }
    config = STMoEConfig(**sizes, **sparse, num_experts=case.num_experts, eval_capacity_factor=None)
    torch.manual_seed(0)
    models: dict[str, Any] = {
        "t5": T5ForConditionalGeneration(T5Config(**sizes)),
        "ours": STMoEForConditionalGeneration(config),
    }

    # Saved and loaded again, as an evaluation does.
    tokenizer = train_tokenizer(make_words(), 300, folder / "tokenizer")
    systems = {}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        systems[name] = load_seq2seq(folder / name)
    return systems


def measure_mode(
    benchmark: EvaluationBenchmark, system: Seq2Seq, task: Task, model: str, mode: str, path: Path
) -> list[Row]:
    """Returns a row for ours and one for lm-evaluation-harness, which has its best batch size."""
    cpu = torch.device("cpu")
    requests = make_requests(task)
    ours = partial(answer_ours, system, task, requests, mode, path)

    # The fastest batch size of the harness.
    harness_ms: dict[int, float] = {}
    harness_runs: dict[int, Callable[[], list[Any]]] = {}
    for batch in benchmark.case.batches:
        harness_runs[batch] = build_harness(system, task, requests, mode, batch)
        harness_ms[batch] = measure(harness_runs[batch], cpu)
    best_batch = min(harness_ms, key=harness_ms.__getitem__)
    theirs = harness_runs[best_batch]

    num_differing = count_differing(ours(), theirs())
    remove_predictions = partial(path.unlink, missing_ok=True)
    remove_predictions()

    runs: dict[str, Callable[[], object]] = {"ours": ours, "lm_eval": theirs}
    clears = {"ours": remove_predictions, "lm_eval": remove_predictions}
    rounds = measure_in_turn(runs, clears, benchmark.rounds, cpu)
    times = list(tqdm(rounds, total=benchmark.rounds, desc=f"{model}, {mode}", unit="round"))

    # A row for each, relative to the harness in the same round.
    rows: list[Row] = []
    for name in runs:
        ms = statistics.median(round_[name] for round_ in times)
        rows.append(
            {
                "model": model,
                "mode": mode,
                "system": name,
                "batch_size": best_batch if name == "lm_eval" else "own",
                "examples_per_second": 1000 * len(requests) / ms,
                "over_lm_eval": 1 / median_ratio(times, name, "lm_eval"),
                "bar": BARS[mode],
                "differing": num_differing,
            }
        )
    return rows


def count_differing(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """Returns how many answers differ: texts at all, log-probabilities by more than 0.001."""
    # Log-probabilities differ in their last digits, since sums are in another order.
    num_differing = 0
    for our_answer, their_answer in zip(ours, theirs, strict=True):
        if isinstance(their_answer, str):
            num_differing += our_answer != their_answer
        else:
            num_differing += abs(our_answer - their_answer) > 1e-3
    return num_differing


def make_requests(task: Task) -> list[Request]:
    """Returns the questions of the task."""
    return [
        Request(example.id, example.inputs, example.choices) for example in task.examples("test")
    ]


def answer_ours(
    system: Seq2Seq, task: Task, requests: Sequence[Request], mode: str, path: Path
) -> list[Any]:
    """Returns log-probabilities of all choices without the end token, or texts.

    The predictions are written, as an evaluation does.
    """
    # Without the end token, as lm-evaluation-harness scores a text.
    predictions: Sequence[Prediction] = predict(
        system, task, requests, mode, path, scoring=Scoring(include_eos=False)
    ).predictions
    if mode == "generate":
        return [prediction.output for prediction in predictions]

    scores: list[Any] = []
    for prediction in predictions:
        scores += (prediction.scores or {}).values()
    return scores


def build_harness(
    system: Seq2Seq, task: Task, requests: Sequence[Request], mode: str, batch: int
) -> Callable[[], list[Any]]:
    """Returns a function that gives the same answers by lm-evaluation-harness."""
    from lm_eval.api.instance import Instance
    from lm_eval.models import huggingface

    hflm: Any = huggingface.HFLM
    model = hflm(
        pretrained=system.model, tokenizer=system.tokenizer, backend="seq2seq", batch_size=batch
    )

    # One instance for each text to generate, or for each choice to score.
    kind = "generate_until" if mode == "generate" else "loglikelihood"
    instances: list[Any] = []
    for request in requests:
        arguments: list[Any] = [(request.inputs, choice) for choice in request.choices]
        if mode == "generate":
            # Its own bound, max_gen_toks, grows with the input; random weights hardly ever end a
            # text before it.
            limits = {"until": [], "max_length": 1 + task.decoding.max_tokens}
            arguments = [(request.inputs, limits)]
        for pair in arguments:
            metadata = (task.name, len(instances), 1)
            instances.append(
                Instance(request_type=kind, doc={}, arguments=pair, idx=0, metadata=metadata)
            )

    def generate() -> list[Any]:
        return model.generate_until(instances, disable_tqdm=True)

    def score_choices() -> list[Any]:
        answers = model.loglikelihood(instances, disable_tqdm=True)
        return [score for score, _ in answers]

    return generate if mode == "generate" else score_choices


COLUMNS: Columns = (
    ("model", "model", ""),
    ("mode", "mode", ""),
    ("system", "system", ""),
    ("batch", "batch_size", ""),
    ("examples/s", "examples_per_second", ".2f"),
    ("over lm_eval", "over_lm_eval", ".2f"),
    ("bar of ours", "bar", ".1f"),
    ("answers that differ", "differing", ""),
)


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text."""
    return report_text(report, f"{report['threads']} threads", COLUMNS)
