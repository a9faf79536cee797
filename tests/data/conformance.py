"""Cases computed by T5's and SeqIO's own code; see the first lines of conformance_cases.json."""

import json
from pathlib import Path
from typing import Any

CASES = json.loads(Path(__file__).with_name("conformance_cases.json").read_text(encoding="utf-8"))["cases"]


def cases_of(function: str) -> list[Any]:
    """Returns (input, expected) of the cases whose function begins with `function`; never none."""
    found = [(case["input"], case["expected"]) for case in CASES if case["input"]["fn"].startswith(function)]
    assert found, function
    return found
