"""Rows of tasks: from repositories, here folders shaped as those of the hub, and from files in
their place.

`datasets` itself reads the repositories; an unreachable hub is the true one under HF_HUB_OFFLINE.
"""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.scores.metrics import ACCURACY
from eval.source import EXPORT, MAIN, BuiltIn, HubData, SystemData
from eval.task import TASKS, Task
from eval.text.postprocess import label_index
from moe import DataError
from tests.eval.rows import FIXTURES

COLUMNS = {"premise": str, "idx": int, "label": int, "answers": {"text": [str], "start": [int]}}
ROWS = [
    {
        "premise": f"Tea {i}.",
        "idx": i,
        "label": i % 2,
        "answers": {"text": ["a", f"b{i}"], "start": [i, 7]},
        "more": 1,
    }
    for i in range(5)
]
WANTED = [{name: row[name] for name in COLUMNS} for row in ROWS]
README = (
    "---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: dev\n    path: {path}\n---\n"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write_parquet(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_jsonl(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def repository(folder: Path, rows=ROWS, config="tea") -> HubData:
    """A repository with parquet on its main branch, whose card names the config and the split."""
    write_parquet(folder / "data" / "dev-00000-of-00001.parquet", rows)
    (folder / "README.md").write_text(
        README.format(config=config, path="data/dev-*"), encoding="utf-8"
    )
    return source(folder)


def source(folder: Path | str, **changes) -> HubData:
    fields = {
        "hub_splits": {"validation": "dev"},
        "labels": {"label": range(2)},
        "hidden": ("test",),
        **changes,
    }
    return HubData(str(folder), "tea", {"validation": 5, "test": 5}, COLUMNS, **fields)


# ---- the hub ----


def test_a_repository_gives_the_columns_of_a_split_by_its_own_name(tmp_path):
    data = repository(tmp_path / "repository")
    assert data.rows("validation") == WANTED
    assert data.splits == ("validation", "test")
    assert data.expected("validation") == 5


def test_a_config_that_main_does_not_have_is_taken_from_the_hubs_parquet_export(tmp_path):
    repository(tmp_path / "repository", config="coffee")
    write_parquet(tmp_path / "repository" / "tea" / "dev" / "0000.parquet", ROWS[:2])
    write_parquet(tmp_path / "repository" / "tea" / "dev" / "0001.parquet", ROWS[2:])
    assert source(tmp_path / "repository").rows("validation") == WANTED
    with pytest.raises(DataError, match=r"At main: BuilderConfig 'tea' not found"):
        source(tmp_path / "repository").rows("validation", revision=MAIN)


def test_splits_whose_names_begin_alike_are_kept_apart_in_the_export(tmp_path):
    write_parquet(tmp_path / "tea" / "dev_r1" / "0000.parquet", ROWS[:1])
    write_parquet(tmp_path / "tea" / "dev_r3" / "0000.parquet", ROWS)
    data = source(tmp_path, revisions=(EXPORT,), hub_splits={"validation": "dev_r3"})
    assert data.rows("validation") == WANTED


def test_a_repository_with_a_script_says_why_and_what_to_do(tmp_path):
    repository(tmp_path / "repository")
    (tmp_path / "repository" / "repository.py").write_text("", encoding="utf-8")
    with pytest.raises(DataError) as error:
        source(tmp_path / "repository").rows("validation")
    for part in (
        "config tea, split dev",
        "At main: Dataset scripts are no longer supported",
        f"At {EXPORT}: ",
    ):
        assert part in str(error.value)
    assert "--revision" in str(error.value)
    assert "--data FOLDER with FOLDER/TASK/validation.jsonl" in str(error.value)


def test_an_unreachable_hub_is_one_message_with_a_way_out():
    with pytest.raises(
        DataError,
        match=r"owner/none \(config tea, split dev at main\) .* not reachable.*HF_HUB_OFFLINE",
    ):
        source("owner/none").rows("validation")


@pytest.mark.parametrize("number", [4, 6])
def test_another_number_of_rows_on_the_hub_is_refused_with_a_way_out(tmp_path, number):
    data = repository(tmp_path / "repository", [*ROWS, *ROWS][:number])
    with pytest.raises(
        DataError, match=f"has {number} rows; expected 5.*--revision.*--data FOLDER"
    ):
        data.rows("validation")


def test_a_missing_column_on_the_hub_is_named_with_those_that_there_are(tmp_path):
    data = repository(
        tmp_path / "repository",
        [{"premise": "Tea.", "idx": 1, "answers": {"text": [], "start": []}}],
    )
    with pytest.raises(
        DataError,
        match=r"at main\) has no column 'label'; its columns are premise, idx, answers. Expected",
    ):
        data.rows("validation")


def test_a_label_out_of_range_on_the_hub_is_found_in_its_row(tmp_path):
    data = repository(tmp_path / "repository", [*ROWS[:4], {**ROWS[4], "label": 2}])
    with pytest.raises(
        DataError,
        match=r"Row 5 of .*repository \(config tea, split dev at main\) has label 2. .* 0, 1",
    ):
        data.rows("validation")


# ---- files in its place ----

FORMS = {
    "jsonl": lambda folder, rows: write_jsonl(folder / "validation.jsonl", rows),
    "parquet": lambda folder, rows: write_parquet(folder / "validation.parquet", rows),
    "shards of jsonl": lambda folder, rows: [
        write_jsonl(folder / "validation" / f"{i}.jsonl", [row]) for i, row in enumerate(rows)
    ],
    "shards of parquet": lambda folder, rows: [
        write_parquet(folder / "validation" / f"{i}.parquet", [row]) for i, row in enumerate(rows)
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [3, 5])
def test_files_take_the_place_of_the_hub_with_any_number_of_rows(tmp_path, form, number):
    FORMS[form](tmp_path, ROWS[:number])
    assert source("owner/none").rows("validation", tmp_path) == WANTED[:number]


def test_a_list_of_structs_is_read_as_a_struct_of_lists(tmp_path):
    turned = {"answers": [{"text": "a", "start": 0}, {"text": "b", "start": 7}]}
    write_jsonl(tmp_path / "validation.jsonl", [{**ROWS[0], **turned}, {**ROWS[1], "answers": []}])
    first, second = source("owner/none").rows("validation", tmp_path)
    assert first["answers"] == {"text": ["a", "b"], "start": [0, 7]}
    assert second["answers"] == {"text": [], "start": []}


def test_empty_lines_are_no_rows_and_line_numbers_count_them(tmp_path):
    text = f"\n{json.dumps(ROWS[0])}\n\n{json.dumps({**ROWS[1], 'idx': '1'})}\n"
    (tmp_path / "validation.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(
        DataError,
        match=r"^Line 4 of .*validation.jsonl has in 'idx' '1' \(str\). Expected whole number",
    ):
        source("owner/none").rows("validation", tmp_path)


def test_labels_are_hidden_where_the_authors_hide_them_and_nowhere_else(tmp_path):
    for split in ("validation", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [{**ROWS[0], "label": -1}])
    assert source("owner/none").rows("test", tmp_path)[0]["label"] == -1
    with pytest.raises(
        DataError,
        match=r"Line 1 of .* has label -1. Expected one of 0, 1. .* hidden label out of this",
    ):
        source("owner/none").rows("validation", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 2}, "has label 2. Expected one of 0, 1"),
        ({"label": True}, r"has in 'label' True \(bool\). Expected whole number"),
        ({"label": None}, r"has in 'label' None \(NoneType\)"),
        ({"premise": 3}, r"has in 'premise' 3 \(int\). Expected text"),
        (
            {"premise": "Tea \ud83c"},
            r"jsonl, line 1: .*is not JSON \(.*half a character.* stands for nothing",
        ),
        ({"answers": "a"}, "Expected {text: list of text, start: list of whole number}"),
        (
            {"answers": {"text": ["a"]}},
            "answers of line 1 of .* has no column 'start'; its columns are text",
        ),
        ({"answers": [{"text": "a"}]}, "has no column 'start'; its columns are text"),
        ({"answers": ["a"]}, "Line 1 of .* is 'a'. Expected an object with"),
        (
            {"answers": {"text": [1], "start": [1]}},
            r"has in 'answers.text' 1 \(int\). Expected text",
        ),
    ],
)
def test_a_value_of_another_kind_is_named_with_its_place_and_what_was_expected(
    tmp_path, change, message
):
    write_jsonl(tmp_path / "validation.jsonl", [{**ROWS[0], **change}])
    with pytest.raises(DataError, match=message):
        source("owner/none").rows("validation", tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_column_in_a_file_is_named_with_the_file(tmp_path, form):
    FORMS[form](
        tmp_path, [{name: row[name] for name in ("premise", "idx", "answers")} for row in ROWS]
    )
    with pytest.raises(
        DataError,
        match=f"{tmp_path}.* has no column 'label'; its columns are premise, idx, answers.",
    ):
        source("owner/none").rows("validation", tmp_path)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "validation.jsonl").write_text(
        json.dumps(ROWS[0]) + '\n{"premise": "Te', encoding="utf-8"
    )
    with pytest.raises(
        DataError, match=r"validation.jsonl, line 2: .* is not JSON .* a copy that was cut off"
    ):
        source("owner/none").rows("validation", tmp_path)


@pytest.mark.parametrize(
    "line",
    [b"[1, 2]", b"7", b'{"a": "\\ud800"}', b"9" * 5_000, b"[" * 100_000, b'{"a": NaN}', b"\xff"],
)
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    (tmp_path / "validation.jsonl").write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + line + b"\n")
    with pytest.raises(
        DataError, match=r"validation\.jsonl(, line 2: | is not UTF-8: .*\(line 2\))"
    ):
        source("owner/none").rows("validation", tmp_path)


def test_a_parquet_file_of_other_types_is_one_message(tmp_path):
    table = pyarrow.Table.from_pylist(WANTED)
    for column, values, message in (
        (
            "premise",
            pyarrow.array([b"\xff"] * 5),
            r"Row 1 of .* has in 'premise' b'\\xff' \(bytes\)",
        ),
        (
            "premise",
            pyarrow.array([b"\xff"] * 5).cast(pyarrow.string(), safe=False),
            "cannot be read as parquet: 'utf-8'",
        ),
        ("idx", pyarrow.array([None] * 5, pyarrow.int64()), r"has in 'idx' None"),
        ("label", pyarrow.array([1.0] * 5), r"has in 'label' 1.0 \(float\)"),
    ):
        changed = table.set_column(table.column_names.index(column), column, values)
        pyarrow.parquet.write_table(changed, tmp_path / "validation.parquet")
        with pytest.raises(DataError, match=message):
            source("owner/none").rows("validation", tmp_path)
    doubled = table.append_column("idx", table["idx"])
    pyarrow.parquet.write_table(doubled, tmp_path / "validation.parquet")
    with pytest.raises(DataError, match="has the column 'idx' 2 times"):
        source("owner/none").rows("validation", tmp_path)


@settings(max_examples=60)
@given(st.data())
def test_a_parquet_file_with_any_byte_changed_is_rows_or_one_message(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("mutated")
    write_parquet(folder / "validation.parquet", ROWS)
    content = bytearray((folder / "validation.parquet").read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "validation.parquet").write_bytes(bytes(content))
    try:
        source("owner/none").rows("validation", folder)
    except DataError as error:
        assert "validation.parquet" in str(error)


def test_a_folder_that_cannot_be_read_is_one_message(tmp_path):
    with pytest.raises(DataError, match=r"The folder .* cannot be read: File name too long"):
        source("owner/none").rows("validation", tmp_path / ("a" * 300))
    (tmp_path / "validation.jsonl").mkdir()
    with pytest.raises(
        DataError, match=r"no rows of split 'validation'; it holds validation\.jsonl"
    ):
        source("owner/none").rows("validation", tmp_path)
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation/1.jsonl").mkdir()
    with pytest.raises(DataError, match=r"validation/1.jsonl cannot be read: Is a directory"):
        source("owner/none").rows("validation", tmp_path)


def test_a_torn_parquet_file_is_named(tmp_path):
    write_parquet(tmp_path / "validation.parquet", ROWS)
    whole = (tmp_path / "validation.parquet").read_bytes()
    (tmp_path / "validation.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        DataError, match=r"validation.parquet cannot be read as parquet: .* download it again"
    ):
        source("owner/none").rows("validation", tmp_path)


def test_a_missing_folder_or_file_says_what_was_expected(tmp_path):
    with pytest.raises(
        DataError, match=r"There is no folder .*none. Make it, and put into it validation.jsonl"
    ):
        source("owner/none").rows("validation", tmp_path / "none")
    write_jsonl(tmp_path / "dev.jsonl", ROWS)
    with pytest.raises(
        DataError,
        match=r"no rows of split 'validation'; it holds dev.jsonl. Expected validation.jsonl",
    ):
        source("owner/none").rows("validation", tmp_path)


def test_a_split_without_rows_is_refused(tmp_path):
    write_jsonl(tmp_path / "validation.jsonl", [])
    with pytest.raises(DataError, match=r"in .* hold no row \(validation\.jsonl\)"):
        source("owner/none").rows("validation", tmp_path)


def test_two_forms_of_a_split_are_refused(tmp_path):
    FORMS["jsonl"](tmp_path, ROWS)
    FORMS["shards of parquet"](tmp_path, ROWS)
    with pytest.raises(
        DataError, match=r"more than once: validation.jsonl and validation/\*.parquet. Keep one"
    ):
        source("owner/none").rows("validation", tmp_path)


# ---- a database of the system ----


def database(read=lambda split: WANTED) -> SystemData:
    return SystemData(read, "teas", "a tea house", COLUMNS, labels={"label": range(2)})


def test_rows_of_a_database_are_read_from_it_or_from_files_which_are_checked(tmp_path):
    assert database().rows("validation") == WANTED
    assert database().expected("validation") is None
    write_jsonl(tmp_path / "validation.jsonl", ROWS[:2])
    assert database().rows("validation", tmp_path) == WANTED[:2]

    write_jsonl(tmp_path / "test.jsonl", [{**ROWS[0], "label": -1}])
    with pytest.raises(
        DataError, match=r"Line 1 of .*test\.jsonl has label -1\. Expected one of 0"
    ):
        database().rows("test", tmp_path)
    with pytest.raises(DataError, match="has no rows of split 'train'"):
        database().rows("train", tmp_path)


def test_rows_are_local_when_no_network_is_needed(tmp_path):
    write_jsonl(tmp_path / "validation.jsonl", ROWS[:2])
    for folder, is_local in ((None, False), (tmp_path, True), (tmp_path / "none", False)):
        assert source("owner/none").is_local("validation", folder) is is_local
    assert not source("owner/none").is_local("test", tmp_path)
    assert not source("owner/none").is_local("train", tmp_path)  # not published

    assert database().is_local("train")
    assert database().is_local("validation", tmp_path)
    assert not database().is_local("train", tmp_path)
    assert BuiltIn(lambda split: WANTED).is_local("train", tmp_path)
    assert not BuiltIn(lambda split: WANTED, splits=("test",)).is_local("train")


def test_files_of_a_shard_folder_are_local_too(tmp_path):
    write_jsonl(tmp_path / "validation" / "part-1.jsonl", ROWS[:2])
    assert database().is_local("validation", tmp_path)
    (tmp_path / "test").mkdir()
    assert not database().is_local("test", tmp_path)


# ---- tasks ----


def a_task(data) -> Task:
    return Task(
        name="tea",
        version=1,
        description="Tea.",
        licence="CC0-1.0",
        source=data,
        preprocess=lambda row: [
            {"idx": row["idx"], "inputs": row["premise"], "targets": ["no", "yes"][row["label"]]}
        ],
        postprocess=label_index(("no", "yes")),
        metrics=(ACCURACY,),
        ids=("idx",),
    )


def test_a_task_and_its_variants_read_the_folder_of_its_name(tmp_path):
    write_jsonl(tmp_path / "tea" / "validation.jsonl", ROWS[:3])
    task = a_task(source("owner/none"))
    examples = task.examples("validation", tmp_path)
    assert [example.targets for example in examples] == ["no", "yes", "no"]
    assert (
        replace(task, name="tea.cold", variant_of="tea").examples("validation", tmp_path)
        == examples
    )


def test_a_task_knows_how_many_rows_are_published_beside_those_that_it_has(tmp_path):
    write_jsonl(tmp_path / "tea" / "validation.jsonl", ROWS[:3])
    task = a_task(source("owner/none"))
    rows = task.rows("validation", tmp_path)
    assert (len(rows), task.source.expected("validation")) == (3, 5)
    assert task.examples_of(rows, "validation") == task.examples("validation", tmp_path)


def test_a_split_that_is_not_published_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"There is no split 'train' of tea. Choose one of validation, test"
    ):
        a_task(source("owner/none")).examples("train", tmp_path)


def test_a_training_row_that_is_repeated_keeps_two_ids():
    task = a_task(source("owner/none"))
    ids = [example.id for example in task.examples_of([ROWS[0], ROWS[1], ROWS[0]], "train")]
    assert ids == ["0", "1", "0#2"]


@pytest.mark.parametrize("name", ["boolq", "multirc", "squad", "squad_v2", "cb", "record"])
def test_two_examples_of_one_id_are_refused_in_evaluation(name, tmp_path):
    rows = (FIXTURES / name / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    path = tmp_path / name / "validation.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join([*rows, rows[1]]) + "\n", encoding="utf-8")

    task = TASKS.get(name)
    assert len(task.examples("validation", FIXTURES)) == len(rows)
    with pytest.raises(DataError, match=f"Two examples of {name} have the id '.*' in split 'valid"):
        task.examples("validation", tmp_path)


def test_files_for_rows_that_come_with_python_are_refused_and_a_folder_without_them_is_not(
    tmp_path,
):
    task = a_task(BuiltIn(lambda split: WANTED))
    assert len(task.examples("validation", tmp_path)) == 5
    (tmp_path / "tea").mkdir()
    with pytest.raises(DataError, match=r"tea was given for a task whose rows come with Python"):
        task.examples("validation", tmp_path)


# ---- labels that are numbers, and labels that are hidden ----


def write_rows(folder: Path, split: str, *rows: dict) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{split}.jsonl").write_text(text)
    return folder


SIMILAR = {"sentence1": "Rain falls.", "sentence2": "It rains.", "idx": 0}


@pytest.mark.parametrize("label", [0, 5, 2.75])
def test_a_similarity_is_a_number_with_or_without_a_point(label, tmp_path):
    folder = write_rows(tmp_path, "validation", {**SIMILAR, "label": label})
    (row,) = TASKS.get("stsb").source.rows("validation", folder)
    assert row["label"] == label
    assert isinstance(row["label"], float)


@pytest.mark.parametrize("label", [-1, 5.01, -0.2, 10**400])
def test_a_similarity_out_of_range_is_refused_with_the_range(label, tmp_path):
    folder = write_rows(tmp_path, "validation", {**SIMILAR, "label": label})
    with pytest.raises(DataError, match=r"Line 1 of .*(a number from 0 to 5\.|Expected number)"):
        TASKS.get("stsb").source.rows("validation", folder)


@pytest.mark.parametrize("label", [True, "3.0", None])
def test_a_similarity_that_is_no_number_is_refused(label, tmp_path):
    folder = write_rows(tmp_path, "validation", {**SIMILAR, "label": label})
    with pytest.raises(DataError, match=r"has in 'label' .*Expected number, as in the hub's"):
        TASKS.get("stsb").source.rows("validation", folder)


def test_a_label_may_be_absent_where_it_is_hidden_and_nowhere_else(tmp_path):
    source = TASKS.get("stsb").source
    for split in ("validation", "test"):
        write_rows(tmp_path, split, SIMILAR, {**SIMILAR, "idx": 1, "label": None})
    assert [row["label"] for row in source.rows("test", tmp_path)] == [-1, -1]
    with pytest.raises(DataError, match="has no column 'label'"):
        source.rows("validation", tmp_path)

    # What is not hidden is not made up.
    write_rows(tmp_path, "test", {"sentence1": None, "sentence2": "It rains.", "idx": 0})
    with pytest.raises(DataError, match="has in 'sentence1' None"):
        source.rows("test", tmp_path)


@pytest.mark.parametrize("with_label", [True, False])
def test_parquet_files_of_a_hidden_split_are_read_with_or_without_labels(with_label, tmp_path):
    row = {**SIMILAR, **({"label": 2.5} if with_label else {})}
    table = pyarrow.Table.from_pylist([row])
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet")
    (read,) = TASKS.get("stsb").source.rows("test", tmp_path)
    assert read["label"] == (2.5 if with_label else -1)


def test_a_hidden_similarity_has_no_target():
    (first, _) = TASKS.get("stsb").examples("test", FIXTURES)
    assert first.targets == "<unk>"
