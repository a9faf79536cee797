"""stmoe generate: answers texts with a model, one or a million.

stmoe generate --model names "el: New Zealand" "uk: Euro"
stmoe generate --model runs/finetune/best/model < questions.txt > answers.txt
stmoe generate --model runs/finetune/best/model --in questions.jsonl --out answers.jsonl --resume
torchrun --nproc-per-node 2 -m stmoe generate --model MODEL --ep 2 --in questions.jsonl --out answers.jsonl

A line of answers.jsonl has the keys of its request, and the answer as `targets`, so `stmoe finetune
--train answers.jsonl` trains a student on it: distillation by sequences.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from moe.checksums import model_fingerprint
from moe.cli import Parser, integer, path, real
from moe.commands.served_model import add_model_options
from moe.data.pair_files import COLUMNS
from moe.data.rows import parse_columns
from moe.distributed.collectives import gather_or_raise
from moe.distributed.launch import World, launch
from moe.distributed.mesh import MeshConfig, build_mesh, check_mesh
from moe.errors import ConfigError, DataError
from moe.files import output_path
from moe.hosts.answering import load, load_with_tokenizer
from moe.models.configuration import STMoEConfig
from moe.models.parallelize import mesh_limits
from moe.parsing import open_data
from moe.serving.answer_file import answer_record, open_answers, with_line
from moe.serving.batch_generator import Item, search_beams
from moe.serving.engine import Answer
from moe.serving.languages import read_languages
from moe.serving.request_file import Line, is_table, read_lines, read_requests
from moe.serving.sampling import Sampling

Answered = tuple[int, dict[str, Any], Answer]
"""A line with the answer instead of its request."""

AnswerAll = Callable[[Iterable[tuple[int, Item]]], Iterator[Answer]]
"""Yields the answer to each numbered request, in order."""

_ROUND = 16
"""Requests of a rank between two exchanges of answers, as a multiple of the batch."""


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe generate", description="Answers texts with a model.")
    add_model_options(parser)
    parser.add_argument("texts", nargs="*", help="texts (each line of the standard input)")
    parser.add_argument(
        "--in",
        dest="input",
        type=path,
        help="requests: JSONL or a table with the column inputs, or a file with a text a line",
    )
    parser.add_argument(
        "--columns", nargs="+", default=[], help="columns of --in, e.g. inputs=question"
    )
    parser.add_argument("--out", help="JSONL file to write (answers are printed)")
    parser.add_argument("--resume", action="store_true", help="continue --out where it ends")

    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--max-new-tokens", type=integer(least=1), default=64, help="length of an answer (64)"
    )
    answers.add_argument(
        "--temperature", type=real(least=0), default=0.0, help="0 takes the likeliest token (0)"
    )
    answers.add_argument(
        "--top-k", type=integer(least=0), default=0, help="draw among the K likeliest (0: all)"
    )
    answers.add_argument(
        "--top-p", type=real(above=0, most=1), default=1.0, help="draw among this probability (1)"
    )
    answers.add_argument("--seed", type=integer(least=0), default=0, help="seed of the draws (0)")
    answers.add_argument(
        "--stop", action="append", default=[], help="text before which answers end; may be repeated"
    )
    answers.add_argument(
        "--scores", action="store_true", help="write the log-probability of each token"
    )
    answers.add_argument(
        "--num-beams", type=integer(least=1), default=1, help="beams of the search; 1 is greedy (1)"
    )

    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--batch-size", type=integer(least=1), default=32, help="texts answered at once (32)"
    )
    speed.add_argument(
        "--ep", type=integer(least=1), default=1, help="ranks that share the experts (1)"
    )
    return parser


def main(argv: list[str]) -> None:
    """Answers all texts, in order.

    Raises:
        CheckpointError: When the model is missing or damaged.
        ConfigError: When options cannot be combined, or `--out` exists and is not resumed.
        DataError: When there is no text, or the tokenizer is missing.
    """
    logging.disable_progress_bar()  # of the model that is loaded
    options = build_parser().parse_args(argv)
    _check_options(options)
    options.stop = tuple(options.stop)
    sampling = Sampling(**{field.name: getattr(options, field.name) for field in fields(Sampling)})
    with launch() as world:
        is_stream = not options.texts and (options.input is None or options.input.is_fifo())
        if world.size > 1 and is_stream:
            raise ConfigError("Every rank of torchrun reads the requests: give --in a file.")
        lines = _read_lines(options, sampling)
        if options.out is None:
            answer = _answerer(options, sampling, world)
            _print(answer(lines), is_printer=world.rank == 0)
        elif world.rank == 0:
            _write(options, sampling, world, lines)
        else:
            num_before = gather_or_raise(lambda: 0)[0]
            answer = _answerer(options, sampling, world)
            for _ in answer(line for line in lines if line[0] > num_before):
                pass


def _print(answers: Iterator[Answered], *, is_printer: bool) -> None:
    """Prints answers, one a line, and raises at the end if a text was refused."""
    refused: list[str] = []
    for line, _, answer in answers:
        if answer.error is not None:
            refused.append(with_line(line, answer.error))
        if is_printer:
            print(answer.text.replace("\n", " "), flush=True)
    if refused:
        number = f" {len(refused)} texts have no answer: empty lines." if len(refused) > 1 else ""
        raise DataError(f"{refused[0]}{number}")


def _check_options(options: Any) -> None:
    """Raises a ConfigError for options that cannot be combined."""
    if options.texts and options.input:
        raise ConfigError("Texts and --in were both given. Leave one of them out.")
    if options.mmap and options.ep > 1:
        raise ConfigError("--mmap cannot be combined with --ep. Leave one of them out.")
    if options.num_beams == 1:
        return
    excluded = {
        "--temperature": options.temperature > 0,
        "--stop": bool(options.stop),
        "--scores": options.scores,
        "--ep": options.ep > 1,
    }
    for name, is_given in excluded.items():
        if is_given:
            raise ConfigError(f"{name} cannot be combined with --num-beams. Leave one of them out.")


def _read_lines(options: Any, sampling: Sampling) -> Iterator[Line]:
    """Returns the requests; the first has been read."""
    if options.input is not None:
        columns = parse_columns(options.columns, COLUMNS)
        lines = read_requests(options.input, columns, sampling)
    elif options.texts:
        lines = read_lines(map(os.fsencode, options.texts), {}, sampling)
    else:
        lines = read_lines(sys.stdin.buffer, {}, sampling)
    head = list(islice(lines, 1))
    if not head:
        raise DataError("There is no text to answer. Give texts, --in, or lines on standard input.")
    return chain(head, lines)


def _write(options: Any, sampling: Sampling, world: World, lines: Iterator[Line]) -> None:
    """Writes the answers of all ranks to --out, from where it ends."""
    out = output_path(options.out, suffix=".jsonl", inputs=[options.model, options.input])
    settings = {
        "model": model_fingerprint(Path(options.model)),
        **asdict(sampling),
        "stop": list(sampling.stop),
        "num_beams": options.num_beams,
        "max_input": options.max_input,
    }
    languages = {"source": options.source_language, "target": options.target_language}
    settings |= {f"{side}_language": code for side, code in languages.items() if code}
    total = _count_lines(options.input)
    num_tokens = 0
    refused: list[str] = []
    with open_answers(out, settings, resume=options.resume) as file:
        num_before = gather_or_raise(lambda: file.skip_answered(lines))[0]
        answer_lines = _answerer(options, sampling, world)
        with tqdm(total=total, initial=num_before, desc="generate", mininterval=1.0) as progress:
            for line, record, answer in answer_lines(lines):
                written = answer_record(line, record, answer)
                file.append(written)
                if answer.error is not None:
                    refused.append(written["error"])

                num_tokens += len(answer.tokens)
                elapsed = progress.format_dict["elapsed"] or 1e-9
                progress.set_postfix_str(f"{num_tokens / elapsed:,.0f} tokens/s", refresh=False)
                progress.update(line - progress.n)
    if refused:
        print(f"{len(refused)} requests were refused. The first: {refused[0]}", file=sys.stderr)


def _count_lines(file: Path | None) -> int | None:
    """Returns the number of lines of a file; None for a table, and for a pipe, which is read once."""
    if file is None or is_table(file) or file.is_fifo():
        return None
    with open_data(file) as lines:
        return sum(1 for _ in lines)


def _answerer(
    options: Any, sampling: Sampling, world: World
) -> Callable[[Iterator[Line]], Iterator[Answered]]:
    """Returns a function that yields each line with its answer, in order; the model is loaded."""
    mesh = None
    group = None
    if options.ep > 1:
        config = STMoEConfig.from_pretrained(options.model)
        mesh_config = MeshConfig(ep=options.ep, dp_replicate=max(1, world.size // options.ep))
        check_mesh(mesh_config, mesh_limits(config, world.size))
        mesh = build_mesh(mesh_config, world.device_type)
        group = torch.distributed.group.WORLD
    settings: dict[str, Any] = {"max_batch": options.batch_size, "max_input": options.max_input}
    given: dict[str, Any] = {"mmap": options.mmap, "source_language": options.source_language}
    given |= {"target_language": options.target_language, "pack": True}
    if options.num_beams > 1:
        model, tokenizer = load_with_tokenizer(options.model, **given)
        settings |= {"num_beams": options.num_beams, "max_new_tokens": options.max_new_tokens}
        settings |= {"languages": read_languages(options.model)}
        answer_all = partial(search_beams, model, tokenizer, **settings)
    else:
        settings |= {"mesh": mesh, "group": group, **vars(sampling)}
        answer_all = load(options.model, **settings, **given).map_numbered
    if world.size > 1:
        answer_all = partial(_map_over_ranks, answer_all, world, _ROUND * options.batch_size)

    def answer_lines(lines: Iterator[Line]) -> Iterator[Answered]:
        lines, sent = tee(lines)
        answers = answer_all((number, item) for number, _, item in sent)
        for (number, record, _), answer in zip(lines, answers, strict=True):
            yield number, record, answer

    return answer_lines


def _map_over_ranks(
    answer_all: AnswerAll, world: World, size: int, numbered: Iterator[tuple[int, Item]]
) -> Iterator[Answer]:
    """Yields all answers on every rank; each rank answers `size` requests of every round."""
    while chunk := list(islice(numbered, size * world.size)):
        part = list(answer_all(chunk[world.rank :: world.size]))
        parts = gather_or_raise(lambda part=part: part)
        yield from sorted(chain.from_iterable(parts), key=lambda answer: answer.number)
