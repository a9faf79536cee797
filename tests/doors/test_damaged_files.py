"""A damaged file of any kind ends a command with one clear line that names it, and runs no code."""

import gzip
import hashlib
import json
import pickle
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stmoe
from moe.checkpoint import load_model
from moe.cli import run_main
from moe.data.corpus import load_corpus
from moe.data.pair_files import read_pairs
from moe.data.tokenizer import load_tokenizer
from moe.errors import MoEError
from moe.parsing import read_yaml
from moe.tracing.trace_file import read_trace
from tests.doors.test_settings import VALUES

pytestmark = pytest.mark.slow

MARKER = "code-of-a-data-file-ran"
"""File that appears in the working folder when a data file's code was run."""


class Code:
    """Something whose pickle runs code when it is read."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (MARKER, "w")


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def not_utf8(content: bytes) -> bytes:
    place = content.find(b'"') + 1 or 1
    return content[:place] + b"\xe9" + content[place:]


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": half,
    "binary": lambda content: bytes(range(256)) * 20,
    "zeros": lambda content: bytes(len(content)),
    "code": lambda content: pickle.dumps(Code(), protocol=2),
}
TEXT = BYTES | {
    "not UTF-8": not_utf8,
    "a list": lambda content: b"[]\n",
    "nested": lambda content: b"[" * 100_000,
    "compressed": gzip.compress,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
}

# Files that each command reads, and what is wrong with them.
DOORS = {
    "corpus --data {documents.jsonl} --out new": {"documents.jsonl": TEXT},
    "tokenizer --corpus {corpus} --out new --vocab-size 230": {
        "corpus/corpus.json": TEXT,
        "corpus/train/data-00000-of-00001.arrow": BYTES,
    },
    "pretrain --config {pretrain.yaml} --corpus {corpus} --tokenizer {tokenizer} --out new": {
        "pretrain.yaml": TEXT,
        "tokenizer/tokenizer.json": TEXT,
        "tokenizer/tokenizer_config.json": TEXT,
    },
    "finetune --pretrained {run/model} --train {pairs.jsonl} --out new": {
        "pairs.jsonl": TEXT,
        "run/model/config.json": TEXT,
        "run/model/model.safetensors": BYTES,
    },
    "finetune --pretrained {run/model} --train {pairs.tsv} --out new": {"pairs.tsv": BYTES},
    "finetune --pretrained {run/model} --train {pairs.parquet} --out new": {"pairs.parquet": BYTES},
    "convert --from {switch} --to new": {
        "switch/config.json": TEXT,
        "switch/model.safetensors": BYTES,
    },
    "convert --from {binary} --to new": {"binary/pytorch_model.bin": BYTES},
    "eval run --model {run/model} --tasks copa --data {rows} --out new": {
        "rows/copa/validation.jsonl": TEXT
    },
    "eval compare {evaluations/first} {evaluations/second} --out new": {
        "evaluations/first/report.json": TEXT,
        "evaluations/first/predictions/copa.model.rank.jsonl": TEXT,
    },
    "inspect compare --trace {trace} --model {run/model} --out new.html": {
        "trace/trace.parquet": BYTES
    },
}
CASES = [(line, file, damages) for line, files in DOORS.items() for file, damages in files.items()]


def copy(workspace: Path, file: str, folder: Path) -> str:
    """Copies a file of the workspace, with the folder that it is in, and returns the name of the copy."""
    name = file.split("/")[0]
    if (workspace / name).is_dir():
        shutil.copytree(workspace / name, folder / name)
    else:
        shutil.copy(workspace / name, folder / name)
    return name


def contents(folder: Path) -> dict[str, str]:
    """Returns the hash of each file below a folder but for the outputs of commands."""
    hashes = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith("new/"):
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


@pytest.mark.parametrize(("line", "file", "damages"), CASES, ids=[file for _, file, _ in CASES])
def test_a_damaged_file_is_named_in_one_line_and_runs_no_code(
    workspace, tmp_path, monkeypatch, capsys, line, file, damages
):
    monkeypatch.chdir(tmp_path)
    name = copy(workspace, file, tmp_path)
    words = []
    for word in shlex.split(line):
        folder = tmp_path if word.startswith("{" + name) else workspace
        words.append(str(folder / word[1:-1]) if word.startswith("{") else word)
    monkeypatch.setattr(sys, "argv", ["stmoe", *words])
    content = Path(file).read_bytes()
    for damage, change in damages.items():
        Path(file).write_bytes(change(content))
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as end:
            run_main(stmoe.main)
        message = capsys.readouterr().err.rpartition("error: ")[2].strip()
        assert end.value.code in (1, 2), (damage, message)  # 1: one task of several has failed
        assert not message.startswith("unexpected "), (damage, message)
        assert message and "\n" not in message and len(message) < 2000, (damage, message)
        assert Path(file).name in message or str(tmp_path / name) in message, (damage, message)
        assert contents(tmp_path) == before, (damage, message)
        assert not Path(MARKER).exists(), damage


READERS = {
    "tokenizer/tokenizer_config.json": lambda root: load_tokenizer(root / "tokenizer"),
    "corpus/corpus.json": lambda root: load_corpus(root / "corpus"),
    "run/model/config.json": lambda root: load_model(root / "run/model"),
    "pretrain.yaml": lambda root: read_yaml(root / "pretrain.yaml"),
    "pairs.jsonl": lambda root: read_pairs(root / "pairs.jsonl"),
    "trace/trace.parquet": lambda root: read_trace(root / "trace"),
    "pairs.parquet": lambda root: read_pairs(root / "pairs.parquet"),
}


@pytest.fixture(params=READERS)
def copied(request, workspace, tmp_path) -> tuple[Path, str]:
    """Returns a folder with a copy of the file's folder, without checksums, and the file's name."""
    copy(workspace, request.param, tmp_path)
    for sums in tmp_path.rglob("SHA256SUMS"):
        sums.unlink()
    return tmp_path, request.param


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_of_a_file_is_read_or_refused(copied, data):
    root, file = copied
    path = root / file
    content = path.read_bytes()
    if path.suffix == ".json" and data.draw(st.booleans()):
        record = json.loads(content)
        record[data.draw(st.sampled_from(sorted(record)))] = data.draw(VALUES)
        changed = json.dumps(record).encode()
    elif path.suffix == ".yaml" and data.draw(st.booleans()):
        changed = yaml.safe_dump(yaml.safe_load(content) | {"seed": data.draw(VALUES)}).encode()
    else:
        start = data.draw(st.integers(0, len(content) - 1))
        stop = start + data.draw(st.integers(0, 9))
        changed = content[:start] + data.draw(st.binary(max_size=9)) + content[stop:]

    try:
        path.write_bytes(changed)
        READERS[file](root)
    except (MoEError, OSError) as error:
        assert str(error)
    finally:
        path.write_bytes(content)
