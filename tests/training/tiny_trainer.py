"""A Seq2SeqTrainer of a tiny model, for one process or several; `python -m
tests.training.tiny_trainer OUT` runs it.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from moe.training.callback import RouterStatsCallback
from tests.models.tiny import tiny_model

HEAVY = {"load_balance_loss_weight": 3.0, "router_z_loss_weight": 2.0, "z_loss_weight": 0.5}
LEARNS = {"router": "bias_balanced", "router_options": {"update_rate": 0.05}}


def examples(number=24, seed=0):
    """Returns pairs of ragged inputs and targets."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(longest):
        length = int(torch.randint(2, longest + 1, (), generator=generator))
        return torch.randint(2, 131, (length,), generator=generator).tolist()

    return [
        {"input_ids": (ids := tokens(13)), "attention_mask": [1] * len(ids), "labels": tokens(11)}
        for _ in range(number)
    ]


def tokenizer():
    words = {f"<{number}>": number for number in range(131)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<2>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<0>", eos_token="<1>", unk_token="<2>"
    )


def make_trainer(
    out,
    model=None,
    data=None,
    callbacks=(),
    eval_dataset=None,
    compute_metrics=None,
    pad_to_multiple_of=None,
    **settings,
):
    """Returns a Trainer on the CPU that takes three plain gradient steps of eight examples."""
    model = model or tiny_model(**HEAVY, group_size=1, capacity_factor=None).double()
    words = tokenizer()
    standard = {
        "per_device_train_batch_size": 8,
        "max_steps": 3,
        "optim": "sgd",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(str(out), **{**standard, **settings}),
        data_collator=DataCollatorForSeq2Seq(
            words, model=model, pad_to_multiple_of=pad_to_multiple_of
        ),
        train_dataset=data or examples(),
        eval_dataset=eval_dataset,
        processing_class=words,
        compute_metrics=compute_metrics,
        callbacks=list(callbacks),
    )


def train(out, model=None, **settings):
    """Returns the parameters after training, and what was logged of each update."""
    trainer = make_trainer(out, model, callbacks=[RouterStatsCallback()], **settings)
    trainer.train()
    values = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return values, [line for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for case, changes, options in json.loads((folder / "cases.json").read_text()):
        changed = {**HEAVY, "group_size": 1, "capacity_factor": None, **changes}
        parameters, lines = train(
            folder / case, tiny_model(**changed).double(), ddp_backend="gloo", **options
        )
        torch.save((parameters, lines), folder / f"{case}.{torch.distributed.get_rank()}.pt")
