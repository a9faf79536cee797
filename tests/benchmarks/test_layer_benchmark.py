"""The benchmark of the layer at a size of milliseconds; the peers' outputs on shared weights are
the oracle of ours.
"""

import importlib.util
import json

import pytest
import torch

from benchmarks.cases import CASES, Case, build_problem
from benchmarks.layer.variants import dense, moe_capacity, moe_dropless
from benchmarks.timing import measure_rounds
from moe import ConfigError
from scripts.benchmark import main

TINY, TINY_SWITCH = Case(64, 32, 48, 8, 2), Case(64, 32, 48, 8, 1)


@pytest.fixture(autouse=True)
def tiny_cases(monkeypatch):
    monkeypatch.setitem(CASES, 0, TINY)
    monkeypatch.setitem(CASES, 3, TINY_SWITCH)


def measure(tmp_path, *options):
    path = tmp_path / "layer.json"
    main(["layer", "--json", str(path), "--rounds", "1", "--device", "cpu", *options])
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_saved_table_has_a_row_for_every_variant_that_can_run(tmp_path, capsys):
    report = measure(tmp_path, "--cases", "0", "--threads", str(torch.get_num_threads()))
    dropless = {"dense", "moe_dropless", "moe_capacity", "moe_static", "hf_grouped_mm"}
    found = {(row["dtype"], row["pass"], row["variant"]) for row in report["rows"]}
    passes, dtypes = ("forward", "forward_backward"), ("float32", "bfloat16")
    assert found >= {
        (dtype, name, variant) for dtype in dtypes for name in passes for variant in dropless
    }
    for row in report["rows"]:
        assert row["ms"] > 0
        assert row["ratio"] == 1 if row["variant"] == "dense" else row["ratio"] > 0
        least, largest = row["ratio_range"]
        assert least <= row["ratio"] <= largest
    printed = capsys.readouterr()
    assert "moe_dropless" in printed.out
    assert "hf_switch (case 0, float32): only one expert for a token" in printed.out + printed.err
    if importlib.util.find_spec("deepspeed") is None:
        assert (
            "deepspeed (case 0, float32): not installed; pip install 'stmoe[bench]'"
            in printed.out + printed.err
        )


@pytest.mark.parametrize(
    ("case", "peer"), [("0", "hf_grouped_mm"), ("3", "hf_grouped_mm"), ("3", "hf_switch")]
)
def test_the_dropless_layer_gives_what_a_peer_gives_with_the_same_weights(tmp_path, case, peer):
    options = (
        "--variants",
        "moe_dropless",
        peer,
        "--dtypes",
        "float32",
        "--passes",
        "forward",
        "--cases",
        case,
    )
    difference = {row["variant"]: row["difference"] for row in measure(tmp_path, *options)["rows"]}
    assert difference[peer] < 1e-6


def test_rows_are_those_that_the_paper_counts(tmp_path):
    rows = {
        row["variant"]: row["product_rows"] for row in measure(tmp_path, "--cases", "0")["rows"]
    }
    assert rows["dense"] == rows["moe_dropless"] == 128
    assert rows["moe_capacity"] <= 80  # 1.25 x 64
    assert rows["moe_static"] == 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rounds", "0"), "--rounds is 0; expected an integer from 1 to"),
        (("--threads", "0"), "--threads is 0; expected an integer from 1 to"),
        (("--cases", "4"), "case 4 is for cuda, and --device is cpu"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        main(["layer", "--device", "cpu", *options])


def test_every_round_has_new_tokens_which_variants_share():
    problem = build_problem(TINY, torch.float32, torch.device("cpu"))
    variants = [dense(problem), moe_dropless(problem), moe_capacity(problem)]
    sums = set()
    for _ in measure_rounds(variants, "forward", rounds=3, device=torch.device("cpu")):
        assert torch.equal(variants[1].x, variants[2].x)
        sums.add(variants[1].x.sum().item())
    assert len(sums) == 3
