"""A folder in the layout of a downloaded dataset gives one split, as `datasets.load_dataset` does."""

import json
from itertools import chain

import datasets
import pytest
from datasets.data_files import SPLIT_KEYWORDS, SPLIT_PATTERN_SHARDED

from moe import DataError
from moe.data import folders
from moe.data.blocks import open_blocks
from moe.data.documents import read_files
from moe.data.folders import files_of
from moe.data.pair_files import read_pairs
from tests.data.test_rows import write

SPLITS = ("train", "validation", "test")


def row(name: str) -> dict[str, str]:
    return {"inputs": f"{name} in", "targets": f"{name} out", "text": name}


def write_snapshot(folder, layout: str):
    """Writes a row for each split, whose text is its name."""
    for split in SPLITS:
        path = {
            "sharded": folder / "data" / f"{split}-00000-of-00001.parquet",
            "files": folder / f"{split}.jsonl",
            "folders": folder / split / "rows.csv",
            "gzip": folder / f"{split}.csv.gz",
            "card": folder / "raw" / f"{split[:2]}.jsonl",
        }[layout]
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [row(split)])
    data_files = [{"split": split, "path": f"raw/{split[:2]}.jsonl"} for split in SPLITS]
    configs = [{"config_name": "default", "data_files": data_files}]
    card = {"license": "mit", **({"configs": configs} if layout == "card" else {})}
    lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in card.items())
    (folder / "README.md").write_text(f"---\n{lines}---\n# Card\n")
    (folder / ".gitattributes").write_text("")
    return folder


def texts_of(source) -> list[list[str]]:
    """Returns the texts of a source by every way to read it."""
    in_memory = [pair.targets.removesuffix(" out") for pair in read_pairs(source)]
    streamed = [str(values["text"]) for _, values in open_blocks(source, "text").read(0)]
    return [in_memory, streamed, [document.text for document in read_files([source])]]


@pytest.mark.parametrize("layout", ["sharded", "files", "folders", "gzip", "card"])
def test_a_downloaded_dataset_gives_its_training_split_or_the_one_that_is_named(
    tmp_path, layout, caplog
):
    folder = write_snapshot(tmp_path / "test_snapshot", layout)
    for split in SPLITS:
        oracle = datasets.load_dataset(str(folder), split=split, cache_dir=str(tmp_path / "hf"))
        assert list(oracle["text"]) == [split]
        assert texts_of(folder.with_name(f"{folder.name}:{split}")) == [[split]] * 3
    assert "of its splits" not in caplog.text
    assert texts_of(folder) == [["train"]] * 3
    assert "of its splits train, validation, test only train is read" in caplog.text
    with pytest.raises(DataError, match="no split 'dev'; its splits: train, validation, test"):
        read_pairs(folder.with_name(f"{folder.name}:dev"))


def test_links_to_files_are_followed_as_in_the_cache_of_the_hub(tmp_path):
    folder = write_snapshot(tmp_path / "snapshot", "sharded")
    for file in (folder / "data").iterdir():
        blob = file.rename(tmp_path / f"blob{file.name[:2]}")
        file.symlink_to(blob)
    assert texts_of(folder) == [["train"]] * 3
    assert texts_of(folder / "data") == [["train"]] * 3
    assert texts_of(folder / "data:validation") == [["validation"]] * 3


def test_one_of_several_configurations_has_to_be_named(tmp_path):
    write(tmp_path / "x.jsonl", [row("x")])
    write(tmp_path / "y.jsonl", [row("y")])
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in "xy"]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    with pytest.raises(DataError, match=r"\['x', 'y'\].*FOLDER:CONFIG:SPLIT"):
        read_pairs(tmp_path)
    assert texts_of(tmp_path.with_name(f"{tmp_path.name}:y:train")) == [["y"]] * 3


def test_a_single_split_needs_no_name_and_several_without_train_do(tmp_path):
    write(tmp_path / "test-0.jsonl", [row("test")])
    assert texts_of(tmp_path) == [["test"]] * 3
    write(tmp_path / "validation-0.jsonl", [row("validation")])
    with pytest.raises(DataError, match="no split 'train'; its splits: validation, test"):
        read_pairs(tmp_path)


def test_splits_of_several_formats_are_not_mixed(tmp_path):
    write(tmp_path / "train.jsonl", [row("train")])
    write(tmp_path / "test.csv", [row("test")])
    (tmp_path / "LICENSE.txt").write_text("MIT")
    with pytest.raises(DataError, match="cannot be read as a dataset"):
        read_pairs(tmp_path)


def test_files_without_names_of_splits_are_all_read(tmp_path):
    """Neither tables of two kinds, nor pages of a documentation that are about testing."""
    tables = tmp_path / "tables"
    tables.mkdir()
    write(tables / "devices.jsonl", [row("a")])  # no name of a split, though `dev` is in it
    write(tables / "trainer.csv", [row("b")])
    assert texts_of(tables) == [["a", "b"]] * 3
    assert texts_of(tmp_path / "tables:train") == [["a", "b"]] * 3
    with pytest.raises(DataError, match="no split 'test'"):
        read_pairs(tmp_path / "tables:test")

    pages = tmp_path / "pages"
    pages.mkdir()
    names = ["index.md", "testing.md", "testing.txt", "training.md", "training.txt"]
    for name in (*names, "requirements.txt"):
        (pages / name).write_text(name)
    assert len(files_of(pages)) == 6


def test_every_name_of_a_split_in_datasets_is_noticed():
    for keyword in chain(*SPLIT_KEYWORDS.values(), [SPLIT_PATTERN_SHARDED]):
        assert folders._SPLIT_WORD.search(keyword.replace("[0-9]", "0"))


@pytest.mark.parametrize("configs", ["5", "{", '[{config_name: x, data_files: "../a.jsonl"}]'])
def test_a_damaged_card_and_one_that_names_files_outside_are_one_message(tmp_path, configs):
    write(tmp_path / "a.jsonl", [row("secret")])
    folder = tmp_path / "snapshot"
    folder.mkdir()
    write(folder / "train.jsonl", [row("train")])
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    with pytest.raises(DataError, match="cannot be read as a dataset"):
        read_pairs(folder)
