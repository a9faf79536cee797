"""The command that runs transformers' mixins, and the page that it wrote."""

import os
import re
from pathlib import Path

import pytest

from tests.mixins.__main__ import main
from tests.mixins.report import ON_PURPOSE, Outcome, page, read_outcomes, unexplained

ROOT = Path(__file__).parents[1]
SOURCE = os.environ.get("TRANSFORMERS_SOURCE")

CASES = """<testsuites><testsuite>
<testcase classname="test_{side}.{owner}" name="test_a"></testcase>
<testcase classname="test_{side}.{owner}" name="test_b"><skipped message="test is | slow"/></testcase>
<testcase classname="test_{side}.{owner}" name="test_c"></testcase>
<testcase classname="test_{side}.{owner}" name="test_c [second]"><failure message="no"/></testcase>
</testsuite></testsuites>"""


def results(folder, side, owner, text=CASES):
    path = folder / f"{side}.xml"
    path.write_text(text.format(side=side, owner=owner))
    return read_outcomes([path])


def test_a_subtest_that_fails_fails_its_test_and_a_further_run_replaces_a_skip(tmp_path):
    outcomes = results(tmp_path, "ours", "STMoETest")
    assert outcomes["STMoETest", "test_a"] == Outcome("passed")
    assert outcomes["STMoETest", "test_b"] == Outcome("skipped", "test is | slow")
    assert outcomes["STMoETest", "test_c"].status == "failed"
    further = tmp_path / "ours-slow.xml"
    further.write_text(
        '<testsuite><testcase classname="x.STMoETest" name="test_b"></testcase></testsuite>'
    )
    outcomes = read_outcomes([tmp_path / "ours.xml", further])
    assert outcomes["STMoETest", "test_b"] == Outcome("passed")
    assert unexplained(outcomes) == ["test_c"]


def test_the_page_counts_shared_tests_and_says_why_each_failure_is_meant(tmp_path):
    ours = results(tmp_path, "ours", "STMoETest")
    theirs = results(tmp_path, "theirs", "T5ModelTest", CASES.replace("test_a", "test_other"))
    text = page(ours, theirs, ["transformers 0"])
    assert "| ours | `STMoETest` | 0 | 1 | 1 |" in text
    assert "| T5 | `T5ModelTest` | 0 | 1 | 1 |" in text
    assert "| `test_c` | not explained |" in text


def test_a_folder_without_the_tests_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a checkout of transformers"):
        main(["run", str(tmp_path), "--to", str(tmp_path / "results")])


def test_the_page_of_the_documentation_has_as_many_passes_as_t5_and_no_failure_without_a_reason():
    text = (ROOT / "docs" / "transformers.md").read_text()
    rows = re.findall(r"\| (ours|T5) \| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|", text)
    assert len(rows) == 4
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert int(ours[2]) >= int(theirs[2]) > 0
    failed = re.findall(r"^\| `(test_\w+)` \| (.*) \|$", text, flags=re.MULTILINE)
    assert dict(failed) == ON_PURPOSE


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(SOURCE is None, reason="TRANSFORMERS_SOURCE names no checkout of transformers")
def test_transformers_own_tests_pass(tmp_path):
    assert main(["run", str(SOURCE), "--to", str(tmp_path), "--side", "ours"]) == 0
    outcomes = read_outcomes([tmp_path / "ours.xml"])
    assert sum(outcome.status == "passed" for outcome in outcomes.values()) > 150
