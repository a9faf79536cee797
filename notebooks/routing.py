# %% [markdown]
# # What is my model's routing like?
#
# Any checkpoint, any text: where the tokens go, which of it is more than chance, and how close the
# choices are. Run `make demo` first, or set
#
# - `MOE_MODEL` to the folder of another model,
# - `MOE_TEXT` to files of your own, e.g. `"news=a.txt code=b.md"`; without it, held-out text of the
#   demo is read, or else Python's own language reference,
# - `MOE_OUT` to where the page and the figures go.
#
# It runs as a script (`python -m notebooks.routing`), and cell by cell in Jupyter and in editors that
# know `# %%`, in under a minute on one core.

# %%
import math
import os
import shlex
from pathlib import Path

import torch

from moe.checksums import model_fingerprint
from moe.commands.routing_inputs import load_inspected
from moe.inspection.figures import (
    Curve,
    CurvePanel,
    HeatMap,
    IntervalPanel,
    Row,
    draw_curves,
    draw_heat_maps,
    draw_intervals,
    draw_load,
)
from moe.inspection.page.panel_data import view_classes
from moe.inspection.page.routing_view import routing_view
from moe.inspection.statistics.coactivation import coactivation, layer_flows
from moe.inspection.statistics.document_intervals import Estimate
from moe.inspection.statistics.margins import choice_margins, noise_stability
from moe.inspection.statistics.permutations import (
    LEAST_DOCUMENTS,
    DocumentShuffle,
    TokenShuffle,
    token_places,
)
from moe.inspection.statistics.routing_entropy import sentinel_entropies
from moe.inspection.statistics.token_classes import DEFAULT_CLASSES
from moe.inspection.statistics.vocabulary import vocabulary_table
from moe.inspection.tables import (
    HEALTH_HEADER,
    count_tokens,
    format_table,
    health_rows,
    load_shares,
    loss_sentence,
)
from moe.tracing.examples import SourceText, corrupted_batches, describe_noise, pretraining_noise
from moe.tracing.recorder import Provenance, record_routing
from moe.tracing.texts import find_texts
from moe.tracing.trace import STACKS, layer_name

# Jupyter starts a notebook in its own folder; a script starts where you are.
root = Path("..") if Path.cwd().name == "notebooks" else Path()
folder = Path(os.environ.get("MOE_MODEL", root / "runs/demo/pretrain/model"))
corpus = Path(os.environ.get("MOE_CORPUS", root / "runs/demo/corpus"))
files = shlex.split(os.environ.get("MOE_TEXT", ""))
out = Path(os.environ.get("MOE_OUT", root / "runs/notebooks/routing"))
view_bytes = int(os.environ.get("MOE_VIEW_BYTES", "5000000"))

_, model, tokenizer = load_inspected(folder)
print(
    f"{folder}: {model.num_parameters():,} parameters, {model.config.num_experts} experts a layer"
)

kept = []


def keep(name, shown):
    """Saves a figure or a page; Jupyter shows what the last line of a cell returns."""
    kept.append(shown.save(out / name))
    return shown


def expert_names(num_experts):
    """Experts are numbered from 1 for people."""
    return [str(expert + 1) for expert in range(num_experts)]


# %% [markdown]
# ## The text
#
# Change the sentences. They come first on the page below, so that you can follow single words;
# the statistics need more text than a few sentences, and get it from the files or the corpus.
#
# Spans of the text are masked as in the model's pre-training: the encoder reads a sentinel for each
# span, the decoder reads and writes what was there. A fine-tuned model has forgotten that: show it
# its own task, with `paired_batches` in place of `corrupted_batches`.

# %%
SENTENCES = [
    "The function returns the number of items in the list, and None if there is no list.",
    "In 1843 Ada Lovelace published notes on a machine that was never built.",
    "Raises a ValueError if the two arrays do not have the same shape, e.g. (3, 4) and (4, 3).",
    "She opened the door, looked at the rain and decided that the walk could wait until evening.",
]

mine = [SourceText(text, "", number, "my sentences") for number, text in enumerate(SENTENCES)]
others = []
for source in find_texts(files, corpus):
    others.append(source._replace(document=source.document + len(mine)))

noise = pretraining_noise(model.config)
batches = []
for texts, most_examples in ((mine, None), (others, 256)):
    batches += corrupted_batches(
        texts, tokenizer, inputs_length=64, batch_size=64, noise=noise, most_examples=most_examples
    )
num_documents = len({number for batch in batches for number in batch.documents})
print(f"{len(mine) + len(others):,} documents, of which {num_documents:,} are traced")

# %% [markdown]
# ## Record
#
# Every choice of every token is kept: which experts it asked for, which of them had room, with
# which weight. `num_best` keeps the highest probabilities too, for the page and the margins.

# %%
provenance = Provenance(
    text=(
        f"{' '.join(files) or 'sentences of the notebook and held-out text'}, "
        f"{describe_noise(noise, model.config)}"
    ),
    model=str(folder),
    model_fingerprint=model_fingerprint(folder),
)
num_best = min(model.config.num_experts, 4)
trace = record_routing(model, batches, num_best=num_best, provenance=provenance)
print(f"{provenance.text}\n{loss_sentence(trace)}")
print(
    f"{trace.encoder.ids.numel():,} tokens in the encoder, "
    f"{trace.decoder.ids.numel():,} in the decoder"
)

# %% [markdown]
# ## Is it healthy?
#
# Look first for experts that nobody asks for, and for drops: a token that is dropped passes the
# layer unchanged. The entropy is of a token's own probabilities: near its maximum, the router is
# not sure of anything, and what follows is noise. An even load is what the auxiliary loss asks for;
# it does not say that experts differ.

# %%
counts = count_tokens(trace, model.config.vocab_size)
print(format_table(HEALTH_HEADER, health_rows(counts)))

names = [layer_name(layer.key) for layer in counts]
shares = [load_shares(layer) for layer in counts]
keep("load.svg", draw_load(names, shares))

# %% [markdown]
# ## See it
#
# The text coloured by expert, layer by layer. Hover a token for its probabilities and its second
# choice, click an expert to see its tokens elsewhere. What you notice there is an idea, not a
# finding: eight colours always make patterns. The tables below test the ideas.

# %%
classes = view_classes(trace, tokenizer, num_permutations=999)
view = routing_view(trace, tokenizer, classes=classes, most_bytes=view_bytes)
keep("view.html", view)

# %% [markdown]
# ## Classes of tokens by expert
#
# A cell is the lift: the share of a class that an expert gets, over the expert's share of all
# tokens. 1 is no preference, and the colour is the same for twice and for half. A star is p ≤ 0.05:
# whole documents exchange their routing 999 times, and a star means that in at most 5 % of these
# shuffles *any* cell of the stack stands out as much. So you may read all cells.
#
# Do not conclude that an expert with a star is *for* the class: its tokens may be handled as well
# by any other. That needs an ablation, in `expert_purpose.py`. A class of few tokens has no star
# even where its lift is large.


# %%
def class_panel(layer):
    """Lift and significance of a layer's classes of tokens; a class without tokens has no row."""
    rows = [row for row in layer.rows if row.name in DEFAULT_CLASSES and row.num_tokens]
    values = []
    labels = []
    for row in rows:
        values.append([math.log2(max(lift, 1e-3)) for lift in row.lifts])
        marks = ["*" if p <= 0.05 else "" for p in row.p_values]
        labels.append([f"{lift:.1f}{mark}" for lift, mark in zip(row.lifts, marks, strict=True)])
    return HeatMap(
        title=layer_name(layer.key),
        rows=[f"{row.name} ({row.num_tokens:,})" for row in rows],
        columns=expert_names(len(rows[0].lifts)),
        values=values,
        texts=labels,
    )


if num_documents < LEAST_DOCUMENTS:
    print(f"No stars: {num_documents} documents are too few to shuffle ({LEAST_DOCUMENTS} needed).")
drawing = draw_heat_maps(
    [class_panel(layer) for layer in classes],
    label="log2 of the lift: +1 is twice the expert's share of all tokens",
    x_label="expert (* p ≤ 0.05, all cells together)",
    limits=(-2, 2),
)
keep("classes.svg", drawing)

# %% [markdown]
# ## Sentinels against all tokens
#
# Table 14 of the ST-MoE paper: over how many experts do sentinels spread, and all tokens? Low is
# specialised. The paper found encoder experts for sentinels, and none in the decoder. Intervals are
# of 95 %, over documents; two that do not overlap differ, two that do may still. Entropy near
# ln E alone does not mean that routing is random: experts can split the classes evenly.

# %%
panels = []
for row in sentinel_entropies(trace, tokenizer):
    rows = []
    for name, entropy in (("sentinels", row.sentinels), ("all tokens", row.all_tokens)):
        estimate = Estimate(entropy.value, entropy.low, entropy.high)
        rows.append(Row(f"{name} ({entropy.tokens:,})", name, estimate))
    line_label = f"even, ln {row.num_experts} = {row.even:.2f}"
    panels.append(IntervalPanel(layer_name(row.layer), rows, row.even, line_label))
keep("entropy.svg", draw_intervals(panels, label="entropy of the first choices (nats)"))

# %% [markdown]
# ## Words of a few experts
#
# For the experts with the sharpest taste: the token ids that they get most beyond their share. The
# decoder is asked twice, about the token that it reads and about the one that it is to write: an
# expert may be for either. The score of a layer is the mean share of an id's favourite expert; it
# is above 1 / E by chance alone, so that it must be read beside its chance.
#
# One word of a class says nothing of the class: look for several of a kind.

# %%
has_documents = num_documents >= LEAST_DOCUMENTS
null = DocumentShuffle if has_documents else TokenShuffle
if not has_documents:
    print("Tokens are shuffled, not documents: these p-values are too small.")


def vocabulary_panel(table, num_experts=3, num_ids=4):
    """Lift of the favourite ids of the experts that have the strongest favourites."""
    best = table.lift.amax(dim=0).argsort(descending=True)[:num_experts]
    ids = []
    for expert in best.tolist():
        ids += table.lift[:, expert].argsort(descending=True)[:num_ids].tolist()
    ids = list(dict.fromkeys(ids))

    lift = table.lift[ids]
    names = tokenizer.convert_ids_to_tokens(table.ids[ids].tolist())
    tokens = "read" if table.tokens == "input" else "to be written"
    return HeatMap(
        title=f"{layer_name(table.layer)}, token {tokens}",
        rows=[f"{name} ({table.seen[id_]})" for id_, name in zip(ids, names, strict=True)],
        columns=expert_names(lift.shape[1]),
        values=lift.log2().tolist(),
        texts=[[f"{value:.1f}" for value in row] for row in lift.tolist()],
    )


panels = []
rows = []
for stack in STACKS:
    part = trace.stack(stack)
    places = token_places(trace, stack)
    kinds = ("input",) if stack == "encoder" else ("input", "target")
    for layer in part.layers:
        for kind in kinds:
            table = vocabulary_table(part, layer, places, tokens=kind, null=null)
            panels.append(vocabulary_panel(table))
            name = layer_name(layer.key)
            score = [f"{table.score:.3f}", f"{table.chance:.3f}", f"{table.p_value:.2f}"]
            rows.append([name, kind, str(len(table.ids)), *score])
print(format_table(["sparse layer", "token", "ids", "score", "by chance", "p"], rows))
drawing = draw_heat_maps(
    panels,
    label="log2 of the smoothed lift",
    x_label="expert (rows: id, occurrences)",
    limits=(-2, 2),
)
keep("vocabulary.svg", drawing)

# %% [markdown]
# ## Which experts go together
#
# With two choices a token: how often two experts are asked for together, over what experts that
# combine at random, each as often as it does, would have. 1 is no preference. A pair that is often
# together may do the same work, or share it; the ablation of one and of both would tell.
#
# From one sparse layer of a stack to the next, the flow: does the first layer's expert tell the
# second's?

# %%
panels = []
for layer in trace.layers:
    if 1 < layer.facts.num_choices < layer.facts.num_experts:
        preference = coactivation(layer).preference.clamp(min=1e-3)
        names = expert_names(layer.facts.num_experts)
        labels = [["" if math.isnan(x) else f"{x:.1f}" for x in row] for row in preference.tolist()]
        panel = HeatMap(layer_name(layer.key), names, names, preference.log2().tolist(), labels)
        panels.append(panel)
if panels:
    drawing = draw_heat_maps(
        panels,
        label="log2 of pairs over pairs at random",
        x_label="expert",
        y_label="expert",
        limits=(-2, 2),
    )
    keep("coactivation.svg", drawing)
else:
    print("A token has one choice, or all experts: there are no pairs to look at.")
drawing if panels else None

# %%
panels = []
for stack in STACKS:
    part = trace.stack(stack)
    for flow in layer_flows(part, token_places(trace, stack), null=null):
        told = f"{100 * flow.information:.0f} % told, {100 * flow.chance:.0f} % by chance"
        panels.append(
            HeatMap(
                title=f"{layer_name(flow.layer)} to {layer_name(flow.next_layer)}: {told}",
                rows=expert_names(len(flow.share)),
                columns=expert_names(flow.share.shape[1]),
                values=flow.share.tolist(),
            )
        )
if panels:
    drawing = draw_heat_maps(
        panels,
        label="share of the tokens of a row's expert",
        x_label="expert of the next layer",
        y_label="expert",
        limits=(0, 1),
        colours="Blues",
    )
    keep("flow.svg", drawing)
else:
    print("No stack has two sparse layers, so there is no flow from one to the next.")
drawing if panels else None

# %% [markdown]
# ## How close are the choices?
#
# Left of each curve: the share of tokens whose last chosen expert leads the next one by less than
# that. Where many margins are near 0, rounding, another batch or a small edit changes who works,
# and single tokens should not be over-read. The second figure adds noise at the router's input and
# counts the choices that stay.

# %%
num_choices = max(layer.facts.num_choices for layer in trace.layers)
has_next = num_choices < num_best
curves = []
if has_next:
    levels = torch.linspace(0, 1, 101)
    for layer in trace.layers:
        gap = choice_margins(layer).gap
        quantiles = gap[:100_000].quantile(levels)
        curves.append(Curve(layer_name(layer.key), quantiles.tolist(), levels.tolist()))
    drawing = draw_curves(
        [CurvePanel("Margin of the last choice over the next expert", curves)],
        x_label="difference in probability",
        y_label="share of tokens below",
        y_limits=(0, 1),
    )
    keep("margins.svg", drawing)
else:
    print("A token has all experts: there is no next one.")
drawing if has_next else None

# %%
variances = (0.01, 0.03, 0.1, 0.3, 1.0)
stability = noise_stability(model, [batches[-1].batch], variances=variances)
curves = []
for layer in trace.layers:
    kept_share = [row.kept for row in stability if row.layer == layer.key]
    curves.append(Curve(layer_name(layer.key), variances, kept_share))
drawing = draw_curves(
    [CurvePanel("Choices that stay under noise", curves)],
    x_label="variance of the noise over that of the token",
    y_label="share of choices",
    y_limits=(0, 1.02),
    log_x=True,
)
keep("noise.svg", drawing)

# %% [markdown]
# ## What is kept
#
# Figures are SVG, the page is one HTML file that needs no network.

# %%
print("\n".join(str(path) for path in kept))
