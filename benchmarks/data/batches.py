"""Input: how fast batches are made, for span corruption and for a packed mixture.

They are compared with what users of Hugging Face `datasets` write, see input_peer.py. The numbers
are seconds of CPU time, over all threads of the process: the work of one core, regardless of other
load.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.data.batches_peer import (
    corrupted_batches,
    packed_batches,
    prepare_chunks,
    prepare_rows,
)
from benchmarks.machine import Columns, describe_machine, print_report, report_text, save_report
from benchmarks.models.evaluation import make_words
from benchmarks.timing import measure_in_turn, median_ratio
from moe.data.batches_ahead import batches_ahead
from moe.data.mixture import MixtureSource, mixing_shares
from moe.data.pipeline import ALL_ROWS, Batch, BatchSource, SpanCorruptionSource
from moe.data.span_corruption import Noise, tokens_length
from moe.data.tokenizer import SpecialIds, train_tokenizer
from moe.data.tokens import tokenize_corpus

if TYPE_CHECKING:
    import datasets

OURS = "ours"
PEER = "datasets"
_SEED = 0


@dataclass(frozen=True)
class InputCase:
    """Sizes.

    Attributes:
        vocab_size: Pieces of the vocabulary.
        num_documents: Documents of the corpus.
        document_words: Minimum and maximum number of words of a document; a word is about 2.7
            tokens.
        num_pairs: Examples of each task of the mixture.
        pair_words: Minimum and maximum number of words of an input; a target has a quarter of them.
        lengths: Tokens of a row in the encoder and the decoder, of the mixture.
        inputs_length: Encoder tokens of an example of span corruption.
        batch_size: Rows of a batch.
        num_batches: Batches that are measured.
    """

    vocab_size: int = 300
    num_documents: int = 1_000
    document_words: tuple[int, int] = (50, 350)
    num_pairs: tuple[int, ...] = (6_000, 1_500, 500)
    pair_words: tuple[int, int] = (4, 60)
    lengths: tuple[int, int] = (512, 128)
    inputs_length: int = 512
    batch_size: int = 32
    num_batches: int = 20


@dataclass(frozen=True)
class InputBenchmark:
    """What to measure; the fields are the command's options.

    Attributes:
        rounds: Number of repetitions; results are medians.
        json: File to save to; None for none.
        case: Sizes.
    """

    rounds: int
    json: Path | None = None
    case: InputCase = InputCase()


class Reader(NamedTuple):
    """A way to make batches.

    Attributes:
        prepare: Reads the texts; the argument says whether cached files of an earlier run may be
            used.
        batches: Makes batches from the result of `prepare`.
    """

    prepare: Callable[[bool], Any]
    batches: Callable[[Any], Iterable[Batch]]


def run_input(benchmark: InputBenchmark) -> None:
    """Measures, prints the table and saves it; results are saved as they come in."""
    import datasets

    case = benchmark.case
    report: dict[str, Any] = {
        **describe_machine(torch.device("cpu")),
        "datasets": datasets.__version__,
        "rounds": benchmark.rounds,
        "case": dataclasses.asdict(case),
        "rows": [],
    }
    with TemporaryDirectory() as name:
        # Both readers have the same texts and tokenizer.
        folder = Path(name)
        tokenizer = train_tokenizer(make_words(), case.vocab_size, folder / "tokenizer")
        for data, build_readers in READERS.items():
            readers = build_readers(case, tokenizer, folder)
            report["rows"] += measure_readers(benchmark, data, readers)
            save_report(report, benchmark.json)

    print_report(format_report(report), benchmark.json)


# ---------------------------------------------------------------------------
# What is measured


def span_corruption_readers(
    case: InputCase, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, Reader]:
    """Returns both ways to corrupt the spans of a corpus."""
    # Chunks of as many tokens as corruption shortens to the length of a row.
    documents = _draw_documents(case, folder / "corpus")
    ids = SpecialIds.of(tokenizer)
    noise = Noise()
    length = tokens_length(case.inputs_length, noise, ids.num_sentinels)

    def prepare(keep: bool) -> SpanCorruptionSource:
        if not keep:
            _remove_tokens(folder / "corpus")
        tokens = tokenize_corpus(documents, tokenizer)
        return SpanCorruptionSource(
            tokens,
            ids,
            inputs_length=case.inputs_length,
            batch_size=case.batch_size,
            seed=_SEED,
            noise=noise,
        )

    def prepare_peer(keep: bool) -> "datasets.Dataset":
        return prepare_chunks(documents, tokenizer, length, keep=keep)

    def read_peer(chunks: "datasets.Dataset") -> Iterable[Batch]:
        return corrupted_batches(chunks, ids, noise, case.batch_size)

    return {OURS: Reader(prepare, partial(_batches, case)), PEER: Reader(prepare_peer, read_peer)}


def mixture_readers(
    case: InputCase, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, Reader]:
    """Returns both ways to pack a mixture of tasks."""
    # Every task is drawn by its number of examples.
    tasks = _draw_tasks(case)
    shares = mixing_shares(tasks, maximum=None, temperature=1.0)
    inputs_length, targets_length = case.lengths
    kept = folder / "kept"

    # Hugging Face datasets cache on disk what they derive from data on disk.
    saved: dict[str, datasets.Dataset] = {}
    for name, pairs in tasks.items():
        inputs, targets = zip(*pairs, strict=True)
        columns = {"inputs": list(inputs), "targets": list(targets)}
        saved[name] = _on_disk(columns, folder / name)

    def prepare(keep: bool) -> MixtureSource:
        if not keep:
            _remove_tokens(kept)
        return MixtureSource(
            tasks,
            tokenizer,
            inputs_length=inputs_length,
            targets_length=targets_length,
            batch_size=case.batch_size,
            seed=_SEED,
            pack=True,
            keep_in=kept,
        )

    def prepare_peer(keep: bool) -> "datasets.Dataset":
        return prepare_rows(saved, tokenizer, case.lengths, shares, keep=keep)

    def read_peer(rows: "datasets.Dataset") -> Iterable[Batch]:
        return packed_batches(rows, case.batch_size)

    return {OURS: Reader(prepare, partial(_batches, case)), PEER: Reader(prepare_peer, read_peer)}


READERS: dict[str, Callable[[InputCase, PreTrainedTokenizerFast, Path], dict[str, Reader]]] = {
    "span corruption": span_corruption_readers,
    "packed mixture": mixture_readers,
}


def _batches(case: InputCase, source: BatchSource) -> Iterable[Batch]:
    return batches_ahead(source, ALL_ROWS, range(case.num_batches), workers=0)


def _draw_documents(case: InputCase, folder: Path) -> "datasets.Dataset":
    draw = random.Random(_SEED)
    words = make_words()
    texts: list[str] = []
    for _ in range(case.num_documents):
        texts.append(" ".join(draw.choices(words, k=draw.randint(*case.document_words))))
    return _on_disk({"text": texts}, folder)


def _draw_tasks(case: InputCase) -> dict[str, list[tuple[str, str]]]:
    draw = random.Random(_SEED)
    words = make_words()
    tasks: dict[str, list[tuple[str, str]]] = {}
    for number, num_pairs in enumerate(case.num_pairs):
        pairs: list[tuple[str, str]] = []
        for _ in range(num_pairs):
            num_words = draw.randint(*case.pair_words)
            inputs = " ".join(draw.choices(words, k=num_words))
            targets = " ".join(draw.choices(words, k=1 + num_words // 4))
            pairs.append((inputs, targets))
        tasks[f"task {number}"] = pairs
    return tasks


def _on_disk(columns: Mapping[str, Sequence[str]], folder: Path) -> "datasets.Dataset":
    import datasets

    datasets.Dataset.from_dict(dict(columns)).save_to_disk(folder)
    return datasets.load_from_disk(str(folder))  # pyright: ignore[reportReturnType]  no dict of them


def _remove_tokens(folder: Path) -> None:
    for path in folder.glob("tokens-*.safetensors"):
        path.unlink()


# ---------------------------------------------------------------------------
# Measuring


def measure_readers(
    benchmark: InputBenchmark, data: str, readers: Mapping[str, Reader]
) -> list[dict[str, Any]]:
    """Returns a row for each stage and reader: medians, and the ratio to `datasets`."""
    import datasets

    datasets.disable_progress_bars()
    num_batches = benchmark.case.num_batches
    runs: dict[str, Callable[[], object]] = {}
    tokens: dict[str, int] = {}
    for system, reader in readers.items():
        prepared = reader.prepare(False)
        read = partial(_read_batches, reader, prepared, num_batches)
        runs[f"prepare, {system}"] = partial(reader.prepare, False)
        runs[f"prepare again, {system}"] = partial(reader.prepare, True)
        runs[f"batches, {system}"] = read

        # Tokens of the batches that are measured.
        batches = islice(reader.batches(prepared), num_batches)
        tokens[system] = count_tokens(batches)

    rounds = measure_in_turn(
        runs, {}, benchmark.rounds, torch.device("cpu"), clock=time.process_time
    )
    times = list(tqdm(rounds, total=benchmark.rounds, desc=data, unit="round"))

    # A row for each, relative to datasets in the same round.
    rows: list[dict[str, Any]] = []
    for name in runs:
        stage, system = name.split(", ")
        seconds = statistics.median(round_[name] for round_ in times) / 1000
        row = {
            "data": data,
            "stage": stage,
            "system": system,
            "cpu_seconds": seconds,
            "times_as_fast": 1 / median_ratio(times, name, f"{stage}, {PEER}"),
        }
        if stage == "batches":
            row["tokens_per_core_second"] = tokens[system] / seconds
            # Tokens of a batch may differ, so times alone are not comparable.
            row["times_as_fast"] *= tokens[system] / tokens[PEER]
        rows.append(row)
    return rows


def _read_batches(reader: Reader, prepared: Any, num_batches: int) -> None:
    for _ in islice(reader.batches(prepared), num_batches):
        pass


def count_tokens(batches: Iterable[Batch]) -> int:
    """Returns the tokens of batches on both sides, without padding."""
    sides = {"input_ids": "segment_ids", "labels": "decoder_segment_ids"}
    total = 0
    for batch in batches:
        for tokens, segments in sides.items():
            # Rows without segments are full.
            if segments in batch:
                total += int((batch[segments] > 0).sum())
            else:
                total += batch[tokens].numel()
    return total


COLUMNS: Columns = (
    ("data", "data", ""),
    ("stage", "stage", ""),
    ("system", "system", ""),
    ("CPU s", "cpu_seconds", ".3f"),
    ("tokens/s and core", "tokens_per_core_second", ",.0f"),
    ("times as fast", "times_as_fast", ".2f"),
)


def format_report(report: Mapping[str, Any]) -> str:
    """Returns the report as text."""
    return report_text(report, f"datasets {report['datasets']}", COLUMNS)
