"""Which operators work on rows: the choice, and its door."""

import importlib.util
import sys

import pytest
import torch

from moe import ConfigError
from moe.kernels.expert_rows import gather_choices
from moe.kernels.row_operators import OPERATORS_VARIABLE, row_operators, use_row_operators
from tests.sparse.layers import build_layer

HERE = torch.zeros(1)


@pytest.fixture
def choose(monkeypatch):
    """Returns what sets the environment variable."""
    return lambda name: monkeypatch.setenv(OPERATORS_VARIABLE, name)


def test_those_of_torch_are_the_default(monkeypatch, choose):
    monkeypatch.delenv(OPERATORS_VARIABLE, raising=False)
    assert row_operators(HERE).gather is gather_choices
    choose("")
    assert row_operators(HERE).gather is gather_choices


@pytest.mark.parametrize("name", ["tritn", "TRITON", "1"])
def test_an_unknown_choice_is_refused_with_the_known_ones(name, choose):
    choose(name)
    message = f"STMOE_ROW_OPERATORS is '{name}'; expected one of torch, triton"
    with pytest.raises(ConfigError, match=message):
        build_layer()(torch.zeros(1, 3, 7, dtype=torch.float64))
    with pytest.raises(ConfigError, match="name of the row operators"):
        use_row_operators(name)


def test_a_process_can_choose_for_itself(choose):
    choose("triton")
    try:
        use_row_operators("torch")
        assert row_operators(HERE).gather is gather_choices
    finally:
        use_row_operators(None)


def test_a_machine_without_triton_is_told_so(choose, monkeypatch):
    choose("triton")
    monkeypatch.setitem(sys.modules, "moe.kernels.triton_hidden", None)
    with pytest.raises(ConfigError, match=r"Triton cannot be imported .*pip install triton"):
        build_layer()(torch.zeros(1, 3, 7, dtype=torch.float64))


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
def test_a_layer_on_a_cpu_is_refused(choose):
    choose("triton")
    layer = build_layer()
    with pytest.raises(ConfigError, match=r"runs on cpu; expected a GPU \(cuda\)"):
        layer(torch.zeros(1, 3, 7, dtype=torch.float64))
    choose("torch")
    layer(torch.zeros(1, 3, 7, dtype=torch.float64))
