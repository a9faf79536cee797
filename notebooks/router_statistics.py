# %% [markdown]
# # What do the routers do with my sentences?
#
# Run `make demo` first, or set `MOE_MODEL` to the folder of another model. It runs as a script
# (`python notebooks/router_statistics.py`) and cell by cell in editors that know `# %%`.
#
# The model is loaded without a capacity, so that no token is dropped: the few tokens of single
# sentences are not spread as evenly as those of a batch.

# %%
import os

from moe import STMoEForConditionalGeneration, load_complete
from moe.data.tokenizer import load_tokenizer
from moe.inspection.tables import (
    HEALTH_HEADER,
    format_table,
    health_rows,
    load_shares,
    token_names,
    top_tokens,
)
from moe.inspection.token_counts import count_tokens
from moe.tracing.recorder import record_routing, traced_batches
from moe.tracing.trace import layer_name

folder = os.environ.get("MOE_MODEL", "runs/demo/pretrain/model")
model = load_complete(
    STMoEForConditionalGeneration, folder, eval_capacity_factor=None, expert_capacity=None
)
tokenizer = load_tokenizer(folder)

# %% [markdown]
# ## Sentences
#
# The encoder reads each sentence with a sentinel at the end; the decoder is given what the sentinel
# hides. The attention mask and labels of -100 say what is padding: no router sees it, and nothing
# below counts it.

# %%
sentences = [
    ("Returns the number of items in a", "list."),
    ("The default value of this argument is", "None."),
    ("Raises an error if the file does not", "exist."),
]
inputs = tokenizer(
    [f"{text} <extra_id_0>" for text, _ in sentences], padding=True, return_tensors="pt"
)
targets = tokenizer(
    [f"<extra_id_0> {hidden}" for _, hidden in sentences], padding=True, return_tensors="pt"
)
labels = targets.input_ids.masked_fill(targets.attention_mask == 0, -100)
batch = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask, "labels": labels}

# %% [markdown]
# ## Health: load, drops, entropy

# %%
trace = record_routing(model, traced_batches([batch]))
counts = count_tokens(trace, model.config.vocab_size)
print(format_table(HEALTH_HEADER, health_rows(counts)))

# %% [markdown]
# ## Tokens by expert
#
# `<start>` is the token that the decoder begins with.

# %%
for layer in counts:
    rows = []
    for expert, share in enumerate(load_shares(layer)):
        top = top_tokens(layer.first_choice, expert)
        names = token_names(tokenizer, layer, [count.token for count in top])
        rows.append([str(expert + 1), f"{100 * share:.0f} %", " ".join(names)])
    print(f"\n{layer_name(layer.key)}: {int(layer.stats.num_tokens)} tokens")
    print(format_table(["expert", "load", "first choice of"], rows))

# %% [markdown]
# ## One sentence, token by token

# %%
output = model(**batch, output_router_logits=True)
router = output.encoder_router_outputs[0]
probs = (
    router.router_logits.softmax(-1).flatten(0, 1).unflatten(0, batch["input_ids"].shape)
)  # [B, L, E]
real = batch["attention_mask"][0] == 1
for token, probs_of_token in zip(
    tokenizer.convert_ids_to_tokens(batch["input_ids"][0][real]), probs[0][real], strict=True
):
    best = probs_of_token.topk(min(2, len(probs_of_token))).indices.tolist()
    print(
        f"{token:<16} expert",
        ", then ".join(f"{expert + 1} ({probs_of_token[expert]:.2f})" for expert in best),
    )
