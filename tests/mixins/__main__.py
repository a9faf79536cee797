"""Runs transformers' mixins, and writes the page of what they said.

python -m tests.mixins run CHECKOUT --to RESULTS [--side ours] [-- pytest options]
python -m tests.mixins page RESULTS > docs/transformers.md
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.mixins.report import page, read_outcomes, unexplained
from tests.mixins.run import SIDES, TEST_FILES, check_source, run_mixins

SOURCES_FILE = "sources.txt"


def run(arguments: argparse.Namespace) -> int:
    """Runs one side or both; returns 0 when every test of ours passes, is skipped or is explained."""
    source = Path(arguments.source)
    check_source(source)
    described = [f"transformers {version('transformers')}, torch {version('torch')}"]
    for name in TEST_FILES:
        digest = hashlib.sha256((source / "tests" / name).read_bytes()).hexdigest()
        described.append(f"transformers' `{name}` with the SHA-256 {digest[:16]}...")
    if arguments.note:
        described.append(arguments.note)

    results = Path(arguments.to)
    results.mkdir(parents=True, exist_ok=True)
    (results / SOURCES_FILE).write_text("\n".join(described) + "\n")
    for side in [arguments.side] if arguments.side else SIDES:
        name = f"{side}{arguments.suffix}.xml"
        run_mixins(source, side, results / name, arguments.options)

    surprises = unexplained(read_outcomes(results.glob("ours*.xml")))
    for test in surprises:
        print(f"{test} fails and is not explained.", file=sys.stderr)
    return 1 if surprises else 0


def show(arguments: argparse.Namespace) -> int:
    """Prints the page of the results."""
    results = Path(arguments.results)
    sources = (results / SOURCES_FILE).read_text().splitlines()
    ours = read_outcomes(results.glob("ours*.xml"))
    theirs = read_outcomes(results.glob("theirs*.xml"))
    print(page(ours, theirs, sources), end="")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mixins", description=__doc__)
    verbs = parser.add_subparsers(required=True)

    verb = verbs.add_parser("run", help="run transformers' tests")
    verb.add_argument("source", help="checkout of transformers")
    verb.add_argument("--to", required=True, help="folder of the results")
    verb.add_argument("--side", choices=SIDES, help="only this one")
    verb.add_argument("--suffix", default="", help="of the name of the results, for a further run")
    verb.add_argument("--note", help="what else the page shall say of the checkout")
    verb.set_defaults(function=run)

    verb = verbs.add_parser("page", help="print what they said as Markdown")
    verb.add_argument("results", help="folder of the results")
    verb.set_defaults(function=show)

    # What stands behind -- is pytest's.
    words = list(arguments)
    split = words.index("--") if "--" in words else len(words)
    parsed = parser.parse_args(words[:split])
    parsed.options = words[split + 1 :]
    return parsed.function(parsed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
