"""Runs the fast tests with the oldest, the pinned and the newest versions, and prints a table.

    python -m scripts.versions
    python -m scripts.versions newest --tests tests/models

Each combination gets a virtual environment of python3.11, python3.12 or python3.13. A later run
reuses it; delete the folder to start over.
torch comes from the index of CPU builds, unless PIP_EXTRA_INDEX_URL names another.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import json
import os
import subprocess
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

from moe.cli import Parser, path, run_main
from moe.errors import DataError
from moe.files import write_text

ROOT = Path(__file__).parents[1]
PYTHONS = {"floor": "python3.11", "pinned": "python3.12", "newest": "python3.13"}
PACKAGES = ("torch", "transformers", "huggingface_hub", "safetensors", "datasets", "numpy")
RESULTS = "tests.xml"
OUTCOMES = ("passed", "failed", "skipped")
CPU_INDEX = {"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}


def main(argv: list[str]) -> None:
    """Makes environments, runs tests in them, and prints the table."""
    parser = Parser(prog="python -m scripts.versions", description="Tests other versions.")
    parser.add_argument(
        "names",
        nargs="*",
        choices=[[], *PYTHONS],
        help=f"combinations ({' '.join(PYTHONS)}; all by default)",
    )
    parser.add_argument(
        "--tests", type=path, nargs="+", default=[Path("tests")], help="files and folders (tests)"
    )
    parser.add_argument(
        "--out",
        type=path,
        default=Path("runs/versions"),
        help="folder of environments and results (runs/versions)",
    )
    options = parser.parse_args(argv)

    out = options.out.absolute()
    for name in options.names or PYTHONS:
        run_tests(build_environment(out / name), options.tests)
    print(version_table([out / name for name in PYTHONS if (out / name / RESULTS).exists()]))


def build_environment(folder: Path) -> Path:
    """Returns the Python of the environment in a folder that is named after its combination."""
    python = folder / "environment/bin/python"
    finished = folder / "finished"
    if finished.exists():
        return python

    constraints = folder / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    texts = {"floor": "\n".join(floors()), "pinned": pinned, "newest": ""}
    write_text(constraints, texts[folder.name])

    venv = [PYTHONS[folder.name], "-m", "venv", "--clear", "--upgrade-deps", python.parents[1]]
    subprocess.run(venv, check=True)
    pip = [python, "-m", "pip", "install", "--constraint", constraints]
    subprocess.run([*pip, "--editable", f"{ROOT}[dev]"], check=True, env=CPU_INDEX | os.environ)
    finished.touch()
    return python


def floors() -> list[str]:
    """Returns the lowest version of each dependency in pyproject.toml, as constraints.

    All bounds there are lower ones.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        declared += extra

    requirements = [Requirement(text) for text in declared]
    return [f"{r.name}{r.specifier}".replace(">=", "==") for r in requirements if r.specifier]


def run_tests(python: Path, tests: Sequence[Path]) -> None:
    """Runs the fast tests, and writes RESULTS next to the environment."""
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables |= {"OMP_NUM_THREADS": "1"}  # each process of pytest has a core
    command = [python, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", "-m", "not slow"]
    results = python.parents[2] / RESULTS
    code = subprocess.run([*command, f"--junitxml={results}", *tests], cwd=ROOT, env=variables)
    if code.returncode not in (0, 1):
        raise DataError(f"pytest ended with code {code.returncode}. See its output above.")


def version_table(folders: Sequence[Path]) -> str:
    """Returns a row for each folder of a combination, and below them the tests that failed."""
    head = ["", "Python", *PACKAGES, *OUTCOMES]
    rows = [head, ["---"] * len(head)]
    failed = []
    for folder in folders:
        outcomes = read_outcomes(folder)
        counts = Counter(outcomes.values())
        numbers = [str(counts[outcome]) for outcome in OUTCOMES]
        rows.append([folder.name, *installed_versions(folder), *numbers])
        failed += [f"- {folder.name}: `{test}`" for test in outcomes if outcomes[test] == "failed"]

    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *failed]).strip()


def read_outcomes(folder: Path) -> dict[str, str]:
    """Returns "passed", "failed" or "skipped" for each test with a result in a folder."""
    outcomes = {}
    for case in ElementTree.parse(folder / RESULTS).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = "failed" if kinds & {"failure", "error"} else "passed"
        test = f"{case.get('classname')}.{case.get('name')}"
        outcomes[test] = "skipped" if "skipped" in kinds else failed
    return outcomes


def installed_versions(folder: Path) -> list[str]:
    """Returns the versions of an environment's Python and of PACKAGES."""
    code = (
        "import json, platform, importlib.metadata as m;"
        f"print(json.dumps([platform.python_version(), *map(m.version, {PACKAGES})]))"
    )
    return json.loads(subprocess.check_output([folder / "environment/bin/python", "-c", code]))


if __name__ == "__main__":
    run_main(main, interrupted="The same command runs the tests again.")
