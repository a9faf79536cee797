"""Every notebook runs from top to bottom on a small model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe.data.tokenizer import train_tokenizer
from tests.models.tiny import tiny_model
from tests.training.tiny_run import write_texts

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"num_experts": 1, "num_selected_experts": 1}], ids=str)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, changes, tmp_path):
    texts = [file.read_text() for file in sorted(write_texts(tmp_path / "texts").iterdir())]
    tiny_model(vocab_size=230, **changes).save_pretrained(tmp_path / "model")
    train_tokenizer(texts, 230, tmp_path / "tokenizer").save_pretrained(str(tmp_path / "model"))
    environment = {**os.environ, "MOE_MODEL": str(tmp_path / "model"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "encoder 1" in done.stdout
