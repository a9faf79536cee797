"""Explains a model's routers on held-out text: tables on the terminal, and a page.

python -m scripts.inspect_router --model runs/demo/pretrain/model --corpus runs/demo/corpus --out report.html \
        [--metrics pretrain=runs/demo/pretrain/metrics.jsonl ...] [--evaluation runs/demo/eval/report.json]
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

from pathlib import Path

from moe.cli import Parser, integer, path, run_main
from moe.data.corpus import corpus_table, load_corpus
from moe.data.pipeline import SpanCorruptionSource
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.data.tokens import tokenize_corpus
from moe.errors import ConfigError
from moe.files import output_path
from moe.inspection.report import write_report
from moe.inspection.tables import HEALTH_HEADER, format_table, health_rows
from moe.inspection.trace import trace_tokens
from moe.models.loading import load_complete
from moe.models.modeling import STMoEForConditionalGeneration
from moe.parsing import read_json, read_json_lines

BATCHES = integer(least=1, most=100_000, reason="the routing of every traced token is kept in memory")
LENGTH = integer(least=2, most=65_536, reason="an attention row holds a number for each token")


def main(argv: list[str]) -> None:
    """Traces held-out text and writes the report."""
    parser = Parser(prog="python -m scripts.inspect_router", description="Explains the routers.")
    parser.add_argument("--model", type=path, required=True, help="folder of a model with its tokenizer")
    parser.add_argument("--corpus", type=path, required=True, help="folder made by scripts.build_corpus")
    parser.add_argument("--out", required=True, help="the .html file to write")
    parser.add_argument("--metrics", nargs="+", default=[], help="NAME=FILE: pre-training first, then fine-tunings")
    parser.add_argument("--evaluation", type=path, help="report.json of python -m eval run")
    parser.add_argument("--batches", type=BATCHES, default=16, help="batches of 64 examples to trace (16)")
    parser.add_argument("--inputs-length", type=LENGTH, default=64, help="encoder tokens of an example (64)")
    options = parser.parse_args(argv)
    out = output_path(options.out, suffix=".html", inputs=[options.model, options.corpus, options.evaluation])
    if unnamed := [value for value in options.metrics if "=" not in value]:
        raise ConfigError(f"--metrics {unnamed[0]!r} has no name. Write NAME=FILE, e.g. pretrain={unnamed[0]}.")

    model, tokenizer = load_complete(STMoEForConditionalGeneration, options.model), load_tokenizer(options.model)
    corpus = load_corpus(options.corpus)
    tokens = tokenize_corpus(corpus.held_out, tokenizer)
    settings = {"inputs_length": options.inputs_length, "batch_size": 64, "seed": 0}
    source = SpanCorruptionSource(tokens, SpecialIds.of(tokenizer), **settings)
    trace = trace_tokens(model, (source.batch(index) for index in range(options.batches)))
    stages = {
        name: [line for _, line in read_json_lines(Path(file), torn_end=True, nan=True)]
        for name, _, file in (value.partition("=") for value in options.metrics)
    }
    evaluation = read_json(options.evaluation, nan=True) if options.evaluation else None
    write_report(
        out,
        config=model.config,
        tokenizer=tokenizer,
        trace=trace,
        stages=stages,
        evaluation=evaluation,
        corpus_table=corpus_table(corpus),
    )
    print(format_table(HEALTH_HEADER, health_rows(trace)))
    print(f"The report is {out.resolve()}.")


if __name__ == "__main__":
    run_main(main)
