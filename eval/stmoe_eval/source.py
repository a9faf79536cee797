"""Sources of a task's rows: Python, the hub, or files of the user.

Files replace the hub's dataset, and are checked row by row like it (row_schema.py).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.parquet
from huggingface_hub.errors import HfHubHTTPError

from moe.data.folders import files_of
from moe.data.rows import read_parquet
from moe.errors import DataError
from moe.parsing import read_json_lines, reading
from stmoe_eval.row_schema import (
    ColumnKinds,
    LabelValues,
    fit_row,
    format_columns,
    require_columns,
    require_label,
)
from stmoe_eval.task import SPLITS, Row

if TYPE_CHECKING:
    import datasets

MAIN = "main"
EXPORT = "refs/convert/parquet"
"""The branch on which the hub keeps a copy of a dataset in parquet: CONFIG/SPLIT/0000.parquet."""

# OSError, and the HTTPError of whichever client the hub's library uses.
_HUB_ERRORS = HfHubHTTPError.__bases__


def _loading_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions of `datasets`, which is imported only when loading from the hub."""
    from datasets.exceptions import DatasetsError

    return (DatasetsError, *_HUB_ERRORS, RuntimeError, ValueError)


# ---------------------------------------------------------------------------
# Rows of Python


@dataclass(frozen=True)
class BuiltIn:
    """Rows that a function returns, such as those that come with every Python installation.

    Attributes:
        read: Returns the rows of a split.
        splits: Splits that have rows.
        hidden: Splits whose labels are not public.
        origin: Origin of the rows, for a list of tasks.
    """

    read: Callable[[str], list[Row]]
    splits: Sequence[str] = SPLITS
    hidden: Sequence[str] = ()
    origin: str = "this Python installation"

    def expected(self, split: str) -> int | None:
        """Returns None: no published number of rows is known."""
        return None

    def is_local(self, split: str, folder: Path | None = None) -> bool:
        """Returns whether the rows of a split can be had without a network: if there are any."""
        return split in self.splits

    def rows(
        self, split: str, folder: Path | None = None, revision: str | None = None
    ) -> list[Row]:
        """Returns the rows of a split.

        Args:
            split: One of `splits`.
            folder: Must not exist: these rows are not read from files.
            revision: Unused; applies to data on the hub.

        Raises:
            DataError: When there are files for them in `folder`.
        """
        if folder is not None and folder.exists():
            raise DataError(
                f"{folder} was given for a task whose rows come with Python. Remove it."
            )
        return list(self.read(split))


# ---------------------------------------------------------------------------
# Rows of the hub


@dataclass(frozen=True)
class HubData:
    """A dataset on the hub. Each row is checked; the number of rows of a split too.

    Attributes:
        repository: `owner/name`.
        config: Configuration of the dataset.
        counts: Rows of each split, in the order of SPLITS.
        columns: Kinds of the columns that are read.
        labels: By column, the values that a label may have.
        hidden: Splits whose labels are not public.
        hidden_values: By column, the value that replaces a missing label in a row of such a split.
        hub_splits: The hub's name of a split, if different.
        revisions: Tried one after the other if the user names none.
    """

    repository: str
    config: str
    counts: Mapping[str, int]
    columns: ColumnKinds
    labels: Mapping[str, LabelValues] = field(default_factory=dict)
    hidden: Sequence[str] = ()
    hidden_values: Mapping[str, Any] = field(default_factory=dict)
    hub_splits: Mapping[str, str] = field(default_factory=dict)
    revisions: tuple[str, ...] = (MAIN, EXPORT)

    @property
    def splits(self) -> Sequence[str]:
        """Splits that have rows."""
        return tuple(self.counts)

    @property
    def origin(self) -> str:
        """Origin of the rows, for a list of tasks."""
        return f"{self.repository} {self.config}"

    def expected(self, split: str) -> int | None:
        """Returns the number of rows on the hub; files of the user may have another."""
        return self.counts[split]

    def is_local(self, split: str, folder: Path | None = None) -> bool:
        """Returns whether the rows of a split are in the files of `folder`."""
        return split in self.splits and folder is not None and has_files(folder, split)

    def rows(
        self, split: str, folder: Path | None = None, revision: str | None = None
    ) -> list[Row]:
        """Returns the rows of a split.

        Args:
            split: One of `splits`.
            folder: Holds SPLIT.jsonl, SPLIT.parquet or a folder SPLIT of such files, with the
                columns of the hub's dataset; any number of rows. None for the hub.
            revision: Branch or commit of the repository; None for `revisions`.

        Raises:
            DataError: When rows cannot be loaded, a split has none, or one does not fit `columns` and
                `labels`; on the hub also when their number is not that of `counts`.
        """
        if folder is None:
            return self._rows_from_hub(split, revision)
        hidden_values = self._hidden_values(split)
        return read_files(folder, split, self.columns, self.labels, hidden_values=hidden_values)

    def _rows_from_hub(self, split: str, revision: str | None) -> list[Row]:
        """Returns the rows of the first revision that can be loaded."""
        # One mirror may lack what another has; stop only if there is no network.
        revisions = (revision,) if revision else self.revisions
        failures: list[str] = []
        for each in revisions:
            try:
                dataset = self._load(split, each)
            except ConnectionError as error:
                raise DataError(
                    f"{self._name_of(split, each)} cannot be loaded, since the hub is not "
                    f"reachable: {error}. Connect to the network (HF_HUB_OFFLINE and "
                    "HF_DATASETS_OFFLINE must not be 1), or give a folder of files in its place: "
                    f"--data FOLDER with FOLDER/TASK/{split}.jsonl or .parquet."
                ) from error
            except _loading_errors() as error:
                failures.append(f"At {each}: {error}.")
                continue
            return self._checked_dataset(dataset, split, each)

        raise DataError(
            f"{self._name_of(split)} cannot be loaded. {' '.join(failures)} Name another branch or "
            "commit with --revision, or give a folder of files in its place: --data FOLDER with "
            f"FOLDER/TASK/{split}.jsonl or .parquet."
        )

    def _load(self, split: str, revision: str) -> "datasets.Dataset":
        """Returns a split as a `datasets` object."""
        import datasets

        hub_split = self.hub_splits.get(split, split)

        # On EXPORT the names of the files are enough.
        config: dict[str, Any] = {"name": self.config}
        if revision == EXPORT:
            config = {"data_files": {hub_split: f"{self.config}/{hub_split}/*.parquet"}}
        dataset = datasets.load_dataset(
            self.repository,
            split=hub_split,
            revision=revision,
            verification_mode="no_checks",
            **config,
        )
        assert isinstance(dataset, datasets.Dataset), "one split, not streamed"
        return dataset

    def _hidden_values(self, split: str) -> Mapping[str, Any] | None:
        return self.hidden_values if split in self.hidden else None

    def _checked_dataset(self, dataset: "datasets.Dataset", split: str, revision: str) -> list[Row]:
        """Returns the rows of a dataset of the hub, all of them and as expected."""
        # A different number of rows means a different dataset.
        name = self._name_of(split, revision)
        require_columns(dataset.column_names, self.columns, name)
        if len(dataset) != self.counts[split]:
            raise DataError(
                f"{name} has {len(dataset):,} rows; expected {self.counts[split]:,}. The dataset has changed, or it "
                "is a different one. Select a branch or commit with --revision, or download the dataset to "
                f"FOLDER/TASK/{split}.jsonl or .parquet with --data FOLDER, which accepts any number of rows."
            )

        rows: list[Row] = []
        hidden_values = self._hidden_values(split)
        for number, row in enumerate(dataset.select_columns(list(self.columns)), start=1):
            where = f"Row {number} of {name}"
            rows.append(_checked(row, self.columns, self.labels, where, hidden_values))
        return rows

    def _name_of(self, split: str, revision: str | None = None) -> str:
        """Returns a description of the dataset requested from the hub."""
        hub_split = self.hub_splits.get(split, split)
        at = f" at {revision}" if revision else ""
        return f"{self.repository} (config {self.config}, split {hub_split}{at})"


# ---------------------------------------------------------------------------
# Files of the user


class _FileRow(NamedTuple):
    """A row of a file, and its location, in words."""

    row: Any
    where: str


def read_files(
    folder: Path,
    split: str,
    columns: ColumnKinds,
    labels: Mapping[str, LabelValues],
    *,
    hidden_values: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Returns the rows of the files of a split, which are checked.

    Args:
        folder: Folder of a task.
        split: Which.
        columns: Kinds of the columns.
        labels: By column, the values that a label may have.
        hidden_values: If labels may be hidden, the value of a hidden label, by column; None if
            every row has its label.

    Raises:
        DataError: When there is no file or no row, or a row is invalid.
    """
    # Files from a benchmark's own site have no column for hidden values.
    required = {name: columns[name] for name in columns if name not in (hidden_values or {})}
    rows: list[Row] = []
    files = find_files(folder, split, required)
    for path in files:
        is_lines = path.suffix == ".jsonl"
        file_rows = _read_jsonl(path) if is_lines else _read_parquet(path, required, columns)
        for row, where in file_rows:
            rows.append(_checked(row, columns, labels, where, hidden_values))
    if not rows:
        names = ", ".join(path.name for path in files)
        raise DataError(
            f"The files of split {split!r} in {folder} contain no rows ({names}). Give at least one."
        )
    return rows


def _checked(
    row: Any,
    columns: ColumnKinds,
    labels: Mapping[str, LabelValues],
    where: str,
    hidden_values: Mapping[str, Any] | None,
) -> Row:
    """Returns a validated row; missing hidden labels are filled in."""
    if hidden_values and isinstance(row, Mapping):
        row = dict(row)
        for name, value in hidden_values.items():
            if row.get(name) is None:
                row[name] = value

    fitted = fit_row(row, columns, where)
    is_hidden = hidden_values is not None
    for column, allowed in labels.items():
        require_label(fitted[column], allowed, column, where, hidden=is_hidden)
    return fitted


def find_files(folder: Path, split: str, columns: ColumnKinds) -> list[Path]:
    """Returns the files of a split in `folder`, in order.

    They are SPLIT.jsonl, SPLIT.parquet, those in the folder SPLIT, or those of the split of a downloaded
    dataset.

    Args:
        folder: Folder of a task.
        split: Which.
        columns: Named in the message when there are none.

    Raises:
        DataError: When there is none, or more than one of these.
    """
    expected = (
        f"{split}.jsonl, {split}.parquet or a folder {split} of such files, with "
        f"{format_columns(columns)}"
    )
    try:
        if not folder.is_dir():
            raise DataError(f"There is no folder {folder}. Create it and add {expected}.")
        forms = _file_forms(folder, split)
        names = [] if forms else sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise DataError(
            f"The folder {folder} cannot be read: {error.strerror or error}. Expected {expected}."
        ) from error

    if not forms:
        raise DataError(
            f"{folder} has no rows of split {split!r}; it holds {', '.join(names) or 'nothing'}. "
            f"Expected {expected}."
        )
    if len(forms) > 1:
        names = [str(files[0].relative_to(folder)) for files in forms]
        raise DataError(
            f"{folder} has the split {split!r} more than once: {' and '.join(names)}. Keep one of "
            "them."
        )
    return forms[0]


def has_files(folder: Path, split: str) -> bool:
    """Returns whether there are files of a split in `folder`, in any format."""
    try:
        return bool(_file_forms(folder, split))
    except OSError:
        return False


def _file_forms(folder: Path, split: str) -> list[list[Path]]:
    """Returns the files of each form in which a split is there."""
    forms: list[list[Path]] = []
    for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet"):
        if path.is_file():
            forms.append([path])
    for pattern in ("*.jsonl", "*.parquet"):
        files = sorted((folder / split).glob(pattern))
        if files:
            forms.append(files)
    if not forms and folder.is_dir():
        with suppress(DataError):  # no such split
            files = files_of(Path(f"{folder}:{split}"))
            forms += [files] if all(path.suffix in (".jsonl", ".parquet") for path in files) else []
    return forms


def _read_jsonl(path: Path) -> Iterator[_FileRow]:
    """Yields the objects of a file, one per line; empty lines are skipped."""
    advice = "Write one object on each line; a broken last line is often a copy that was cut off."
    for number, row in read_json_lines(path, advice=advice):
        yield _FileRow(row, f"Line {number} of {path}")


def _read_parquet(
    path: Path, required: ColumnKinds, columns: Collection[str]
) -> Iterator[_FileRow]:
    """Yields the rows of a file.

    Args:
        path: The file.
        required: Columns that it must have.
        columns: Columns that are read, where they are there.
    """
    advice = "Write or download it again."
    with reading(path, advice=advice, problem="cannot be read as Parquet"):
        names = pyarrow.parquet.read_schema(path).names
    require_columns(names, required, str(path))
    for where, row in read_parquet(path, advice=advice, columns=columns):
        yield _FileRow(dict(row), where)
