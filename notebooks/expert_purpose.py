# %% [markdown]
# # Is this expert for that?
#
# An expert that gets a class of tokens is not yet *for* it: another might do as well. Here a class
# of your own is one function, its routing is tested against chance, and every expert is taken away
# to see whose loss rises. Run `make demo` first, or set
#
# - `MOE_MODEL` to the folder of another model,
# - `MOE_TEXT` to files of your own, e.g. `"news=a.txt code=b.md"`; without it, held-out text of the
#   demo is read, or else Python's own language reference,
# - `MOE_OUT` to where the page and the figures go.
#
# It runs as a script (`python -m notebooks.expert_purpose`), and cell by cell in Jupyter and in editors that
# know `# %%`, in under a minute on one core.

# %%
import math
import os
import shlex
import sys
from pathlib import Path

import torch

from moe.checksums import model_fingerprint
from moe.commands.routing_inputs import load_inspected
from moe.inspection.ablation.ablate import ablate_experts
from moe.inspection.ablation.ablation_table import (
    MARGIN,
    class_verdicts,
    expert_effects,
    top_effects,
    top_effects_text,
    verdict_table,
)
from moe.inspection.ablation.loss_split import mean_change, token_losses
from moe.inspection.ablation.target_sets import list_targets
from moe.inspection.figures import HeatMap, IntervalPanel, Row, draw_heat_maps, draw_intervals
from moe.inspection.page.panel_data import ablation_bars
from moe.inspection.page.routing_view import routing_view
from moe.inspection.statistics.document_intervals import Estimate
from moe.inspection.statistics.permutations import (
    LEAST_DOCUMENTS,
    DocumentShuffle,
    TokenShuffle,
    token_places,
)
from moe.inspection.statistics.specialization import class_table, specialization_test
from moe.inspection.statistics.token_classes import TOKEN_CLASSES, classify
from moe.inspection.tables import format_table, loss_sentence
from moe.sparse.editing import edit_routing
from moe.sparse.edits import DropExperts, SwapExperts
from moe.tracing.examples import corrupted_batches, describe_noise, pretraining_noise
from moe.tracing.recorder import Provenance, record_routing
from moe.tracing.texts import find_texts
from moe.tracing.trace import layer_name

# Jupyter starts a notebook in its own folder; a script starts where you are.
root = Path("..") if Path.cwd().name == "notebooks" else Path()
folder = Path(os.environ.get("MOE_MODEL", root / "runs/demo/pretrain/model"))
corpus = Path(os.environ.get("MOE_CORPUS", root / "runs/demo/corpus"))
files = shlex.split(os.environ.get("MOE_TEXT", ""))
out = Path(os.environ.get("MOE_OUT", root / "runs/notebooks/expert_purpose"))
view_bytes = int(os.environ.get("MOE_VIEW_BYTES", "5000000"))

_, model, tokenizer = load_inspected(folder)
num_experts = model.config.num_experts
if num_experts < 2:
    sys.exit(f"The model in {folder} has one expert a layer: there is nothing to compare it with.")
print(f"{folder}: {model.num_parameters():,} parameters, {num_experts} experts a layer")

kept = []


def keep(name, shown):
    """Saves a figure or a page; Jupyter shows what the last line of a cell returns."""
    kept.append(shown.save(out / name))
    return shown


# %% [markdown]
# ## A class of your own
#
# A class is a function from the text of the tokens to a yes or no for each; `text.of_words` asks
# once for each distinct word, and a piece of a word is of the class of the whole word. Write yours
# here before you look at any routing: a class that is made after the look at the data will always
# be found in the data.

# %%
OWN = "ing form"


def is_ing_form(text):
    """Words such as `returning`: more than four letters that end in -ing."""
    return text.of_words(lambda word: len(word) > 4 and word.lower().endswith("ing"))


if OWN not in TOKEN_CLASSES.names():  # the cell may run twice
    TOKEN_CLASSES.add(OWN, is_ing_form)
CLASSES = (OWN, "sentinel", "punctuation", "article", "preposition", "word inside")

# %%
texts = find_texts(files, corpus)
noise = pretraining_noise(model.config)
batches = list(
    corrupted_batches(
        texts, tokenizer, inputs_length=64, batch_size=64, noise=noise, most_examples=192
    )
)
provenance = Provenance(
    text=f"{' '.join(files) or 'held-out text'}, {describe_noise(noise, model.config)}",
    model=str(folder),
    model_fingerprint=model_fingerprint(folder),
)
trace = record_routing(model, batches, num_best=min(num_experts, 4), provenance=provenance)
print(f"{provenance.text}\n{loss_sentence(trace)}")

# What encoders read, and what decoders are to write: the tokens whose loss an expert changes.
read = classify(trace.encoder, tokenizer, CLASSES)
written = classify(trace.decoder, tokenizer, CLASSES, tokens="target")
num_documents = trace.document.unique().numel()
rows = []
for name in CLASSES:
    num_read = int(read.of(name).sum())
    rows.append([name, f"{num_read:,}", f"{int(written.of(name).sum()):,}"])
print(f"{num_documents} documents")
print(format_table(["class", "tokens read", "tokens to be written"], rows))

# %% [markdown]
# ## Is there a relation at all?
#
# The test shuffles whole documents: what is left then is chance. A star is p ≤ 0.05 for all cells
# of a stack together. Classes may overlap, and a class may get its star by another one that lies in
# it. In the decoder the class is that of the token to be written.

# %%
has_documents = num_documents >= LEAST_DOCUMENTS
null = DocumentShuffle if has_documents else TokenShuffle
if not has_documents:
    print("Tokens are shuffled, not documents: these p-values are too small.")

panels = []
information = []
for stack, classes in (("encoder", read), ("decoder", written)):
    layers = trace.stack(stack).layers
    places = token_places(trace, stack)
    tests = specialization_test(layers, classes, places, null=null, num_permutations=999)
    for layer, test in zip(layers, tests, strict=True):
        table = class_table(layer, classes)
        values = []
        labels = []
        for lifts, p_values in zip(table.lift.tolist(), test.p_value.tolist(), strict=True):
            marks = ["*" if p <= 0.05 else "" for p in p_values]
            values.append([math.log2(max(lift, 1e-3)) for lift in lifts])
            labels.append([f"{lift:.1f}{mark}" for lift, mark in zip(lifts, marks, strict=True)])
        columns = [str(expert + 1) for expert in range(len(values[0]))]
        panels.append(HeatMap(layer_name(layer.key), CLASSES, columns, values, labels))

        told = [f"{100 * share:.1f} %" for share in (test.information, test.chance)]
        information.append([layer_name(layer.key), *told, f"{test.information_p:.3f}"])
print("How much of the entropy of the class the expert tells:")
print(format_table(["sparse layer", "told", "by chance", "p"], information))
drawing = draw_heat_maps(
    panels,
    label="log2 of the lift: +1 is twice the expert's share of all tokens",
    x_label="expert (* p ≤ 0.05, all cells together)",
    limits=(-2, 2),
)
keep("relation.svg", drawing)

# %% [markdown]
# ## Take every expert away
#
# Two questions: `drop` asks what the expert contributes (its output is 0, all else stays);
# `reroute` what its loss would cost (its tokens choose again among the others, as after pruning).
# An expert whose drop costs much and whose reroute costs little can be replaced. Intervals are of
# 95 % for all bars together, over documents; a bar whose interval holds 0 shows nothing, neither
# that the expert matters nor that it does not.

# %%
of_targets = dict(zip(written.names, written.members, strict=True))
of_inputs = dict(zip(read.names, read.members, strict=True))
ablations = {}
for kind in ("drop", "reroute"):
    if kind == "reroute" and model.config.num_selected_experts >= num_experts:
        print("A token has all experts: none is left to choose again.")
        continue
    ablations[kind] = ablate_experts(
        model, batches, of_targets, intervention=kind, input_classes=of_inputs, progress=False
    )

by_layer = {layer.key: [] for layer in trace.layers}
for kind, ablation in ablations.items():
    for effect in expert_effects(ablation):
        estimate = Estimate(*effect.effect)
        by_layer[effect.key].append(Row(f"expert {effect.expert + 1}", kind, estimate))
panels = [IntervalPanel(layer_name(key), rows) for key, rows in by_layer.items()]
ablation = ablations["drop"]
print(f"The loss with all experts is {ablation.loss:.3f} nats a token.")
keep(
    "effects.svg", draw_intervals(panels, label="change of the loss (nats a token)", from_zero=True)
)

# %% [markdown]
# ## Yes, no, or not shown
#
# A *yes* needs three intervals above 0: the class loses by the expert's absence, loses more than
# all other tokens do, and more than by as many random choices taken away. A *no* needs an interval
# that lies below the margin. The rest is `?`: not shown, which is no answer, and with little text
# the usual one. Experts of the encoder write nothing themselves: they are asked about the tokens
# that the decoder writes, and about all of the sequences in which they could read such a token.
# Grey is a class that is in every sequence, so that there are no others to compare with.

# %%
verdicts = class_verdicts(ablation)
ANSWERS = {"yes": "yes", "no": "no", "not shown": "?"}
panels = []
deepest = 10 * MARGIN
for layer in ablation.layers:
    cells = {(v.expert, v.token_class): v for v in verdicts if v.key == layer.key}
    values = []
    labels = []
    for name in layer.sets[1:]:
        row = [cells[expert, name] for expert in range(len(layer.load))]
        values.append([cell.over_others.value for cell in row])
        labels.append([ANSWERS[cell.answer] for cell in row])
    columns = [str(expert + 1) for expert in range(len(layer.load))]
    panels.append(HeatMap(layer_name(layer.key), layer.sets[1:], columns, values, labels))

counts = []
for answer in ANSWERS:
    counts.append(f"{sum(verdict.answer == answer for verdict in verdicts)} {answer}")
print(f"{len(verdicts)} questions: {', '.join(counts)}")
drawing = draw_heat_maps(
    panels,
    label="change of the loss on the class less that on other tokens (nats a token)",
    x_label="expert",
    limits=(-deepest, deepest),
)
keep("verdicts.svg", drawing)

# %% [markdown]
# ## The largest effects
#
# The five experts whose absence costs most, with the classes that they were shown to be for. Then
# the class of your own: the expert with the largest advantage on it, beside its controls.

# %%
print(top_effects_text(top_effects(ablation)))
shown = [verdict for verdict in verdicts if verdict.answer == "yes"]
print(verdict_table(shown) if shown else "No expert was shown to be for a class of tokens.")

own = [verdict for verdict in verdicts if verdict.key[0] == "decoder"]
own = [verdict for verdict in own if verdict.token_class == OWN and verdict.num_tokens]
if own:
    best = max(own, key=lambda verdict: verdict.over_others.value)
    rows = []
    for name in ("effect", "over_others", "over_random", "over_peer"):
        estimate = Estimate(*getattr(best, name))
        rows.append(Row(name.replace("_", " "), "", estimate))
    title = f"{layer_name(best.key)}, expert {best.expert + 1}, {OWN}: {best.answer}"
    drawing = draw_intervals(
        [IntervalPanel(title, rows, 0.0)], label="change of the loss (nats a token)"
    )
    keep("own_class.svg", drawing)
else:
    print(f"No token to be written is of the class {OWN!r}.")
drawing if own else None

# %% [markdown]
# ## Edit the routing by hand
#
# An edit is a function of the router's scores and its plan that returns the plan to carry out.
# Write one: here each token keeps its first choice alone. `DropExperts` and `SwapExperts` are
# ready-made. Each is compared with the routing as it is, on the same tokens, so that what texts
# differ in cancels.


# %%
def first_choice_alone(scores, plan):
    """Returns the plan without the later choices of each token."""
    is_later = torch.zeros_like(plan.accepted)
    is_later[..., 1:] = True
    return plan._replace(
        accepted=plan.accepted & ~is_later,
        combine_weight=plan.combine_weight.masked_fill(is_later, 0),
    )


effects = sorted(expert_effects(ablation), key=lambda effect: effect.effect.value, reverse=True)
key = effects[0].key
largest = effects[0].expert
peer = effects[0].peer
EDITS = {
    "first choice alone, everywhere": {layer.key: first_choice_alone for layer in trace.layers},
    f"{layer_name(key)} without expert {largest + 1}": {key: DropExperts(largest)},
    f"{layer_name(key)}, experts {largest + 1} and {peer + 1} swapped": {
        key: SwapExperts(largest, peer)
    },
}

targets = list_targets(batches)
before = token_losses(model, batches)
rows = []
for name, edits in EDITS.items():
    with edit_routing(model, edits):
        after = token_losses(model, batches)
    part = mean_change(after - before, targets)
    rows.append(Row(name, "", Estimate(*part)))
drawing = draw_intervals(
    [IntervalPanel("Edits by hand", rows)],
    label="change of the loss (nats a token)",
    from_zero=True,
)
keep("edits.svg", drawing)

# %% [markdown]
# An edit holds under `generate` too. One text is an anecdote, not a measurement: the figure above
# is the measurement.

# %%
PROMPT = "Returns the number of <extra_id_0> in the list."
prompt = tokenizer(PROMPT, return_tensors="pt")
answers = {}
for name, edits in {"as it is": {}, **EDITS}.items():
    with edit_routing(model, edits):
        tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answers[name] = tokenizer.decode(tokens[0], skip_special_tokens=True).strip()
print(format_table(["routing", "the span is"], [list(row) for row in answers.items()]))

# %% [markdown]
# ## The page
#
# The text with the bars of both interventions beside it.

# %%
bars = []
for done in ablations.values():
    bars += ablation_bars(done)
keep("view.html", routing_view(trace, tokenizer, ablation=bars, most_bytes=view_bytes))

# %%
print("\n".join(str(path) for path in kept))
