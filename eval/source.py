"""Where the rows of tasks come from: Python itself, a dataset on the hub, or files of the user in
its place.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HfHubHTTPError

from eval.row_schema import Columns, describe, fit_row, require_columns, require_label
from eval.task import SPLITS, Row
from moe import DataError
from moe.parsing import read_json_lines

MAIN = "main"
EXPORT = "refs/convert/parquet"
"""The branch on which the hub keeps a copy of a dataset in parquet: CONFIG/SPLIT/0000.parquet."""

_LOADING_ERRORS: tuple[type[Exception], ...] = (
    DatasetsError,
    *HfHubHTTPError.__bases__,  # OSError, and the HTTPError of whichever client the hub's library uses
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True)
class BuiltIn:
    """Rows that every Python installation carries.

    Attributes:
        read: Returns the rows of a split.
        splits: Those that there are.
        hidden: Those whose labels nobody knows.
    """

    read: Callable[[str], list[Row]]
    splits: Sequence[str] = SPLITS
    hidden: Sequence[str] = ()

    def expected(self, split: str) -> int | None:
        """Returns None: the number of rows depends on the version of Python."""
        return None

    def rows(
        self, split: str, folder: Path | None = None, revision: str | None = None
    ) -> list[Row]:
        """Returns the rows of a split; `revision` is about data of the hub and says nothing of
        them.

        Raises:
            DataError: When there are files for them in `folder`.
        """
        if folder is not None and folder.exists():
            raise DataError(
                f"{folder} was given for a task whose rows come with Python. Take it away."
            )
        return list(self.read(split))


@dataclass(frozen=True)
class HubData:
    """A dataset on the hub. Each row is checked; the number of rows of a split too.

    Attributes:
        repository: `owner/name`.
        config: Of the repository.
        counts: Rows of each split, in the order of SPLITS.
        columns: The kinds of the columns that are read.
        labels: By column, the values that there are.
        hidden: Splits whose labels the authors keep to themselves.
        hub_splits: The hub's name of a split, where it is another.
        revisions: Tried one after the other when the user names none.
    """

    repository: str
    config: str
    counts: Mapping[str, int]
    columns: Columns
    labels: Mapping[str, Collection[Any]] = field(default_factory=dict)
    hidden: Sequence[str] = ()
    hub_splits: Mapping[str, str] = field(default_factory=dict)
    revisions: tuple[str, ...] = (MAIN, EXPORT)

    @property
    def splits(self) -> Sequence[str]:
        """Those that there are."""
        return tuple(self.counts)

    def expected(self, split: str) -> int | None:
        """Returns the number of rows on the hub; files of the user may have another."""
        return self.counts[split]

    def rows(
        self, split: str, folder: Path | None = None, revision: str | None = None
    ) -> list[Row]:
        """Returns the rows of a split.

        Args:
            split: Which; one of `splits`.
            folder: Holds SPLIT.jsonl, SPLIT.parquet or a folder SPLIT of such files, with the
                columns of the hub's dataset; any number of rows. None for the hub.
            revision: Branch or commit of the repository; None for `revisions`.

        Raises:
            DataError: When they cannot be had, there are none, or one is not what is expected; on
                the hub also when there are more or fewer than `counts` says.
        """
        if folder is None:
            return self._from_hub(split, revision)
        found = [self._checked(row, split, where) for where, row in self._read_files(folder, split)]
        if not found:
            raise DataError(
                f"The files of split {split!r} in {folder} hold no row. Give at least one."
            )
        return found

    def _from_hub(self, split: str, revision: str | None) -> list[Row]:
        """Returns the rows of the first revision that can be loaded."""
        failures = []
        for place in (revision,) if revision else self.revisions:
            try:
                dataset = self._load(split, place)
            except ConnectionError as error:
                raise DataError(
                    f"{self._named(split, place)} cannot be loaded, since the hub is not reachable: {error}. Connect "
                    "to the network (HF_HUB_OFFLINE and HF_DATASETS_OFFLINE must not be 1), or give a folder of files "
                    f"in its place: --data FOLDER with FOLDER/TASK/{split}.jsonl or .parquet."
                ) from error
            except _LOADING_ERRORS as error:
                failures.append(f"{place}: {error}")
                continue
            return self._checked_dataset(dataset, split, place)
        raise DataError(
            f"{self._named(split)} cannot be loaded. "
            + " ".join(f"At {failure}." for failure in failures)
            + " Name "
            "another branch or commit with --revision, or give a folder of files in its place: --data FOLDER with "
            f"FOLDER/TASK/{split}.jsonl or .parquet."
        )

    def _load(self, split: str, revision: str) -> datasets.Dataset:
        """Returns a split as `datasets` has it; on EXPORT by the names of its files, which say all."""
        name = self.hub_splits.get(split, split)
        which: dict[str, Any] = {"name": self.config}
        if revision == EXPORT:
            which = {"data_files": {name: f"{self.config}/{name}/*.parquet"}}
        dataset = datasets.load_dataset(
            self.repository, split=name, revision=revision, verification_mode="no_checks", **which
        )
        assert isinstance(dataset, datasets.Dataset)  # one split, not streamed
        return dataset

    def _checked_dataset(self, dataset: datasets.Dataset, split: str, revision: str) -> list[Row]:
        """Returns the rows of a dataset of the hub, all of them and as expected."""
        named = self._named(split, revision)
        require_columns(dataset.column_names, self.columns, named)
        if len(dataset) != self.counts[split]:
            raise DataError(
                f"{named} has {len(dataset):,} rows; expected {self.counts[split]:,}. The dataset has changed, or is "
                "another. Name the branch or commit that you mean with --revision; or download it and give it as "
                f"FOLDER/TASK/{split}.jsonl or .parquet with --data FOLDER, where any number of rows is taken."
            )
        rows = dataset.select_columns(list(self.columns))
        return [
            self._checked(row, split, f"Row {number} of {named}")
            for number, row in enumerate(rows, 1)
        ]

    def _named(self, split: str, revision: str | None = None) -> str:
        """Returns what was asked of the hub, in words."""
        at = f" at {revision}" if revision else ""
        return f"{self.repository} (config {self.config}, split {self.hub_splits.get(split, split)}{at})"

    def _read_files(self, folder: Path, split: str) -> Iterator[tuple[str, Any]]:
        """Yields the rows of the user's files, each with its place in words."""
        for path in find_files(folder, split, self.columns):
            if path.suffix == ".jsonl":
                yield from _read_jsonl(path)
            else:
                yield from _read_parquet(path, self.columns)

    def _checked(self, row: Any, split: str, where: str) -> Row:
        """Returns a row that is as expected."""
        fitted = fit_row(row, self.columns, where)
        for column, allowed in self.labels.items():
            require_label(fitted[column], allowed, column, where, hidden=split in self.hidden)
        return fitted


def find_files(folder: Path, split: str, columns: Columns) -> list[Path]:
    """Returns the files of a split in `folder`: SPLIT.jsonl, SPLIT.parquet, or those in the folder
    SPLIT, in order.

    Raises:
        DataError: When there is none, or more than one of these.
    """
    expected = f"{split}.jsonl, {split}.parquet or a folder {split} of such files, with {describe(columns)}"
    try:
        return _find_files(folder, split, expected)
    except OSError as error:
        raise DataError(
            f"The folder {folder} cannot be read: {error.strerror or error}. Expected {expected}."
        ) from error


def _find_files(folder: Path, split: str, expected: str) -> list[Path]:
    """Returns the files of a split; see `find_files`."""
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}. Make it, and put into it {expected}.")
    found = [
        path for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet") if path.is_file()
    ]
    for suffix in ("jsonl", "parquet"):
        shards = sorted((folder / split).glob(f"*.{suffix}"))
        found += [folder / split / f"*.{suffix}"] if shards else []
    if not found:
        there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise DataError(
            f"{folder} has no rows of split {split!r}; it holds {there}. Expected {expected}."
        )
    if len(found) > 1:
        names = " and ".join(str(path.relative_to(folder)) for path in found)
        raise DataError(
            f"{folder} has the split {split!r} more than once: {names}. Keep one of them."
        )
    return sorted(found[0].parent.glob(found[0].name))


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the objects of a file, one on each line; empty lines are none."""
    advice = "Write one object on each line; a broken last line is often a copy that was cut off."
    for number, row in read_json_lines(path, advice=advice):
        yield f"Line {number} of {path}", row


def _read_parquet(path: Path, columns: Columns) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a file."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            require_columns(names, columns, str(path))
            for name in columns:
                if names.count(name) > 1:
                    raise DataError(
                        f"{path} has the column {name!r} {names.count(name)} times. Keep one of them."
                    )
            number = 0
            for batch in file.iter_batches(columns=list(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield f"Row {number} of {path}", row
    except DataError:
        raise
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
    ) as error:  # a text that is no UTF-8 is a ValueError
        raise DataError(
            f"{path} cannot be read as parquet: {error}. Write or download it again."
        ) from error
