"""The start of a command, before torch: what it sets, says and leaves alone."""

import ast
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import stmoe
from stmoe_eval.verbs import EVAL
from tests.processes import run_program

ROOT = Path(__file__).parents[1]
SAID = "Waiting threads sleep after half a millisecond (GOMP_SPINCOUNT=10000; set it to change this).\n"
START = """\
if __name__ == '__main__':
    from stmoe import start_command
    start_command()"""
PROGRAM = """
import os, stmoe
stmoe.start_command()
print(os.environ.get("GOMP_SPINCOUNT"))
"""


def start(program=PROGRAM, **variables):
    """Runs a program in a fresh interpreter with these variables and no others."""
    environment = {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "count", "said"),
    [
        ({}, 10_000, SAID),
        ({"GOMP_SPINCOUNT": "7"}, 7, ""),
        ({"OMP_WAIT_POLICY": "active"}, None, ""),
        ({"RANK": "0"}, 10_000, SAID),
        ({"RANK": "3"}, 10_000, ""),  # of several ranks one says so
    ],
)
def test_threads_that_wait_soon_sleep_unless_the_user_set_something(variables, count, said):
    ended = start(**variables)
    assert (ended.stdout, ended.stderr) == (f"{count}\n", said)


@pytest.mark.slow
def test_a_command_that_is_called_by_another_is_silent():
    """torch has its threads already."""
    ended = start("import sys; sys.modules['torch'] = sys" + PROGRAM)
    assert (ended.stdout, ended.stderr) == ("None\n", "")


def test_every_command_starts_here_before_it_imports_anything():
    for path in ROOT.glob("scripts/*.py"):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            _docstring, first, *_ = ast.parse(text).body
            assert ast.unparse(first) == START, path


HEAVY = ("moe", "torch", "transformers", "numpy", "scipy")
LIGHT = """
import importlib, sys
name, *sys.argv[1:] = sys.argv[1].split()
try:
    importlib.import_module(name).run()
finally:
    print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "answer"),
    [
        ("stmoe --help", 0, "usage: stmoe VERB"),
        ("stmoe --version", 0, f"stmoe {version('stmoe')}"),
        ("stmoe recipes", 0, "st_moe_tiny_pretrain  "),
        ("stmoe recipes all", 2, "no option 'all'"),
        ("stmoe pretrian --debug", 2, "no verb 'pretrian'. Did you mean 'pretrain'?"),
        ("stmoe inspect vew", 2, "no verb 'vew'. Did you mean 'view'? stmoe inspect --help"),
        ("stmoe eval --help", 0, "usage: stmoe eval VERB"),
    ],
)
def test_help_version_recipes_and_misspelt_verbs_import_no_library(arguments, code, answer):
    words = [sys.executable, "-c", LIGHT.replace("{HEAVY}", repr(HEAVY)), arguments]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'eval'}"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ended.returncode == code
    *message, imported = ended.stderr.split("\n")[:-1]
    assert imported == ""
    assert answer in (ended.stdout if code == 0 else message[0])


@pytest.mark.slow
def test_help_that_nobody_reads_ends_as_other_commands_do():
    """The reader of the output closed the pipe, as `head` does; the disk is full."""
    for file, code in (("/dev/full", 2), (None, 141)):
        read, write = os.pipe()
        os.close(read)
        with open(file or write, "w") as out:  # noqa: PTH123  a descriptor has no path
            words = [sys.executable, "-m", "stmoe", "--help"]
            ended = subprocess.run(words, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == code
        assert "Traceback" not in ended.stderr


# Seconds each, which a command needs once it works: functions import them.
IMPORTED_LATE = "datasets,matplotlib,nltk,pandas,rouge_score,scipy.stats,sklearn,tensorstore"
IMPORTS = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print(*(name for name in sys.argv[2].split(",") if name in sys.modules))
"""


@pytest.mark.slow
def test_no_command_imports_what_only_its_work_needs():
    modules = [f"scripts.{path.stem}" for path in sorted(ROOT.glob("scripts/*.py"))]
    modules += ["moe"]
    verbs = [*stmoe.VERBS.values(), *stmoe.INSPECT_VERBS.values()]
    ours = [verb.module for verb in verbs if verb.module]
    modules += [name if "." in name else f"moe.commands.{name}" for name in ours]
    modules += [verb.module for verb in EVAL.verbs.values()]
    words = [sys.executable, "-c", IMPORTS, ",".join(modules), IMPORTED_LATE]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'eval'}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "\n"


def test_the_collector_rests_while_a_command_imports_and_works_afterwards(tmp_path):
    program = """
import gc
import stmoe
stmoe.start_command()
resting = not gc.isenabled()
from moe.cli import run_main
run_main(lambda argv: print(resting, gc.isenabled(), gc.get_freeze_count() > 100_000))
"""
    assert run_program(tmp_path, program).stdout.split() == ["True", "True", "True"]
