"""The table of versions: what is installed at the floor, and how outcomes of tests are counted."""

import tomllib

from packaging.requirements import Requirement

from scripts.versions import ROOT, floors, read_outcomes


def test_the_floor_holds_the_lowest_version_of_every_dependency_and_none_has_an_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        declared += extra
    requirements = [Requirement(text) for text in declared if not text.startswith("stmoe[")]

    pinned = dict(line.split("==") for line in floors())
    assert len(set(floors())) == len(pinned)  # one version of each
    for requirement in requirements:
        assert requirement.specifier.contains(pinned[requirement.name])
        assert "<" not in str(requirement.specifier)


def test_a_test_counts_once_and_as_failed_when_its_end_failed(tmp_path):
    (tmp_path / "tests.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.a" name="test_passes" />
        <testcase classname="tests.a" name="test_skips"><skipped /></testcase>
        <testcase classname="tests.a" name="test_fails"><failure /></testcase>
        <testcase classname="tests.a" name="test_ends_badly" />
        <testcase classname="tests.a" name="test_ends_badly"><error /></testcase>
        </testsuite></testsuites>"""
    )
    assert read_outcomes(tmp_path) == {
        "tests.a.test_passes": "passed",
        "tests.a.test_skips": "skipped",
        "tests.a.test_fails": "failed",
        "tests.a.test_ends_badly": "failed",
    }
