"""The benchmark of adapters at a size of milliseconds."""

import json

import pytest

from benchmarks.models import adapters
from benchmarks.models.adapters import WAYS
from scripts import benchmark

TINY = {
    "VOCAB_SIZE": 37,
    "SIZES": {"d_model": 32, "d_ff": 32},
    "BATCH": (2, 7),
    "EXPERTS": 5,
    "FEW_EXPERTS": 3,
    "LAYER_EXPERTS": (2, 7),
    "LAYER_TOKENS": {11: 1.0, 13: 1.0},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_saved_table_has_every_way(tmp_path, monkeypatch):
    for name, value in TINY.items():
        monkeypatch.setattr(adapters, name, value)
    path = tmp_path / "adapters.json"
    benchmark.main(["adapters", "--json", str(path), "--rounds", "1"])
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]

    difference = rows.pop(0)
    assert difference["part"] == "difference" and difference["difference"] < 1e-12
    ways: dict[tuple, list[str]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("part", "setting", "experts", "tokens"))
        ways.setdefault(key, []).append(row["way"])
    steps = {("step", "8 bits", 3), ("step", "4 bits", 3), ("step", "floats", 5)}
    expected = {(*step, 14) for step in steps}
    expected |= {
        ("layer", d, e, t) for d in ("float32", "bfloat16") for e in (2, 7) for t in (11, 13)
    }
    assert ways == {key: list(WAYS) for key in expected}
    assert all(row["ms"] > 0 and row["over_full"] > 0 for row in rows)
