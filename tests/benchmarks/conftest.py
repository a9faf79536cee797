"""Rulers of microseconds: those of a benchmark are large."""

import pytest

from benchmarks import machine


@pytest.fixture(autouse=True)
def tiny_rulers(monkeypatch):
    monkeypatch.setattr(machine, "COPIED_BYTES", 2**12)
    monkeypatch.setitem(machine.SQUARE_SIZES, "cpu", 32)
