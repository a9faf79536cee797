# %% [markdown]
# # What changed between two models?
#
# Two models on the same text, for example before and after fine-tuning, pruning or quantization:
# which tokens go to other experts, and how much of the change in loss is caused by the routing. Run
# `make demo` first, or set `MOE_MODEL` to the folder of the model before and `MOE_OTHER` to that of
# the model after. By default these are the demo's pre-trained and fine-tuned models; with `MOE_MODEL`
# alone, the second model is a copy rounded to 4 bits. `MOE_TEXT` names your own files, e.g.
# `"news=a.txt code=b.md"`. Figures go to `MOE_OUT`.
#
# Run it as a script (`python -m notebooks.what_changed`), or cell by cell in Jupyter or an editor.

# %%
import copy
import os

import torch

from moe import STMoEForConditionalGeneration, load_complete, record_routing, replay_routing
from moe.data.tokenizer import load_tokenizer
from moe.inspection import figures, tables
from moe.inspection.ablation import loss_split
from moe.inspection.page.routing_view import routing_view
from moe.inspection.statistics import matching, saturation
from moe.tracing import examples, texts, trace

if os.path.basename(os.getcwd()) == "notebooks":  # Jupyter starts in the notebook's folder
    os.chdir("..")
MODEL = os.environ.get("MOE_MODEL", "runs/demo/pretrain/model")
OTHER = os.environ.get("MOE_OTHER", "" if "MOE_MODEL" in os.environ else "runs/demo/model")
FILES = os.environ.get("MOE_TEXT", "").split()
OUT = os.environ.get("MOE_OUT", "runs/notebooks/what_changed")


def plot(name, draw, panels, **options):
    """Draws and saves a figure, which Jupyter then shows."""
    drawing = draw(panels, **options)
    drawing.save(f"{OUT}/{name}.svg")
    return drawing


# %% [markdown]
# ## Two models
#
# Rounding is simulated: each row of a matrix is rounded to a number of bits, symmetrically. This shows
# the effect on results, not on memory or speed.


# %%
def rounded(model, bits):
    """Returns a copy whose matrices are rounded to `bits` bits."""
    model = copy.deepcopy(model)
    for weight in model.parameters():
        if weight.ndim > 1:
            step = weight.data.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
            weight.data = (weight.data / step.clamp(min=1e-12)).round() * step
    return model


before = load_complete(STMoEForConditionalGeneration, MODEL)
tokenizer = load_tokenizer(MODEL)
after = load_complete(STMoEForConditionalGeneration, OTHER) if OTHER else rounded(before, bits=4)
if OTHER and load_tokenizer(OTHER).get_vocab() != tokenizer.get_vocab():
    raise SystemExit(f"{MODEL} and {OTHER} have different tokenizers, so no token is comparable.")
after_name = OTHER or f"{MODEL}, rounded to 4 bits"
print(f"before: {MODEL}\nafter:  {after_name}")

# %% [markdown]
# ## The same text for both
#
# Spans of the text are masked as in the pre-training of the model before. A fine-tuned model has
# forgotten this task; its higher loss below shows it.

# %%
batches = list(
    examples.corrupted_batches(
        texts.find_texts(FILES, "runs/demo/corpus"),
        tokenizer,
        inputs_length=64,
        batch_size=64,
        noise=examples.pretraining_noise(before.config),
        most_examples=192,
    )
)
trace_before = record_routing(before, batches, num_best=min(4, before.config.num_experts))
trace_after = record_routing(after, batches, num_best=min(4, after.config.num_experts))
print(f"before: {tables.loss_sentence(trace_before)}")
print(f"after:  {tables.loss_sentence(trace_after)}")

# %% [markdown]
# ## Do tokens go to the same experts?
#
# The share of tokens with the same first choice, and the share expected by chance from the loads of
# the experts. Corrected for chance, 0 is chance and 1 is the same routing.

# %%
rows = []
for layer, other in zip(trace_before.layers, trace_after.layers, strict=True):
    same = saturation.choice_agreement(layer.first, other.first, layer.facts.num_experts)
    numbers = [f"{x:.2f}" for x in (same.share, same.load_chance, same.load_corrected)]
    rows.append([trace.layer_name(layer.key), *numbers])
print(tables.format_table(["sparse layer", "same first choice", "chance", "corrected"], rows))

# %% [markdown]
# ## Or were the experts renumbered?
#
# Two models trained from different seeds number their experts differently, so experts must be matched
# first. Rows are the experts before, columns the experts after in the order of their partners: a dark
# diagonal is a one-to-one correspondence. The adjusted Rand index ignores the numbers: 0 is chance, 1
# the same groups of tokens.

# %%
matchings = matching.match_traces(trace_before, trace_after)


def plot_matching(key, match):
    partners = match.partner.tolist()
    others = [expert for expert in range(match.counts.shape[1]) if expert not in partners]
    order = [expert for expert in partners if expert >= 0] + others
    share = (match.counts / match.counts.sum(dim=1, keepdim=True))[:, order]
    return figures.HeatMap(
        title=f"{trace.layer_name(key)}, adjusted Rand index {match.adjusted_rand:.2f}",
        rows=range(1, len(share) + 1),
        columns=[expert + 1 for expert in order],
        values=share.tolist(),
        texts=[[f"{100 * value:.0f}" for value in row] for row in share.tolist()],
    )


plot(
    "matching",
    figures.draw_heat_maps,
    [plot_matching(*item) for item in matchings.items()],
    label="share of the tokens of a row's expert (cells: %)",
    x_label="expert after, in the order of partners",
    y_label="expert before",
    limits=(0, 1),
    colours="Blues",
)

# %% [markdown]
# ## Side by side
#
# The text in both models. Experts with the same number correspond, as after fine-tuning; for two
# seeds, pass `matching=` with the partners from above.

# %%
title = f"{MODEL} and {after_name}"
view = routing_view(trace_before, tokenizer, other=trace_after, title=title)
print(view.save(f"{OUT}/view.html"))
view

# %% [markdown]
# ## Is it the routing?
#
# The second model runs once more with the routing of the first. The difference in loss that remains
# comes from its other weights; the rest comes from its routing. Below 0, the second model is better.
# For comparison: copies of the first model rounded to 8, 4 and 3 bits. Intervals are 95 %, over
# documents.

# %%
MODELS = {after_name: after}
for bits in (8, 4, 3):
    MODELS[f"before, rounded to {bits} bits"] = rounded(before, bits)

splits = {}
rows = []
for name, model in MODELS.items():
    split = loss_split.split_loss(before, model, trace_before, batches)
    rows.append([name, f"{split.first:.4f}", f"{split.second:.4f}", f"{split.replayed:.4f}"])
    splits[name] = split
header = ["nats per token", "before", "after", "after, routed as before"]
print(tables.format_table(header, rows))


def plot_split(title, names):
    rows = []
    for name in names:
        rows.append(figures.Row(name, "by routing", figures.Estimate(*splits[name].routing)))
        rows.append(figures.Row(name, "by other weights", figures.Estimate(*splits[name].weights)))
    return figures.IntervalPanel(title, rows)


CHANGE = {"label": "change of the loss (nats per token)", "from_zero": True}
names = list(splits)
plot("loss_split", figures.draw_intervals, [plot_split("The model after", names[:1])], **CHANGE)

# %%
plot("copies", figures.draw_intervals, [plot_split("Rounded copies", names[1:])], **CHANGE)

# %% [markdown]
# ## Check the replay
#
# Replayed in its own model, a trace must give every token a bit-identical loss. Otherwise, do not
# trust the split above.

# %%
original = loss_split.token_losses(before, batches)
with replay_routing(before, trace_before):
    replayed = loss_split.token_losses(before, batches)
print("The replay in the same model is bit-identical:", torch.equal(original, replayed))

# %% [markdown]
# To see when the routing settled during training, train with `--training.probe_every 100` and open
# `stmoe inspect view --probe RUN/probe ...`.
