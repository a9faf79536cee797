"""A model's predictions, written as they are made: from requests, which never hold the reference, to a JSONL file."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from eval.ranks import ALONE, Ranks
from eval.task import Task
from moe import CheckpointError, ConfigError, STMoEConfig, load_complete, load_model_on_mesh, together

MODES = ("generate", "rank")
_ROWS = {"generate": 128, "rank": 32}
_CHUNK = 1 << 24  # bytes


class Request(NamedTuple):
    """What a model is asked: the example without its reference."""

    id: str
    inputs: str
    choices: tuple[str, ...] = ()


class Prediction(NamedTuple):
    """What a model answered.

    Attributes:
        id: Of the request.
        output: Generated text, or the choice of the highest score.
        scores: Log-probability of each choice in nats, end token included; none when generated.
    """

    id: str
    output: str
    scores: dict[str, float] | None


class Seq2Seq(NamedTuple):
    """A checkpoint that is ready to predict.

    Attributes:
        model: On a mesh this rank's part.
        tokenizer: Its own.
        fingerprint: Of the checkpoint's files; known to rank 0 only.
        ranks: Who predicts with it.
    """

    model: Any
    tokenizer: Any
    fingerprint: str
    ranks: Ranks = ALONE


def load_seq2seq(folder: Path, ranks: Ranks = ALONE) -> Seq2Seq:
    """Returns any sequence-to-sequence checkpoint with its tokenizer: of this library or of transformers.

    Args:
        folder: The checkpoint.
        ranks: Who will predict with it; those of a mesh read their parts only.

    Raises:
        CheckpointError: When the folder is missing, or holds no such model with all its weights and a tokenizer.
    """
    if ranks.mesh is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_complete(AutoModelForSeq2SeqLM, folder).eval().to(device)
    else:
        # Fixed slots would need batches of one shape on all ranks; which token goes where is the same either way.
        config = STMoEConfig.from_pretrained(folder, dispatch="ragged")
        model, _ = load_model_on_mesh(folder, ranks.mesh, config=config, gather=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The tokenizer in {folder} cannot be loaded: {error}") from error
    return Seq2Seq(model, tokenizer, fingerprint(folder) if ranks.world.rank == 0 else "", ranks)


def fingerprint(folder: Path) -> str:
    """Returns 16 hexadecimal digits that tell a checkpoint from others."""
    digest = hashlib.sha256()
    for path in [*sorted(folder.glob("*.safetensors")), folder / "config.json"]:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def predict(system: Seq2Seq, task: Task, requests: Sequence[Request], mode: str, path: Path) -> list[Prediction]:
    """Returns a prediction for every request, in their order, on every rank.

    Predictions are appended to `path` as they are made, by rank 0. A sparse model drops tokens by group, so a
    prediction may depend on the requests beside it; the batches are therefore a function of all requests, and not of
    the ranks that share them. An interrupted run that goes on, on as many ranks or not, reads back the batches that
    the file holds whole and makes the others again: its file equals, byte for byte, that of a run that was never
    stopped on the same machine. A file of another model, task, mode or list of requests is replaced.

    Args:
        system: The model.
        task: Gives choices and the most tokens to generate.
        requests: What to ask; every id once.
        mode: `generate` (greedy) or `rank` (log-probability of each choice).
        path: JSONL file.

    Raises:
        ConfigError: When there is no such mode.
    """
    if mode not in MODES:
        raise ConfigError(f"There is no mode {mode!r}. Choose from {', '.join(MODES)}.")
    ranks, batches = system.ranks, cut_batches(requests, _ROWS[mode])
    header = {
        "model": system.fingerprint,
        "task": task.name,
        "version": task.version,
        "mode": mode,
        "batches": hashlib.sha256(json.dumps(batches).encode()).hexdigest()[:16],
    }
    leads = ranks.world.rank == 0
    known = together(lambda: read_predictions(path, header) if leads else {})[0]
    whole = list(takewhile(lambda batch: all(request.id in known for request in batch), batches))
    together(partial(_write, path if leads else None, "w", header, *(known[r.id]._asdict() for b in whole for r in b)))
    answer = _generate if mode == "generate" else _rank
    label, num_read = f"{task.name} {mode}", sum(map(len, whole))
    with tqdm(total=len(requests), initial=num_read, desc=label, mininterval=1.0, disable=not leads) as bar:
        for dealt in ranks.deal(batches[len(whole) :]):
            batch = ranks.share(dealt)
            made = ranks.collect(answer(system, task, batch) if batch or ranks.in_step else [])
            together(partial(_write, path if leads else None, "a", *(prediction._asdict() for prediction in made)))
            known.update({prediction.id: prediction for prediction in made})
            bar.update(len(made))
    return [known[request.id] for request in requests]


def cut_batches(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Returns all requests in batches of `size`, the shortest inputs first, so that a batch needs little padding."""
    ordered = sorted(requests, key=lambda request: (len(request.inputs), request.id))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def read_predictions(path: Path, header: dict[str, Any]) -> dict[str, Prediction]:
    """Returns the predictions in a file by id, without a torn end; none when it is missing or has another header."""
    if not path.is_file():
        return {}
    values = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            break
    if not values or values[0] != header:
        return {}
    return {value["id"]: Prediction(**value) for value in values[1:]}


@torch.inference_mode()
def _generate(system: Seq2Seq, task: Task, batch: Sequence[Request]) -> list[Prediction]:
    """Returns greedy generations; on ranks in step, all go on until the last of them is done."""
    encoded = _encode(system, [request.inputs for request in batch])
    tokens = system.model.generate(
        **encoded,
        max_new_tokens=task.decoding.max_tokens + len(_target_start(system)),
        do_sample=False,
        num_beams=1,
        synced_gpus=system.ranks.in_step,
    )
    texts = system.tokenizer.batch_decode(tokens, skip_special_tokens=True)[: len(batch)]
    return [Prediction(request.id, text, None) for request, text in zip(batch, texts, strict=True)]


@torch.inference_mode()
def _rank(system: Seq2Seq, task: Task, batch: Sequence[Request]) -> list[Prediction]:
    """Returns for each request the choice of the highest log-probability; inputs are encoded once."""
    encoded = _encode(system, [request.inputs for request in batch])
    hidden = system.model.get_encoder()(**encoded).last_hidden_state
    choices = task.choices if isinstance(task.choices, tuple) else batch[0].choices
    texts = system.tokenizer(list(choices), add_special_tokens=False)["input_ids"]
    targets = [[*_target_start(system), *ids, system.tokenizer.eos_token_id] for ids in texts]
    padded = [ids + [-100] * (max(map(len, targets)) - len(ids)) for ids in targets]
    labels = torch.tensor(padded, device=hidden.device)
    scores = score_choices(system.model, hidden, encoded["attention_mask"], labels if batch else labels * 0 - 100)
    predictions = []
    for request, row in zip(batch, scores[: len(batch)].tolist(), strict=True):
        by_choice: dict[str, float] = dict(zip(choices, row, strict=True))
        predictions.append(Prediction(request.id, max(by_choice, key=lambda choice: by_choice[choice]), by_choice))
    return predictions


def _target_start(system: Seq2Seq) -> list[int]:
    """Returns the tokens that every target begins with: the sentinel of a model that was fine-tuned with one."""
    first = system.model.generation_config.forced_bos_token_id
    return [] if first is None else [first]


def score_choices(model: Any, hidden: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Returns <float32>[N, C]: the log-probability of each of C target sequences for each of N encoded inputs.

    Args:
        model: Any encoder-decoder of transformers' form.
        hidden: <float>[N, L, D] encoder output.
        mask: <int64>[N, L] real tokens of the inputs.
        labels: <int64>[C, T] targets with their end token, -100 for padding.
    """
    num_inputs, num_choices = hidden.shape[0], labels.shape[0]
    output = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=hidden.repeat_interleave(num_choices, dim=0)),
        attention_mask=mask.repeat_interleave(num_choices, dim=0),
        labels=labels.repeat(num_inputs, 1),
    )
    log_probs = output.logits.float().log_softmax(dim=-1)
    index = labels.clamp(min=0).repeat(num_inputs, 1)[..., None]
    picked = log_probs.gather(-1, index).squeeze(-1) * (labels != -100).repeat(num_inputs, 1)
    return picked.sum(dim=-1).reshape(num_inputs, num_choices)


def _encode(system: Seq2Seq, texts: list[str]) -> dict[str, Tensor]:
    """Returns `input_ids` and `attention_mask` <int64>[N, L] on the model's device; one row of padding for no texts."""
    encoded = system.tokenizer(texts or [""], padding=True, truncation=True, return_tensors="pt")
    encoded = {name: encoded[name].to(system.model.device) for name in ("input_ids", "attention_mask")}
    if not texts:
        encoded["attention_mask"] = torch.zeros_like(encoded["attention_mask"])
    return encoded


def _write(path: Path | None, mode: str, *values: dict[str, Any]) -> None:
    """Writes or appends one JSON object a line, unless there is no path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps(value) + "\n" for value in values)
