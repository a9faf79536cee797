"""The console command `stmoe`, and the start of every command before torch is imported.

    stmoe pretrain --config st_moe_tiny_pretrain --corpus corpus --tokenizer tokenizer --out run
    stmoe generate --model run/model "Replace the <extra_id_0> of this sentence."

On several devices torchrun starts it: `torchrun --nproc-per-node 4 -m stmoe pretrain ...`.

Importing torch takes seconds, in which Ctrl-C must be answered; and OpenMP reads the environment
once, when torch loads it. Every command therefore imports this file first, and help, version,
recipes and misspelt verbs are answered here. It lies beside the package because `import moe` needs
torch.
"""

import difflib
import gc
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

_INTERRUPTED = b"\nInterrupted while starting. Nothing was written. Run the same command again.\n"

WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables that say how long a waiting thread spins; one that the user set is left alone."""

SPIN_COUNT = 10_000
"""Rounds that a waiting thread spins before it sleeps, half a millisecond; libgomp's default is 300,000."""

_WIDTH = 11  # of the names, in --help


class Verb(NamedTuple):
    """A verb of a command.

    Attributes:
        summary: Line of --help that says what it does.
        module: Module whose `main` it runs; in moe.commands unless it has a dot.
        trains: Whether it is a training run, which can be resumed and counts its seconds.
        after_interrupt: How to continue after Ctrl-C, if not as all verbs do.
        verbs: Its own verbs, instead of a module.
    """

    summary: str
    module: str = ""
    trains: bool = False
    after_interrupt: str = ""
    verbs: "Mapping[str, Verb] | None" = None


INSPECT_VERBS = {
    "record": Verb("record the experts of every token of a text", "inspect_record"),
    "view": Verb(
        "show a trace: an interactive page, and tables with their significance", "inspect_view"
    ),
    "ablate": Verb(
        "measure the loss without each expert, and what each expert serves", "inspect_ablate"
    ),
    "compare": Verb("compare the routing of two models on the text of a trace", "inspect_compare"),
    "report": Verb(
        "explain the routers on held-out examples, with the training that made them",
        "inspect_report",
    ),
}

VERBS = {
    "corpus": Verb("build a corpus from your text", "build_corpus"),
    "names": Verb("write names of places and languages in 157 languages, as pairs", "names"),
    "tokenizer": Verb("train a vocabulary on a corpus or on pairs", "train_tokenizer"),
    "recipes": Verb("list the recipes that --config knows by name"),
    "plan": Verb("compute the needs of a run on a mesh, without any device", "plan"),
    "network": Verb("time the exchanges of a planned run on your network", "moe.network.command"),
    "pretrain": Verb("pre-train a model by span corruption", "pretrain", trains=True),
    "finetune": Verb("fine-tune a model on pairs of texts", "finetune", trains=True),
    "goodput": Verb("show how the seconds of a run were spent", "goodput"),
    "generate": Verb("answer texts with a model", "generate"),
    "serve": Verb("answer texts over HTTP, with OpenAI's completions API", "serve"),
    "inspect": Verb("see, replay and edit what the routers of a model do", verbs=INSPECT_VERBS),
    "convert": Verb("convert a checkpoint of T5, Switch, T5X or ours", "convert"),
    "export": Verb("write a model for onnxruntime, torch.export or CTranslate2", "export"),
    "upcycle": Verb("make a dense model sparse, with copies as experts", "upcycle"),
    "join": Verb("make one model of several with experts of prefixes", "join"),
    "prune": Verb("remove experts of a sparse model", "prune"),
    "distill": Verb("train a dense or smaller student of a sparse teacher", "distill", trains=True),
    "quantize": Verb("store experts in 8 or 4 bits, or a whole model in 8", "quantize"),
}

_HELP = ("-h", "--help")


def start_command() -> None:
    """Answers Ctrl-C until `moe.cli.run_main` takes over, and shares cores with other processes.

    Python's collector rests until then: imports leave no garbage, and it would take a sixth of their time.
    """
    gc.disable()

    # A starter that ignores Ctrl-C, as `nohup` does, is left alone.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    _share_cores()


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Ends the process with a message and code 130.

    Some imports swallow an exception or print its traceback, so none is raised.
    """
    os.write(2, _INTERRUPTED)
    os._exit(130)


def _share_cores() -> None:
    """Lets threads sleep when they wait for each other for long, and says so once.

    By default they spin for milliseconds. When another process takes the core of one of them, the
    others waste theirs until it is back: two small trainings of two threads each, on two cores,
    take 4.5 seconds a step, and 0.3 with this. Threads that sleep at once must be woken for every
    small product: one training alone then takes 0.176 seconds a step instead of 0.101, and 0.105
    with this.
    """
    # Once torch is loaded it is too late; what the user has set is kept.
    is_set = any(name in os.environ for name in WAIT_POLICIES)
    if is_set or "torch" in sys.modules:
        return

    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if os.environ.get("RANK", "0") == "0":
        text = f"Waiting threads sleep after half a millisecond (GOMP_SPINCOUNT={SPIN_COUNT}; set it to change this)."
        print(text, file=sys.stderr)


# ---------------------------------------------------------------------------
# The verbs


def main(argv: list[str], *, process_start: float | None = None) -> None:
    """Runs a verb of `stmoe`.

    Args:
        argv: The verb and its options.
        process_start: When this process started, in seconds since 1970, if it exists for this
            command alone; a training run then counts its seconds from there.
    """
    verb, options = find_verb(argv)
    name = verb.module if "." in verb.module else f"moe.commands.{verb.module}"
    run_verb = import_module(name).main

    if verb.trains:
        run_verb(options, process_start=process_start)
    else:
        run_verb(options)


def all_verbs() -> dict[str, Verb]:
    """Returns the verbs by name: ours, and those that packages register as `stmoe.verbs`."""
    return VERBS | {point.name: point.load() for point in entry_points(group="stmoe.verbs")}


def find_verb(argv: list[str]) -> tuple[Verb, list[str]]:
    """Returns the verb that the arguments begin with, and its options.

    Help, version, the list of recipes and misspelt verbs are answered here, and end the process.
    """
    if argv == ["--version"]:
        _end(f"stmoe {version('stmoe')}")
    if argv[:1] == ["recipes"]:
        _end_with_recipes(argv[1:])

    # A verb may have verbs of its own.
    command = "stmoe"
    verb = Verb("", verbs=all_verbs())
    while verb.verbs is not None:
        if not argv or argv[0] in _HELP:
            _end(_help(command, verb.verbs))
        name, *argv = argv
        if name not in verb.verbs:
            matches = difflib.get_close_matches(name, verb.verbs, n=1, cutoff=0.5)
            closest = f" Did you mean {matches[0]!r}?" if matches else ""
            _refuse(f"There is no verb {name[:80]!r}.{closest} {command} --help lists all verbs.")
        verb = verb.verbs[name]
        command = f"{command} {name}"
    return verb, argv


def _help(command: str, verbs: Mapping[str, Verb]) -> str:
    """Returns the text of --help: a line for each verb."""
    lines = [f"usage: {command} VERB [OPTION ...]", ""]
    lines += [f"  {name:<{_WIDTH}}{verb.summary}" for name, verb in verbs.items()]
    lines += ["", f"{command} VERB --help explains the options of a verb."]
    if command == "stmoe":
        lines[-1] = lines[-1].removesuffix(".") + "; stmoe --version prints ours."
    return "\n".join(lines)


def recipes_folder() -> Path:
    """Returns the folder of our recipes: in the installed package, else in the repository."""
    here = Path(__file__).resolve().parent
    installed = here / "moe/recipes"
    return installed if installed.is_dir() else here / "recipes"


def _end_with_recipes(options: list[str]) -> NoReturn:
    """Prints the name of each recipe and the first line of its header."""
    if options and options[0] not in _HELP:
        _refuse(f"There is no option {options[0][:80]!r}. stmoe recipes has none.")
    if options:
        _end("usage: stmoe recipes\n\nLists the recipes that --config knows by name.")

    lines: list[str] = []
    for path in sorted(recipes_folder().glob("*.yaml")):
        header = path.read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"{path.stem:<32} {header.removeprefix('# ')}")
    _end("\n".join(lines))


def _end(text: str) -> NoReturn:
    """Prints an answer and ends the process."""
    try:
        print(text, flush=True)
    except OSError as error:  # the reader closed the pipe, as `head` does, or the disk is full
        is_closed = isinstance(error, BrokenPipeError)
        if not is_closed:
            print(f"error: {error}", file=sys.stderr)
        os._exit(141 if is_closed else 2)
    sys.exit(0)


def _refuse(text: str) -> NoReturn:
    """Prints what is wrong and ends the process, as `moe.cli.run_main` does."""
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def run() -> None:
    """Runs `stmoe` with the arguments of the process: the entry point of the wheel."""
    process_start = time.time()
    verb, _ = find_verb([argument for argument in sys.argv[1:] if argument != "--debug"])

    start_command()
    from functools import partial

    from moe.cli import AGAIN, RESUME, run_main

    advice = verb.after_interrupt or (RESUME if verb.trains else AGAIN)
    run_main(partial(main, process_start=process_start), interrupted=advice)


if __name__ == "__main__":
    run()
