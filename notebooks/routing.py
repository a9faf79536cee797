# %% [markdown]
# # Where do the tokens of my model go?
#
# This notebook traces any checkpoint on any text. Run `make demo` first, or set `MOE_MODEL` to the
# folder of another model. `MOE_TEXT` names your own files, e.g. `"news=a.txt code=b.md"`; the default
# is held-out text of the demo, or Python's language reference. Figures go to `MOE_OUT`.
#
# Run it as a script (`python -m notebooks.routing`), or cell by cell in Jupyter or an editor.

# %%
import os

from moe import STMoEForConditionalGeneration, load_complete, record_routing
from moe.data.tokenizer import load_tokenizer
from moe.inspection import figures, tables
from moe.inspection.page.panel_data import view_classes
from moe.inspection.page.routing_view import routing_view
from moe.inspection.statistics import (
    coactivation,
    margins,
    permutations,
    routing_entropy,
    vocabulary,
)
from moe.tracing.examples import SourceText, corrupted_batches, pretraining_noise
from moe.tracing.texts import find_texts
from moe.tracing.trace import STACKS, layer_name

if os.path.basename(os.getcwd()) == "notebooks":  # Jupyter starts in the notebook's folder
    os.chdir("..")
MODEL = os.environ.get("MOE_MODEL", "runs/demo/pretrain/model")
FILES = os.environ.get("MOE_TEXT", "").split()
OUT = os.environ.get("MOE_OUT", "runs/notebooks/routing")

model = load_complete(STMoEForConditionalGeneration, MODEL)
tokenizer = load_tokenizer(MODEL)
print(
    f"{MODEL}: {model.num_parameters():,} parameters, {model.config.num_experts} experts per layer"
)


def plot(name, draw, panels, **options):
    """Draws and saves a figure, which Jupyter then shows."""
    if not panels:
        return print(f"{name}: this model has nothing to show.")
    drawing = draw(panels, **options)
    drawing.save(f"{OUT}/{name}.svg")
    return drawing


# %% [markdown]
# ## The text
#
# Change the sentences. They come first on the page below. The statistics need more text, which
# comes from the files or the corpus.
#
# Spans of the text are masked as in pre-training: the encoder reads a sentinel instead of each span,
# and the decoder writes the span. Fine-tuned models have forgotten this; trace them on their task
# with `paired_batches` instead of `corrupted_batches`.

# %%
SENTENCES = [
    "The function returns the number of items in the list, and None if there is no list.",
    "In 1843 Ada Lovelace published notes on a machine that was never built.",
    "Raises a ValueError if the two arrays do not have the same shape, e.g. (3, 4) and (4, 3).",
    "She opened the door, looked at the rain and decided that the walk could wait until evening.",
]
sentences = [SourceText(text, "", number, "my sentences") for number, text in enumerate(SENTENCES)]
others = []
for source in find_texts(FILES, "runs/demo/corpus"):
    others.append(source._replace(document=source.document + len(sentences)))

settings = {"inputs_length": 64, "batch_size": 64, "noise": pretraining_noise(model.config)}
batches = list(corrupted_batches(sentences, tokenizer, **settings))
batches += corrupted_batches(others, tokenizer, **settings, most_examples=256)

# %% [markdown]
# ## Record
#
# A trace holds every choice of every token: the experts, whether they had a free slot, and the
# weights. `num_best` also keeps the highest probabilities.

# %%
trace = record_routing(model, batches, num_best=min(4, model.config.num_experts))
num_documents = len(trace.document.unique())
print(f"{num_documents:,} documents, {trace.encoder.ids.numel():,} encoder tokens")
print(tables.loss_sentence(trace))

# %% [markdown]
# ## Is the router healthy?
#
# Look for experts without tokens and for dropped tokens, which pass the layer unchanged. exp(entropy)
# is the effective number of experts per token: near the number of experts, the router is undecided.
# The auxiliary loss makes the load uniform; a uniform load does not show that experts differ.

# %%
counts = tables.count_tokens(trace, model.config.vocab_size)
print(tables.format_table(tables.HEALTH_HEADER, tables.health_rows(counts)))

names = [layer_name(layer.key) for layer in counts]
plot("load", figures.draw_load, names, shares=[tables.load_shares(layer) for layer in counts])

# %% [markdown]
# ## See it
#
# The text colored by expert, layer by layer. Hover over a token for its probabilities and its second
# choice; click an expert to see its other tokens. Colors always seem to form patterns. Test what you
# notice with the statistics below.

# %%
classes = view_classes(trace, tokenizer, num_permutations=999)
view = routing_view(trace, tokenizer, classes=classes, title=f"Where the tokens go in {MODEL}")
print(view.save(f"{OUT}/view.html"))
view

# %% [markdown]
# ## Classes of tokens by expert
#
# A cell is the lift: an expert's share of the class divided by its share of all tokens; 1 is no
# preference. A star is p ≤ 0.05 in a permutation test of whole documents, corrected for all cells of
# a stack. It needs at least eight documents.
#
# A star does not show that the expert is *for* the class, because other experts may process its
# tokens as well. `expert_purpose.py` tests that by ablation.


# %%
def plot_classes(layer):
    rows = [row for row in layer.rows if row.num_tokens]
    texts = []
    for row in rows:
        stars = ["*" if p <= 0.05 else "" for p in row.p_values]
        texts.append([f"{lift:.1f}{star}" for lift, star in zip(row.lifts, stars, strict=True)])
    return figures.HeatMap(
        title=layer_name(layer.key),
        rows=[f"{row.name} ({row.num_tokens:,})" for row in rows],
        columns=range(1, len(rows[0].lifts) + 1),
        values=[row.lifts for row in rows],
        texts=texts,
    )


plot(
    "classes",
    figures.draw_heat_maps,
    [plot_classes(layer) for layer in classes],
    label="lift: 1 is no preference",
    x_label="expert (* p ≤ 0.05)",
    limits=(0, 2),
)

# %% [markdown]
# ## Sentinels and all tokens
#
# Table 14 of the ST-MoE paper: the entropy of the first choices of sentinels and of all tokens, with
# 95 % intervals over documents. Low entropy means that few experts get them. The paper found
# specialized encoder experts for sentinels, and none in the decoder.


# %%
def plot_entropy(row):
    estimates = []
    for name, entropy in (("sentinels", row.sentinels), ("all tokens", row.all_tokens)):
        estimate = figures.Estimate(entropy.value, entropy.low, entropy.high)
        estimates.append(figures.Row(f"{name} ({entropy.tokens:,})", name, estimate))
    return figures.IntervalPanel(layer_name(row.layer), estimates, row.even, "uniform")


entropies = routing_entropy.sentinel_entropies(trace, tokenizer)
panels = [plot_entropy(row) for row in entropies]
plot("entropy", figures.draw_intervals, panels, label="entropy of the first choices (nats)")

# %% [markdown]
# ## Tokens of a few experts
#
# The tokens that an expert gets most often relative to its share of all tokens: in the encoder the
# token it reads, in the decoder the token it predicts. The score is the mean share of a token's
# favorite expert. Compare it with the score by chance, not with 1 / E.

# %%
enough = num_documents >= permutations.LEAST_DOCUMENTS
null = permutations.DocumentShuffle if enough else permutations.TokenShuffle
if not enough:
    print("Too few documents: tokens are permuted instead, so the p-values are too small.")

vocabularies = []
flows = []
for stack, tokens in zip(STACKS, ("input", "target"), strict=True):
    part = trace.stack(stack)
    places = permutations.token_places(trace, stack)
    flows += coactivation.layer_flows(part, places, null=null)
    for layer in part.layers:
        table = vocabulary.vocabulary_table(part, layer, places, tokens=tokens, null=null)
        vocabularies.append(table)

rows = []
for table in vocabularies:
    scores = [f"{table.score:.3f}", f"{table.chance:.3f}", f"{table.p_value:.2f}"]
    rows.append([layer_name(table.layer), str(len(table.ids)), *scores])
print(tables.format_table(["sparse layer", "different tokens", "score", "by chance", "p"], rows))


def plot_vocabulary(table, num_experts=3, num_ids=4):
    best = table.lift.amax(dim=0).argsort(descending=True)[:num_experts]
    ids = table.lift[:, best].topk(min(num_ids, len(table.ids)), dim=0).indices.T.flatten().tolist()
    ids = list(dict.fromkeys(ids))  # the tokens of the first expert first, each once
    names = tokenizer.convert_ids_to_tokens(table.ids[ids].tolist())
    return figures.HeatMap(
        title=layer_name(table.layer),
        rows=[f"{name} ({table.seen[row]})" for row, name in zip(ids, names, strict=True)],
        columns=range(1, table.lift.shape[1] + 1),
        values=table.lift[ids].tolist(),
        texts=[[f"{lift:.1f}" for lift in lifts] for lifts in table.lift[ids].tolist()],
    )


plot(
    "vocabulary",
    figures.draw_heat_maps,
    [plot_vocabulary(table) for table in vocabularies],
    label="smoothed lift: 1 is no preference",
    x_label="expert (rows: token and its count)",
    limits=(0, 2),
)

# %% [markdown]
# ## Experts that are chosen together
#
# How often a token chooses two experts together, divided by the rate if choices were independent; 1
# is no preference.


# %%
def plot_pairs(layer):
    preference = coactivation.coactivation(layer).preference.tolist()
    experts = range(1, len(preference) + 1)
    texts = [
        [f"{x:.1f}" if x == x else "" for x in row] for row in preference
    ]  # the diagonal is NaN
    return figures.HeatMap(layer_name(layer.key), experts, experts, preference, texts)


some = [layer for layer in trace.layers if layer.facts.num_choices < layer.facts.num_experts]
plot(
    "coactivation",
    figures.draw_heat_maps,
    [plot_pairs(layer) for layer in some if layer.facts.num_choices > 1],
    label="pairs over pairs if independent",
    x_label="expert",
    y_label="expert",
    limits=(0, 2),
)

# %% [markdown]
# In models with several sparse layers per stack, the flow shows whether the expert of one layer
# predicts the expert of the next.


# %%
def plot_flow(flow):
    experts = range(1, flow.share.shape[0] + 1)
    title = f"{layer_name(flow.layer)} to {layer_name(flow.next_layer)}"
    title += f": {100 * flow.information:.0f} % predicted, {100 * flow.chance:.0f} % by chance"
    return figures.HeatMap(title, experts, range(1, flow.share.shape[1] + 1), flow.share.tolist())


plot(
    "flow",
    figures.draw_heat_maps,
    [plot_flow(flow) for flow in flows],
    label="share of the tokens of a row's expert",
    x_label="expert of the next layer",
    y_label="expert",
    limits=(0, 1),
    colours="Blues",
)

# %% [markdown]
# ## How close are the choices?
#
# First figure: the share of tokens whose last chosen expert leads the next one by less than x in
# probability. Where many margins are near 0, rounding or a small edit changes the expert. Second
# figure: the share of choices that stay the same with noise on the router's input.


# %%
def plot_margins(layer):
    gap = margins.choice_margins(layer).gap.sort().values
    gap = gap[:: len(gap) // 100 + 1].tolist()
    share = [place / len(gap) for place in range(1, len(gap) + 1)]
    return figures.Curve(layer_name(layer.key), gap, share)


curves = [plot_margins(layer) for layer in some]
plot(
    "margins",
    figures.draw_curves,
    [figures.CurvePanel("Margin over the next expert", curves)] if curves else [],
    x_label="difference in probability",
    y_label="share of tokens below",
    y_limits=(0, 1),
)

# %%
VARIANCES = (0.01, 0.03, 0.1, 0.3, 1.0)
stability = margins.noise_stability(model, [batches[-1].batch], variances=VARIANCES)


def plot_noise(key):
    shares = [row.kept for row in stability if row.layer == key]
    return figures.Curve(layer_name(key), VARIANCES, shares)


curves = [plot_noise(layer.key) for layer in trace.layers]
plot(
    "noise",
    figures.draw_curves,
    [figures.CurvePanel("Choices that stay the same", curves)],
    x_label="variance of the noise relative to the token's",
    y_label="share of choices",
    y_limits=(0, 1.02),
    log_x=True,
)
