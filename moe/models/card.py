"""The model card: README.md next to the weights, with a header that the hub reads."""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from moe.files import whole_file, write_text
from moe.models.configuration import STMoEConfig
from moe.sparse.all_routers import load_routers
from moe.sparse.stats import RouterStats

CARD_NAME = "README.md"
_GENERATES = "STMoEForConditionalGeneration"
_TAGS = ("moe", "st-moe", "mixture-of-experts", "encoder-decoder")
_ENCODING = """The library `moe` (distribution `stmoe`) is needed.

```python
from moe import {model_class}

folder = "."  # or its name on the hub
model = {model_class}.from_pretrained(folder)
```
"""
_GENERATION = """The library `moe` (distribution `stmoe`) and a tokenizer beside the model are needed.

```python
from transformers import AutoTokenizer
from moe import STMoEForConditionalGeneration

folder = "."  # or its name on the hub
model = STMoEForConditionalGeneration.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
batch = tokenizer(["Some text"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**batch, max_new_tokens=16)))
```
"""
_UNDESCRIBED = (
    "What it was trained on, and how good it is, this card does not know; whoever publishes it "
    "should say so."
)
_SEAL = re.compile(r"\n<!-- Written by moe, ([0-9a-f]{16}): .* -->\n")


def model_card(
    config: STMoEConfig,
    *,
    model_class: str = _GENERATES,
    parameters: tuple[int, int] | None = None,
    base_model: str | list[str] | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    datasets: list[str] | None = None,
    metrics: list[str] | None = None,
    tags: Sequence[str] = (),
    stats: Mapping[str, RouterStats] | None = None,
    sections: Mapping[str, str] | None = None,
    adapters: Any = None,
) -> str:
    """Returns the text of a model's README.md.

    It contains only given facts and those that follow from the config.

    Args:
        config: Config of the model.
        model_class: Name of its class.
        parameters: Total, and used by one token; None counts the whole model from the config.
        base_model: Name on the hub of the model that this one was derived from, or of each.
        license: Its identifier on the hub.
        language: ISO codes.
        datasets: Names on the hub.
        metrics: Names on the hub.
        tags: Additional tags.
        stats: Statistics of the routers in an evaluation, by stack: `encoder`, `decoder`; see
            `RouterStats.sum`.
        sections: Markdown by title, e.g. on training data and quality. Without them the card states
            that these are unknown.
        adapters: PEFT's configuration of the adapters that the folder holds instead of weights.
    """
    total, active = parameters or (config.num_parameters(), config.num_active_parameters())
    generates = model_class == _GENERATES

    # The header, which the hub reads: its common entries, and parameters, capacity and drops.
    sparse_fields: dict[str, Any] = {}
    if config.num_experts:
        factors = {"training": config.capacity_factor, "evaluation": config.eval_capacity_factor}
        capacity = ("expert_capacity", config.expert_capacity)
        name, value = capacity if config.expert_capacity else ("capacity_factor", factors)
        sparse_fields = {name: value, "drop_rate": _drop_rate(config, stats)}
    header = ModelCardData(
        library_name="moe",
        license=license,
        language=language,
        base_model=base_model,
        datasets=datasets,
        metrics=metrics,
        pipeline_tag="text-generation" if generates else "feature-extraction",
        tags=[*_TAGS, *([tags] if isinstance(tags, str) else tags or ())],
        parameters={"total": total, "active": active},
        **sparse_fields,
    )

    # The text, for people.
    rows = [
        ("class", f"`{model_class}` of the library `moe`"),
        ("parameters", f"{total:,}; a token uses {active:,}"),
        *_table_rows(config, sparse_fields.get("drop_rate", 0)),
    ]
    if adapters is not None:
        names = [*(adapters.target_modules or ()), *(adapters.target_parameters or ())]
        adapted = ", ".join(sorted({name.partition(".")[0] for name in names}))
        base = f"`{adapters.base_model_name_or_path}`, which has all other weights"
        rows.append(("adapters", f"LoRA of rank {adapters.r} on {adapted} of {base}"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    kind = "sparse" if config.num_experts else "dense"
    usage = _GENERATION if generates else _ENCODING.format(model_class=model_class)
    parts = [
        f"\n# A {kind} encoder-decoder of {total:,} parameters\n\n| | |\n|---|---|\n{table}\n",
        f"## How to use\n\n{usage}",
        *_sections(sections or {}),
    ]
    limits = _limits(config)
    if not sections:
        limits.insert(0, _UNDESCRIBED)
    if limits:
        parts.append("## Limits\n\n" + "".join(f"- {limit}\n" for limit in limits))
    body = "\n".join(parts)
    return _seal(ModelCard(f"---\n{header.to_yaml()}\n---\n{body}"))


def host_card(model_class: str, sections: Mapping[str, str]) -> str:
    """Returns the text of README.md for a model of transformers with sparse layers.

    Args:
        model_class: Name of its class.
        sections: Markdown by title.
    """
    body = f"""---
library_name: transformers
---
# {model_class}

A model of transformers with sparse feed-forward layers of the library `moe`:

```python
from moe.checkpoint import load_model

model = load_model(FOLDER)
```
"""
    return _seal(ModelCard("\n".join([body, *_sections(sections)])))


def _sections(sections: Mapping[str, str]) -> list[str]:
    return [f"## {name}\n\n{text.rstrip()}\n" for name, text in sections.items()]


# ---------------------------------------------------------------------------
# The file


def write_card(folder: Path | str, text: str) -> None:
    """Writes README.md into a folder, unless the user wrote or changed the one in it.

    An unchanged card of ours is replaced; tags, which the hub and transformers add, are kept.
    """
    path = Path(folder) / CARD_NAME
    if _belongs_to_user(path):
        return

    # Ours is replaced, but the tags of others stay.
    replaced = read_card(path)
    write_text(path, text)
    if replaced:
        add_tags(folder, replaced.data.tags or [])


def add_tags(folder: Path | str, tags: Sequence[str]) -> None:
    """Adds tags to the header of a folder's card."""
    path = Path(folder) / CARD_NAME
    card = read_card(path)
    if card is not None and not set(tags) <= set(card.data.tags or []):
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
        write_text(path, str(card))


def fetch_card(repo_id: str, folder: Path, token: str | bool | None = None) -> bool:
    """Returns whether a repository on the hub has a card, and copies it into a folder.

    A card written by the user stays.
    """
    try:
        fetched = hf_hub_download(repo_id, CARD_NAME, token=token)
    except EntryNotFoundError:
        return False

    path = folder / CARD_NAME
    if not _belongs_to_user(path):
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            shutil.copyfile(fetched, partial)
    return True


def read_card(path: Path) -> Any:
    """Returns the ModelCard in a file; None when there is none with a readable header."""
    try:
        has_header = path.read_bytes().startswith(b"---")
        return ModelCard.load(path) if has_header else None
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return None


def find_source_model(name_or_path: Path | str) -> str | list[str] | None:
    """Returns the name on the hub of the model that is being loaded.

    It is the name itself, or the base model in a folder's card; a joined model has several.
    """
    path = Path(name_or_path)
    if not path.exists():
        return str(name_or_path)

    # A folder has the name in its card.
    card = read_card(path / CARD_NAME)
    base_model = card.data.get("base_model") if card else None
    is_list = isinstance(base_model, list) and all(isinstance(name, str) for name in base_model)
    return base_model if is_list or isinstance(base_model, str) else None


def _seal(card: ModelCard) -> str:
    """Returns a card with a last line that reveals later changes, except of tags."""
    rule = "rewritten when the model is saved, unless anything but the tags was changed"
    return f"{card}\n<!-- Written by moe, {_digest(card)}: {rule} -->\n"


def _belongs_to_user(path: Path) -> bool:
    """Returns whether there is a card that, apart from tags, differs from what was written here."""
    if not path.exists():
        return False
    card = read_card(path)
    seal = _SEAL.search(card.text) if card else None
    if seal is None:
        return True

    # The seal has the digest of the card without it.
    unsealed = ModelCard(str(card).replace(seal.group(), ""))
    return _digest(unsealed) != seal.group(1)


def _digest(card: ModelCard) -> str:
    """Returns 16 hexadecimal digits of a card without its tags."""
    header = card.data.to_dict()
    header.pop("tags", None)
    content = json.dumps([header, card.text], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------
# The text


def _drop_rate(
    config: STMoEConfig, stats: Mapping[str, RouterStats] | None
) -> float | str | dict[str, float]:
    """Returns the fraction of tokens dropped in evaluation by stack, if known."""
    if not stats:
        return 0.0 if config.eval_capacity_field is None else "not measured"
    return {
        stack: round(of_stack.summary()["fraction_dropped"], 6) for stack, of_stack in stats.items()
    }


def _table_rows(
    config: STMoEConfig, drop_rate: float | str | dict[str, float]
) -> list[tuple[str, str]]:
    """Returns the rows of the table on the architecture."""
    names = {"gated-gelu": "GEGLU", "gated-silu": "SwiGLU", "relu": "ReLU"}
    activation = names[config.feed_forward_proj]
    blocks = f"{config.num_layers} in the encoder, {config.num_decoder_layers} in the decoder"
    d_ff = f"d_ff {config.d_ff}"
    if config.expert_d_ff is not None:
        d_ff += f", of an expert {config.expert_d_ff}"
    width = f"d_model {config.d_model}, {d_ff} ({activation}), {config.num_heads} heads"
    rows = [("blocks", blocks), ("width", width), ("vocabulary", f"{config.vocab_size:,}")]
    if not config.num_experts:
        return rows

    # Encoder and decoder may have different routers, or one of them no sparse layer.
    layers = []
    routers = []
    for stack, decoder in (("encoder", False), ("decoder", True)):
        _, num_sparse = config.stack_sizes(decoder)
        if num_sparse:
            layers.append(f"{num_sparse} in the {stack}")
            routers.append(f"`{config.sparse_config(decoder=decoder).router}` in the {stack}")

    drops = "0, there is no capacity" if drop_rate == 0 else str(drop_rate)
    if isinstance(drop_rate, dict):
        drops = ", ".join(f"{100 * share:.2f} % in the {name}" for name, share in drop_rate.items())
    num_selected = config.num_selected_experts
    num_shared = config.num_shared_experts
    shared = f", and {num_shared} shared" if num_shared else ""
    return [
        *rows,
        ("sparse layers", ", ".join(layers)),
        ("experts", f"{experts_range(config)} in each, at most {num_selected} for a token{shared}"),
        ("router", f"{', '.join(routers)}; computed in float32"),
        ("capacity", f"{describe_capacity(config)}; `generate` drops nothing it decodes"),
        ("tokens dropped in evaluation", drops),
    ]


def experts_range(config: STMoEConfig) -> str:
    """Returns the number of experts of a sparse layer as text, e.g. `8`, or `3 to 8` if layers differ."""
    numbers = [layer.num_experts for layer in config.all_sparse_configs()]
    least = min(numbers, default=0)
    return f"{least} to {max(numbers)}" if len(set(numbers)) > 1 else str(least)


def describe_capacity(config: STMoEConfig) -> str:
    """Returns the capacity of an expert in training and evaluation as text."""
    if config.expert_capacity is not None:
        return f"{config.expert_capacity} slots of an expert in each {config.rules.capacity_scope}"
    factors = (config.capacity_factor, config.eval_capacity_factor)
    training, evaluation = ("none" if factor is None else f"{factor:g}" for factor in factors)
    return f"factor {training} in training, {evaluation} in evaluation"


def _limits(config: STMoEConfig) -> list[str]:
    """Returns what the output for a sequence may depend on."""
    limits = []
    if config.eval_capacity_field is not None:
        limits.append(
            "With a capacity in evaluation, what an encoder or a forward with labels makes of "
            "a sequence may depend on padding and on the other sequences of the batch; load it "
            "with `eval_capacity_factor=None, expert_capacity=None` to drop nothing."
        )
    for name in sorted({layer.router for layer in config.all_sparse_configs()}):
        if load_routers().get(name).experts_choose:
            limits.append(
                f"Router `{name}` compares the tokens of a batch: a sequence's output may depend "
                "on the others."
            )
    return limits
