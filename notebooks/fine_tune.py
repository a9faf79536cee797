# %% [markdown]
# # Fine-tune a sparse model with transformers' Trainer
#
# Run `make demo` first, or set `MOE_MODEL` to the folder of another model. The result goes to
# `MOE_OUT`. This takes about a minute on 2 cores.
#
# Run it as a script (`python -m notebooks.fine_tune`), or cell by cell in Jupyter or an editor.

# %%
import os
import random
import unicodedata

import numpy as np
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

from moe import RouterStatsCallback, STMoEForConditionalGeneration, load_complete, record_routing
from moe.data.tokenizer import load_tokenizer
from moe.inspection import tables
from moe.tracing.recorder import traced_batches

if os.path.basename(os.getcwd()) == "notebooks":  # Jupyter starts in the notebook's folder
    os.chdir("..")
MODEL = os.environ.get("MOE_MODEL", "runs/demo/pretrain/model")
OUT = os.environ.get("MOE_OUT", "runs/fine_tune/model")

set_seed(0)
model = load_complete(STMoEForConditionalGeneration, MODEL)
tokenizer = load_tokenizer(MODEL)
active = model.config.num_active_parameters()
print(f"{model.num_parameters():,} parameters, of which one token uses {active:,}")

# %% [markdown]
# ## The task
#
# Input: the name of a Unicode character. Target: its category in words. Replace `pairs` with your own.

# %%
CATEGORIES = {
    "Ll": "lowercase letter",
    "Lu": "uppercase letter",
    "Nd": "decimal number",
    "Mn": "nonspacing mark",
}
pairs = []
for character in map(chr, range(0x10000)):
    category = CATEGORIES.get(unicodedata.category(character))
    if category:
        pairs.append((unicodedata.name(character).lower(), category))
random.seed(0)
random.shuffle(pairs)
validation = pairs[:120]
train = pairs[120:1320]


def encode(pair):
    """Token ids of input and target; the collator pads them, targets with -100."""
    return tokenizer(pair[0], text_target=pair[1], truncation=True, max_length=64)


# %% [markdown]
# ## Train
#
# The loss of the model includes the router losses; the callback logs the cross-entropy separately,
# and router statistics. Exact match is the share of predictions that equal the target.


# %%
def decode(rows):
    """Texts of rows of tokens, which the Trainer pads with -100."""
    padded = np.where(rows >= 0, rows, tokenizer.pad_token_id)
    return np.array(tokenizer.batch_decode(padded, skip_special_tokens=True))


def exact_match(prediction):
    """Share of the predictions that equal the target."""
    is_equal = decode(prediction.predictions) == decode(prediction.label_ids)
    return {"exact_match": float(is_equal.mean())}


trainer = Seq2SeqTrainer(
    model,
    Seq2SeqTrainingArguments(
        OUT,
        max_steps=150,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        warmup_steps=20,
        logging_steps=30,
        save_strategy="no",
        predict_with_generate=True,
        generation_max_length=20,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    ),
    DataCollatorForSeq2Seq(tokenizer, model),
    train_dataset=[encode(pair) for pair in train],
    eval_dataset=[encode(pair) for pair in validation],
    compute_metrics=exact_match,
    callbacks=[RouterStatsCallback()],
)
before = trainer.evaluate()
trainer.train()
after = trainer.evaluate()
for name, metrics in (("before", before), ("after", after)):
    print(f"{name}: {100 * metrics['eval_exact_match']:.1f} % exact match")

# %% [markdown]
# ## The routers on this task

# %%
batches = [{**batch.to(model.device)} for batch in trainer.get_eval_dataloader()]
for batch in batches:
    batch.pop("decoder_input_ids", None)
trace = record_routing(model, traced_batches(batches))
print(tables.format_table(tables.HEALTH_HEADER, tables.health_rows(trace.layers)))

# %% [markdown]
# ## Save, load, generate
#
# With `eval_capacity_factor=None` the model drops no token, and an answer does not depend on the
# other inputs of its batch.

# %%
model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)

model = load_complete(STMoEForConditionalGeneration, OUT, eval_capacity_factor=None)
batch = tokenizer([name for name, _ in validation[:6]], padding=True, return_tensors="pt")
answers = decode(model.generate(**batch, max_new_tokens=16).numpy())
rows = [[*pair, answer] for pair, answer in zip(validation[:6], answers, strict=True)]
print(tables.format_table(["input", "target", "generated"], rows))
