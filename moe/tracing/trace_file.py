"""A trace on disk: `trace.safetensors`, and `trace.json` with its description.

Comes after `recorder`, whose rows it writes as they arrive.
"""

import json
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from moe.checksums import refuse_damage, write_sums
from moe.errors import DataError
from moe.files import register_folder_kind, whole_folder
from moe.opening import check_regular
from moe.parsing import read_record, reading, to_json
from moe.tracing.recorder import (
    FORMAT_VERSION,
    Provenance,
    Recording,
    TracedBatch,
    inputs_fingerprint,
)
from moe.tracing.trace import Trace, TraceFacts, trace_from, trace_tensors

TENSORS_FILE = "trace.safetensors"
FACTS_FILE = "trace.json"
TRACE = register_folder_kind("trace", markers=[FACTS_FILE], parts=[FACTS_FILE, TENSORS_FILE])

_DTYPE_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def record_to_folder(
    model: PreTrainedModel,
    batches: Iterable[TracedBatch],
    folder: Path,
    *,
    num_best: int = 0,
    provenance: Provenance = Provenance(),  # noqa: B008  an immutable tuple
) -> TraceFacts:
    """Writes the routing of every token of the batches atomically, and returns its description.

    Memory holds one batch, however many there are. An earlier trace in the folder is replaced.

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
        # Rows go to disk batch by batch; what adds up over batches comes last.
        with _RowStream(partial / ".rows") as stream:
            for batch in batches:
                stream.append(recording.record(batch))
            recorded = recording.facts(provenance)
            stream.finish(partial / TENSORS_FILE, recording.totals())
        _write_facts(recorded, partial)
        write_sums(partial)
    return recorded


def save_trace(trace: Trace, folder: Path) -> None:
    """Writes a trace to a folder, whole or not at all; an earlier trace there is replaced.

    Raises:
        DataError: When the folder holds something other than a trace.
    """
    with whole_folder(folder, kind=TRACE) as partial:
        with _RowStream(partial / ".rows") as stream:
            stream.finish(partial / TENSORS_FILE, trace_tensors(trace))
        _write_facts(trace.facts, partial)
        write_sums(partial)


def _write_facts(facts: TraceFacts, folder: Path) -> None:
    content = json.dumps(to_json(facts), indent=1) + "\n"
    (folder / FACTS_FILE).write_text(content, encoding="utf-8")


class _RowStream(ExitStack):
    """Tensors whose rows arrive in batches, each in a raw file until it is complete."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir()
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._shapes: dict[str, list[int]] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def append(self, rows: dict[str, Tensor]) -> None:
        """Appends rows <any>[N, ...] to the tensor of each name."""
        for name, values in rows.items():
            if name not in self._files:
                self._files[name] = self.enter_context((self._folder / name).open("wb"))
                self._shapes[name] = [0, *values.shape[1:]]
                self._dtypes[name] = values.dtype
            self._files[name].write(values.contiguous().numpy().tobytes())
            self._shapes[name][0] += values.shape[0]

    def finish(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Writes all tensors, and further ones that are whole, to a safetensors file."""
        for name, values in tensors.items():
            scalar = values.reshape(1) if values.dim() == 0 else values
            self.append({name: scalar})
            self._shapes[name] = list(values.shape)
        self.close()

        # The header has the position of each tensor; wide numbers come first, so that all are
        # aligned.
        names = sorted(self._files, key=lambda name: (-self._dtypes[name].itemsize, name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            start = end
            end += (self._folder / name).stat().st_size
            header[name] = {
                "dtype": _DTYPE_NAMES[self._dtypes[name]],
                "shape": self._shapes[name],
                "data_offsets": [start, end],
            }

        # The format: the header's length, the header, and the tensors one after the other.
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with path.open("wb") as target:
            target.write(len(encoded).to_bytes(8, "little"))
            target.write(encoded)
            for name in names:
                with (self._folder / name).open("rb") as source:
                    shutil.copyfileobj(source, target)
        shutil.rmtree(self._folder)


def read_trace(folder: Path) -> Trace:
    """Returns a trace that was written to a folder.

    Raises:
        DataError: When the folder is not a trace, or a file of it is damaged; names the file.
    """
    advice = "Record it again: `stmoe inspect record`."
    if not (folder / FACTS_FILE).is_file():
        raise DataError(f"{folder} is not a trace: it has no {FACTS_FILE}. {advice}")
    refuse_damage(folder, [FACTS_FILE, TENSORS_FILE], advice=advice)

    # The facts tell which tensors to expect.
    facts = read_record(folder / FACTS_FILE, TraceFacts, advice=advice)
    path = folder / TENSORS_FILE
    if facts.version != FORMAT_VERSION:
        raise DataError(
            f"{folder / FACTS_FILE}: the format is {facts.version}; this version of the library reads "
            f"{FORMAT_VERSION}. {advice}"
        )

    with reading(path, advice=advice):
        check_regular(path)
        trace = trace_from(facts, load_file(path))

    # Checksums found other damage; this finds the tensors of another trace.
    if inputs_fingerprint(trace) != facts.inputs_fingerprint:
        raise DataError(f"{path} has different token ids from {FACTS_FILE} beside it. {advice}")
    return trace
