"""Tables in every format hold the same rows, and a bad row is named by its place."""

import csv
import gzip
import json
import random
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets.table import InMemoryTable
from hypothesis import given
from hypothesis import strategies as st

from moe import ConfigError, DataError
from moe.data.blocks import open_blocks
from moe.data.documents import read_files
from moe.data.pair_files import Pair, read_pairs
from moe.data.rows import parse_columns, read_rows

PAIRS = [
    {"inputs": "What, is it?", "targets": 'a "quoted"\nanswer', "group": "a"},
    {"inputs": "fünf · 五", "targets": "", "group": "b"},
    {"inputs": "007", "targets": "nan", "group": "b"},
]


def write(path, rows):
    """Writes rows to a file, or a saved dataset to a folder."""
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        case ".csv" | ".tsv":
            with path.open("w", encoding="utf-8", newline="") as file:
                lines = [list(rows[0]), *(list(row.values()) for row in rows)]
                if path.suffix == ".csv":
                    csv.writer(file).writerows(lines)
                else:
                    file.writelines("\t".join(line) + "\n" for line in lines)
        case ".gz":
            plain = write(path.with_suffix(""), rows)
            path.write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
        case ".parquet":
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, path, row_group_size=2)
        case _:
            datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


FORMATS = ["a.jsonl", "a.csv", "a.parquet", "saved", "A.CSV", "a.jsonl.gz", "A.csv.gz"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_pairs(tmp_path, name):
    path = tmp_path / name
    if name == "A.CSV":
        write(tmp_path / "b.csv", PAIRS).rename(path)
    else:
        write(path, PAIRS)
    assert read_pairs(path) == [Pair(**pair) for pair in PAIRS]


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_quotation_marks_of_tsv_are_part_of_the_text(tmp_path, name):
    rows = [
        {"inputs": '"Never', "targets": '"'},
        {"inputs": 'a ""b""', "targets": '"c"'},
        {"inputs": 'say "', "targets": "d,e"},
    ]
    assert read_pairs(write(tmp_path / name, rows)) == [Pair(**row) for row in rows]


def test_a_column_that_occurs_twice_is_refused_if_it_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("inputs,targets,x,x,inputs\na,b,,,c\n")
    twice = pyarrow.table([["a"], ["b"], ["c"]], names=["inputs", "targets", "inputs"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(DataError, match=f"{name} repeats the column 'inputs'"):
            read_pairs(tmp_path / name)
        with pytest.raises(DataError, match="repeats the column 'inputs'"):
            list(open_blocks(tmp_path / name, "inputs").read(0))
    (document,) = read_files([tmp_path / "a.csv"], "targets")
    assert document.text == "b"


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_a_file_that_is_not_utf8_text_says_what_it_is(tmp_path, name):
    path = tmp_path / name
    text = "inputs,targets\na,b\n"
    for content, format_name in (
        (text.encode("utf-16"), "UTF-16.*iconv -f utf-16"),
        (text.encode("utf-16-be"), "UTF-16"),
        (gzip.compress(text.encode()), r"gzip.*\.gz"),
        (b"PAR1 and more", "Parquet"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=format_name):
            _ = read_files([path]) if name == "a.txt" else read_pairs(path)
        with pytest.raises(DataError, match=format_name):
            list(open_blocks(path, "inputs").read(0))


def test_a_damaged_archive_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", PAIRS)
    whole = path.read_bytes()
    for content in (b"no archive", whole[:-9]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
            read_pairs(path)


def test_columns_that_are_not_needed_are_neither_decoded_nor_fetched(tmp_path, monkeypatch):
    """An image is a URL that does not answer or bytes that are none, and a sound has no decoder."""
    features = {name: datasets.Value("string") for name in PAIRS[0]}
    features |= {"image": datasets.Image(), "sound": datasets.Audio()}
    schema = datasets.Features(features).arrow_schema
    url = {"bytes": None, "path": "http://127.0.0.1:9/a.png"}
    no_media = {"bytes": b"no", "path": None}
    remote = [{**pair, "image": url, "sound": url} for pair in PAIRS]
    local = [{**pair, "image": no_media, "sound": no_media} for pair in PAIRS]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(remote, schema), path)
    table = pyarrow.Table.from_pylist(local, schema)
    datasets.Dataset(InMemoryTable(table)).save_to_disk(tmp_path / "saved")

    load = datasets.load_dataset

    def load_from_hub(name, **options):
        return load("parquet", data_files=str(path), cache_dir=str(tmp_path / "hf"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_from_hub)
    for source in (path, tmp_path / "saved", Path("org/name:train")):
        rows = local if source.name == "saved" else remote
        assert read_pairs(source) == [Pair(**pair) for pair in PAIRS]
        with pytest.raises(DataError, match="row 1: image is"):
            read_pairs(source, {"inputs": "image"})
        for column in ("inputs", "image"):
            expected = [{column: row[column]} for row in rows]
            values = [dict(row) for _, row in open_blocks(source, column).read(0)]
            assert values
            assert values == expected[: len(values)]


def test_a_split_of_a_saved_dataset_has_a_name(tmp_path):
    splits = {
        "train": datasets.Dataset.from_list(PAIRS),
        "test": datasets.Dataset.from_list(PAIRS[:1]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert len(read_pairs(tmp_path / "saved:test")) == 1
    for wrong in ("saved", "saved:dev"):
        with pytest.raises(DataError, match="train, test"):
            read_pairs(tmp_path / wrong)


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=7), st.booleans())
def test_any_text_survives_csv_and_parquet(tmp_path_factory, texts, is_csv):
    # A surrogate is not UTF-8, NUL ends a line of CSV for Python 3.11, and csv reads \r\n as \n within quotes as it is.
    rows = []
    for inputs, targets in texts:
        clean = [
            text.replace("\0", "").encode("utf-8", "ignore").decode() for text in (inputs, targets)
        ]
        rows.append({"inputs": clean[0], "targets": clean[1]})
    path = tmp_path_factory.mktemp("rows") / ("a.csv" if is_csv else "a.parquet")
    pairs = read_pairs(write(path, rows))
    assert [{"inputs": pair.inputs, "targets": pair.targets} for pair in pairs] == rows


def test_columns_have_other_names_on_request(tmp_path):
    rows = [{"question": "q", "answer": "a", "inputs": "no"}]
    columns = parse_columns(["inputs=question", "targets=answer"], ["inputs", "targets", "group"])
    assert read_pairs(write(tmp_path / "a.csv", rows), columns) == [Pair("q", "a")]
    with pytest.raises(DataError, match=r"a\.csv, line 2: anser is missing\..*'answer'"):
        read_pairs(tmp_path / "a.csv", {**columns, "targets": "anser"})
    for values in (["input=q"], ["inputs"], ["inputs="], ["inputs=a", "inputs=b"]):
        with pytest.raises(ConfigError, match="--columns"):
            parse_columns(values, ["inputs", "targets"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"inputs,targets\na,b\nc\n", r"a\.csv, line 3: .*columns inputs, targets"),
        ("a.csv", b"inputs,targets\na,b,c\n", r"a\.csv, line 2: "),
        ("a.csv", b'inputs,targets\na,"b\n', r"a\.csv"),
        ("a.csv", b"inputs,targets\n\xff,b\n", "UTF-8"),
        ("a.csv", b"inputs,targets\n", "holds no pairs"),
        ("a.parquet", b"", "Parquet"),
        ("a.jsonl", b'{"inputs": 3, "targets": ""}', r"line 1: inputs is 3"),
    ],
)
def test_a_bad_table_is_named_with_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_pairs(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["none.jsonl", "none.csv", "none.parquet", "folder", "org/none:train"]
)
def test_a_missing_table_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=name.partition(":")[0]):
        read_pairs(tmp_path / name if ":" not in name else type(tmp_path)(name))


def test_a_date_that_python_does_not_have_is_one_error(tmp_path):
    path = tmp_path / "a.parquet"
    dates = pyarrow.array([2**60]).cast(pyarrow.timestamp("ms"))
    table = pyarrow.table({"text": ["a"], "when": dates})
    pyarrow.parquet.write_table(table, path)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for source in (path, tmp_path / "saved"):
        with pytest.raises(DataError, match=rf"{source.name} cannot be read.*: .+ Restore it\."):
            list(read_rows(source, advice="Restore it."))


def test_a_saved_dataset_with_another_state_is_one_error(tmp_path):
    folder = write(tmp_path / "saved", PAIRS)
    for content in ("[]", '{"_data_files": [7]}'):
        (folder / "state.json").write_text(content)
        with pytest.raises(DataError, match=r"saved cannot be read as .* dataset"):
            read_pairs(folder)


def test_a_field_may_be_longer_than_pythons_default(tmp_path):
    long = "".join(random.Random(0).choices("abc ", k=200_000))
    path = write(tmp_path / "a.csv", [{"inputs": long, "targets": "b"}])
    assert read_pairs(path)[0].inputs == long


def test_a_corpus_reads_the_column_of_a_table(tmp_path):
    write(
        tmp_path / "a.parquet", [{"body": "One text."}, {"body": " \n"}, {"body": "Two\n\ntexts."}]
    )
    write(tmp_path / "b.csv", [{"body": "Three."}])
    documents = read_files([tmp_path], "body")
    assert [document.text for document in documents] == ["One text.", "Two\n\ntexts.", "Three."]
    assert documents[1].source == f"{tmp_path.name}/a.parquet:3"
    with pytest.raises(DataError, match=r"a\.parquet has the columns body\..*'text'"):
        read_files([tmp_path])
    with pytest.raises(DataError, match=r"b\.csv has the columns body\."):
        read_files([tmp_path / "b.csv"])


def test_rows_of_a_large_parquet_file_come_before_it_is_read(tmp_path):
    table = pyarrow.table({"inputs": ["a"] * 300_000, "targets": ["b"] * 300_000})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    del table
    before = pyarrow.total_allocated_bytes()
    rows = read_rows(tmp_path / "a.parquet", advice="")
    for _ in range(3):
        next(rows)
    assert pyarrow.total_allocated_bytes() - before < 100 * 65_536
