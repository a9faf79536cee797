"""Runs transformers' mixins on our models or on its T5, in a process of its own."""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PROJECT = Path(__file__).parents[2]
_PACKAGE = '''"""The tests of transformers."""

__path__ = ["{tests}"]
'''


def run_mixins(source: Path, side: str, folder: Path) -> dict[str, str]:
    """Returns what each test did: passed, failed or skipped.

    Args:
        source: A checkout of transformers; its tests need the packages parameterized and httpx.
        side: `ours` or `theirs`, the file here that names the classes.
        folder: Empty folder for the run.
    """
    # Inside of the process `tests` is transformers' package: its files import each other by it.
    package = folder / "tests"
    package.mkdir()
    (package / "__init__.py").write_text(_PACKAGE.format(tests=source.resolve() / "tests"))
    shutil.copy(Path(__file__).with_name(f"{side}.py"), folder / f"test_{side}.py")
    (folder / "pytest.ini").write_text("[pytest]\n")
    search_path = [str(folder), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    command = [
        *(sys.executable, "-m", "pytest", "-q", f"test_{side}.py"),
        *("-p", "no:cacheprovider", "-W", "ignore", "--junitxml=results.xml"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
    subprocess.run(command, cwd=folder, env=environment, check=False)

    # Subtests are cases of their own, and one that fails fails the test.
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(folder / "results.xml").getroot().iter("testcase"):
        tags = {element.tag for element in case}
        outcome = "failed" if tags & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in tags else outcome
        name = f"{case.attrib['classname'].rpartition('.')[2]}.{case.attrib['name'].split(' ')[0]}"
        if outcomes.get(name) != "failed":
            outcomes[name] = outcome
    return outcomes
