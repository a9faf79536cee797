"""Cases computed by T5's and SeqIO's own code; tests/conformance/test_conformance.py runs all of them."""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "conformance" / "cases.json"
CASES = json.loads(_FILE.read_text(encoding="utf-8"))["cases"]


def cases_of(function: str) -> list[Any]:
    """Returns (input, expected) of the cases whose function begins with `function`; never none."""
    found = [
        (case["input"], case["expected"])
        for case in CASES
        if case["input"].get("fn", "").startswith(function)
    ]
    assert found, function
    return found
