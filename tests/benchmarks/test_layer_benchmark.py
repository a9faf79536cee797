"""The benchmark of the layer at a size of milliseconds; the peers' outputs on shared weights are
the oracle of ours.
"""

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cases import CASES, Case, build_problem
from benchmarks.layer.layer import describe_times
from benchmarks.layer.peers import UnavailableError, build_olmoe, build_peer, run_olmoe
from benchmarks.layer.variants import dense, moe_capacity, moe_dropless
from benchmarks.timing import measure_rounds
from scripts.benchmark import main

TINY, TINY_SWITCH = Case(64, 32, 48, 8, 2), Case(64, 32, 48, 8, 1)


@pytest.fixture(autouse=True)
def tiny_cases(monkeypatch):
    monkeypatch.setitem(CASES, 0, TINY)
    monkeypatch.setitem(CASES, 3, TINY_SWITCH)


def measure(tmp_path, options):
    path = tmp_path / "layer.json"
    main(["layer", "--json", str(path), "--rounds", "1", "--device", "cpu", *options.split()])
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_saved_table_has_a_row_for_every_variant_that_can_run(tmp_path, capsys):
    report = measure(
        tmp_path, "--cases 0 --threads 1 --dtypes float32 --passes forward forward_backward"
    )
    variants = {"dense", "moe_dropless", "moe_capacity", "moe_static", "hf_grouped_mm"}
    passes = ("forward", "forward_backward")
    found = {(row["pass"], row["variant"]) for row in report["rows"]}
    assert found >= {(name, variant) for name in passes for variant in variants}
    for row in report["rows"]:
        least, largest = row["ratio_range"]
        assert row["ms"] > 0 and 0 < least <= row["ratio"] <= largest
        assert row["of_square"] > 0 and row["copy_gb_per_second"] > 0
    # Rows of the products, as the paper counts them.
    product_rows = {row["variant"]: row["product_rows"] for row in report["rows"]}
    assert product_rows["dense"] == product_rows["moe_dropless"] == 128
    assert product_rows["moe_capacity"] <= 80  # 1.25 x 64
    assert product_rows["moe_static"] == 80

    printed = "".join(capsys.readouterr())
    assert "hf_switch (case 0, float32): only one expert for a token" in printed


def test_the_dropless_layer_gives_what_a_peer_gives_with_the_same_weights(tmp_path):
    options = "--variants moe_dropless hf_grouped_mm hf_switch --dtypes float32"
    report = measure(tmp_path, f"{options} --passes forward --cases 0 3")
    differences = {}
    for row in report["rows"]:
        if row["variant"].startswith("hf_"):
            differences[row["case"], row["variant"]] = row["difference"]
    assert set(differences) == {(0, "hf_grouped_mm"), (3, "hf_grouped_mm"), (3, "hf_switch")}
    assert max(differences.values()) < 1e-6


def test_the_ruler_is_the_better_square_product_of_the_same_round():
    problem = build_problem(TINY, torch.float32, torch.device("cpu"))
    slow = {"dense": 3.0, "square": 5.0, "square onednn": 1.0, "copy": 1.0}
    fast = {"dense": 3.0, "square": 4.0, "square onednn": 9.0, "copy": 0.5}
    flops = 2 * 128 * 32 * 48 * 2
    for times, best in (([slow], 1.0), ([fast], 4.0), ([slow, fast], 2.5)):
        numbers = describe_times(TINY, dense(problem), "forward", times, torch.device("cpu"))
        assert numbers["of_square"] == pytest.approx(flops / 3 / (2 * 32**3 / best))
    assert numbers["copy_gb_per_second"] == pytest.approx(1.5 * 2 * 2**12 / 1e6)


def test_every_round_has_new_tokens_which_variants_share():
    problem = build_problem(TINY, torch.float32, torch.device("cpu"))
    variants = [dense(problem), moe_dropless(problem), moe_capacity(problem)]
    sums = set()
    for _ in measure_rounds(variants, "forward", 3, torch.device("cpu"), {}):
        assert torch.equal(variants[1].x, variants[2].x)
        sums.add(variants[1].x.sum().item())
    assert len(sums) == 3


class Swiglu:
    """What Liger's operation computes, without a GPU."""

    @staticmethod
    def apply(x, gate_up, down, index, weight):
        assert index.dtype == torch.int32
        gate, up = torch.einsum("td,tkfd->tkf", x, gate_up[index]).chunk(2, dim=-1)
        return torch.einsum("tkf,tkdf,tk->td", F.silu(gate) * up, down[index], weight)


def test_liger_is_a_peer_where_it_is_installed(monkeypatch):
    gated = Case(64, 32, 48, 8, 2, gated=True)
    problem = build_problem(gated, torch.float32, torch.device("cpu"))
    if find_spec("liger_kernel") is None:
        with pytest.raises(UnavailableError, match="not installed; pip install liger-kernel"):
            build_peer("liger", problem)

    for name in ("liger_kernel", "liger_kernel.ops"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    module.LigerFusedMoEFunction = Swiglu
    peer = build_peer("liger", problem)
    olmoe = build_olmoe(problem, "batched_mm")
    olmoe["experts"].act_fn = torch.nn.SiLU()
    torch.testing.assert_close(peer.forward(problem.x), run_olmoe(olmoe, problem.x))
