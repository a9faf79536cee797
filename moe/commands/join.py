"""stmoe join: makes one model of several that added experts of prefixes to the same one.

stmoe join --from runs/names_mk/model runs/names_az/model --to runs/names_joined
"""

import shlex
import time
from pathlib import Path

from moe.checks import check
from moe.checksums import SUMS_FILE, sha256_of
from moe.cli import Parser, model_name
from moe.commands.convert import new_model_folder
from moe.commands.surgery_report import ReportTable, write_report
from moe.files import whole_folder
from moe.models.configuration import STMoEConfig
from moe.surgery.join import join_checkpoints

_HEADER = ["parent", "prefixes", f"SHA-256 of its {SUMS_FILE}"]


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe join", description="Joins models with experts of prefixes.")
    parser.add_argument(
        "--from",
        dest="sources",
        type=model_name,
        nargs="+",
        required=True,
        help="folders or hub names of models that added experts of prefixes to the same model",
    )
    parser.add_argument("--to", required=True, help="the folder to make")
    return parser


def main(argv: list[str]) -> None:
    """Joins models, and prints the sizes and the prefixes of all."""
    start = time.perf_counter()
    options = build_parser().parse_args(argv)
    sources = options.sources
    check(len(sources) > 1, "--from", sources, "two models or more")
    target = new_model_folder(options.to, sources)

    with whole_folder(target, kind="model") as folder:
        join_checkpoints(sources, folder)
        rows = []
        for source in sources:
            records = STMoEConfig.from_pretrained(source).prefix_experts or ()
            prefixes = ", ".join(record["prefix"] for record in records)
            sums = Path(source) / SUMS_FILE
            rows.append([source, prefixes, sha256_of(sums) if sums.is_file() else "none"])
        report = write_report(
            folder,
            command=shlex.join(["stmoe join", *argv]),
            sources=sources,
            tables=[ReportTable(_HEADER, rows)],
            start=start,
        )

    print(report)
    print(f"The model is in {target}.")
