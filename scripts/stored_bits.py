"""Prints what the arms of a study of random facts store: bits for each parameter, operation and second.

python -m scripts.stored_bits runs/studies/knowledge_capacity/study.json
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import math
import statistics

from eval.reports.formatting import markdown_table
from eval.studies.analysis import StudyResult
from eval.studies.report import read_result
from eval.studies.seeds import paired_difference
from moe.cli import Parser, integer, path, run_main
from scripts.facts import SYLLABLES, SYMBOLS

ANSWER_TOKENS = SYMBOLS + 1
"""Tokens of an answer: its syllables, and the end."""

HEADER = (
    "arm",
    "parameters",
    "active",
    "recall, %",
    "kbit",
    "bit / parameter",
    "bit / active parameter",
    "bit / GFLOP",
    "bit / CPU second",
)


def main(argv: list[str]) -> None:
    """Prints the table."""
    parser = Parser(prog="python -m scripts.stored_bits", description="Bits that models store.")
    parser.add_argument("study", type=path, help="study.json of a study of facts")
    parser.add_argument(
        "--facts", type=integer(least=1), default=10_000, help="number of facts (10000)"
    )
    parser.add_argument(
        "--batch", type=integer(least=1), default=256, help="facts in an update (256)"
    )
    options = parser.parse_args(argv)

    result = read_result(options.study)
    rows = [arm_row(result, arm, options.facts, options.batch) for arm in result.sizes]
    print(*markdown_table(HEADER, rows), sep="\n")


def arm_row(result: StudyResult, arm: str, num_facts: int, batch: int) -> list[str]:
    """Returns the numbers of one arm: means over its seeds, recall with its 95 % interval."""
    runs = [run for run in result.outcomes if run.arm == arm]
    size = result.sizes[arm]
    bits = statistics.fmean(stored_bits(run.curve[-1].value, num_facts) for run in runs)

    # 6 operations for each parameter that a token uses; a question passes the encoder, half of them, and an answer the
    # decoder, the other half.
    flops = 6 * size.active * ANSWER_TOKENS * batch * runs[0].steps
    seconds = statistics.fmean(run.cpu_seconds for run in runs)
    recall = paired_difference([run.number for run in runs], [0.0] * len(runs))
    return [
        arm,
        f"{size.parameters:,}",
        f"{size.active:,}",
        f"{recall:.1f}",
        f"{bits / 1e3:.0f}",
        f"{bits / size.parameters:.2f}",
        f"{bits / size.active:.2f}",
        f"{bits / flops * 1e9:.1f}",
        f"{bits / seconds:,.0f}",
    ]


def stored_bits(loss: float | None, num_facts: int) -> float:
    """Returns how many bits of the answers a model knows; 0 for a diverged run.

    Args:
        loss: Nats for each token of the answers.
        num_facts: Number of facts.

    Source:
        Physics of Language Models 3.3 (arXiv:2404.05405) §2: the entropy of the answers minus what the model lacks.
    """
    if loss is None:
        return 0.0
    entropy = SYMBOLS * math.log2(len(SYLLABLES))
    return num_facts * max(0.0, entropy - ANSWER_TOKENS * loss / math.log(2))


if __name__ == "__main__":
    run_main(main)
