"""The valid things that cases damage copies of, made once for all processes of a test run."""

from pathlib import Path

import pytest

from tests.doors.workspace import build_workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    base = tmp_path_factory.getbasetemp().resolve()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    return build_workspace(shared / "doors" / "workspace")
