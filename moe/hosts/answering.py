"""Loads a model with its tokenizer, to answer texts."""

from pathlib import Path
from typing import Any

import torch

from moe.checkpoint.loading import find_class, load_model
from moe.convert.formats import find_tokenizer
from moe.data.language_codes import answer_settings, with_languages
from moe.data.tokenizer import load_tokenizer
from moe.distributed.mesh import Mesh
from moe.errors import ConfigError
from moe.files import find_model
from moe.hosts import all_hosts  # noqa: F401  registers the hosts, which `load_model` then reads
from moe.models.inputs import check_reads_texts
from moe.serving.batch_generator import BatchGenerator
from moe.serving.languages import read_languages
from moe.surgery.packing import pack_weights


def load(
    source: Path | str,
    *,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
    mmap: bool = False,
    pack: bool = False,
    source_language: str | None = None,
    target_language: str | None = None,
    **settings: Any,
) -> BatchGenerator:
    """Returns a model that answers texts, whose experts drop nothing.

    Example:
        from moe import load
        names = load("names")
        print(*names(["el: New Zealand"]))

    Args:
        source: `names`, which comes with the library, a folder, or a name of the hub.
        mesh: Ranks that share the experts, see `load_model`; `group` is then a setting.
        device: Device of the weights; None for the fastest.
        mmap: Whether weights stay in their files until they are used, on a CPU.
        pack: Whether other weights are packed, with which a CPU answers faster, and which do not train;
            see `pack_weights`.
        source_language: Code of the language of texts, for a tokenizer with languages; None for the
            tokenizer's.
        target_language: Likewise of answers.
        settings: Settings of `BatchGenerator`.

    Raises:
        CheckpointError: When there is no model, or it is damaged.
        ConfigError: When a language is unknown, or that of the answers is missing.
        DataError: When the tokenizer is missing or damaged.
    """
    codes = (source_language, target_language)
    options: dict[str, Any] = {"mesh": mesh, "device": device, "mmap": mmap, "pack": pack}
    model, tokenizer = load_with_tokenizer(source, *codes, **options)
    languages = read_languages(find_model(source))
    return BatchGenerator(model, tokenizer, languages=languages, **settings)


def load_with_tokenizer(
    source: Path | str,
    source_language: str | None,
    target_language: str | None,
    *,
    pack: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Returns a model and its tokenizer, which have these languages; see `load`."""
    source = find_model(source)
    check_reads_texts(find_class(source))
    tokenizer = load_tokenizer(find_tokenizer(source))
    tokenizer = with_languages(tokenizer, source_language, target_language)
    fastest = "cuda" if torch.cuda.is_available() else "cpu"
    options["device"] = options.get("device") or fastest
    model = load_model(source, dropless=True, **options)
    if pack and not options.get("mmap"):
        pack_weights(model)

    # Translators search beams by default, which is the caller's choice here.
    generation = model.generation_config
    generation.update(num_beams=1, **answer_settings(tokenizer))
    if getattr(tokenizer, "tgt_lang", "") is None and generation.forced_bos_token_id is None:
        raise ConfigError("No language of the answers was given. Add --target-language CODE.")
    return model, tokenizer
