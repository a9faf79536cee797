"""transformers finds our models in a process that never imports this library; the oracle is one
that did.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

import moe
from moe import STMoEConfig, STMoEForConditionalGeneration, STMoEModel
from tests.models.tiny import tiny_batch, tiny_model

ELSEWHERE = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
folder, out = sys.argv[1:]
assert "moe" not in sys.modules
auto = {"config": AutoConfig, "model": AutoModel, "seq2seq": AutoModelForSeq2SeqLM}
made = {name: one.from_pretrained(folder, trust_remote_code=True) for name, one in auto.items()}
made["seq2seq"].save_pretrained(out)
print(*(type(one).__name__ for one in made.values()))
"""


def run_python(
    program: str, *arguments: Path | str, cache: Path
) -> subprocess.CompletedProcess[str]:
    """Runs a program that asks nobody and reaches no hub, in a folder that has no `moe`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(moe.__file__).parents[1]),
        "HF_MODULES_CACHE": str(cache / "modules"),
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(
        command,
        env=environment,
        cwd=cache,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_auto_classes_find_the_library_that_nobody_imported(tmp_path):
    # As it lies in the cache after a download.
    revision = "a" * 40
    folder = tmp_path / "hub" / "models--org--tiny" / "snapshots" / revision
    (folder.parents[1] / "refs").mkdir(parents=True)
    (folder.parents[1] / "refs" / "main").write_text(revision)
    tiny_model().save_pretrained(folder)

    copy = tmp_path / "again"
    done = run_python(ELSEWHERE, "org/tiny", copy, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["STMoEConfig", "STMoEModel", "STMoEForConditionalGeneration"]
    assert {path.name for path in copy.iterdir()} == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        if path.name != "README.md":  # which names the model that it was loaded from
            assert (copy / path.name).read_bytes() == path.read_bytes(), path.name


def test_without_the_library_the_message_says_what_to_install(tmp_path, monkeypatch):
    STMoEConfig().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "moe", None)  # as Python does when there is none
    with pytest.raises(ImportError, match=r"needs the library `moe`: pip install stmoe"):
        runpy.run_path(str(tmp_path / "modeling_st_moe.py"))


def test_whoever_imported_the_library_is_never_asked(tmp_path, monkeypatch):
    def refuse(prompt: str = "") -> str:
        raise AssertionError(f"asked: {prompt}")

    monkeypatch.setattr("builtins.input", refuse)
    model = tiny_model()
    model.save_pretrained(tmp_path)
    for trust in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        assert type(AutoConfig.from_pretrained(tmp_path, **trust)) is STMoEConfig
        assert type(AutoModel.from_pretrained(tmp_path, **trust)) is STMoEModel
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **trust)
        assert type(loaded) is STMoEForConditionalGeneration
        with torch.no_grad():
            assert torch.equal(loaded(**tiny_batch()).logits, model(**tiny_batch()).logits)


def test_a_config_has_no_map_and_its_folder_no_copy_of_the_code(tmp_path):
    STMoEConfig.register_for_auto_class()  # as transformers does after it has found it by `auto_map`
    STMoEConfig().save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "modeling_st_moe.py"]
    assert not hasattr(STMoEConfig.from_pretrained(tmp_path), "auto_map")
    assert not hasattr(AutoConfig.from_pretrained(tmp_path), "auto_map")
