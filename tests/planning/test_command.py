"""stmoe plan: its table, its ranking of meshes, its errors, and the table that its guide quotes."""

import re
import shlex
from pathlib import Path

import pytest

from moe.commands.plan import main
from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError
from moe.planning.plan import BYTES_PER_SECOND, seconds_of, suggest
from moe.planning.table import parse_bytes, show_bytes
from moe.planning.traffic import Transfer
from moe.planning.workload import Workload
from tests.models.tiny import tiny_model

ROOT = Path(__file__).parents[2]
TINY = ["--config", str(ROOT / "recipes" / "st_moe_tiny_pretrain.yaml")]
SMALL_GROUPS = ["--model.group_size", "64"]
SIZES = {"d_ff": 32, "num_heads": 4, "num_experts": 8, "group_size": 64}
WORK = Workload(batch_size=32, inputs_length=64, targets_length=16)


def printed(capsys, *argv):
    main(list(argv))
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_guide_quotes_what_the_command_prints(capsys):
    page = (ROOT / "docs/guides/pretrain.md").read_text(encoding="utf-8")
    section = page.partition("### ST-MoE-32B on paper")[2]
    pattern = r"```bash\n(stmoe plan .*?)```\n+```text\n(.*?)```"
    command, table = re.search(pattern, section, re.DOTALL).groups()
    argv = shlex.split(command.replace("\\\n", " "))[2:]
    assert printed(capsys, *argv) == table
    assert "269,104,613,376" in table


@pytest.mark.slow
def test_a_recipe_is_planned_with_the_settings_that_follow_it(capsys):
    plain = printed(capsys, *TINY)
    assert "1 ranks" in plain
    assert "2,887,680; a token uses 1,708,032" in plain
    assert "48 sequences of 64 + 14 tokens" in plain
    assert "rows to experts" not in plain
    more = ("--mesh.ep", "2", "--training.precision", "bfloat16", "--memory", "1MiB")
    spread = printed(capsys, *TINY, *SMALL_GROUPS, *more)
    assert re.search(r"rows to experts and back +ep +2 ", spread)
    assert "bfloat16, adafactor" in spread
    assert "does NOT fit into 1.00 MiB" in spread


@pytest.mark.slow
def test_meshes_are_ranked(capsys):
    more = ("--suggest", "4", "--memory", "80GiB")
    lines = printed(capsys, *TINY, *SMALL_GROUPS, *more).splitlines()
    header = "dp_replicate dp_shard ep tp rows/pass memory fits seconds"
    assert lines[0].split() == header.split()
    assert re.fullmatch(r"\d+ meshes, of which \d+ fit into 80.00 GiB\.", lines[-1])
    seconds = [float(line.split()[-1]) for line in lines[1:-1]]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--mesh.ep 3", "8 experts cannot be spread evenly over ep 3.*Meshes that would fit: "),
        ("--suggest 4", "--suggest needs a number of ranks above 0, and --memory of a device"),
        ("--suggest 7 --memory 1GiB", "No mesh of 7 ranks fits the model and the batch"),
    ],
)
def test_what_cannot_be_planned_is_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        main([*TINY, *argv.split()])


def test_meshes_that_fit_come_first_and_then_those_that_send_least():
    config = tiny_model(**SIZES).config
    every = suggest(config, WORK, 8, memory=2**50)
    assert [plan.seconds for plan in every] == sorted(plan.seconds for plan in every)
    assert all(plan.mesh.num_ranks == 8 for plan in every)
    limit = sorted(plan.memory for plan in every)[len(every) // 2]
    some = suggest(config, WORK, 8, memory=limit)
    fits = [plan.memory <= limit for plan in some]
    assert fits == sorted(fits, reverse=True)
    assert any(fits)


def test_a_suggestion_splits_a_batch_that_is_too_large_for_memory():
    config = tiny_model(**{**SIZES, "group_size": 16}).config
    whole = suggest(config, WORK, 4, memory=2**50)
    assert all(plan.workload.num_passes(plan.mesh) == 1 for plan in whole)
    split = suggest(config, WORK, 4, memory=whole[0].memory - whole[0].activations.total // 2)
    assert any(plan.workload.num_passes(plan.mesh) > 1 for plan in split)


def test_tp_stays_inside_a_node_of_8_ranks():
    transfer = Transfer("tensor-parallel sums", "tp", 1e9)
    assert seconds_of(transfer, MeshConfig(ep=4, tp=8)) == 1e9 / BYTES_PER_SECOND["inside"]
    assert seconds_of(transfer, MeshConfig(ep=4, tp=16)) == 1e9 / BYTES_PER_SECOND["across"]
    rows = Transfer("rows to experts and back", "ep", 1e9)
    assert seconds_of(rows, MeshConfig(ep=4, tp=2)) == 1e9 / BYTES_PER_SECOND["inside"]
    assert seconds_of(rows, MeshConfig(ep=4, tp=4)) == 1e9 / BYTES_PER_SECOND["across"]


def test_sizes_of_memory_are_read_and_shown_in_the_largest_unit():
    assert parse_bytes("80GiB") == 80 * 2**30
    assert parse_bytes("1.5 MiB") == 1_572_864
    assert parse_bytes("2gb") == 2 * 10**9
    shown = [show_bytes(number) for number in (7, 2048, 3 * 2**20, 2**40)]
    assert shown == ["7 B", "2.00 KiB", "3.00 MiB", "1,024.00 GiB"]
    for text in ("GiB", "0GiB", "-1GiB", "\u0668GiB", "9" * 400 + "GiB"):
        with pytest.raises(ConfigError, match=r"A size of memory is .*a number above 0 and a unit"):
            parse_bytes(text)
