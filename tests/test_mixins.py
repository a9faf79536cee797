"""Transformers' own tests of models, which docs/transformers.md tells about."""

import os
import re
from pathlib import Path

import pytest

from tests.mixins.run import run_mixins

PAGE = Path(__file__).parents[1] / "docs/transformers.md"
SOURCE = os.environ.get("TRANSFORMERS_SOURCE")


def explained_failures():
    """The tests that fail here on purpose, of which the page gives the reasons."""
    rows = re.findall(r"^\| `(test_\w+)` \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    return {name for name, _ in rows}


def test_the_page_has_as_many_passes_as_t5_and_a_reason_for_each_failure():
    rows = re.findall(r"\| (ours|T5) \| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|", PAGE.read_text())
    assert len(rows) == 4
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert int(ours[2]) >= int(theirs[2]) > 0
    assert 0 < len(explained_failures()) <= sum(int(row[3]) for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(SOURCE is None, reason="TRANSFORMERS_SOURCE names no checkout of transformers")
def test_transformers_own_tests_pass_but_for_those_that_the_page_explains(tmp_path):
    outcomes = {}
    for side in ("ours", "theirs"):
        (tmp_path / side).mkdir()
        outcomes[side] = run_mixins(Path(SOURCE), side, tmp_path / side)
    failed = {name for name, outcome in outcomes["ours"].items() if outcome == "failed"}
    assert {name.rpartition(".")[2] for name in failed} <= explained_failures()
    assert sum(outcome == "passed" for outcome in outcomes["ours"].values()) > 150
