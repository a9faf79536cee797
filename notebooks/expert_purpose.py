# %% [markdown]
# # Is this expert for that class of tokens?
#
# An expert that gets a class of tokens is not yet *for* it: another expert may do as well. This
# notebook defines a class, tests its routing against chance, and ablates every expert. Run
# `make demo` first, or set `MOE_MODEL` to the folder of another model. `MOE_TEXT` names your own
# files, e.g. `"news=a.txt code=b.md"`; the default is held-out text of the demo, or Python's language
# reference. Figures go to `MOE_OUT`.
#
# Run it as a script (`python -m notebooks.expert_purpose`), or cell by cell in Jupyter or an editor.

# %%
import os

from moe import (
    DropExperts,
    STMoEForConditionalGeneration,
    edit_routing,
    load_complete,
    record_routing,
)
from moe.data.tokenizer import load_tokenizer
from moe.inspection import figures, tables
from moe.inspection.ablation import ablate, ablation_table, loss_split, target_sets
from moe.inspection.statistics import permutations, specialization, token_classes
from moe.tracing.examples import corrupted_batches, pretraining_noise
from moe.tracing.texts import find_texts
from moe.tracing.trace import layer_name

if os.path.basename(os.getcwd()) == "notebooks":  # Jupyter starts in the notebook's folder
    os.chdir("..")
MODEL = os.environ.get("MOE_MODEL", "runs/demo/pretrain/model")
FILES = os.environ.get("MOE_TEXT", "").split()
OUT = os.environ.get("MOE_OUT", "runs/notebooks/expert_purpose")

model = load_complete(STMoEForConditionalGeneration, MODEL)
tokenizer = load_tokenizer(MODEL)
num_experts = model.config.num_experts
if num_experts < 2:
    raise SystemExit(f"{MODEL} has one expert per layer, so there is no expert to compare.")


def plot(name, draw, panels, **options):
    """Draws and saves a figure, which Jupyter then shows."""
    drawing = draw(panels, **options)
    drawing.save(f"{OUT}/{name}.svg")
    return drawing


# %% [markdown]
# ## A class of your own
#
# A class is a function from the text of the tokens to a boolean for each token. `text.of_words` calls
# a function once per distinct word; all tokens of a word get its result. Define your class before you
# look at any routing: a class made after looking at the data always shows an effect.


# %%
def is_ing_form(text):
    """Words of more than four letters that end in -ing, such as `returning`."""
    return text.of_words(lambda word: len(word) > 4 and word.lower().endswith("ing"))


if "ing form" not in token_classes.TOKEN_CLASSES.names():  # the cell may run twice
    token_classes.TOKEN_CLASSES.add("ing form", is_ing_form)
CLASSES = ("ing form", "sentinel", "punctuation", "article", "preposition", "word inside")

# %%
texts = find_texts(FILES, "runs/demo/corpus")
settings = {"inputs_length": 64, "batch_size": 64, "noise": pretraining_noise(model.config)}
batches = list(corrupted_batches(texts, tokenizer, **settings, most_examples=192))
trace = record_routing(model, batches)
print(tables.loss_sentence(trace))

# The encoder's classes are of the tokens it reads, the decoder's of the tokens it predicts.
read = token_classes.classify(trace.encoder, tokenizer, CLASSES)
predicted = token_classes.classify(trace.decoder, tokenizer, CLASSES, tokens="target")
rows = [
    [name, str(int(read.of(name).sum())), str(int(predicted.of(name).sum()))] for name in CLASSES
]
print(tables.format_table(["class", "tokens read", "tokens predicted"], rows))

# %% [markdown]
# ## Is there a relation at all?
#
# A cell is the lift: an expert's share of the class divided by its share of all tokens; 1 is no
# preference. A star is p ≤ 0.05 in a permutation test of whole documents, corrected for all cells of
# a stack. A class can get its star from another class that overlaps with it.

# %%
enough = len(trace.document.unique()) >= permutations.LEAST_DOCUMENTS
null = permutations.DocumentShuffle if enough else permutations.TokenShuffle
relations = []
for stack, classes in (("encoder", read), ("decoder", predicted)):
    layers = trace.stack(stack).layers
    places = permutations.token_places(trace, stack)
    tests = specialization.specialization_test(layers, classes, places, null=null)
    relations += [(layer, classes, test) for layer, test in zip(layers, tests, strict=True)]


def plot_relation(layer, classes, test):
    lifts = specialization.class_table(layer, classes).lift.tolist()
    texts = []
    for row, p_values in zip(lifts, test.p_value.tolist(), strict=True):
        stars = ["*" if p <= 0.05 else "" for p in p_values]
        texts.append([f"{lift:.1f}{star}" for lift, star in zip(row, stars, strict=True)])
    name = layer_name(layer.key)
    return figures.HeatMap(name, CLASSES, range(1, num_experts + 1), lifts, texts)


plot(
    "relation",
    figures.draw_heat_maps,
    [plot_relation(*relation) for relation in relations],
    label="lift: 1 is no preference",
    x_label="expert (* p ≤ 0.05)",
    limits=(0, 2),
)

# %% [markdown]
# ## Ablate every expert
#
# `drop` sets the expert's output to zero and measures its contribution. `reroute` lets its tokens
# choose another expert and measures the cost of pruning it. An expert that is costly to drop and
# cheap to reroute can be replaced. Intervals are 95 % for all bars together, over documents. A bar
# whose interval contains 0 shows neither that the expert matters nor that it does not.

# %%
kinds = ["drop"]
if model.config.num_selected_experts < num_experts:  # else no other expert is left to choose
    kinds.append("reroute")
of_predicted = dict(zip(predicted.names, predicted.members, strict=True))
of_read = dict(zip(read.names, read.members, strict=True))
ablations = {}
for kind in kinds:
    ablations[kind] = ablate.ablate_experts(
        model, batches, of_predicted, intervention=kind, input_classes=of_read, progress=False
    )
ablation = ablations["drop"]
print(f"The loss with all experts is {ablation.loss:.3f} nats per token.")


def plot_effects(key):
    rows = []
    for kind, done in ablations.items():
        for effect in ablation_table.expert_effects(done):
            if effect.key == key:
                rows.append(figures.Row(f"expert {effect.expert + 1}", kind, effect.effect))
    return figures.IntervalPanel(layer_name(key), rows)


plot(
    "effects",
    figures.draw_intervals,
    [plot_effects(layer.key) for layer in trace.layers],
    label="change of the loss (nats per token)",
    from_zero=True,
)

# %% [markdown]
# ## Yes, no, or not shown
#
# *yes*: without the expert, the loss rises on the class, more than on all other tokens, and more than
# without as many random choices. *no*: one of these differences is shown to be below a margin.
# `?`: neither is shown, which is usual with little text. Encoder experts are tested on the tokens that
# the decoder predicts, and on all sequences in which they read the class. Grey: every sequence
# contains the class, so there is nothing to compare with.

# %%
verdicts = ablation_table.class_verdicts(ablation)
answers = [verdict.answer for verdict in verdicts]
counts = [f"{answers.count(answer)} {answer}" for answer in ("yes", "no", "not shown")]
print(f"{len(verdicts)} questions: {', '.join(counts)}")
print(ablation_table.top_effects_text(ablation_table.top_effects(ablation)))


def plot_verdicts(layer):
    cells = {(v.expert, v.token_class): v for v in verdicts if v.key == layer.key}
    experts = range(len(layer.load))
    classes = layer.sets[1:]
    values = [[cells[e, name].over_others.value for e in experts] for name in classes]
    texts = [[cells[e, name].answer.replace("not shown", "?") for e in experts] for name in classes]
    columns = [expert + 1 for expert in experts]
    return figures.HeatMap(layer_name(layer.key), classes, columns, values, texts)


limit = 10 * ablation_table.MARGIN
plot(
    "verdicts",
    figures.draw_heat_maps,
    [plot_verdicts(layer) for layer in ablation.layers],
    label="change of the loss on the class minus that on other tokens (nats per token)",
    x_label="expert",
    limits=(-limit, limit),
)

# %% [markdown]
# ## Edit the routing by hand
#
# An edit is a function of the router's scores and its plan that returns the plan to execute. This one
# keeps only the first choice of each token; `DropExperts` and `SwapExperts` are ready-made. Inside the
# block, `generate` and training use the edited routing too.


# %%
def only_first_choice(scores, plan):
    first = plan.accepted.clone()
    first[..., 1:] = False
    return plan._replace(accepted=first, combine_weight=plan.combine_weight * first)


largest = max(ablation_table.expert_effects(ablation), key=lambda effect: effect.effect.value)
EDITS = {
    "only first choices": {layer.key: only_first_choice for layer in trace.layers},
    f"{layer_name(largest.key)}, expert {largest.expert + 1} dropped": {
        largest.key: DropExperts(largest.expert)
    },
}
targets = target_sets.list_targets(batches)
before = loss_split.token_losses(model, batches)
changes = {}
for name, edits in EDITS.items():
    with edit_routing(model, edits):
        after = loss_split.token_losses(model, batches)
    changes[name] = loss_split.mean_change(after - before, targets)


def plot_edits():
    rows = [figures.Row(name, "", figures.Estimate(*change)) for name, change in changes.items()]
    return [figures.IntervalPanel("Edits by hand", rows)]


plot(
    "edits",
    figures.draw_intervals,
    plot_edits(),
    label="change of the loss (nats per token)",
    from_zero=True,
)
