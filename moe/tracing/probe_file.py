"""Probes on disk: the routing of a fixed text at several steps of one training run.

    probe.json                    what is probed
    text.safetensors              its tokens, and where its examples start
    step_00000100.safetensors     the choices of each token after 100 updates

Comes after `recorder`. moe/training/routing_probe.py makes probes; `read_probes` reads them for
comparison.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import pad

from moe.data.pipeline import Batch
from moe.errors import DataError
from moe.files import whole_file, write_text
from moe.models.inputs import IGNORED_LABEL
from moe.models.modeling import STMoEForConditionalGeneration
from moe.opening import check_regular
from moe.parsing import read_record, reading, to_json
from moe.sparse.editing import LayerKey, Stack
from moe.tracing.recorder import layer_facts, stack_inputs, unpacked
from moe.tracing.trace import STACKS, LayerFacts, StackTrace, expert_dtype

FACTS_FILE = "probe.json"
TEXT_FILE = "text.safetensors"
FORMAT_VERSION = 1

_TEXT_TENSORS = {
    "encoder.ids",
    "encoder.starts",
    "decoder.ids",
    "decoder.starts",
    "decoder.targets",
}
_FINGERPRINT = "text_fingerprint"
_ADVICE = "Restore the file from a copy, or move the folder away."


class ProbeFacts(NamedTuple):
    """Facts about probes; the content of probe.json.

    Attributes:
        version: Version of the format.
        library: Version of this library.
        text: Description of the text.
        text_fingerprint: SHA-256 of the text's tokens.
        num_tokens: Tokens of the text in each stack, N.
        layers: The sparse layers, the encoder's first.
    """

    version: int
    library: str
    text: str
    text_fingerprint: str
    num_tokens: dict[Stack, int]
    layers: list[LayerFacts]


class ProbeText(NamedTuple):
    """The text that is probed, as the model reads it.

    Attributes:
        encoder: The encoder's tokens, without layers.
        decoder: The decoder's.
    """

    encoder: StackTrace
    decoder: StackTrace

    def stack(self, name: Stack) -> StackTrace:
        """Returns the tokens of one stack."""
        return self.encoder if name == "encoder" else self.decoder


class Probe(NamedTuple):
    """The routing of the text after some updates.

    Attributes:
        step: Updates so far.
        choices: <int8 or int16>[N, K] of each sparse layer: the experts that each token requested,
            or that chose it, its first choice in front and -1 for none at the end. Tokens are in
            the order of `ProbeText`.
    """

    step: int
    choices: dict[LayerKey, Tensor]


# ---------------------------------------------------------------------------
# The text that is probed


def probe_text(model: STMoEForConditionalGeneration, batches: Iterable[Batch]) -> ProbeText:
    """Returns the tokens of whole batches; the model determines the decoder's tokens.

    Raises:
        DataError: When a batch has no labels, or is packed.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in _TEXT_TENSORS}
    for stack in STACKS:
        parts[f"{stack}.starts"].append(torch.zeros(1, dtype=torch.int64))

    for given in batches:
        batch = unpacked(given)
        batch = {name: values.cpu() for name, values in batch.items()}
        for stack, inputs in stack_inputs(model, batch).items():
            parts[f"{stack}.ids"].append(inputs.ids[inputs.is_real].int())
            parts[f"{stack}.starts"].append(inputs.is_real.sum(dim=1))
        labels = batch["labels"]
        parts["decoder.targets"].append(labels[labels != IGNORED_LABEL].int())

    # Each example starts where those before it end.
    tensors = {name: torch.cat(values) for name, values in parts.items()}
    for stack in STACKS:
        tensors[f"{stack}.starts"] = tensors[f"{stack}.starts"].cumsum(0)
    return _text_from(tensors)


def probe_facts(
    model: STMoEForConditionalGeneration, text: ProbeText, description: str
) -> ProbeFacts:
    """Returns the facts about the probes of a model on a text.

    Args:
        model: Gives the sparse layers.
        text: See `probe_text`.
        description: Description of the text.
    """
    return ProbeFacts(
        version=FORMAT_VERSION,
        library=version("stmoe"),
        text=description,
        text_fingerprint=_fingerprint(text),
        num_tokens={stack: text.stack(stack).ids.numel() for stack in STACKS},
        layers=layer_facts(model),
    )


def _text_tensors(text: ProbeText) -> dict[str, Tensor]:
    """Returns the tensors of a text by name."""
    return {
        "encoder.ids": text.encoder.ids,
        "encoder.starts": text.encoder.starts,
        "decoder.ids": text.decoder.ids,
        "decoder.starts": text.decoder.starts,
        "decoder.targets": text.decoder.targets,
    }


def _text_from(tensors: Mapping[str, Tensor]) -> ProbeText:
    """Returns the text of tensors by name."""
    no_targets = torch.empty(0, dtype=torch.int32)
    stacks = []
    for stack in STACKS:
        text = StackTrace(
            ids=tensors[f"{stack}.ids"],
            targets=tensors.get(f"{stack}.targets", no_targets),
            starts=tensors[f"{stack}.starts"],
            layers=(),
        )
        stacks.append(text)
    return ProbeText(*stacks)


def _fingerprint(text: ProbeText) -> str:
    digest = hashlib.sha256()
    for tensor in _text_tensors(text).values():
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------
# Writing


def begin_probes(folder: Path, facts: ProbeFacts, text: ProbeText, step: int) -> None:
    """Prepares a folder for the probes of a run that has completed `step` updates.

    Probes of later steps, which the run will repeat, are removed; at step 0, all are removed.

    Raises:
        DataError: When earlier probes belong to another text or other layers, or probe.json is
            damaged.
    """
    # Probes that stay must be comparable with later ones.
    if step and (folder / FACTS_FILE).exists():
        earlier = read_probe_facts(folder)
        comparable = facts._replace(library=earlier.library, text=earlier.text)
        if comparable != earlier:
            raise DataError(
                f"{folder} holds probes of a different text or different layers, so new probes could not be compared "
                "with them. Probe the same batches as before, or move the folder."
            )

    # Probes that the run will repeat.
    folder.mkdir(parents=True, exist_ok=True)
    for path in _step_files(folder):
        if not step or _step_of(path) > step:
            path.unlink()

    with whole_file(folder / TEXT_FILE) as partial:
        partial.write_bytes(save(_text_tensors(text)))
    write_text(folder / FACTS_FILE, json.dumps(to_json(facts), indent=1) + "\n")


def write_probe(folder: Path, probe: Probe, facts: ProbeFacts) -> None:
    """Writes a probe to a folder that `begin_probes` has prepared, whole or not at all."""
    tensors = {}
    for layer in facts.layers:
        choices = probe.choices[layer.stack, layer.layer]

        # Columns that are empty for all tokens are left out; where experts choose, most are.
        num_columns = int((choices >= 0).any(dim=0).sum())
        narrow = choices[:, :num_columns].to(expert_dtype(layer.num_experts))
        tensors[_tensor_name(layer)] = narrow.contiguous()

    metadata = {_FINGERPRINT: facts.text_fingerprint}
    name = f"step_{probe.step:08d}.safetensors"
    with whole_file(folder / name) as partial:
        partial.write_bytes(save(tensors, metadata))


def has_probes(folder: Path) -> bool:
    """Returns whether there is a probe in a folder."""
    return bool(_step_files(folder))


# ---------------------------------------------------------------------------
# Reading


def read_probes(folder: Path) -> list[Probe]:
    """Returns the probes of a run, by ascending steps.

    Args:
        folder: The folder `probe` of a run.

    Raises:
        DataError: When there are no probes, or a file is damaged or belongs to another text.
    """
    facts = read_probe_facts(folder)
    probes = [_read_probe(path, facts) for path in _step_files(folder)]
    if not probes:
        raise DataError(
            f"{folder} holds no probe yet. Continue training until the first one is due."
        )
    read_probe_text(folder)  # choices without their text mean nothing
    return probes


def read_probe_text(folder: Path) -> ProbeText:
    """Returns the text whose routing was probed.

    Raises:
        DataError: When a file is missing or damaged; names the file.
    """
    facts = read_probe_facts(folder)
    path = folder / TEXT_FILE
    tensors, _ = _read_tensors(path)
    missing = _TEXT_TENSORS - tensors.keys()
    text = None if missing else _text_from(tensors)
    if text is None or _fingerprint(text) != facts.text_fingerprint:
        raise DataError(f"{path} does not hold the text of {folder / FACTS_FILE}. {_ADVICE}")
    return text


def read_probe_facts(folder: Path) -> ProbeFacts:
    """Returns the description of a run's probes.

    Args:
        folder: The folder `probe` of a run.

    Raises:
        DataError: When there are none, or the file is damaged.
    """
    path = folder / FACTS_FILE
    if not path.is_file():
        raise DataError(
            f"{folder} holds no probes: it has no {FACTS_FILE}. "
            "Give the folder `probe` of a run with training.probe_every."
        )
    facts = read_record(path, ProbeFacts, advice=_ADVICE)
    if facts.version != FORMAT_VERSION:
        raise DataError(
            f"{path}: the format is {facts.version}; "
            f"this version of the library reads {FORMAT_VERSION}. {_ADVICE}"
        )
    return facts


def _read_probe(path: Path, facts: ProbeFacts) -> Probe:
    tensors, metadata = _read_tensors(path)
    if metadata.get(_FINGERPRINT) != facts.text_fingerprint:
        raise DataError(
            f"{path} belongs to a different text than {FACTS_FILE} beside it. {_ADVICE}"
        )

    choices = {}
    for layer in facts.layers:
        name = _tensor_name(layer)
        if name not in tensors:
            raise DataError(f"{path} has no tensor {name}. {_ADVICE}")

        # Experts of the layer, or none, for each token.
        narrow = tensors[name]
        num_tokens = facts.num_tokens[layer.stack]
        if not _are_choices(narrow, num_tokens, layer):
            raise DataError(
                f"{path}: {name} is {tuple(narrow.shape)} of {narrow.dtype}; "
                f"expected at most {layer.num_choices} of {layer.num_experts} experts "
                f"for each of {num_tokens:,} tokens. {_ADVICE}"
            )

        # The columns that were left out.
        num_absent = layer.num_choices - narrow.shape[1]
        wide = pad(narrow, (0, num_absent), value=-1)  # [N, K]
        choices[layer.stack, layer.layer] = wide
    return Probe(_step_of(path), choices)


def _are_choices(choices: Tensor, num_tokens: int, layer: LayerFacts) -> bool:
    """Returns whether a tensor can be the choices of a layer, [N, up to K]."""
    if choices.dim() != 2 or choices.dtype != expert_dtype(layer.num_experts):
        return False
    if choices.shape[0] != num_tokens or choices.shape[1] > layer.num_choices:
        return False
    return bool(((choices >= -1) & (choices < layer.num_experts)).all())


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and the metadata of a file.

    Raises:
        DataError: When it is missing or damaged.
    """
    tensors = {}
    with reading(path, advice=_ADVICE):
        check_regular(path)
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118  a file has no iterator
                tensors[name] = file.get_tensor(name)
    return tensors, metadata


# ---------------------------------------------------------------------------
# Names


def _tensor_name(layer: LayerFacts) -> str:
    return f"{layer.stack}.{layer.layer}.choices"


def _step_files(folder: Path) -> list[Path]:
    """Returns the files of probes by ascending steps, without the user's files."""
    paths = []
    for path in folder.glob("step_*.safetensors"):
        if re.fullmatch(r"step_\d{8}", path.stem):
            paths.append(path)
    return sorted(paths)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))
