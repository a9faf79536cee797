"""`--help` explains the settings people use, `--help-all` every one of the recipe."""

import re
import shlex
from pathlib import Path

import pytest

from moe.commands.finetune import finetune_command
from moe.commands.plan import plan_command
from moe.commands.pretrain import pretrain_command
from moe.network.command import network_command

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "pretrain": pretrain_command,
    "finetune": finetune_command,
    "plan": plan_command,
    "network": network_command,
}


@pytest.fixture(params=COMMANDS)
def verb(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return request.param


def help_of(verb, option, capsys):
    with pytest.raises(SystemExit) as end:
        COMMANDS[verb]().parse([option])
    assert end.value.code == 0
    return capsys.readouterr().out


def options_of(text):
    return set(re.findall(r"^  (?:-h, )?--([\w.-]+)", text, re.MULTILINE))


def documented_options(verb):
    """Returns the options of a verb in the commands of the guides, which may be torchrun's."""
    options = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(
            r"^```bash\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            for line in block.replace("\\\n", " ").splitlines():
                _, is_ours, rest = line.partition(f"stmoe {verb} ")
                if is_ours:
                    words = shlex.split(rest, comments=True)
                    options |= {w[2:].split("=")[0] for w in words if w.startswith("--")}
    return options


def test_help_is_a_page_and_a_half_and_all_of_it_is_in_help_all(verb, capsys):
    short = help_of(verb, "--help", capsys)
    everything = help_of(verb, "--help-all", capsys)
    assert options_of(short) < options_of(everything)
    assert short.count("\n") < (80 if verb in ("plan", "network") else 60)
    assert f"stmoe {verb} --help-all explains all options" in short
    assert "\b" not in everything
    for text in (short, everything):
        assert text.startswith(f"usage: stmoe {verb} ")


def test_every_option_of_the_guides_is_explained(verb, capsys):
    everything = help_of(verb, "--help-all", capsys)
    known = options_of(everything) | {"help", "help-all", "print_config"}
    documented = documented_options(verb)
    assert documented
    mappings = ("model.router_options.", "optim.schedule_options.", "optim.optimizer_options.")
    assert {name for name in documented if not name.startswith(mappings)} <= known


def test_every_setting_has_an_explanation_and_its_default(capsys):
    text = help_of("pretrain", "--help-all", capsys)
    assert not re.findall(r"^  --model\.\S+ \S+\n(?! {20})", text, re.MULTILINE)
    assert "`SparseConfig`" not in text

    short = help_of("pretrain", "-h", capsys)
    assert re.search(r"^  --training\.batch_size N +Sequences in an update \(128\)$", short, re.M)
    assert re.search(
        r"^  --tokenizer TOKENIZER +folder made by stmoe tokenizer \(required\)$", short, re.M
    )
