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

from moe.checks import check
from moe.files import whole_file, write_text
from moe.models.configuration import STMoEConfig
from moe.sparse.all_routers import load_routers
from moe.sparse.stats import RouterStats

CARD_NAME = "README.md"
_GENERATES = "STMoEForConditionalGeneration"
_TAGS = ("moe", "st-moe", "mixture-of-experts", "encoder-decoder")
_SEAL = re.compile(r"\n<!-- Written by moe, ([0-9a-f]{16}): .* -->\n")


def model_card(
    config: STMoEConfig,
    *,
    model_class: str = _GENERATES,
    parameters: tuple[int, int] | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    datasets: list[str] | None = None,
    metrics: list[str] | None = None,
    tags: Sequence[str] = (),
    stats: Mapping[str, RouterStats] | None = None,
    sections: Mapping[str, str] | None = None,
) -> str:
    """Returns the text of a model's README.md.

    It contains only given facts and those that follow from the config.

    Args:
        config: Config of the model.
        model_class: Name of its class.
        parameters: Total, and used by one token; None counts the whole model from the config.
        base_model: Name on the hub of the model that this one was derived from.
        license: Its identifier on the hub.
        language: ISO codes.
        datasets: Names on the hub.
        metrics: Names on the hub.
        tags: Additional tags.
        stats: Statistics of the routers in an evaluation, by stack: `encoder`, `decoder`; see
            `total_stats`.
        sections: Markdown by title, e.g. on training data and quality. Without them the card states
            that these are unknown.
    """
    if parameters is None:
        parameters = (config.num_parameters(), config.num_active_parameters())
    total, active = parameters

    # The header, which the hub reads.
    sparse_fields: dict[str, Any] = {}
    if config.num_experts:
        if config.expert_capacity is None:
            sparse_fields["capacity_factor"] = {
                "training": config.capacity_factor,
                "evaluation": config.eval_capacity_factor,
            }
        else:
            sparse_fields["expert_capacity"] = config.expert_capacity
        sparse_fields["drop_rate"] = _drop_rate(config, stats)

    # In addition to the hub's common entries: parameters, capacity and drops.
    generates = model_class == _GENERATES
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
        *_backbone_rows(config),
    ]
    if config.num_experts:
        rows += _sparse_rows(config, sparse_fields["drop_rate"])
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)

    kind = "sparse" if config.num_experts else "dense"
    title = f"# A {kind} encoder-decoder of {total:,} parameters\n"
    parts = [f"\n{title}\n| | |\n|---|---|\n{table}\n", _how_to_use(model_class)]
    parts += _sections(sections or {})
    limits = _limits(config, is_described=bool(sections))
    if limits:
        parts.append(limits)
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
    if card is None:
        return

    present = card.data.tags or []
    new_tags = [tag for tag in tags if tag not in present]
    if new_tags:
        card.data.tags = [*present, *new_tags]
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


def find_source_model(name_or_path: Path | str) -> str | None:
    """Returns the name on the hub of the model that is being loaded.

    It is the name itself, or the base model in a folder's card.
    """
    path = Path(name_or_path)
    if not path.exists():
        return str(name_or_path)

    # A folder has the name in its card.
    card = read_card(path / CARD_NAME)
    base_model = card.data.get("base_model") if card else None
    return base_model if isinstance(base_model, str) else None


def _seal(card: ModelCard) -> str:
    """Returns a card with a last line that reveals later changes, except of tags."""
    rule = "rewritten when the model is saved, unless anything but the tags was changed"
    return f"{card}\n<!-- Written by moe, {_digest(card)}: {rule} -->\n"


def _belongs_to_user(path: Path) -> bool:
    """Returns whether there is a card that, apart from tags, differs from what was written here."""
    if not path.exists():
        return False
    card = read_card(path)
    if card is None:
        return True
    seal = _SEAL.search(card.text)
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

    are_stats = isinstance(stats, Mapping) and all(
        isinstance(value, RouterStats) for value in stats.values()
    )
    check(are_stats, "stats of a card", stats, "RouterStats by stack: encoder, decoder")
    fractions = {}
    for stack, stack_stats in stats.items():
        fractions[stack] = round(stack_stats.summary()["fraction_dropped"], 6)
    return fractions


def _backbone_rows(config: STMoEConfig) -> list[tuple[str, str]]:
    """Returns the rows of the table that every model has."""
    activation = "GEGLU" if config.feed_forward_proj == "gated-gelu" else "ReLU"
    blocks = f"{config.num_layers} in the encoder, {config.num_decoder_layers} in the decoder"
    d_ff = f"d_ff {config.d_ff}"
    if config.expert_d_ff is not None:
        d_ff += f", of an expert {config.expert_d_ff}"
    width = f"d_model {config.d_model}, {d_ff} ({activation}), {config.num_heads} heads"
    return [("blocks", blocks), ("width", width), ("vocabulary", f"{config.vocab_size:,}")]


def _sparse_rows(
    config: STMoEConfig, drop_rate: float | str | dict[str, float]
) -> list[tuple[str, str]]:
    """Returns the rows of the table about sparse layers."""
    # Encoder and decoder may have different routers, or one of them no sparse layer.
    layers = []
    routers = []
    for stack, decoder in (("encoder", False), ("decoder", True)):
        _, num_sparse = config.stack_sizes(decoder)
        if num_sparse:
            router = config.sparse_config(decoder=decoder).router
            layers.append(f"{num_sparse} in the {stack}")
            routers.append(f"`{router}` in the {stack}")

    experts = f"{experts_range(config)} in each, at most {config.num_selected_experts} for a token"
    return [
        ("sparse layers", ", ".join(layers)),
        ("experts", experts),
        ("router", f"{', '.join(routers)}; computed in float32"),
        ("capacity", f"{_capacity(config)}; `generate` drops nothing it decodes"),
        ("tokens dropped in evaluation", _percentages(drop_rate)),
    ]


def experts_range(config: STMoEConfig) -> str:
    """Returns the number of experts of a sparse layer as text, e.g. `8`, or `3 to 8` if layers differ."""
    numbers = [layer.num_experts for layer in config.all_sparse_configs()]
    least = min(numbers, default=0)
    return f"{least} to {max(numbers)}" if len(set(numbers)) > 1 else str(least)


def _capacity(config: STMoEConfig) -> str:
    if config.expert_capacity is not None:
        return f"{config.expert_capacity} slots of an expert in each {config.rules.capacity_scope}"
    training = _factor(config.capacity_factor)
    evaluation = _factor(config.eval_capacity_factor)
    return f"factor {training} in training, {evaluation} in evaluation"


def _factor(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _percentages(drop_rate: float | str | dict[str, float]) -> str:
    """Returns a drop rate as text."""
    if isinstance(drop_rate, dict):
        parts = [f"{100 * share:.2f} % in the {stack}" for stack, share in drop_rate.items()]
        return ", ".join(parts)
    return "0, there is no capacity" if drop_rate == 0 else str(drop_rate)


def _how_to_use(model_class: str) -> str:
    """Returns the section with a snippet that runs in the card's folder."""
    generates = model_class == _GENERATES
    needs = "The library `moe` (distribution `stmoe`)"
    needs += " and a tokenizer beside the model are needed." if generates else " is needed."

    lines = [
        f"from moe import {model_class}",
        "",
        'folder = "."  # or its name on the hub',
        f"model = {model_class}.from_pretrained(folder)",
    ]
    if generates:
        lines = [
            "from transformers import AutoTokenizer",
            *lines,
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            'batch = tokenizer(["Some text"], return_tensors="pt")',
            "print(tokenizer.batch_decode(model.generate(**batch, max_new_tokens=16)))",
        ]
    return "\n".join(["## How to use", "", needs, "", "```python", *lines, "```", ""])


def _limits(config: STMoEConfig, *, is_described: bool) -> str:
    """Returns the section on limits; empty if there are none."""
    limits = []
    if not is_described:
        limits.append(
            "What it was trained on, and how good it is, this card does not know; whoever "
            "publishes it should say so."
        )
    if config.eval_capacity_field is not None:
        limits.append(
            "With a capacity in evaluation, what an encoder or a forward with labels makes of "
            "a sequence may depend on padding and on the other sequences of the batch; load it "
            "with `eval_capacity_factor=None, expert_capacity=None` to drop nothing."
        )
    routers = {config.router, config.decoder_router} if config.num_experts else set()
    for name in sorted(routers - {None}):
        if load_routers().get(name).experts_choose:
            limits.append(
                f"Router `{name}` compares the tokens of a batch: a sequence's output may depend "
                "on the others."
            )
    if not limits:
        return ""
    return "## Limits\n\n" + "".join(f"- {limit}\n" for limit in limits)
