"""stmoe network: what it prints, writes and refuses, and the table of its guide."""

import json
import re
import shlex
from pathlib import Path

import pytest

from moe.commands.plan import add_preset
from moe.errors import ConfigError
from moe.network.command import main, network_command
from moe.network.topology_file import read_network
from tests.processes import start_torchrun

ROOT = Path(__file__).parents[2]
TINY = ["--config", str(ROOT / "recipes" / "st_moe_tiny_pretrain.yaml"), "--model.group_size", "64"]
SQUARE = {"grid": {"shape": [2, 2], "wraps": True, "bandwidth": "1 GB/s", "latency": "1 us"}}
MESH = ["--mesh.dp_replicate", "2", "--mesh.ep", "2"]


@pytest.fixture
def square(tmp_path):
    path = tmp_path / "square.json"
    path.write_text(json.dumps({"name": "square", **SQUARE}))
    return str(path)


def printed(capsys, *argv):
    main([str(word) for word in argv])
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_table_of_the_guide_is_what_the_command_prints(capsys):
    page = (ROOT / "docs/guides/network.md").read_text(encoding="utf-8")
    section = page.partition("## An example: ST-MoE-32B")[2]
    pattern = r"```bash\n(stmoe network .*?)```\n+```text\n(.*?)```"
    command, table = re.search(pattern, section, re.DOTALL).groups()
    argv = shlex.split(command.replace("\\\n", " "))[2:]
    text = printed(capsys, *argv)
    blocks = table.strip("\n").split("\n\n")
    assert len(blocks) >= 2
    for block in blocks:
        assert block in text


def test_the_commands_in_the_headers_of_networks_are_understood():
    commands = []
    for path in (ROOT / "recipes/networks").iterdir():
        text = path.read_text(encoding="utf-8").replace("\\\n#", "")
        commands += re.findall(r"^#   stmoe network (.*)$", text, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        network_command().parse(add_preset(shlex.split(command)))


@pytest.mark.slow
def test_a_plan_on_a_network_names_schedules_reasons_and_assumptions(capsys, square, tmp_path):
    page = tmp_path / "plan.html"
    more = ("--on", square, "--place", "dp_replicate=2x1,ep=1x2", "--page", page)
    text = printed(capsys, *TINY, *MESH, *more)
    assert "on square, 4 ranks; the mesh is placed dp_replicate=2x1,ep=1x2" in text
    assert re.search(r"rows to experts and back +ep +all-to-all +\d+ .*\n", text)
    assert "schedules compared for the largest payload of each, ms a call" in text
    assert "assumed\n  - Links work at the bandwidth and latency of the file" in text
    total = float(re.search(r"\n  in all  +(\S+)\n", text.partition("what for")[2])[1])
    rows = re.findall(r"^  .*(?:all-\S+|reduce-scatter) .*?(\S+)  [a-z]\S*(?:, \S+)*$", text, re.M)
    assert sum(map(float, rows[: len(rows)])) == pytest.approx(total, rel=0.02)
    assert " (plan)</td>" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_dead_ranks_cost_what_the_table_says(capsys, square):
    text = printed(capsys, *TINY, *MESH, "--on", square, "--dead", "2")
    assert "1 of 4 ranks of square are dead: 2" in text
    assert "1 of 2 groups of ep lose a rank." in text
    assert "Every parameter is held 2 times" in text
    ratios = re.findall(r" (\d+\.\d\d)  [a-z]", text.partition("are dead")[2])
    assert ratios
    total = re.search(r"in all, seconds of a step +(\S+) +(\S+) +(\S+)", text)
    assert float(total[3]) == pytest.approx(float(total[2]) / float(total[1]), abs=0.02)


@pytest.mark.slow
def test_meshes_on_a_network_are_simulated_and_ranked(capsys, square):
    text = printed(capsys, *TINY, "--on", square, "--suggest", "4", "--memory", "80GiB")
    lines = text.splitlines()
    assert lines[0] == "on square"
    simulated = [line.split() for line in lines[2:-1] if len(line.split()) == 10]
    seconds = [float(words[8]) for words in simulated]
    assert seconds
    assert seconds == sorted(seconds)
    assert "by the formula were simulated" in lines[-1]


@pytest.mark.slow
def test_a_network_is_measured_on_ranks_and_read_again(tmp_path):
    path = tmp_path / "pair.yaml"
    path.write_text("name: pair\nswitch: {ranks: 2, bandwidth: 1 GB/s, latency: 1 s}\n")
    measured = tmp_path / "measured.json"
    argv = ["--on", str(path), "--measure", str(measured)]
    with pytest.raises(ConfigError, match=r"has 2 ranks, but 1 are running\. Start .*torchrun"):
        main(argv)

    ended = start_torchrun(2, "stmoe", "network", *argv).finish()
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"switch: \S+ GB/s, \S+ us", ended.stdout)
    network = read_network(measured)
    assert network.topology.name == "pair"
    assert 0 < network.topology.links.latency.max() < 0.5
    assert "2 ranks at once, gloo" in network.notes[0]


def test_what_the_network_or_the_mesh_does_not_have_is_refused(square):
    on_square = [*TINY, "--on", square]
    for argv in (["--dead", "3"], ["--page", "x.html"]):
        with pytest.raises(ConfigError, match=f"{argv[0]} .* a mesh of one rank exchanges nothing"):
            main([*on_square, *argv])
    with pytest.raises(ConfigError, match="--dead is '4'; expected ranks of square, 0 to 3"):
        main([*on_square, *MESH, "--dead", "4"])
    with pytest.raises(ConfigError, match="expected two ranks at least that live"):
        main([*on_square, *MESH, "--dead", "0,1,2"])
    with pytest.raises(ConfigError, match="ranks of the mesh is 8; expected no more than the 4"):
        main([*on_square, *MESH, "--mesh.tp", "2"])
