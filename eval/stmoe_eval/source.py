"""Sources of a task's rows: Python, the hub, or files of the user.

Files replace the hub's dataset, and are checked row by row like it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from huggingface_hub.errors import HfHubHTTPError
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from moe.checks import shown
from moe.data.folders import files_of
from moe.data.rows import read_rows
from moe.errors import DataError
from moe.parsing import to_record

if TYPE_CHECKING:
    import datasets

SPLITS = ("train", "validation", "test")

Row = Mapping[str, Any]
"""A row of a dataset: values by column."""

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
# Schema of a row

ColumnKinds = Mapping[str, Any]
"""The kind of each column that is read: `str`, `int` or `float`, `[kind]` for a list, or `{name:
kind}` for a struct. A struct of lists may also come as a list of structs: mirrors of the same
dataset differ here, and both become a struct of lists."""

HIDDEN_LABELS = (-1, "")
"""Placeholder for a label that the authors of a dataset keep secret."""


class Interval(NamedTuple):
    """All numbers from one to another, which a label may have."""

    least: float
    most: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"


LabelValues = Collection[Any] | Interval
"""The values that a label may have."""


@dataclass(frozen=True)
class Schema:
    """What a row must be.

    Attributes:
        columns: Kinds of the columns that are read.
        labels: By column, the values that a label may have.
        hidden_values: By column, the value that replaces a missing label where labels are hidden.
    """

    columns: ColumnKinds
    labels: Mapping[str, LabelValues] = field(default_factory=dict)
    hidden_values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def advice(self) -> str:
        """What to do about a row that does not match."""
        return f"Expected {', '.join(self.columns)}, as in the hub's dataset."

    @cached_property
    def _row_type(self) -> Any:
        return _row_type(self.columns)

    def checked(self, row: Any, where: str, *, hidden: bool) -> Row:
        """Returns the columns of a row that are read, with missing hidden labels filled in.

        Raises:
            DataError: When a column is missing, a value is of another kind, or a label is not one.
        """
        if hidden:
            given = {name: value for name, value in row.items() if value is not None}
            row = {**row, **self.hidden_values, **given}
        fitted = to_record(self._row_type, row, where=where, advice=self.advice)
        for column, allowed in self.labels.items():
            label = fitted[column]
            if label not in allowed and not (hidden and label in HIDDEN_LABELS):
                expected = str(allowed)
                if not isinstance(allowed, Interval):
                    expected = f"one of {', '.join(map(repr, allowed))}"
                raise DataError(
                    f"{where}: {column} is {shown(label)}; expected {expected}. Map your labels to "
                    "those of the hub's dataset, and take rows with a hidden label out of this split."
                )
        return fitted


def _row_type(columns: ColumnKinds) -> Any:
    """Returns columns as a type that pydantic validates; other columns are left out."""
    types: dict[str, Any] = {}
    for name, kind in columns.items():
        types[name] = _type_of(kind)
    return TypedDict("Row", types)  # type: ignore[operator]


def _type_of(kind: Any) -> Any:
    if isinstance(kind, list):
        return list[_type_of(kind[0])]  # type: ignore[misc]
    if isinstance(kind, Mapping):
        return Annotated[_row_type(kind), BeforeValidator(partial(_to_struct, list(kind)))]
    return Annotated[float, Field(allow_inf_nan=False)] if kind is float else kind


def _to_struct(names: Sequence[str], value: Any) -> Any:
    """Returns a list of structs as a struct of lists, and anything else as it is."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    return {name: [item.get(name) for item in value] for name in names}


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
            folder: Unused; applies to data on the hub, as does the next one.
            revision: Unused.
        """
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
        columns: See `Schema`, as of the next ones.
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

    @cached_property
    def schema(self) -> Schema:
        """What a row must be."""
        return Schema(self.columns, self.labels, self.hidden_values)

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
        return split in self.splits and folder is not None and bool(_file_forms(folder, split))

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
        return read_files(folder, split, self.schema, hidden=split in self.hidden)

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

    def _checked_dataset(self, dataset: "datasets.Dataset", split: str, revision: str) -> list[Row]:
        """Returns the rows of a dataset of the hub, all of them and as expected."""
        # A different number of rows means a different dataset.
        name = self._name_of(split, revision)
        if len(dataset) != self.counts[split]:
            raise DataError(
                f"{name} has {len(dataset):,} rows; expected {self.counts[split]:,}. The dataset has changed, or it "
                "is a different one. Select a branch or commit with --revision, or download the dataset to "
                f"FOLDER/TASK/{split}.jsonl or .parquet with --data FOLDER, which accepts any number of rows."
            )

        rows: list[Row] = []
        for number, row in enumerate(dataset, start=1):
            where = f"{name}, row {number}"
            rows.append(self.schema.checked(row, where, hidden=split in self.hidden))
        return rows

    def _name_of(self, split: str, revision: str | None = None) -> str:
        """Returns a description of the dataset requested from the hub."""
        hub_split = self.hub_splits.get(split, split)
        at = f" at {revision}" if revision else ""
        return f"{self.repository} (config {self.config}, split {hub_split}{at})"


# ---------------------------------------------------------------------------
# Files of the user


def read_files(folder: Path, split: str, schema: "Schema", *, hidden: bool) -> list[Row]:
    """Returns the rows of the files of a split, which are checked.

    Args:
        folder: Folder of a task.
        split: Which.
        schema: What a row must be.
        hidden: Whether labels may be hidden.

    Raises:
        DataError: When there is no file or no row, or a row is invalid.
    """
    rows: list[Row] = []
    files = find_files(folder, split, schema.columns)
    for path in files:
        for where, row in read_rows(path, advice=schema.advice, columns=schema.columns):
            rows.append(schema.checked(row, where, hidden=hidden))
    if not rows:
        names = ", ".join(path.name for path in files)
        raise DataError(
            f"The files of split {split!r} in {folder} contain no rows ({names}). Give at least one."
        )
    return rows


def find_files(folder: Path, split: str, columns: Collection[str]) -> list[Path]:
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
        f"{', '.join(columns)}"
    )
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}. Create it and add {expected}.")
    forms = _file_forms(folder, split)
    if not forms:
        names = sorted(path.name for path in folder.iterdir())
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
