"""Serving: continuous and static batches of our model, beside Switch and T5 of transformers, and T5
in CTranslate2.

All models have the same backbone, and Switch has our weights. Answers have given lengths: the end
token is never the likeliest, and a static batch runs until its longest answer is complete.
"""

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.machine import describe_machine
from benchmarks.models.model import ModelCase, build_models
from benchmarks.report import Columns, Group, Row, measure_groups, rows_by_round
from benchmarks.timing import measure_in_turn, median_ratio, ratio_range, ratio_text
from moe.serving.engine import Engine
from moe.serving.sampling import Sampling

END = 1
"""The end token of T5's vocabulary."""

SERVED_CASE = ModelCase(
    d_model=512, d_ff=2048, num_heads=8, num_layers=6, sparse_layers=3, input_length=48
)


class Load(NamedTuple):
    """Requests: their inputs, and the lengths of their answers."""

    inputs: list[list[int]]
    lengths: list[int]


@dataclass(frozen=True)
class ServingBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        batches: Requests that run at a time.
        rounds: How often everything is measured; results are medians.
        json: File to save to after every round; None for none.
        case: Sizes of the models; its input_length is the mean number of tokens of an input.
        num_experts: E.
        mean_length: Mean number of tokens of an answer.
        spread: Standard deviation of the logarithm of lognormal lengths.
        requests_per_row: Requests, as a multiple of the batch.
    """

    batches: Sequence[int]
    rounds: int
    json: Path | None
    case: ModelCase = SERVED_CASE
    num_experts: int = 8
    mean_length: int = 24
    spread: float = 0.8
    requests_per_row: int = 3


def run_serving(benchmark: ServingBenchmark) -> None:
    """Measures, prints the table and saves it."""
    settings = describe_machine(torch.device("cpu")) | {
        "rounds": benchmark.rounds,
        "case": dataclasses.asdict(benchmark.case),
        "num_experts": benchmark.num_experts,
    }
    served = build_models(benchmark.case, benchmark.num_experts)
    for model in served.values():
        never_end(model.eval())
    translators = build_translators(served["t5_sdpa"], ("float32", "int8"))
    groups: list[Group] = []
    for batch, lengths in product(benchmark.batches, ("equal", "lognormal")):
        measure = partial(measure_load, benchmark, served, translators, batch, lengths)
        groups.append(Group({"lengths": lengths, "batch": batch}, measure))
    measure_groups(settings, groups, {"rows": COLUMNS}, benchmark.json)


def never_end(model: Any) -> None:
    """Makes the logit of the end token 0, which is never the largest."""
    with torch.no_grad():
        model.get_output_embeddings().weight[END] = 0
    model.generation_config.eos_token_id = END


def draw_load(benchmark: ServingBenchmark, number: int, lengths: str) -> Load:
    """Returns requests; equal loads have one length of inputs and one of answers.

    Lognormal lengths are at most six times the mean.
    """
    draw = np.random.default_rng(number)
    means = {"inputs": benchmark.case.input_length, "answers": benchmark.mean_length}
    drawn: dict[str, list[int]] = {}
    for name, mean in means.items():
        sizes = np.full(number, mean)
        if lengths == "lognormal":
            location = math.log(mean) - benchmark.spread**2 / 2
            sizes = draw.lognormal(location, benchmark.spread, number).round()
        drawn[name] = np.clip(sizes, 1, 6 * mean).astype(int).tolist()
    inputs = [
        draw.integers(2, benchmark.case.vocab_size, size).tolist() for size in drawn["inputs"]
    ]
    return Load(inputs, drawn["answers"])


def measure_load(
    benchmark: ServingBenchmark,
    served: Mapping[str, Any],
    translators: Mapping[str, Any],
    batch: int,
    lengths: str,
) -> Iterator[list[Row]]:
    """Yields a row for each way to serve a load after every round."""
    load = draw_load(benchmark, max(8, benchmark.requests_per_row * batch), lengths)
    latencies: dict[str, list[float]] = {}

    def serve(name: str, answer: Any) -> None:
        latencies[name] = answer()

    engine = Engine(served["ours"], _no_words(), max_batch=batch)
    answers: dict[str, Any] = {name: partial(generate, model) for name, model in served.items()}
    for kind, translator in translators.items():
        answers[f"ctranslate2 {kind}"] = translator
    ways: dict[str, Any] = {"ours, continuous": partial(answer_continuously, engine, load)}
    for name, answer in answers.items():
        ways[f"{name}, static"] = partial(answer_statically, answer, load, batch)

    def describe(times: Sequence[dict[str, float]]) -> list[Row]:
        rows: list[Row] = []
        for name in ways:
            ms = statistics.median(round_[name] for round_ in times)
            p50, p95 = np.percentile(latencies[name], [50, 95]).tolist()
            rows.append(
                {
                    "model": name,
                    "tokens_per_second": 1000 * sum(load.lengths) / ms,
                    "p50_ms": 1000 * p50,
                    "p95_ms": 1000 * p95,
                    "times_faster": median_ratio(times, name, "ours, continuous"),
                    "times_faster_range": ratio_range(times, name, "ours, continuous"),
                }
            )
        return rows

    runs = {name: partial(serve, name, way) for name, way in ways.items()}
    rounds = measure_in_turn(runs, {}, benchmark.rounds, torch.device("cpu"))
    return rows_by_round(rounds, describe)


def answer_continuously(engine: Engine, load: Load) -> list[float]:
    """Answers a load; returns the seconds of each answer from the start of its encoder pass."""
    for number, (tokens, length) in enumerate(zip(load.inputs, load.lengths, strict=True)):
        engine.submit(number, tokens, Sampling(max_new_tokens=length))

    started: dict[int, float] = {}
    seconds: list[float] = []
    while not engine.is_idle:
        now = time.perf_counter()
        for piece in engine.step():
            begin = started.setdefault(piece.number, now)
            if piece.answer is not None:
                assert piece.answer.finish == "length", "an answer of another length"
                seconds.append(time.perf_counter() - begin)
    return seconds


def answer_statically(
    answer: Callable[[list[list[int]], int], object], load: Load, batch: int
) -> list[float]:
    """Answers a load in batches in the order of arrival; returns seconds likewise.

    Args:
        answer: Answers inputs with a number of tokens.
        load: The requests.
        batch: Requests in a batch.
    """
    seconds: list[float] = []
    for start in range(0, len(load.inputs), batch):
        now = time.perf_counter()
        inputs = load.inputs[start : start + batch]
        answer(inputs, max(load.lengths[start : start + batch]))
        seconds += [time.perf_counter() - now] * len(inputs)
    return seconds


@torch.inference_mode()
def generate(model: Any, inputs: list[list[int]], length: int) -> Tensor:
    """Returns the tokens <int64>[B, length] that transformers' `generate` answers inputs with."""
    longest = max(map(len, inputs))
    rows = [row + [0] * (longest - len(row)) for row in inputs]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in inputs]
    tokens = model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        max_new_tokens=length,
        do_sample=False,
    )
    assert not (tokens == END).any(), "an answer that ended early"
    return tokens[:, 1:]


def build_translators(t5: Any, kinds: Sequence[str]) -> dict[str, Callable[..., None]]:
    """Returns what answers with a T5 in CTranslate2 by kind of its numbers; nothing if that is not installed.

    Each has a process. In this one its threads would count as torch's: more threads than cores, which
    then sleep after each product, and a step of decoding with torch takes 7 ms more.
    """
    if find_spec("ctranslate2") is None:
        return {}
    from ctranslate2.converters import TransformersConverter

    translators: dict[str, Callable[..., None]] = {}
    words = {"</s>": END, "<pad>": 0}
    words |= {str(token): token for token in range(2, t5.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="</s>")),
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="</s>",
    )
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "t5")
        t5.save_pretrained(source)
        tokenizer.save_pretrained(source)
        for kind in kinds:
            folder = Path(temporary, kind)
            TransformersConverter(str(source)).convert(str(folder), quantization=kind)
            process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            model = (str(folder), kind, torch.get_num_threads())
            translators[kind] = partial(translate_batch, partial(process.submit, _translate, model))
            translators[kind]([[END]], 1)  # before the folder goes
    return translators


def translate_batch(submit: Callable[..., Any], inputs: list[list[int]], length: int) -> None:
    """Answers inputs with the CTranslate2 of a process, to which `submit` sends words."""
    words = [[str(token) for token in row] for row in inputs]
    lengths = submit(words, length).result()
    assert lengths == [length] * len(inputs), "an answer of another length"


def _translate(model: tuple[Any, ...], words: list[list[str]], length: int) -> list[int]:
    """Returns the lengths of the answers."""
    answers = _open_translator(*model).translate_batch(
        words, beam_size=1, min_decoding_length=length, max_decoding_length=length
    )
    return [len(answer.hypotheses[0]) for answer in answers]


@lru_cache
def _open_translator(folder: str, kind: str, num_threads: int) -> Any:
    """Returns the model of a folder, once in a process."""
    import ctranslate2

    return ctranslate2.Translator(folder, compute_type=kind, intra_threads=num_threads)


def _no_words() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that decodes every token to nothing: texts are not measured."""
    words = Tokenizer(models.WordLevel({"</s>": 0}, unk_token="</s>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")


def over_continuous(row: Row) -> str:
    """Returns the time of a row over that of continuous batches."""
    return ratio_text(row["times_faster"], row["times_faster_range"])


COLUMNS: Columns = (
    ("lengths", "lengths", ""),
    ("batch", "batch", ""),
    ("model", "model", ""),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("p50 ms", "p50_ms", ".0f"),
    ("p95 ms", "p95_ms", ".0f"),
    ("time / continuous", over_continuous, ""),
)
