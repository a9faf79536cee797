"""One study that was run, for all tests of what is done with a study."""

import shutil
from pathlib import Path

import pytest

from tests.eval.studies.tiny_study import run_study, write_studies


@pytest.fixture(scope="session")
def complete_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a corpus, a tokenizer, a study, and its runs in `whole`."""
    studies = write_studies(tmp_path_factory.mktemp("study") / "studies")
    run_study(studies, studies / "whole", "--jobs", "2")
    return studies


@pytest.fixture
def studies(complete_study: Path, tmp_path: Path) -> Path:
    """Returns a copy of it that may be changed."""
    return Path(shutil.copytree(complete_study, tmp_path / "studies"))


def copy_run(studies: Path, out: str, run: str) -> None:
    """Copies ARM/seed-SEED of the complete study to another folder of runs."""
    shutil.copytree(studies / "whole/runs" / run, studies / out / "runs" / run)
