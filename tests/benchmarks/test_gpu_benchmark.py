"""The benchmark of a GPU, as far as it goes without one."""

import dataclasses

import pytest
import torch

from benchmarks.models.gpu import (
    COMPARED_STEPS,
    GpuBenchmark,
    build_model,
    decode,
    format_decoding,
    measure_decoding,
    measure_models,
    measure_optimizers,
    start_decoding,
)
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


def test_models_and_optimizers_are_rows_of_their_tables(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    benchmark = GpuBenchmark(cases=[], batches=[], experts=3, rounds=1, json=None, case=TINY)
    models = measure_models(benchmark, CPU)
    assert {row["model"] for row in models} == {"switch", "ours", "t5_eager", "t5_sdpa"}
    optimizers = measure_optimizers(benchmark, CPU)
    names = [*OPTIMIZERS.names(), "transformers' adafactor"]
    assert [row["optimizer"] for row in optimizers] == names
    assert all(row["ms"] > 0 for row in models + optimizers)


def test_a_form_that_cannot_run_is_a_line_of_the_table(monkeypatch):
    def refuse(decoding):
        raise RuntimeError("no graph\nand why")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    benchmark = GpuBenchmark(cases=[], batches=[2], experts=3, rounds=2, json=None, case=TINY)
    forms = {"eager": lambda decoding: decoding.step, "cuda_graph": refuse}
    rows = measure_decoding(benchmark, 2, CPU, forms)
    assert rows[0]["ms"] > 0 and rows[0]["ratio"] == 1 and rows[0]["same_tokens"]
    table = format_decoding(rows)
    assert "no: no graph" in table and "and why" not in table
    assert dataclasses.asdict(benchmark)["experts"] == 3
