"""Commands in processes of their own, without the seconds that a fresh interpreter needs to import
torch.

A server imports the library once for all tests of a worker and does nothing else; every process is
forked from it. It runs the command as `python -m` does, with arguments, exit code and signals of its
own. Only what a user sees before the imports are done needs a real interpreter.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT = 900  # seconds; a command takes few of them, but the machine may be busy

IMPORTED = (
    "moe",
    "moe.planning.plan",
    "moe.training.loop",
    "stmoe_eval.dev_scores",
    "stmoe_eval.run",
    "torch.distributed.launcher.api",
    "peft",
    "datasets",
    "rouge_score.rouge_scorer",
    "scipy.stats",
    "sklearn.linear_model",
)
"""What the server imports: all that takes long, and no command itself."""


class Ended(NamedTuple):
    """How a process ended, with the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


@cache
def fork_context() -> ForkServerContext:
    """Returns what starts processes that are forked from the server, which it starts.

    There is one server in a process. A program under test that starts it first, e.g. a benchmark,
    preloads less or nothing, and every process afterwards imports torch again.
    """
    missing = [name for name in IMPORTED if find_spec(name) is None]
    assert not missing, f"the server can import no {missing}; name the modules that there are now"
    multiprocessing.set_forkserver_preload([*IMPORTED, "pytest"])
    forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


class Command:
    """A module that runs as a command, in a process of its own; the imports lie behind it already.

    Args:
        module: As behind `python -m`, or the path of a script.
        arguments: Of the command; each is made a text.
        environment: Variables that are set before the command starts.
        prepare: Called before the command starts; a function of a module, or a `partial` of one.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[object] = (),
        *,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], Any] | None = None,
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        texts = [str(argument) for argument in arguments]
        options = (Path(self._folder.name), dict(environment or {}), prepare)
        self._process = fork_context().Process(target=_run, args=(module, texts, *options))
        self._process.start()
        self.wait_for(Path(self._folder.name, "started").exists)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code, the negative of a signal that killed it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait_for(self, is_reached: Callable[[], bool], timeout: float = TIMEOUT) -> None:
        """Waits until something is reached or the process has ended."""
        end = time.monotonic() + timeout
        while not is_reached() and self.poll() is None:
            assert time.monotonic() < end, f"nothing was reached within {timeout} seconds"
            time.sleep(0.002)

    def finish(self, timeout: float = TIMEOUT) -> Ended:
        """Waits for the end, and kills what does not come to one."""
        self._process.join(timeout)
        hangs = self.poll() is None
        self._process.kill()
        self._process.join()
        said = {}
        for name in ("stdout", "stderr"):
            file = Path(self._folder.name, name)
            said[name] = file.read_text(encoding="utf-8", errors="backslashreplace")
        self._folder.cleanup()
        assert not hangs, f"the command did not end within {timeout} seconds: {said}"
        return Ended(self._process.exitcode or 0, **said)


def run_command(module: str, *arguments: object, **options: Any) -> Ended:
    """Runs a module as a command to its end; see `Command`."""
    return Command(module, arguments, **options).finish()


def run_program(folder: Path, text: str, *arguments: object) -> Ended:
    """Runs a text of Python, which it writes to a folder first."""
    path = folder / "program.py"
    path.write_text(text, encoding="utf-8")
    return run_command(str(path), *arguments)


def start_torchrun(num_ranks: int, module: str, *arguments: object, options: Sequence[str] = ()):
    """Starts `torchrun -m module`; its agent is torch's own, and forks the ranks from itself."""
    words = ["--standalone", "--nproc-per-node", num_ranks, *options, "-m", module, *arguments]
    return Command("torch.distributed.run", words, prepare=_fork_ranks)


def _fork_ranks() -> None:
    """Makes torch's agent run a function in the place of a fresh interpreter."""
    from torch.distributed.launcher import api

    elastic_launch = api.elastic_launch

    def launch(config: Any, entrypoint: str) -> Any:
        config.start_method = "fork"
        return elastic_launch(config, _run_rank)

    api.elastic_launch = launch


def _run_rank(*words: str) -> None:
    """Runs what an interpreter would with these words: `-u -m module` and the module's arguments."""
    start = words.index("-m") + 1
    sys.argv = list(words[start:])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _run(
    module: str,
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    prepare: Callable[[], Any] | None,
) -> None:
    import torch  # of the server

    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    torch.set_num_threads(1)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which the tests' own start may ignore
    sys.argv = [module, *arguments]
    if prepare is not None:
        prepare()
    (folder / "started").touch()
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
