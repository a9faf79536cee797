"""The benchmark of a GPU, as far as it goes without one."""

import itertools
import json

import pytest
import torch

from benchmarks.cases import CASES, DTYPES, PASSES, Case
from benchmarks.models import gpu
from benchmarks.models.gpu import COMPARED_STEPS, GpuBenchmark, build_model, decode, start_decoding
from benchmarks.models.model import draw_tokens, switch_config
from moe import ConfigError
from moe.optim.optimizers import OPTIMIZERS
from scripts.benchmark import main
from tests.benchmarks.tiny_case import TINY

CPU = torch.device("cpu")


def test_a_machine_without_a_gpu_is_told_so(tmp_path):
    path = tmp_path / "gpu.json"
    with pytest.raises(ConfigError, match="`gpu` measures a GPU, and torch finds none"):
        main(["gpu", "--json", str(path)])
    assert not path.exists()


def test_steps_in_memory_that_stays_decode_what_generate_does():
    model = build_model(switch_config(TINY, 3), CPU)
    decoding = start_decoding(model, TINY, 5, CPU)
    first = decoding.ids.flatten().tolist()
    with torch.no_grad():
        tokens = [first, *decode(decoding, decoding.step)]

    inputs = draw_tokens(TINY, 5, TINY.input_length)
    length = {"min_new_tokens": COMPARED_STEPS + 1, "max_new_tokens": COMPARED_STEPS + 1}
    expected = model.generate(inputs, attention_mask=torch.ones_like(inputs), **length)
    assert all(model.config.eos_token_id not in step for step in tokens)  # which generate puts off
    assert torch.tensor(tokens).T.tolist() == expected[:, 1:].tolist()

    decoding.restore()
    assert decoding.ids.flatten().tolist() == first
    with torch.no_grad():
        assert decode(decoding, decoding.step) == tokens[1:]


def tiny_benchmark(path, **options):
    """Returns the benchmark that a GPU runs, for this machine and for sizes of milliseconds."""
    settings = {"cases": [0, 3], "batches": [2, 5], "experts": 3, "rounds": 1, "device": CPU}
    variants = ("moe_dropless", "hf_grouped_mm")  # without what takes half a minute to compile
    settings |= {"case": TINY, "variants": variants, "forms": ("eager", "cuda_graph")}
    return GpuBenchmark(json=path, **(settings | options))


@pytest.fixture
def tiny_cases(monkeypatch):
    monkeypatch.setitem(CASES, 0, Case(64, 32, 48, 8, 2))
    monkeypatch.setitem(CASES, 3, Case(64, 32, 48, 8, 1))


def test_the_tables_have_every_row_that_a_gpu_gives(tiny_cases, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    gpu.run_gpu(tiny_benchmark(path))
    report = json.loads(path.read_text())

    # Except those left out here.
    rows = {(row["case"], row["dtype"], row["pass"], row["variant"]) for row in report["rows"]}
    variants = ("dense", "moe_dropless", "hf_grouped_mm")
    assert rows == set(itertools.product((0, 3), DTYPES, PASSES, variants))
    models = ["t5_sdpa", "t5_eager", "switch", "ours"]
    assert sorted(row["model"] for row in report["training"]) == sorted(models)
    names = [*OPTIMIZERS.names(), "transformers' adafactor"]
    assert [row["optimizer"] for row in report["optimizers"]] == names
    forms = [(row["batch"], row["form"]) for row in report["decoding"]]
    assert forms == list(itertools.product((2, 5), ("eager", "cuda_graph")))
    table = capsys.readouterr().out
    assert all(name in table for name in (*models, *names, *variants))
