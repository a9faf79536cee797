"""Distillation: a student learns from the labels and from the probabilities of a teacher.

`dense_student` makes a student; a pruned model is one, too. The teacher runs beside the
student, or its most probable tokens are read from a file.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe.checkpoint.loading import load_complete, load_model_on_mesh, local_device
from moe.checks import check_field_types, check_integer, check_number
from moe.checksums import model_fingerprint
from moe.data.pipeline import ALL_ROWS, Batch, BatchSource, fingerprint
from moe.data.tokens import Arrays, kept_arrays
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.mesh import Mesh
from moe.errors import ConfigError
from moe.files import cache_folder
from moe.models.configuration import STMoEConfig
from moe.models.inputs import IGNORED_LABEL
from moe.models.losses import LossCounts
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.outputs import STMoEOutput
from moe.sparse.all_routers import load_routers
from moe.surgery.dense_student import StudentInit

_TOKENS = "teacher_tokens"
_LOG_PROBS = "teacher_log_probs"
_STARTS = "starts"
_MOST_WEIGHT = 1e6
_FORMAT = 1  # increase when the same teacher and batches give other numbers


@dataclass(frozen=True)
class DistillationSettings:
    """Settings of a distillation.

    Attributes:
        init: Layer in place of the teacher's experts: `random`, `mean` of the experts, `aligned_mean`
            (weighted by gates, hidden units aligned) or `best`, the expert with the largest gates.
        hard_weight: Weight of the cross-entropy to the labels.
        soft_weight: Weight of the cross-entropy to the teacher's probabilities.
        temperature: Temperature of both models in the latter.
        cached_batches: Batches that are repeated, with the teacher's probabilities from a file; 0
            for new batches in every step, with the teacher beside the student.
        top_n: Most probable tokens of the teacher in that file, for each target.

    Source:
        Switch (arXiv:2101.03961) §4.2: 0.75 and 0.25 at temperature 1, `random`. M-SMoE
        (arXiv:2310.01334): 1.0 and 0.2 at temperature 2 for a merged student.
    """

    init: StudentInit = "aligned_mean"
    hard_weight: float = 0.75
    soft_weight: float = 0.25
    temperature: float = 1.0
    cached_batches: int = 0
    top_n: int = 32

    def __post_init__(self) -> None:
        """Raises a ConfigError when a value is out of range."""
        prefix = "distillation."
        check_field_types(self, prefix=prefix)
        check_number(f"{prefix}hard_weight", self.hard_weight, least=0, most=_MOST_WEIGHT)
        reason = "without a teacher, use stmoe pretrain or stmoe finetune"
        name = f"{prefix}soft_weight"
        check_number(name, self.soft_weight, above=0, most=_MOST_WEIGHT, reason=reason)
        check_number(f"{prefix}temperature", self.temperature, above=0, most=100)
        check_integer(f"{prefix}cached_batches", self.cached_batches, least=0, most=10**6)
        check_integer(f"{prefix}top_n", self.top_n, least=1)


# ---------------------------------------------------------------------------
# The teacher


def teacher_config(folder: Path | str) -> STMoEConfig:
    """Returns the config of a teacher that drops no token, so that each row has its own answer.

    Raises:
        ConfigError: When experts choose their tokens, and answers depend on the rest of the batch.
    """
    config = STMoEConfig.from_pretrained(folder)
    for decoder in (False, True):
        if not config.stack_sizes(decoder)[1]:
            continue
        router = config.sparse_config(decoder=decoder).router
        if load_routers().get(router).experts_choose:
            raise ConfigError(
                f"The teacher in {folder} has router {router!r}, whose experts choose their tokens: its probabilities "
                "depend on the other rows of a batch. Give a teacher whose tokens choose."
            )
    return config.replaced(expert_capacity=None, eval_capacity_factor=None)


def load_teacher(
    folder: Path | str, device_type: str, mesh: Mesh | None = None
) -> STMoEForConditionalGeneration:
    """Returns a teacher in evaluation mode, on its device or sharded over a mesh."""
    config = teacher_config(folder)
    if mesh is not None:
        return load_model_on_mesh(folder, mesh, config=config)[0]
    model = load_complete(STMoEForConditionalGeneration, folder, config=config)
    torch.nn.Module.to(model, local_device(device_type))
    return model.eval()


@torch.no_grad()
def target_log_probs(
    teacher: STMoEForConditionalGeneration, batch: Batch, temperature: float
) -> Tensor:
    """Returns the teacher's log-probabilities <float32>[N, V] at the N targets of a batch."""
    logits = teacher(**batch, output_router_logits=False, use_cache=False).logits
    logits = logits[batch["labels"] != IGNORED_LABEL].float()  # [N, V]
    return (logits / temperature).log_softmax(dim=-1)


# ---------------------------------------------------------------------------
# The loss


def soft_cross_entropy(
    logits: Tensor, teacher_log_probs: Tensor, tokens: Tensor | None = None, temperature: float = 1
) -> Tensor:
    """Returns the sum over N targets of the student's cross-entropy to the teacher's probabilities.

    If only the teacher's n most probable tokens are known, all others count as one: the student
    learns their total probability.

    Args:
        logits: <any float>[N, V] of the student.
        teacher_log_probs: <float32>[N, V], or [N, n] of `tokens`, at this temperature.
        tokens: <int64>[N, n] tokens of the log-probabilities; None for all V in order.
        temperature: Divides the logits, and its square multiplies the loss, so that the size of the
            gradient does not depend on it.

    Source:
        Hinton et al. (arXiv:1503.02531) §2. Differs: the total of the other tokens.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs = (logits.to(dtype) / temperature).log_softmax(dim=-1)  # [N, V]
    probs = teacher_log_probs.to(dtype).exp()  # [N, V or n]
    if tokens is None:
        return -(probs * log_probs).sum() * temperature**2

    log_likelihood = (probs * log_probs.gather(-1, tokens)).sum()
    if tokens.shape[-1] < log_probs.shape[-1]:
        rest = (1 - probs.sum(dim=-1)).clamp(min=0)  # [N]
        log_rest = log_probs.scatter(-1, tokens, float("-inf")).logsumexp(dim=-1)  # [N]
        log_likelihood = log_likelihood + (rest * log_rest).sum()
    return -log_likelihood * temperature**2


class Distillation(NamedTuple):
    """The forward pass of a student: its loss compares it with labels and with a teacher.

    L = hard_weight * CE(labels) + soft_weight * T^2 * CE(teacher) + the z-losses and balance losses
    of the student, with cross-entropies as means over the targets of the whole batch.

    Attributes:
        settings: The weights, and the temperature T.
        teacher: In evaluation mode; None where batches hold its probabilities, see `TeacherSource`.

    Source:
        Switch (arXiv:2101.03961) §4.2, with its weights and T = 1. Differs: no.
    """

    settings: DistillationSettings
    teacher: STMoEForConditionalGeneration | None = None

    def __call__(
        self, student: STMoEForConditionalGeneration, batch: Batch, counts: LossCounts
    ) -> STMoEOutput:
        """Returns the output of the student for a micro-batch.

        Args:
            student: The student.
            batch: Keyword arguments of its forward, with labels.
            counts: Counts of the whole batch.
        """
        hard_weight = self.settings.hard_weight
        soft_weight = self.settings.soft_weight
        temperature = self.settings.temperature
        inputs = dict(batch)
        is_target = inputs["labels"] != IGNORED_LABEL
        tokens = None
        if self.teacher is None:
            tokens = inputs.pop(_TOKENS)[is_target]
            log_probs = inputs.pop(_LOG_PROBS)[is_target]
        else:
            log_probs = target_log_probs(self.teacher, inputs, temperature)

        output = student(**inputs, loss_counts=counts, output_router_logits=True)
        assert output.loss is not None and output.ce_loss is not None, "a batch has labels"
        soft = soft_cross_entropy(output.logits[is_target], log_probs, tokens, temperature)
        soft_loss = soft / counts.target_tokens.clamp(min=1)
        output.loss = output.loss + (hard_weight - 1) * output.ce_loss + soft_weight * soft_loss
        return output


class TaughtSource:
    """Batches of a source for one teacher: a run cannot be resumed with another."""

    def __init__(self, source: BatchSource, teacher: Path) -> None:
        self.batch_size = source.batch_size
        self.lengths = source.lengths
        self.fingerprint = f"{source.fingerprint}-{model_fingerprint(teacher)}"
        self._source = source

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns the batch of the source."""
        return self._source.batch(step, rows)


# ---------------------------------------------------------------------------
# Probabilities in a file


class TeacherSource:
    """The first batches of a source again and again, with the teacher's most probable tokens."""

    def __init__(self, source: BatchSource, arrays: Arrays, num_batches: int) -> None:
        """Prepares the batches.

        Args:
            source: Makes the batches.
            arrays: Result of `teacher_arrays` for this source.
            num_batches: Batches of the source that are repeated.
        """
        self.batch_size = source.batch_size
        self.lengths = source.lengths
        numbers = (num_batches, arrays[_TOKENS].shape[1])
        probabilities = arrays[_LOG_PROBS].data
        self.fingerprint = fingerprint(
            source.fingerprint.encode(), repr(numbers).encode(), probabilities
        )
        self._source = source
        self._arrays = arrays
        self._num_batches = num_batches

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns a batch with `teacher_tokens` <int64> and `teacher_log_probs` <float32>[B, T, n]."""
        step %= self._num_batches
        batch = self._source.batch(step, rows)
        first, last, _ = rows.indices(self.batch_size)
        starts = self._arrays[_STARTS]
        offset = step * self.batch_size
        targets = slice(starts[offset + first], starts[offset + last])

        # [targets, n] -> [B, T, n], 0 where there is no target.
        is_target = batch["labels"] != IGNORED_LABEL
        for name, dtype in ((_TOKENS, torch.int64), (_LOG_PROBS, torch.float32)):
            values = torch.from_numpy(self._arrays[name][targets].copy()).to(dtype)
            padded = torch.zeros(*is_target.shape, values.shape[-1], dtype=dtype)
            padded[is_target] = values
            batch[name] = padded
        return batch


def teacher_arrays(
    teacher: STMoEForConditionalGeneration, source: BatchSource, settings: DistillationSettings
) -> Arrays:
    """Returns the teacher's most probable tokens at all targets of the first batches of a source.

    Returns:
        `teacher_tokens` <int32>[targets, n], `teacher_log_probs` <float32>[targets, n], and `starts`
        <int64>[rows + 1]: the first target of each row, and the number of targets. The mass of the
        other tokens is 1 less the sum of the probabilities.

    Raises:
        ConfigError: When `top_n` is larger than the vocabulary.
    """
    n = settings.top_n
    vocab_size = teacher.config.vocab_size
    reason = f"the vocabulary has {vocab_size} tokens"
    check_integer("distillation.top_n", n, least=1, most=vocab_size, reason=reason)
    tokens: list[Tensor] = []
    log_probs: list[Tensor] = []
    counts = [torch.zeros(1, dtype=torch.int64)]
    for step in range(settings.cached_batches):
        batch = source.batch(step)
        inputs = {name: tensor.to(teacher.device) for name, tensor in batch.items()}
        top = target_log_probs(teacher, inputs, settings.temperature).topk(n, dim=-1)
        tokens.append(top.indices.int().cpu())
        log_probs.append(top.values.cpu())
        counts.append((batch["labels"] != IGNORED_LABEL).sum(dim=1))
    return {
        _TOKENS: torch.cat(tokens).numpy(),
        _LOG_PROBS: torch.cat(log_probs).numpy(),
        _STARTS: torch.cat(counts).cumsum(dim=0).numpy(),
    }


def cached_teacher(
    folder: Path, source: BatchSource, device_type: str, settings: DistillationSettings
) -> TeacherSource:
    """Returns a source with the teacher's probabilities from a file, which rank zero makes first.

    The file is in the cache folder and is named after the teacher's weights, the batches and the
    settings, so that other runs find it. It is made in memory: 8 `top_n` bytes for each target.

    Args:
        folder: Folder of the teacher.
        source: Makes the batches.
        device_type: Device of the teacher.
        settings: The number of batches and tokens, and the temperature.
    """
    numbers = (settings.cached_batches, settings.top_n, settings.temperature)
    identity = (_FORMAT, model_fingerprint(folder), source.fingerprint, *numbers)
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]

    def read() -> Arrays:
        path = cache_folder() / f"teacher-{name}.safetensors"
        return kept_arrays(path, (_TOKENS, _LOG_PROBS, _STARTS), make)

    def make() -> Arrays:
        return teacher_arrays(load_teacher(folder, device_type), source, settings)

    broadcast_from_rank_zero(lambda: bool(read()))  # the others then find the file
    return TeacherSource(source, read(), settings.cached_batches)
