# %% [markdown]
# # Fine-tune a sparse model with transformers' Trainer
#
# Run `make demo` first, or set `MOE_MODEL` to the folder of another model; `MOE_OUT` is where the
# result goes. It runs as a script (`python -m notebooks.fine_tune`) and cell by cell in Jupyter and
# in editors that know `# %%`, in about a minute on 2 cores.

# %%
import operator
import os
import sys
from pathlib import Path

import numpy as np
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

# Jupyter starts a notebook in its own folder; a script starts where you are.
root = Path("..") if Path.cwd().name == "notebooks" else Path()
sys.path.insert(0, str(root.resolve()))  # eval/ is not installed

from eval.task import TASKS
from moe import RouterStatsCallback, STMoEForConditionalGeneration, add_stats, load_complete
from moe.data.tokenizer import load_tokenizer
from moe.inspection.tables import HEALTH_HEADER, format_table, health_rows
from moe.tracing.recorder import record_routing, traced_batches

folder = Path(os.environ.get("MOE_MODEL", root / "runs/demo/pretrain/model"))
out = Path(os.environ.get("MOE_OUT", root / "runs/fine_tune/model"))
if not (folder / "config.json").is_file():
    sys.exit(
        f"There is no model in {folder}. Run `make demo` first, or set MOE_MODEL to the folder of a model."
    )

set_seed(0)
model = load_complete(STMoEForConditionalGeneration, folder)
tokenizer = load_tokenizer(folder)
print(
    f"{model.num_parameters():,} parameters; a token uses {model.config.num_active_parameters():,}"
)

# %% [markdown]
# ## The task
#
# The name of a Unicode character in, its category in words out: real data that every Python
# carries. Four of the seventeen categories are enough here; `stmoe finetune` trains on
# them all.

# %%
TASK = TASKS.get("unicode_category")
CHOICES = ("lowercase letter", "uppercase letter", "decimal number", "nonspacing mark")


def select_examples(split, most):
    """At most so many examples of a split, taken evenly."""
    examples = [example for example in TASK.examples(split) if example.targets in CHOICES]
    step = -(-len(examples) // most)
    return examples[::step]


def encode(example):
    """Token ids of inputs and targets; the collator pads them, targets with -100."""
    return tokenizer(example.inputs, text_target=example.targets, truncation=True, max_length=64)


train = select_examples("train", 1200)
validation = select_examples("validation", 120)
print(
    f"{len(train)} examples for training, {len(validation)} for validation, for instance {validation[0]}"
)

# %% [markdown]
# ## The trainer
#
# The routers' losses are in the loss that the model returns; the callback logs the cross-entropy
# apart, and what the routers did. A prediction counts when it is the target to the letter.


# %%
def exact_match(prediction):
    """Share of the predictions that are the target."""
    answers = decode(prediction.predictions)
    targets = decode(prediction.label_ids)
    num_equal = sum(map(operator.eq, answers, targets))
    return {"exact_match": num_equal / len(targets)}


def decode(rows):
    """Texts of rows of tokens; the Trainer pads them with -100."""
    padded = np.where(rows >= 0, rows, tokenizer.pad_token_id)
    return tokenizer.batch_decode(padded, skip_special_tokens=True)


arguments = Seq2SeqTrainingArguments(
    output_dir=str(out),
    max_steps=150,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=60,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_steps=20,
    logging_steps=30,
    save_strategy="no",
    predict_with_generate=True,
    generation_max_length=TASK.decoding.max_tokens,
    generation_num_beams=1,
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Seq2SeqTrainer(
    model,
    arguments,
    train_dataset=[encode(example) for example in train],
    eval_dataset=[encode(example) for example in validation],
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    compute_metrics=exact_match,
    callbacks=[RouterStatsCallback()],
)

# %%
before = trainer.evaluate()
trainer.train()
after = trainer.evaluate()
names = ("loss", "ce_loss", "router/encoder/load_balance_loss", "router/encoder/fraction_dropped")
rows = []
for entry in trainer.state.log_history:
    if "ce_loss" in entry:
        rows.append([str(entry["step"]), *(f"{entry[name]:.3f}" for name in names)])
print(format_table(["step", *names], rows))

rows = []
for name, metrics in (("before", before), ("after", after)):
    exact_match = f"{100 * metrics['eval_exact_match']:.1f} %"
    rows.append([name, exact_match, f"{metrics['eval_loss']:.3f}"])
print(format_table(["validation", "exact match", "loss"], rows))

# %% [markdown]
# ## What the routers do with the task

# %%
batches = []
for batch in trainer.get_eval_dataloader():
    batch.pop("decoder_input_ids", None)
    batches.append({name: value.to(model.device) for name, value in batch.items()})
trace = record_routing(model, traced_batches(batches))
print(format_table(HEALTH_HEADER, health_rows(trace.layers)))

# %% [markdown]
# ## Save, load, generate
#
# The model card beside the weights says what was measured. Loaded with `eval_capacity_factor=None`
# the model drops no token, and an answer does not depend on the questions beside it.

# %%
stats = {}
for layer in trace.layers:
    stack = layer.facts.stack
    earlier = stats.get(stack)
    stats[stack] = layer.stats if earlier is None else add_stats(earlier, layer.stats)
model.save_pretrained(out, card={"stats": stats})
tokenizer.save_pretrained(out)
print((out / "README.md").read_text(encoding="utf-8").split("## How")[0])

model = load_complete(STMoEForConditionalGeneration, out, eval_capacity_factor=None)
shown = validation[:: len(validation) // 5]
batch = tokenizer([example.inputs for example in shown], padding=True, return_tensors="pt")
tokens = model.generate(**batch, max_new_tokens=TASK.decoding.max_tokens, do_sample=False)
answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
rows = [
    [example.inputs, example.targets, answer]
    for example, answer in zip(shown, answers, strict=True)
]
print(format_table(["asked", "expected", "generated"], rows))
