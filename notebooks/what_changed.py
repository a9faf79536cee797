# %% [markdown]
# # What changed?
#
# Two models on the same text: before and after fine-tuning, pruning, quantising. Which tokens go
# elsewhere, whether experts only changed their names, and how much of the loss is due to the
# routing. Run `make demo` first, or set
#
# - `MOE_MODEL` to the folder of the model before, `MOE_OTHER` to that of the model after; without
#   either the demo's pre-trained and fine-tuned models are taken, and where there is no fine-tuned
#   one, a copy whose weights are rounded to 4 bits, made in this notebook,
# - `MOE_TEXT` to files of your own, e.g. `"news=a.txt code=b.md"`; without it, held-out text of the
#   demo is read, or else Python's own language reference,
# - `MOE_PROBE` to the folder `probe` of the run that made the model before,
# - `MOE_OUT` to where the page and the figures go.
#
# It runs as a script (`python -m notebooks.what_changed`), and cell by cell in Jupyter and in editors that
# know `# %%`, in under a minute on one core.

# %%
import copy
import os
import shlex
import sys
from pathlib import Path

import torch

from moe.checksums import model_fingerprint
from moe.commands.routing_inputs import load_inspected, tokenizer_fingerprint
from moe.inspection.ablation.loss_split import mean_change, split_loss, token_losses
from moe.inspection.ablation.target_sets import list_targets
from moe.inspection.figures import (
    Curve,
    CurvePanel,
    HeatMap,
    IntervalPanel,
    Row,
    draw_curves,
    draw_heat_maps,
    draw_intervals,
)
from moe.inspection.page.panel_data import view_saturation
from moe.inspection.page.routing_view import routing_view
from moe.inspection.statistics.document_intervals import Estimate, TokenSums, mean_over_tokens
from moe.inspection.statistics.matching import match_traces
from moe.inspection.statistics.saturation import choice_agreement
from moe.inspection.statistics.token_classes import classify
from moe.inspection.tables import format_table, loss_sentence
from moe.sparse.editing import sparse_layers
from moe.tracing.examples import corrupted_batches, describe_noise, pretraining_noise
from moe.tracing.probe_file import has_probes
from moe.tracing.recorder import Provenance, record_routing
from moe.tracing.replay import replay_routing
from moe.tracing.texts import find_texts
from moe.tracing.trace import layer_name

# Jupyter starts a notebook in its own folder; a script starts where you are.
root = Path("..") if Path.cwd().name == "notebooks" else Path()
folder = Path(os.environ.get("MOE_MODEL", root / "runs/demo/pretrain/model"))
corpus = Path(os.environ.get("MOE_CORPUS", root / "runs/demo/corpus"))
files = shlex.split(os.environ.get("MOE_TEXT", ""))
probe = Path(os.environ.get("MOE_PROBE", folder.parent / "probe"))
out = Path(os.environ.get("MOE_OUT", root / "runs/notebooks/what_changed"))
view_bytes = int(os.environ.get("MOE_VIEW_BYTES", "5000000"))

# The demo's own fine-tuned model belongs to the demo's own pre-trained one.
other_folder = os.environ.get("MOE_OTHER", "")
finetuned = root / "runs/demo/model"
if not other_folder and "MOE_MODEL" not in os.environ and finetuned.exists():
    other_folder = str(finetuned)

kept = []


def keep(name, shown):
    """Saves a figure or a page; Jupyter shows what the last line of a cell returns."""
    kept.append(shown.save(out / name))
    return shown


# %% [markdown]
# ## Two models
#
# Rounding is simulated: each row of a matrix is rounded to so many bits, symmetrically, and
# computed with as before. That is what it does to the results, not to memory or speed.


# %%
def rounded(model, bits):
    """Returns a copy whose weights are rounded to so many bits; 16 stands for bfloat16."""
    model = copy.deepcopy(model)
    largest = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for weight in model.parameters():
            if bits == 16:
                weight.copy_(weight.bfloat16().float())
            elif weight.ndim > 1:
                step = weight.abs().amax(dim=-1, keepdim=True) / largest
                weight.copy_((weight / step.clamp(min=1e-12)).round() * step)
    return model


def pruned(model, share):
    """Returns a copy in which a share of the weights of each expert, the smallest, is 0."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in sparse_layers(model).values():
            for weight in layer.experts.parameters():  # [E, ...]
                size = weight.abs().flatten(1)
                num_pruned = int(share * size.shape[1])
                if num_pruned:
                    limit = size.kthvalue(num_pruned, dim=1).values
                    weight[weight.abs() <= limit.reshape(-1, *[1] * (weight.ndim - 1))] = 0
    return model


_, first, tokenizer = load_inspected(folder)
first_name = str(folder)
if other_folder:
    _, second, other_tokenizer = load_inspected(Path(other_folder))
    second_name = other_folder
    second_fingerprint = model_fingerprint(Path(other_folder))
    if tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(other_tokenizer):
        sys.exit(f"{folder} and {other_folder} have different tokenizers: no token is comparable.")
else:
    second = rounded(first, bits=4)
    second_name = f"{folder}, rounded to 4 bits"
    second_fingerprint = ""
print(f"before: {first_name}\nafter:  {second_name}")

# %% [markdown]
# ## The same text for both
#
# Its spans are masked as in the pre-training of the model before. Fine-tuning on a task makes a model
# forget that, and then the loss of the model after says so below: the agreement tells how far it
# has moved, not how it routes its task.

# %%
texts = find_texts(files, corpus)
noise = pretraining_noise(first.config)
batches = list(
    corrupted_batches(
        texts, tokenizer, inputs_length=64, batch_size=64, noise=noise, most_examples=192
    )
)
text_name = f"{' '.join(files) or 'held-out text'}, {describe_noise(noise, first.config)}"
of_first = Provenance(text_name, first_name, model_fingerprint(folder))
of_second = Provenance(text_name, second_name, second_fingerprint)
num_best = min(first.config.num_experts, 4)
trace = record_routing(first, batches, num_best=num_best, provenance=of_first)
other = record_routing(second, batches, num_best=num_best, provenance=of_second)
print(f"{trace.facts.num_examples} examples, {trace.encoder.ids.numel():,} tokens in the encoder")
print(f"{text_name}\nbefore: {loss_sentence(trace)}\nafter:  {loss_sentence(other)}")

# %% [markdown]
# ## Do tokens go to the same experts?
#
# The share of tokens whose first choice is the same expert, by class of token, with 95 % intervals
# over documents. The dashed line is chance: the share if tokens exchanged their choices, which is
# more than 1 / E where some experts are busier. Where a class moved more than the rest, ask what
# the new data taught about it; where all moved alike, the router drifted.


# %%
def same_share(layer, other_layer, members, document):
    """Share of the tokens of a class whose first choice is the same, with its interval."""
    has_both = members & (layer.first >= 0) & (other_layer.first >= 0)
    is_same = (layer.first == other_layer.first)[has_both]
    sums = torch.zeros(int(document.max()) + 1, dtype=torch.float64)
    same = sums.index_add(0, document[has_both], is_same.double())
    counts = sums.index_add(0, document[has_both], torch.ones_like(is_same).double())
    estimates = mean_over_tokens(TokenSums(same, counts))
    low, high = estimates.interval(0.95)
    return Estimate(float(estimates.value), max(0.0, float(low)), min(1.0, float(high)))


panels = []
rows = []
for layer, other_layer in zip(trace.layers, other.layers, strict=True):
    part = trace.stack(layer.facts.stack)
    document = trace.document.long()[part.example]
    agreement = choice_agreement(layer.first, other_layer.first, layer.facts.num_experts)
    everything = torch.ones_like(part.ids, dtype=torch.bool)
    estimates = [Row("all tokens", "", same_share(layer, other_layer, everything, document))]
    classes = classify(part, tokenizer)
    for name, members in zip(classes.names, classes.members, strict=True):
        if members.any():
            estimate = same_share(layer, other_layer, members, document)
            estimates.append(Row(f"{name} ({int(members.sum()):,})", "", estimate))
    title = layer_name(layer.key)
    panels.append(IntervalPanel(title, estimates, agreement.load_chance, "by chance"))

    numbers = (agreement.share, agreement.load_chance, agreement.load_corrected)
    rows.append([title, *(f"{number:.2f}" for number in numbers)])
print(format_table(["sparse layer", "same first choice", "chance", "beyond chance"], rows))
keep("agreement.svg", draw_intervals(panels, label="share with the same first choice"))

# %% [markdown]
# ## Or did they change names?
#
# Between two seeds, experts have no common numbers: a low agreement means nothing before they are
# matched. The rows are the first model's experts, the columns are ordered by partner, so that a
# dark diagonal is a one-to-one correspondence. The adjusted Rand index compares the two groupings
# of tokens whatever the experts are called: 0 is chance, 1 the same groups.

# %%
panels = []
matchings = match_traces(trace, other)
for key, matching in matchings.items():
    partners = matching.partner.tolist()
    others = [expert for expert in range(matching.counts.shape[1]) if expert not in partners]
    order = [expert for expert in partners if expert >= 0] + others
    share = matching.counts / matching.counts.sum(dim=1, keepdim=True)
    share = share[:, order]
    panels.append(
        HeatMap(
            title=f"{layer_name(key)}, adjusted Rand {matching.adjusted_rand:.2f}",
            rows=[str(expert + 1) for expert in range(len(share))],
            columns=[str(expert + 1) for expert in order],
            values=share.tolist(),
            texts=[[f"{100 * value:.0f}" for value in row] for row in share.tolist()],
        )
    )
drawing = draw_heat_maps(
    panels,
    label="share of the tokens of a row's expert (cells: %)",
    x_label="expert after, in the order of partners",
    y_label="expert before",
    limits=(0, 1),
    colours="Blues",
)
keep("matching.svg", drawing)

# %% [markdown]
# ## Side by side
#
# The same text in both models. Experts of the same number are taken for the same, as after
# fine-tuning; for two seeds, give `matching=` from above.

# %%
keep("view.html", routing_view(trace, tokenizer, other=other, most_bytes=view_bytes))

# %% [markdown]
# ## Is it the routing?
#
# The second model runs once more with the routing of the first. What it loses even then is due to
# its other weights; the rest is due to its own routing. Below 0 the second model is better there.
# Beside the second model stand copies of the first: rounded ever more coarsely, and pruned, the
# smallest weights of each expert set to 0. Intervals are of 95 %, over documents.

# %%
MODELS = {second_name: second}
for bits, name in ((16, "bfloat16"), (8, "8 bits"), (3, "3 bits")):
    MODELS[f"before, in {name}"] = rounded(first, bits)
MODELS["before, a third of the expert weights pruned"] = pruned(first, share=1 / 3)

panels = {"The model after": [], "Copies of the model before": []}
losses = []
for name, model in MODELS.items():
    split = split_loss(first, model, trace, batches)
    rows = panels["The model after" if model is second else "Copies of the model before"]
    rows.append(Row(name, "by routing", Estimate(*split.routing)))
    rows.append(Row(name, "by other weights", Estimate(*split.weights)))
    numbers = (split.first, split.second, split.replayed)
    losses.append([name, *(f"{number:.4f}" for number in numbers)])
print(format_table(["nats a token", "before", "after", "after, routed as before"], losses))

drawings = []
for title, rows in panels.items():
    drawing = draw_intervals(
        [IntervalPanel(title, rows)], label="change of the loss (nats a token)", from_zero=True
    )
    drawings.append(drawing)
keep("loss_split.svg", drawings[0])

# %%
keep("copies.svg", drawings[1])

# %% [markdown]
# ## Replay
#
# A trace replayed in its own model must give every token the same loss, bit for bit: if it does
# not, nothing above is to be trusted. In the other model the weights of the choices may come from
# its own router, or from the trace too.

# %%
own = token_losses(first, batches)
with replay_routing(first, trace):
    replayed = token_losses(first, batches)
print("The replay in the same model is bit-identical:", torch.equal(own, replayed))

targets = list_targets(batches)
after = token_losses(second, batches)
rows = [Row("its own routing", "", Estimate(*mean_change(after - own, targets)))]
for weights, name in (
    ("recompute", "choices of the trace"),
    ("replay", "choices and weights of the trace"),
):
    with replay_routing(second, trace, weights=weights):
        losses = token_losses(second, batches)
    rows.append(Row(name, "", Estimate(*mean_change(losses - own, targets))))
drawing = draw_intervals(
    [IntervalPanel(f"The model after: {second_name}", rows, 0.0)],
    label="loss over that of the model before (nats a token)",
)
keep("replay.svg", drawing)

# %% [markdown]
# ## When did the routing settle?
#
# A run with `training.probe_every` writes down where a fixed text goes, every so many steps. The
# curve is the share of first choices that are already those of the last probe, corrected for
# chance. The last point is 1 by definition: look at how early the curve is high. A router that
# settles in the first steps has chosen before the experts knew anything.

# %%
points = view_saturation(probe) if has_probes(probe) else []
if points:
    by_layer = {}
    for point in points:
        by_layer.setdefault(point.key, []).append(point)
    curves = []
    for key, of_layer in by_layer.items():
        steps = [point.step for point in of_layer]
        curves.append(Curve(layer_name(key), steps, [point.value for point in of_layer]))
    drawing = draw_curves(
        [CurvePanel(f"Saturation of {folder}", curves)],
        x_label="step of training",
        y_label="as at the end, beyond chance",
        y_limits=(-0.05, 1.05),
    )
    keep("saturation.svg", drawing)
else:
    print(f"There are no probes in {probe}: train with --training.probe_every 100 to have them.")
drawing if points else None

# %%
print("\n".join(str(path) for path in kept))
