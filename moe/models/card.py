"""The model card: README.md beside the weights, with a header that the hub reads."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from moe.errors import ConfigError, did_you_mean
from moe.models.configuration import STMoEConfig
from moe.sparse.stats import RouterStats, summarize

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
) -> str:
    """Returns the text of a model's README.md; what is not given and not in the config is not in
    it.

    Args:
        config: Of the model.
        model_class: Name of its class.
        parameters: All, and those that one token uses; None counts those of the whole model from
            the config.
        base_model: Name on the hub of the model that this one comes from.
        license: Its identifier on the hub.
        language: ISO codes.
        datasets: Names on the hub.
        metrics: Names on the hub.
        tags: Beside those of every card.
        stats: What the routers did in an evaluation, by stack: `encoder`, `decoder`; see
            `total_stats`.
    """
    check_card({"stats": stats})
    total, active = parameters or (config.num_parameters(), config.num_active_parameters())
    sparse: dict[str, Any] = {}
    if config.num_experts:
        factors = {"training": config.capacity_factor, "evaluation": config.eval_capacity_factor}
        capacity = {"capacity_factor": factors} if config.expert_capacity is None else {}
        sparse |= capacity or {"expert_capacity": config.expert_capacity}
        sparse["drop_rate"] = _drop_rate(config, stats)
    data = ModelCardData(
        library_name="moe",
        license=license,
        language=language,
        base_model=base_model,
        datasets=datasets,
        metrics=metrics,
        pipeline_tag="text-generation" if model_class == _GENERATES else "feature-extraction",
        tags=[*_TAGS, *([tags] if isinstance(tags, str) else tags)],
        parameters={"total": total, "active": active},
        **sparse,
    )
    rows = [
        ("class", f"`{model_class}` of the library `moe`"),
        ("parameters", f"{total:,}; a token uses {active:,}"),
    ]
    rows += _describe(config, sparse.get("drop_rate"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    title = f"# A {'sparse' if config.num_experts else 'dense'} encoder-decoder of {total:,} parameters\n"
    body = f"\n{title}\n| | |\n|---|---|\n{table}\n\n{_how_to_use(model_class)}\n{_limits(config)}"
    return _seal(ModelCard(f"---\n{data.to_yaml()}\n---\n{body}"))


def check_card(given: Mapping[str, Any]) -> None:
    """Checks the arguments of `model_card` that a user gives with a model to save.

    Raises:
        ConfigError: When one is unknown, or statistics are of no stack.
    """
    known = ("base_model", "license", "language", "datasets", "metrics", "tags", "stats")
    for name in given:
        if name not in known:
            raise ConfigError(
                f"A card has no {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."
            )
    stats = given.get("stats") or {}
    if not isinstance(stats, Mapping) or not set(stats) <= {"encoder", "decoder"}:
        raise ConfigError(
            f"stats of a card is {str(stats)[:60]!r}; expected {{'encoder': RouterStats, 'decoder': ...}}."
        )


def write_card(folder: Path | str, text: str) -> None:
    """Writes README.md into a folder, unless one lies there that somebody else wrote or changed.

    A card of ours that nobody changed is replaced; tags, which the hub and transformers add, are
    kept.
    """
    path = Path(folder) / CARD_NAME
    if _is_others(path):
        return
    found = read_card(path)
    path.write_text(text, encoding="utf-8")
    if found:
        add_tags(folder, found.data.tags or [])


def add_tags(folder: Path | str, tags: Sequence[str]) -> None:
    """Adds tags to the header of a folder's card."""
    path = Path(folder) / CARD_NAME
    card = read_card(path)
    if card and (new := [tag for tag in tags if tag not in (card.data.tags or [])]):
        card.data.tags = [*(card.data.tags or []), *new]
        card.save(path)


def fetch_card(repo_id: str, folder: Path, token: str | bool | None = None) -> bool:
    """Returns whether a repository on the hub has a card; puts it into a folder, unless somebody
    else's lies there.
    """
    try:
        fetched = hf_hub_download(repo_id, CARD_NAME, token=token)
    except EntryNotFoundError:
        return False
    if not _is_others(folder / CARD_NAME):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CARD_NAME).write_bytes(Path(fetched).read_bytes())
    return True


def read_card(path: Path) -> Any:
    """Returns the ModelCard in a file; None when there is none, or no header that can be read."""
    try:
        return ModelCard.load(path) if path.read_text(encoding="utf-8").startswith("---") else None
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return None


def origin(name_or_path: Path | str) -> str | None:
    """Returns the name on the hub of what is being loaded: the name itself, or the base model in a
    folder's card.
    """
    path = Path(name_or_path)
    if path.exists():
        card = read_card(path / CARD_NAME)
        base_model = card.data.get("base_model") if card else None
        return base_model if isinstance(base_model, str) else None
    return str(name_or_path)


def _drop_rate(
    config: STMoEConfig, stats: Mapping[str, RouterStats] | None
) -> float | str | dict[str, float]:
    """Returns the share of tokens that reached no expert in evaluation, by stack, as far as it is
    known.
    """
    if stats:
        return {
            stack: round(summarize(found)["fraction_dropped"], 6) for stack, found in stats.items()
        }
    return 0.0 if config.eval_capacity_field is None else "not measured"


def _describe(
    config: STMoEConfig, drop_rate: float | str | dict[str, float] | None
) -> list[tuple[str, str]]:
    """Returns the rows of the table that come from the config."""
    activation = "GEGLU" if config.feed_forward_proj == "gated-gelu" else "ReLU"
    rows = [
        (
            "blocks",
            f"{config.num_layers} in the encoder, {config.num_decoder_layers} in the decoder",
        ),
        (
            "width",
            f"d_model {config.d_model}, d_ff {config.d_ff} ({activation}), {config.num_heads} heads",
        ),
        ("vocabulary", f"{config.vocab_size:,}"),
    ]
    if not config.num_experts:
        return rows
    stacks = [
        (False, "encoder", config.num_sparse_encoder_layers),
        (True, "decoder", config.num_sparse_decoder_layers),
    ]
    routers = [
        (stack, config.sparse_config(decoder=decoder).router)
        for decoder, stack, layers in stacks
        if layers
    ]
    if isinstance(drop_rate, dict):
        dropped = ", ".join(
            f"{100 * share:.2f} % in the {stack}" for stack, share in drop_rate.items()
        )
    else:
        dropped = "0, there is no capacity" if drop_rate == 0 else str(drop_rate)
    factors = [
        "none" if f is None else f"{f:g}"
        for f in (config.capacity_factor, config.eval_capacity_factor)
    ]
    capacity = f"factor {factors[0]} in training, {factors[1]} in evaluation"
    if config.expert_capacity is not None:
        capacity = f"{config.expert_capacity} slots of an expert in each {config.capacity_scope}"
    return [
        *rows,
        (
            "sparse layers",
            ", ".join(f"{layers} in the {stack}" for _, stack, layers in stacks if layers),
        ),
        (
            "experts",
            f"{config.num_experts} in each, at most {config.num_selected_experts} for a token",
        ),
        (
            "router",
            ", ".join(f"`{router}` in the {stack}" for stack, router in routers)
            + "; computed in float32",
        ),
        ("capacity", f"{capacity}; `generate` drops nothing it decodes"),
        ("tokens dropped in evaluation", dropped),
    ]


def _how_to_use(model_class: str) -> str:
    """Returns the section with a snippet that runs in the card's folder."""
    lines = [f"from moe import {model_class}", "", 'folder = "."  # or its name on the hub']
    lines.append(f"model = {model_class}.from_pretrained(folder)")
    if model_class == _GENERATES:
        lines = [
            "from transformers import AutoTokenizer",
            *lines,
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
        ]
        lines.append('batch = tokenizer(["Some text"], return_tensors="pt")')
        lines.append("print(tokenizer.batch_decode(model.generate(**batch, max_new_tokens=16)))")
    needs = "The library `moe` (distribution `stmoe`)"
    needs += (
        " and a tokenizer beside the model are needed."
        if model_class == _GENERATES
        else " is needed."
    )
    return "\n".join(["## How to use", "", needs, "", "```python", *lines, "```", ""])


def _limits(config: STMoEConfig) -> str:
    """Returns the section on what not to expect."""
    limits = [
        "What it was trained on, and how good it is, this card does not know; whoever publishes it should say so."
    ]
    if config.eval_capacity_field is not None:
        limits.append(
            "With a capacity in evaluation, what an encoder or a forward with labels makes of a sequence may "
            "depend on padding and on the other sequences of the batch; load it with "
            "`eval_capacity_factor=None, expert_capacity=None` to drop nothing."
        )
    if config.num_experts and "expert_choice" in (config.router, config.decoder_router):
        limits.append(
            "Router `expert_choice` compares the tokens of a batch: a sequence's output may depend on the others."
        )
    return "## Limits\n\n" + "".join(f"- {limit}\n" for limit in limits)


def _seal(card: ModelCard) -> str:
    """Returns a card with a last line that tells whether anything but its tags was changed since."""
    rule = "rewritten when the model is saved, unless anything but the tags was changed"
    return f"{card}\n<!-- Written by moe, {_digest(card)}: {rule} -->\n"


def _is_others(path: Path) -> bool:
    """Returns whether there is a file that is not, but for its tags, as it was written here."""
    if not path.exists():
        return False
    card = read_card(path)
    seal = _SEAL.search(card.text) if card else None
    return (
        card is None
        or seal is None
        or _digest(ModelCard(str(card).replace(seal.group(), ""))) != seal.group(1)
    )


def _digest(card: ModelCard) -> str:
    """Returns 16 hexadecimal digits of a card without its tags."""
    data = {name: value for name, value in card.data.to_dict().items() if name != "tags"}
    return hashlib.sha256(json.dumps([data, card.text], sort_keys=True).encode()).hexdigest()[:16]
