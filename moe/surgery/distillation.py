"""Distillation: a student learns from the labels and from the probabilities of a teacher.

`dense_student` makes a student; a pruned model is one, too. The teacher runs beside the student.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe.checkpoint.loading import load_model, load_model_on_mesh
from moe.checks import check_field_types, check_number
from moe.checksums import model_fingerprint
from moe.data.pipeline import ALL_ROWS, Batch, BatchSource
from moe.distributed.mesh import Mesh
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.inputs import IGNORED_LABEL
from moe.models.losses import LossCounts
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.outputs import STMoEOutput
from moe.sparse.all_routers import load_routers
from moe.surgery.dense_student import StudentInit

_MOST_WEIGHT = 1e6


@dataclass(frozen=True)
class DistillationSettings:
    """Settings of a distillation.

    Attributes:
        init: Layer in place of the teacher's experts: `random`, `mean` of the experts, `aligned_mean`
            (weighted by gates, hidden units aligned) or `best`, the expert with the largest gates.
        hard_weight: Weight of the cross-entropy to the labels.
        soft_weight: Weight of the cross-entropy to the teacher's probabilities.
        temperature: Temperature of both models in the latter.

    Source:
        Switch (arXiv:2101.03961) §4.2: 0.75 and 0.25 at temperature 1, `random`. M-SMoE
        (arXiv:2310.01334): 1.0 and 0.2 at temperature 2 for a merged student.
    """

    init: StudentInit = "aligned_mean"
    hard_weight: float = 0.75
    soft_weight: float = 0.25
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Raises a ConfigError when a value is out of range."""
        prefix = "distillation."
        check_field_types(self, prefix=prefix)
        check_number(f"{prefix}hard_weight", self.hard_weight, least=0, most=_MOST_WEIGHT)
        reason = "without a teacher, use stmoe pretrain or stmoe finetune"
        name = f"{prefix}soft_weight"
        check_number(name, self.soft_weight, above=0, most=_MOST_WEIGHT, reason=reason)
        check_number(f"{prefix}temperature", self.temperature, above=0, most=100)


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
    return load_model(folder, device=device_type, config=config)


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


def soft_cross_entropy(logits: Tensor, teacher_log_probs: Tensor, temperature: float = 1) -> Tensor:
    """Returns the sum over N targets of the student's cross-entropy to the teacher's probabilities.

    Args:
        logits: <any float>[N, V] of the student.
        teacher_log_probs: <float32>[N, V] at this temperature.
        temperature: Divides the logits, and its square multiplies the loss, so that the size of the
            gradient does not depend on it.

    Source:
        Hinton et al. (arXiv:1503.02531) §2.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs = (logits.to(dtype) / temperature).log_softmax(dim=-1)  # [N, V]
    probs = teacher_log_probs.to(dtype).exp()  # [N, V]
    return -(probs * log_probs).sum() * temperature**2


class Distillation(NamedTuple):
    """The forward pass of a student: its loss compares it with labels and with a teacher.

    L = hard_weight * CE(labels) + soft_weight * T^2 * CE(teacher) + the z-losses and balance losses
    of the student, with cross-entropies as means over the targets of the whole batch.

    Attributes:
        settings: The weights, and the temperature T.
        teacher: In evaluation mode.

    Source:
        Switch (arXiv:2101.03961) §4.2, with its weights and T = 1.
    """

    settings: DistillationSettings
    teacher: STMoEForConditionalGeneration

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
        is_target = batch["labels"] != IGNORED_LABEL
        log_probs = target_log_probs(self.teacher, batch, temperature)

        output = student(**batch, loss_counts=counts, output_router_logits=True)
        assert output.loss is not None and output.ce_loss is not None, "a batch has labels"
        soft = soft_cross_entropy(output.logits[is_target], log_probs, temperature)
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
