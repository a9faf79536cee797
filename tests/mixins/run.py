"""Runs transformers' mixins on our models and on its T5, each in a process of its own."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[2]
SIDES = ("ours", "theirs")
TEST_FILES = (
    "test_modeling_common.py",
    "test_configuration_common.py",
    "generation/test_utils.py",
    "exporters/test_export.py",
)
"""The files of the mixins, in transformers' folder `tests`."""

_PACKAGE = '''"""The tests of transformers."""

__path__ = {folders}
'''


def run_mixins(
    sources: Sequence[Path],
    side: str,
    results: Path,
    options: Sequence[str] = (),
) -> int:
    """Runs one side and writes what each test did; returns pytest's exit status.

    Args:
        sources: Folders with transformers' folder `tests`. A file is taken from the first that has
            it: the source distribution, for instance, holds only a part of the tests.
        side: "ours" or "theirs".
        results: The XML file to write.
        options: Further arguments of pytest.
    """
    # Inside of the process `tests` is transformers' package: its files import each other by it.
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "tests"
        package.mkdir()
        folders = [str(source.resolve() / "tests") for source in sources]
        (package / "__init__.py").write_text(_PACKAGE.format(folders=folders))
        shutil.copy(Path(__file__).with_name(f"{side}.py"), Path(folder) / f"test_{side}.py")

        results.parent.mkdir(parents=True, exist_ok=True)
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        search_path = [folder, str(PROJECT), os.environ.get("PYTHONPATH", "")]
        command = [
            *(sys.executable, "-m", "pytest", "-q", f"test_{side}.py"),
            *("-p", "no:cacheprovider", "-W", "ignore"),
            f"--junitxml={results.resolve()}",
            *options,
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def find_file(sources: Sequence[Path], name: str) -> Path:
    """Returns a file of transformers' tests.

    Args:
        sources: Folders with transformers' folder `tests`.
        name: Of the file, from there.

    Raises:
        FileNotFoundError: When none has it.
    """
    for source in sources:
        path = source / "tests" / name
        if path.is_file():
            return path
    places = ", ".join(map(str, sources))
    raise FileNotFoundError(
        f"tests/{name} is in none of {places}; expected a checkout of transformers. Its source "
        "distribution holds only a part of the tests."
    )
