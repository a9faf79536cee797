"""A trace on disk: a Parquet table with a row for each token and a column for each sparse layer.

Comes after `recorder`, whose rows it writes as they arrive. In a row of the encoder, the columns of
the decoder are null, and the other way round; the description of the trace and its statistics are in
the metadata of the file:

    polars.read_parquet("runs/trace/trace.parquet").group_by("domain", "stack").len()
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from moe.checksums import refuse_damage, write_sums
from moe.errors import DataError
from moe.files import register_folder_kind, whole_folder
from moe.parsing import parse_json, read_record, reading, to_json, to_record
from moe.sparse.editing import STACKS, LayerKey
from moe.sparse.stats import RouterStats
from moe.tracing.recorder import Provenance, Recording, TracedBatch
from moe.tracing.trace import CHOICES, FORMAT_VERSION, Trace, TraceFacts, trace_from

TRACE_FILE = "trace.parquet"

# Files of format 1, which is still read.
_OLD_FACTS = "trace.json"
_OLD_TENSORS = "trace.safetensors"
TRACE = register_folder_kind(
    "trace", markers=[TRACE_FILE, _OLD_FACTS], parts=[TRACE_FILE, _OLD_FACTS, _OLD_TENSORS]
)

_HEADER = "stmoe"  # key of the metadata
GROUP_ROWS = 65_536  # that are written at once
_ADVICE = "Record it again: `stmoe inspect record`."


# ---------------------------------------------------------------------------
# Write


def record_to_folder(
    model: PreTrainedModel,
    batches: Iterable[TracedBatch],
    folder: Path,
    *,
    num_best: int = 0,
    provenance: Provenance = Provenance(),  # noqa: B008  an immutable tuple
) -> TraceFacts:
    """Writes the routing of every token of the batches atomically, and returns its description.

    Memory holds the rows of some 65,536 tokens, however many there are. An earlier trace in the
    folder is replaced.

    Args:
        model: The model; evaluated, its training mode is restored.
        batches: Examples; see `traced_batches`.
        folder: Where to.
        num_best: M: the experts of highest probability that are kept with their probabilities.
        provenance: Where the trace comes from.

    Raises:
        ConfigError: When `num_best` is not between 0 and the number of experts.
        DataError: When there is no example, a batch has no labels or has segments, or the folder
            holds something other than a trace.
    """
    recording = Recording(model, num_best=num_best)
    with whole_folder(folder, kind=TRACE) as partial:
        with ExitStack() as files:
            writer = None
            for table in _row_groups(recording, batches):
                if writer is None:
                    file = pq.ParquetWriter(partial / TRACE_FILE, table.schema, compression="zstd")
                    writer = files.enter_context(file)
                writer.write_table(table)

            # Sums over all batches come last.
            facts = recording.facts(provenance)
            stats = {}
            for (stack, layer), of_layer in recording.stats.items():
                values = {name: value.tolist() for name, value in of_layer._asdict().items()}
                stats[f"{stack}.{layer}"] = values
            header = {"facts": to_json(facts), "stats": stats}
            assert writer is not None, "a recording without batches has no facts"
            writer.add_key_value_metadata({_HEADER: json.dumps(header)})
        write_sums(partial)
    return facts


def _row_groups(recording: Recording, batches: Iterable[TracedBatch]) -> Iterator[pa.Table]:
    """Yields the recorded rows, joined until there are enough for a row group."""
    tables: list[pa.Table] = []
    num_examples = 0
    for batch in batches:
        rows = recording.record(batch)
        for stack in STACKS:
            tables.append(_table(stack, rows, batch.domains, num_examples))
        num_examples += len(batch.domains)

        if sum(table.num_rows for table in tables) >= GROUP_ROWS:
            yield pa.concat_tables(tables, promote_options="default")
            tables = []
    if tables:
        yield pa.concat_tables(tables, promote_options="default")


def _table(
    stack: str, rows: dict[str, Tensor], domains: Iterable[str], first_example: int
) -> pa.Table:
    """Returns the rows of a stack in one batch."""
    # What the tokens of an example have in common.
    lengths = rows[f"{stack}.lengths"].numpy()
    row = np.repeat(np.arange(len(lengths)), lengths)  # [N]
    columns: dict[str, Any] = {
        "stack": [stack] * len(row),
        "example": (first_example + row).astype(np.int32),
        "document": rows["document"].numpy()[row],
        "domain": np.array([*domains], dtype=object)[row],
        "token": rows[f"{stack}.ids"].numpy(),
    }
    if stack == "decoder":
        columns["target"] = rows["decoder.targets"].numpy()

    # The choices of each layer.
    number = 0
    while f"{stack}.{number}.expert" in rows:
        fields = {}
        for name in CHOICES:
            values = rows[f"{stack}.{number}.{name}"].numpy()
            if values.ndim == 1:
                fields[name] = pa.array(values)
            elif values.shape[1]:
                cells = pa.array(values.ravel())
                fields[name] = pa.FixedSizeListArray.from_arrays(cells, values.shape[1])
        columns[f"{stack}.{number}"] = pa.StructArray.from_arrays(
            list(fields.values()), names=list(fields)
        )
        number += 1
    return pa.table(columns)


# ---------------------------------------------------------------------------
# Read


def read_trace(folder: Path) -> Trace:
    """Returns a trace that was written to a folder, by this version of the library or an earlier one.

    Raises:
        DataError: When the folder is not a trace, or a file of it is damaged; names the file.
    """
    if (folder / _OLD_FACTS).is_file():
        return _read_old_trace(folder)
    path = folder / TRACE_FILE
    if not path.is_file():
        raise DataError(f"{folder} is not a trace: it has no {TRACE_FILE}. {_ADVICE}")
    refuse_damage(folder, [TRACE_FILE], advice=_ADVICE)
    with reading(path, advice=_ADVICE):
        file = pq.ParquetFile(path)
        text = file.metadata.metadata[_HEADER.encode()].decode()
        header = parse_json(text, where=path, advice=_ADVICE)
        facts = to_record(TraceFacts, header["facts"], where=str(path), advice=_ADVICE)
        _check_version(facts, FORMAT_VERSION, path)

        table = file.read()
        stats: dict[LayerKey, RouterStats] = {}
        for layer in facts.layers:
            values = header["stats"][f"{layer.stack}.{layer.layer}"]
            tensors = {name: torch.from_numpy(np.array(value)) for name, value in values.items()}
            stats[layer.stack, layer.layer] = RouterStats(**tensors)
        return trace_from(facts, _read_rows(table, facts), stats)


def _read_rows(table: pa.Table, facts: TraceFacts) -> dict[str, Tensor]:
    """Returns the rows of all tokens by name, as `Recording.record` gives those of a batch."""
    # Document and domain of each example are those of its first token.
    numbers, first = np.unique(table["example"].to_numpy(), return_index=True)
    of_examples = table.take(first)
    domains = [facts.domains.index(name) for name in of_examples["domain"].to_pylist()]
    rows = {
        "document": torch.zeros(facts.num_examples, dtype=torch.int32),
        "domain": torch.zeros(facts.num_examples, dtype=torch.int32),
    }
    rows["document"][numbers] = _tensor(of_examples["document"])
    rows["domain"][numbers] = torch.tensor(domains, dtype=torch.int32)

    # Columns of a stack are null in rows of the other.
    for stack in STACKS:
        of_stack = table.filter(pc.field("stack") == stack).flatten()
        example = _tensor(of_stack["example"])
        rows[f"{stack}.lengths"] = torch.bincount(example, minlength=facts.num_examples)
        rows[f"{stack}.ids"] = _tensor(of_stack["token"])
        for name in of_stack.column_names:
            if name.startswith(f"{stack}."):
                rows[name] = _tensor(of_stack[name])
        if stack == "decoder":
            rows["decoder.targets"] = _tensor(of_stack["target"])
    return rows


def _tensor(column: pa.ChunkedArray) -> Tensor:
    """Returns a column of numbers <any>[N], or of lists of K numbers each <any>[N, K]."""
    array = column.combine_chunks()
    if not pa.types.is_fixed_size_list(array.type):
        return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    values = array.flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(values.reshape(len(array), array.type.list_size).copy())


def _read_old_trace(folder: Path) -> Trace:
    """Returns a trace of format 1: a JSON file, and tensors by name."""
    path = folder / _OLD_TENSORS
    refuse_damage(folder, [_OLD_FACTS, _OLD_TENSORS], advice=_ADVICE)
    facts = read_record(folder / _OLD_FACTS, TraceFacts, advice=_ADVICE)
    _check_version(facts, 1, folder / _OLD_FACTS)
    with reading(path, advice=_ADVICE):
        rows = load_file(path)
        for stack in STACKS:
            rows[f"{stack}.lengths"] = rows[f"{stack}.starts"].diff()
        stats: dict[LayerKey, RouterStats] = {}
        for layer in facts.layers:
            prefix = f"{layer.stack}.{layer.layer}.stats"
            tensors = [rows[f"{prefix}.{name}"] for name in RouterStats._fields]
            stats[layer.stack, layer.layer] = RouterStats(*tensors)
        return trace_from(facts, rows, stats)


def _check_version(facts: TraceFacts, version: int, path: Path) -> None:
    """Raises a DataError when a file is from a later version of the library."""
    if facts.version != version:
        raise DataError(f"{path}: the format is {facts.version}, expected {version}. {_ADVICE}")
