"""One HTML file that holds a model, its tokenizer and its languages, and runs them in a browser.

The page needs no network: templates/model.js computes what the model computes, with typed arrays.
"""

import base64
import json
from pathlib import Path
from string import Template
from typing import Any, NotRequired

import safetensors.torch
import torch
from transformers import PreTrainedTokenizerFast
from typing_extensions import TypedDict

from moe.checks import shown
from moe.data.tokenizer import MODEL_MAX_LENGTH, input_frame, load_tokenizer
from moe.errors import ConfigError
from moe.models.attention import relative_position_bucket
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.transformers_private import load_generation_config
from moe.models.weight_files import find_weight_files, open_weights, stored_state
from moe.parsing import read_record
from moe.serving.languages import read_languages

EXPERTS_FILE = "experts.json"

_TEMPLATES = Path(__file__).with_name("templates")
_TOP_LANGUAGES = 3  # of an expert
_EXAMPLES = {"el": "New Zealand", "de": "Japanese", "ru": "Swiss Franc", "hi": "Old Persian"}
_LEGEND = "Each token with its experts and their weights."
_LEGEND_OF_LANGUAGES = (
    " Beside an expert: the languages of most of its tokens, with their shares of them."
)
_MOST_BYTES = 100_000_000  # of the weights; a browser would take minutes


class _ExpertShares(TypedDict):
    languages: list[str]
    encoder: NotRequired[dict[str, list[list[float]]]]
    decoder: NotRequired[dict[str, list[list[float]]]]


def model_page(folder: Path) -> str:
    """Returns the page of a model of ours.

    Optional files of the folder tell it about languages:

    - languages.json: `{"languages": {CODE: {"name": ENGLISH NAME, ...}, ...}, "longest_name": N}`.
      The model then gets `CODE: TEXT`, and N is the most tokens of that, end token included. Other
      keys are ignored. Without the file the page sends the text as it is typed.
    - experts.json: `{"languages": [CODE, ...], "encoder": {LAYER: [[SHARE, ...], ...]}, "decoder":
      ...}`, where LAYER is the number of a sparse layer in its stack, from 0, and each list of shares
      belongs to an expert: the shares of its tokens by language, in the order of the codes.

    Args:
        folder: The model, with its tokenizer, a byte-level BPE.

    Raises:
        CheckpointError: When the model is damaged.
        DataError: When the tokenizer is missing or damaged.
        ConfigError: When the page cannot compute what the model or its tokenizer computes.
    """
    config = STMoEConfig.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    languages = read_languages(folder)
    names = dict(languages.names) if languages else {}
    longest = (languages and languages.longest) or MODEL_MAX_LENGTH

    generation = load_generation_config(folder, {})
    ends = generation.eos_token_id
    data = {
        "model": _model_settings(config),
        "tokenizer": _tokenizer_settings(tokenizer),
        "start": config.decoder_start_token_id,
        "ends": ends if isinstance(ends, list) else [ends],
        "longest": longest,
        "most_new_tokens": generation.max_new_tokens or longest,
        "languages": names,
        "examples": [[code, text] for code, text in _EXAMPLES.items() if code in names],
        "experts": _languages_of_experts(folder, config),
    }
    title = f"Names in {len(names)} languages" if names else folder.resolve().name
    return Template(_read("model_page.html")).substitute(
        title=title.replace("&", "&amp;").replace("<", "&lt;"),
        summary=_summary(config),
        legend=_LEGEND + (_LEGEND_OF_LANGUAGES if data["experts"] else ""),
        css=_read("model_page.css"),
        data=json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", r"\u003c"),
        weights=base64.b64encode(_weights(folder, config)).decode(),
        scripts="".join(map(_read, ("tokenizer.js", "model.js"))),
        page_script=_read("model_page.js"),
    )


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _summary(config: STMoEConfig) -> str:
    """Returns a sentence about the model."""
    size = f"{config.num_parameters() / 1e6:.1f} million parameters"
    sentence = f"A Transformer of {size} runs in this page."
    if config.num_experts:
        chosen = f"{config.num_selected_experts} of {config.num_experts} experts"
        sentence += f" Each token is coloured by its experts, at most {chosen}."
    return sentence


def _model_settings(config: STMoEConfig) -> dict[str, Any]:
    """Returns what model.js needs to know of a configuration.

    Raises:
        ConfigError: When model.js does not have something.
    """
    settings: dict[str, Any] = {
        "num_heads": config.num_heads,
        "gated": config.gated,
        "activation": config.activation,
        "epsilon": config.layer_norm_epsilon,
        "output_scale": config.d_model**-0.5 if config.scale_decoder_outputs else 1,
        "tied": config.tie_word_embeddings,
    }
    # Buckets by distance, so that no logarithm is rounded differently.
    longest = config.relative_attention_max_distance
    distances = torch.arange(-longest, longest + 1)
    for stack, decoder in (("encoder", False), ("decoder", True)):
        buckets = relative_position_bucket(
            distances,
            bidirectional=not decoder,
            num_buckets=config.relative_attention_num_buckets,
            max_distance=longest,
        )
        num_layers, num_sparse = config.stack_sizes(decoder)
        settings[stack] = {
            "num_layers": num_layers,
            "buckets": buckets.tolist(),
            "router": _router_settings(config, decoder=decoder) if num_sparse else None,
        }
    return settings


def _router_settings(config: STMoEConfig, *, decoder: bool) -> dict[str, Any]:
    """Returns the settings of a stack's routers, outside training and without a capacity."""
    layer = config.sparse_config(decoder=decoder)
    options = {
        "eval_second_expert_policy": "threshold" if layer.router == "token_choice" else "all",
        "eval_second_expert_threshold": 0.2,
        "normalize_gates": True,
        **layer.router_options,
    }
    supported = {
        "router": (layer.router, ("token_choice", "switch")),
        "eval_second_expert_policy": (
            options["eval_second_expert_policy"],
            ("all", "none", "threshold"),
        ),
        "router_input": (layer.router_input, ("hidden",)),
        "num_shared_experts": (layer.num_shared_experts, (0,)),
        "prefix_experts": (layer.prefix_experts, ((),)),
        "expert_bias": (layer.expert_bias, ("none",)),
        "expert_quantization": (layer.expert_quantization, (None, {"bits": 8})),
    }
    advice = "Distill a dense student." if layer.prefix_experts else "Use --format onnx."
    for name, (value, known) in supported.items():
        if value not in known:
            raise ConfigError(
                f"A page cannot run a model whose {name} is {shown(value)}; expected "
                f"{' or '.join(map(str, known))}. {advice}"
            )
    return {
        "num_selected": layer.num_selected_experts,
        "policy": options["eval_second_expert_policy"],
        "threshold": options["eval_second_expert_threshold"],
        "normalize": options["normalize_gates"],
    }


def _tokenizer_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Returns the vocabulary for tokenizer.js.

    Raises:
        ConfigError: When it is no byte-level BPE with GPT-2's words.
    """
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    model = whole["model"]
    words = whole["pre_tokenizer"] or {}
    normalizer = (whole["normalizer"] or {"type": None})["type"]
    is_supported = (
        model["type"] == "BPE"
        and words.get("type") == "ByteLevel"
        and words.get("use_regex", True)
        and normalizer in (None, "NFC", "NFKC")
        and not any(model.get(name) for name in _UNSUPPORTED_BPE)
        and all(token["special"] for token in whole["added_tokens"])
    )
    if not is_supported:
        raise ConfigError(
            f"A page cannot run a tokenizer of the kind {model['type']} with "
            f"{words.get('type')} words; expected a byte-level BPE. Use --format onnx."
        )

    tokens = [""] * len(tokenizer)
    for token, index in tokenizer.get_vocab().items():
        tokens[index] = token
    merges: list[int] = []
    for left, right in model["merges"]:
        merges += [model["vocab"][left], model["vocab"][right]]
    start, end = input_frame(tokenizer)
    return {
        "tokens": tokens,
        "merges": merges,
        "special": [token["id"] for token in whole["added_tokens"]],
        "normalizer": normalizer,
        "prefix": " " if words.get("add_prefix_space") else "",
        "start": start,
        "end": end,
    }


_UNSUPPORTED_BPE = (
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)


def _weights(folder: Path, config: STMoEConfig) -> bytes:
    """Returns the stored tensors as one safetensors file.

    Raises:
        ConfigError: When they are not in our format, or too many for a browser.
    """
    stored = open_weights(find_weight_files(folder))
    with torch.device("meta"):
        expected = set(
            STMoEForConditionalGeneration(config.replaced(expert_quantization=None)).state_dict()
        )
    if config.tie_word_embeddings:
        expected.remove("lm_head.weight")
        stored.pop("lm_head.weight", None)
    missing = sorted(expected - stored.keys())
    if missing:
        raise ConfigError(
            f"{folder} holds no {missing[0]}; expected a model in this library's format. Make one: "
            f"stmoe convert --from {folder} --to FOLDER."
        )

    state = {name: (weight.read_quantized or weight.read)() for name, weight in stored.items()}
    tensors = {name: tensor.contiguous() for name, tensor in stored_state(state).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > _MOST_BYTES:
        raise ConfigError(
            f"The weights of {folder} have {size / 1e6:.0f} MB; expected at most {_MOST_BYTES / 1e6:.0f} for a page. "
            "Make them smaller: stmoe quantize --bits 8, or stmoe distill."
        )
    return safetensors.torch.save(tensors)


def _languages_of_experts(
    folder: Path, config: STMoEConfig
) -> dict[str, dict[int, list[list[list[Any]]]]]:
    """Returns the languages with the largest shares, [code, share] each, of every expert by block."""
    if not (folder / EXPERTS_FILE).is_file():
        return {}
    record = read_record(folder / EXPERTS_FILE, _ExpertShares)
    codes = record["languages"]
    result: dict[str, dict[int, list[list[list[Any]]]]] = {}
    blocks = {"encoder": config.num_layers, "decoder": config.num_decoder_layers or 0}
    for stack, num_blocks in blocks.items():
        result[stack] = {}
        decoder = stack == "decoder"
        sparse = [n for n in range(num_blocks) if config.is_sparse_block(n, decoder=decoder)]
        for layer, experts in record.get(stack, {}).items():
            top = []
            for shares in experts:
                order = sorted(range(len(codes)), key=shares.__getitem__, reverse=True)
                top.append([[codes[i], round(shares[i], 4)] for i in order[:_TOP_LANGUAGES]])
            result[stack][sparse[int(layer)]] = top
    return result
