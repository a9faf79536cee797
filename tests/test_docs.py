"""What the README and the site print is true: examples run, commands parse, files exist."""

import importlib
import io
import re
import shlex
import socket
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed.run
import yaml

import moe
import stmoe
from moe import STMoEConfig
from moe.cli import Parser
from moe.data.tokenizer import train_tokenizer
from moe.hosts.all_hosts import HOSTS
from moe.models.checkpoint_formats import CHECKPOINT_FORMATS
from moe.optim.optimizers import OPTIMIZERS
from moe.sparse.router_options import ROUTERS
from moe.training.command import RecipeCommand
from moe.training.recipe import Recipe
from stmoe_eval.task import TASKS
from tests.models.hf_models import their_model
from tests.models.tiny import tiny_model
from tests.training.tiny_run import write_texts

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "MODEL_CARD.md",
    *sorted(page for page in DOCS.rglob("*.md") if page.name != "files.md"),  # made by the build
]
CHANGELOG = ROOT / "CHANGELOG.md"
NOT_OURS = {
    "--nproc-per-node",
    "--max-restarts",
    "--heartbeat_timeout_ms",
}  # of torchrun and torchft
FACES = sorted(path.parent.name for path in (ROOT / "moe").glob("*/__init__.py"))


# ---------------------------------------------------------------------------
# Blocks of a page


def blocks(page, language, section=""):
    """Returns the code blocks of one language, indented ones too, below a heading or of all."""
    text = page.read_text(encoding="utf-8")
    if section:
        text = text.partition(f"\n## {section}")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(page, section=""):
    """Returns the commands of the bash blocks, each as a list of words."""
    lines = "".join(blocks(page, "bash", section)).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run_commands(page, section="", **more):
    """Runs the commands of the bash blocks, with more options of the verbs that are named."""
    for words in commands(page, section):
        name, arguments = (words[0], words[1:]) if words[0] == "stmoe" else (words[2], words[3:])
        options = shlex.split(more.get(words[1], ""))
        importlib.import_module(name).main([*arguments, *options])


def with_blocks(language):
    pages = [page for page in PAGES if blocks(page, language)]
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


# ---------------------------------------------------------------------------
# Python: every page runs from top to bottom in one namespace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Returns a folder with the models that the pages load: small and random, under their names."""
    folder = tmp_path_factory.mktemp("docs")
    texts = [file.read_text() for file in sorted(write_texts(folder / "texts").iterdir())]
    demo = folder / "runs/demo/model"
    train_tokenizer(texts, 230, demo)
    tiny_model(vocab_size=230).save_pretrained(demo)
    their_model("Switch").save_pretrained(folder / "google/switch-base-8")
    return folder


@pytest.fixture
def registries(monkeypatch):
    """Lets a page register what it explains, for its own time only."""
    TASKS.names()
    registries = (ROUTERS, OPTIMIZERS, TASKS, CHECKPOINT_FORMATS, HOSTS)
    for registry in registries:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture
def rank_of_one(monkeypatch):
    """Sets what torchrun sets for a single rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@with_blocks("python")
def test_the_examples_of_a_page_run_as_written(page, workspace, registries, monkeypatch, request):
    monkeypatch.chdir(workspace)
    if "launch()" in page.read_text(encoding="utf-8"):
        request.getfixturevalue("rank_of_one")
    namespace = {"__name__": "page"}
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


# ---------------------------------------------------------------------------
# Commands: every line is read by the parser of its command


class Parsed(BaseException):
    """A command was understood; nothing of it is run."""


@pytest.fixture
def only_parse(monkeypatch):
    """Lets commands end where they have read their arguments."""

    def end_after(read):
        def parse(self, *arguments, **options):
            read(self, *arguments, **options)
            raise Parsed

        return parse

    monkeypatch.setattr(Parser, "parse_args", end_after(Parser.parse_args))
    monkeypatch.setattr(RecipeCommand, "parse", end_after(RecipeCommand.parse))
    monkeypatch.chdir(ROOT)


def check_module(name, arguments):
    """Raises when `python -m NAME` does not understand its arguments."""
    main = importlib.import_module(name).main
    with pytest.raises(Parsed):
        main(arguments)


def check_make(words):
    """Raises when there is no such target, or ARGS are none of its command's."""
    targets = [word for word in words if "=" not in word]
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets and set(targets) <= set(known), targets

    for word in words:
        if word.startswith("ARGS=") and targets == ["demo"]:
            check_module("scripts.demo", shlex.split(word.removeprefix("ARGS=")))


def check_command(words):
    """Raises when a command is not understood."""
    match words:
        case ["python", "-m", "pytest", *_]:
            pass
        case ["python", "-m", name, *arguments] if name.startswith("scripts."):
            check_module(name, arguments)
        case ["torchrun", *arguments]:
            options = torch.distributed.run.parse_args(arguments)
            assert options.module, words
            check_module(options.training_script, options.training_script_args)
        case ["make", *targets]:
            check_make(targets)
        case ["stmoe", "--version" | "--help" | "recipes"]:
            with pytest.raises(SystemExit, match="0"):
                stmoe.main(words[1:])
        case ["stmoe", *arguments]:
            check_module("stmoe", arguments)
        case ["pip", "install", *_] | ["git", "clone", *_] | ["cd", _]:
            pass
        case _:
            pytest.fail(f"no parser reads {shlex.join(words)}; use ```sh for what is not ours")


@with_blocks("bash")
def test_the_commands_of_a_page_are_understood(page, only_parse):
    for words in commands(page):
        check_command(words)


@pytest.fixture(scope="module")
def options_of():
    """Returns the options in the help of each verb of stmoe, by the words of its command."""
    commands = []
    for name, verb in stmoe.all_verbs().items():
        commands += [(name, inner) for inner in verb.verbs] if verb.verbs else [(name,)]
    return {words: help_options(stmoe.main, words) for words in commands if words != ("recipes",)}


def help_options(main, words=()):
    """Returns the options that a command lists, hidden ones too where it can list those."""
    for flag in ("--help", "--help-all"):
        printed = io.StringIO()
        with redirect_stdout(printed), pytest.raises(SystemExit):
            main([*words, flag])
        if "--help-all" not in printed.getvalue():
            break
    options = set(re.findall(r"--[a-z][\w.-]*\w", printed.getvalue()))
    fields = {f"--model.{name}" for name in Recipe.model_fields}
    return {"--help", "--help-all", "--debug", *options} | (
        fields if "--model.FIELD" in options else set()
    )


OPTION = r"(?<!\S)(--[a-z][\w.-]*\w)"
SETTING = r"`((?:data|distillation|mesh|mixture|optim|training)\.[a-z_]+)"


@pytest.mark.slow
def test_every_option_that_a_page_names_exists(options_of):
    study = help_options(importlib.import_module("scripts.study").main)
    everywhere = set.union(*options_of.values(), study, NOT_OURS)
    unknown = []
    for page in PAGES:
        if page.name == "migrate.md":  # options of other libraries
            continue
        text = re.sub(r"`[^`]+`\s+at\s+commit", "", page.read_text(encoding="utf-8"))
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        settings = {f"--{name}" for name in re.findall(SETTING, prose)}
        unknown += [(page.name, setting) for setting in settings - everywhere]

        # Of a command whose verb is named the options of this verb, else those of any.
        shell = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
        ours = [line for line in shell if re.search(r"\bstmoe [a-z]", line)]
        for command in [*re.findall(r"`([^`]+)`", prose), *ours]:
            verb = re.search(r"(?:^|-m )stmoe ([a-z]+)(?: ([a-z]+))?", command)
            words = verb.groups() if verb else ()
            known = options_of.get(words[:1]) or options_of.get(words) or everywhere
            module = re.match(r"python -m ((?:scripts|benchmarks)[a-z_.]*)(?: ([a-z]+))?", command)
            if module and "--" in command:
                main = importlib.import_module(module[1]).main
                known = help_options(main, [word for word in module.groups()[1:] if word])
            options = set(re.findall(OPTION, command.partition("-m stmoe")[2] or command))
            unknown += [(page.name, command, option) for option in options - known]
    assert not unknown


@pytest.mark.slow
def test_own_pairs_of_the_start_page_are_trained_on_scored_and_compared(
    workspace, monkeypatch, capsys
):
    """Every block as written, with a tiny model in place of the demo's and a fifth of the steps."""
    monkeypatch.chdir(workspace)
    page = DOCS / "start.md"
    section = "3. Fine-tune it on your own pairs"
    for block in blocks(page, "python", section):
        exec(compile(block, page.name, "exec"), {})
    run_commands(page, section, finetune="--training.steps 60 --optim.cooldown_steps 30")

    printed = capsys.readouterr().out
    assert "Dev scores: 30 of 30 pairs" in printed
    assert "pairs_labels by generate, accuracy: tuned " in printed
    for folder in ("my_pairs/best/model", "my_pairs/model", "my_eval", "my_comparison"):
        assert (workspace / "runs" / folder).is_dir()


@pytest.mark.slow
def test_languages_are_carved_added_and_joined_as_their_page_says(tmp_path, monkeypatch):
    """Every command as written, with two steps of training and a few examples."""
    monkeypatch.chdir(tmp_path)
    steps = "--training.steps 2 --training.evaluate_every 2 --training.held_out_batches 1"
    rates = "--optim.warmup_steps 1 --optim.cooldown_steps 0 --training.batch_size 8"
    few = "--examples 8"
    page = DOCS / "guides/languages.md"
    run_commands(page, finetune=f"{steps} {rates}", prune=few, upcycle=few, eval="--limit 3")

    assert STMoEConfig.from_pretrained("runs/names_el").num_experts == 8
    records = STMoEConfig.from_pretrained("runs/names_joined").prefix_experts
    assert [record["prefix"] for record in records or ()] == ["mk:", "az:"]
    texts = ["el: New Zealand", "New Zealand", "uk: Ivory Coast"]
    assert moe.load("runs/names_joined")(texts) == moe.load("runs/names_model/model")(texts)


# ---------------------------------------------------------------------------
# Names


def test_the_documentation_stays_within_its_budget_of_words():
    """As with budgets of code, lower the number with every page that becomes shorter."""
    words = [len(page.read_text(encoding="utf-8").split()) for page in [*PAGES, CHANGELOG]]
    assert sum(words) <= 28_450


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert citation["references"][0]["url"].endswith("2202.08906")


def test_every_verb_of_stmoe_is_explained():
    page = (DOCS / "start.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `stmoe (\w+)` \|", page, re.MULTILINE) == list(stmoe.all_verbs())


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_recipes_and_files_that_are_named_exist():
    pattern = (
        r"(?<![\w/.])((?:moe|eval|scripts|benchmarks|recipes|notebooks|tests|docs)/[\w./-]*\w\.\w+)"
    )
    for page in PAGES:
        for name in re.findall(pattern, page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists() or "NAME" in name, f"{page.name}: {name}"


def test_pictures_follow_dark_mode_and_that_of_the_layer_names_its_files():
    for svg in DOCS.rglob("*.svg"):
        assert "@media (prefers-color-scheme: dark)" in svg.read_text("utf-8"), svg.name
    picture = (DOCS / "journey.svg").read_text(encoding="utf-8")
    names = re.findall(r"([a-z_]+\.py|[a-z_]+/)(?=[,<)\s])", picture)
    assert {"dispatch.py", "routers/"} <= set(names)
    for name in names:
        assert (ROOT / "moe/sparse" / name).exists(), name


def test_every_notebook_is_listed():
    page = (DOCS / "guides/notebooks.md").read_text(encoding="utf-8")
    names = sorted(path.name for path in (ROOT / "notebooks").iterdir() if path.is_file())
    assert sorted(re.findall(r"\(../../notebooks/(\w+\.ipynb)\)", page)) == names


def test_the_summary_of_a_command_is_text_although_it_begins_like_a_command(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    prepare_docstring = importlib.import_module("conf").prepare_docstring
    for path in (ROOT / "moe/commands").glob("[a-z]*.py"):
        module = importlib.import_module(f"moe.commands.{path.stem}")
        lines = module.__doc__.splitlines()
        prepare_docstring(None, "module", module.__name__, module, None, lines)
        assert lines[0] == module.__doc__.splitlines()[0], path.name


def test_every_public_name_stands_in_the_reference():
    page = (DOCS / "api/index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^ +~(moe\.[\w.]+)$", page, re.MULTILINE)
    faces = [moe, *(importlib.import_module(f"moe.{face}") for face in FACES)]
    public = {name: face for face in reversed(faces) for name in getattr(face, "__all__", ())}
    assert sorted(name.rpartition(".")[2] for name in listed) == sorted(public)
    for name in listed:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(
            public[attribute], attribute
        )


def test_every_module_stands_in_the_reference(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    importlib.import_module("conf").write_file_list()
    page = (DOCS / "files.md").read_text(encoding="utf-8")
    listed = re.findall(r"^ +((?:moe|stmoe_eval)\.[\w.]*)$", page, re.MULTILINE)
    modules = [*(ROOT / "moe").rglob("*.py"), *(ROOT / "eval/stmoe_eval").rglob("*.py")]
    expected = []
    for path in modules:
        if path.name != "__init__.py":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            expected.append(name.removeprefix("eval."))
    assert sorted(listed) == sorted(expected)
