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

from moe import DataError
from stmoe_eval.scores.metrics import ACCURACY
from stmoe_eval.source import EXPORT, MAIN, HubData
from stmoe_eval.task import TASKS, Task
from stmoe_eval.text.postprocess import label_index
from tests.eval.rows import FIXTURES, write_parquet

COLUMNS = {"premise": str, "idx": int, "label": int, "answers": {"text": [str], "start": [int]}}


def make_row(i: int) -> dict:
    answers = {"text": ["a", f"b{i}"], "start": [i, 7]}
    return {"premise": f"Tea {i}.", "idx": i, "label": i % 2, "answers": answers, "more": 1}


ROWS = [make_row(i) for i in range(5)]
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


def write_jsonl(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def repository(folder: Path, rows=ROWS, config="tea") -> HubData:
    """A repository with parquet on its main branch, whose card names the config and the split."""
    write_parquet(folder / "data" / "dev-00000-of-00001.parquet", rows)
    card = README.format(config=config, path="data/dev-*")
    (folder / "README.md").write_text(card, encoding="utf-8")
    return source(folder)


def source(folder: Path | str, **changes) -> HubData:
    fields = {"hub_splits": {"validation": "dev"}, "labels": {"label": range(2)}}
    fields |= {"hidden": ("test",), **changes}
    return HubData(str(folder), "tea", {"validation": 5, "test": 5}, COLUMNS, **fields)


def read(folder: Path, split="validation"):
    """Returns the rows that take the place of the hub's."""
    return source("owner/none").rows(split, folder)


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
        *("config tea, split dev", "At main: Dataset scripts are no longer supported"),
        *(f"At {EXPORT}: ", "--revision", "--data FOLDER with FOLDER/TASK/validation.jsonl"),
    ):
        assert part in str(error.value)


def test_an_unreachable_hub_is_one_message_with_a_way_out():
    with pytest.raises(DataError, match=r"tea, split dev at main\) .* not reach.*HF_HUB_OFFLINE"):
        source("owner/none").rows("validation")


LAST = {**ROWS[4], "label": 2}
UNLABELLED = [{name: row[name] for name in ("premise", "idx", "answers")} for row in ROWS]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:4], r"has 4 rows; expected 5.*--revision.*--data FOLDER"),
        ([*ROWS, ROWS[0]], r"has 6 rows; expected 5"),
        (UNLABELLED, r"label is missing"),
        ([*ROWS[:4], LAST], r"config tea, split dev at main\), row 5: label is 2; .* 0, 1"),
    ],
)
def test_other_rows_on_the_hub_are_refused_with_their_place(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        repository(tmp_path / "repository", rows).rows("validation")


# ---- files in its place ----


def write_form(folder: Path, form: str, rows) -> None:
    """Writes the validation split in one of FORMS, a row in each shard."""
    write = write_jsonl if form.endswith("jsonl") else write_parquet
    if form == "downloaded":
        write(folder / "data/validation-00000-of-00001.parquet", rows)
    elif form.startswith("shards"):
        for i, row in enumerate(rows):
            write(folder / f"validation/{i}.{form.split()[-1]}", [row])
    else:
        write(folder / f"validation.{form}", rows)


FORMS = ("jsonl", "shards of jsonl", "shards of parquet", "downloaded")


@pytest.mark.parametrize("form", FORMS)
def test_files_take_the_place_of_the_hub_with_any_number_of_rows(tmp_path, form):
    write_form(tmp_path / "good", form, ROWS[:3])
    assert read(tmp_path / "good") == WANTED[:3]
    found = source("owner/none")
    assert found.is_local("validation", tmp_path / "good")
    for split, folder in (("validation", None), ("test", tmp_path / "good"), ("train", tmp_path)):
        assert not found.is_local(split, folder)

    write_form(tmp_path / "bad", form, UNLABELLED)
    with pytest.raises(DataError, match=f"{tmp_path}.* 1: label is missing.*premise, idx"):
        read(tmp_path / "bad")


@pytest.mark.parametrize(
    ("change", "noun"),
    [
        ({"label": 2}, "label is 2; expected one of 0, 1"),
        ({"label": -1}, "label is -1"),  # not hidden in this split
        ({"label": True}, "label is True"),
        ({"premise": "Tea \ud83c"}, "hex escape"),
        ({"answers": "a"}, "answers is 'a'"),
        ({"answers": {"text": ["a"]}}, "answers.start is missing"),
        ({"answers": [{"text": "a"}]}, "answers.start.0 is None"),
    ],
)
def test_a_value_of_another_kind_is_named_with_its_place(tmp_path, change, noun):
    """Empty lines are no rows, but are counted."""
    path = tmp_path / "validation.jsonl"
    path.write_text(f"\n{json.dumps(ROWS[1])}\n\n{json.dumps({**ROWS[0], **change})}\n")
    with pytest.raises(DataError, match=rf"validation\.jsonl, line 4: .*{noun}"):
        read(tmp_path)


def test_a_parquet_file_of_other_types_is_one_message(tmp_path):
    table = pyarrow.Table.from_pylist(WANTED)
    raw = pyarrow.array([b"\xff"] * 5)
    for column, values, message in (
        ("premise", raw, r"row 1: premise is b'\\xff'"),
        ("premise", raw.cast(pyarrow.string(), safe=False), "cannot be read as Parquet: 'utf-8'"),
        ("label", pyarrow.array([1.0] * 5), "row 1: label is 1.0"),
    ):
        changed = table.set_column(table.column_names.index(column), column, values)
        pyarrow.parquet.write_table(changed, tmp_path / "validation.parquet")
        with pytest.raises(DataError, match=message):
            read(tmp_path)


def test_a_folder_without_readable_rows_is_one_message(tmp_path):
    with pytest.raises(DataError, match=r"no folder .*none. Create it .* validation.jsonl"):
        read(tmp_path / "none")
    (tmp_path / "validation.jsonl").mkdir()
    with pytest.raises(DataError, match=r"no rows of split 'validation'; it holds validation\.jso"):
        read(tmp_path)
    write_jsonl(tmp_path / "empty/validation.jsonl", [])
    with pytest.raises(DataError, match=r"in .* contain no rows \(validation\.jsonl\)"):
        read(tmp_path / "empty")
    write_form(tmp_path / "two", "jsonl", ROWS)
    write_form(tmp_path / "two", "shards of parquet", ROWS)
    with pytest.raises(DataError, match=r"once: validation.jsonl and validation/0.parquet. Keep"):
        read(tmp_path / "two")


# ---- tasks ----


def a_task(data) -> Task:
    def preprocess(row):
        targets = ["no", "yes"][row["label"]]
        return [{"idx": row["idx"], "inputs": row["premise"], "targets": targets}]

    return Task(
        name="tea",
        version=1,
        description="Tea.",
        licence="CC0-1.0",
        source=data,
        preprocess=preprocess,
        postprocess=label_index(("no", "yes")),
        metrics=(ACCURACY,),
        ids=("idx",),
    )


def test_a_task_and_its_variants_read_the_folder_of_its_name(tmp_path):
    write_jsonl(tmp_path / "tea" / "validation.jsonl", ROWS[:3])
    task = a_task(source("owner/none"))
    examples = task.examples("validation", tmp_path)
    assert [example.targets for example in examples] == ["no", "yes", "no"]
    varied = replace(task, name="tea.cold", variant_of="tea")
    assert varied.examples("validation", tmp_path) == examples

    # In training a repeated row has an id of its own.
    repeated = task.examples_of([ROWS[0], ROWS[1], ROWS[0]], "train")
    assert [example.id for example in repeated] == ["0", "1", "0#2"]
    with pytest.raises(DataError, match=r"no split 'train' of tea. Choose one of validation, test"):
        task.examples("train", tmp_path)


def test_two_examples_of_one_id_are_refused_in_evaluation(tmp_path):
    name = "multirc"
    rows = (FIXTURES / name / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    path = tmp_path / name / "validation.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join([*rows, rows[1]]) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"Two examples of {name} have the id '.*' in split 'valid"):
        TASKS.get(name).examples("validation", tmp_path)


# ---- labels that are numbers, and labels that are hidden ----


SIMILAR = {"sentence1": "Rain falls.", "sentence2": "It rains.", "idx": 0}
STSB = TASKS.get("stsb").source


def test_a_label_may_be_absent_where_it_is_hidden_and_nowhere_else(tmp_path):
    for split in ("validation", "test"):
        rows = [SIMILAR, {**SIMILAR, "idx": 1, "label": None}]
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    assert [row["label"] for row in STSB.rows("test", tmp_path)] == [-1, -1]
    with pytest.raises(DataError, match="label is missing"):
        STSB.rows("validation", tmp_path)

    # What is not hidden is not made up, and a similarity lies in its range.
    write_jsonl(tmp_path / "test.jsonl", [{**SIMILAR, "sentence1": None}])
    with pytest.raises(DataError, match="sentence1 is None"):
        STSB.rows("test", tmp_path)
    for label, message in ((5.01, r"a number from 0 to 5\."), (True, "label is True")):
        write_jsonl(tmp_path / "validation.jsonl", [{**SIMILAR, "label": label}])
        with pytest.raises(DataError, match=rf"line 1: .*{message}"):
            STSB.rows("validation", tmp_path)
