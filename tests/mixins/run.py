"""Runs transformers' mixins on our models and on its T5, each in a process of its own."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
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
PACKAGES = ("parameterized", "httpx")
"""What they import beside what this library needs."""

_PACKAGE = '''"""The tests of transformers."""

__path__ = ["{folder}"]
'''


def run_mixins(source: Path, side: str, results: Path, options: Sequence[str] = ()) -> int:
    """Runs one side and writes what each test did; returns pytest's exit status.

    Args:
        source: A checkout of transformers.
        side: "ours" or "theirs".
        results: The XML file to write.
        options: Further arguments of pytest.
    """
    # Inside of the process `tests` is transformers' package: its files import each other by it.
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "tests"
        package.mkdir()
        (package / "__init__.py").write_text(_PACKAGE.format(folder=source.resolve() / "tests"))
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


def check_source(source: Path) -> None:
    """Raises an error unless a folder is a checkout of transformers whose tests can be imported."""
    for name in ("__init__.py", *TEST_FILES):
        if not (source / "tests" / name).is_file():
            raise FileNotFoundError(
                f"{source} has no tests/{name}; expected a checkout of transformers. Its source "
                "distribution holds only a part of the tests."
            )
    for package in PACKAGES:
        if find_spec(package) is None:
            raise ModuleNotFoundError(
                f"transformers' tests need {package}: pip install {' '.join(PACKAGES)}"
            )
