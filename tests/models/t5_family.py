"""T5's family, small and random, in transformers' own classes: the oracle of their conversions."""

import json

import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForSeq2SeqLM

# The caches of transformers 5.23 fail where the decoder is the deeper stack.
SIZES = {"vocab_size": 131, "d_model": 29, "d_kv": 5, "d_ff": 31, "num_heads": 3}
SIZES |= {"num_layers": 3, "num_decoder_layers": 2, "dropout_rate": 0.0}
SIZES |= {"decoder_start_token_id": 0}
T5_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

# Fields of config.json on the hub, beside the sizes.
FAMILY = {
    "T5 1.0": ("t5", {"feed_forward_proj": "relu"}),
    "T5 1.1": ("t5", T5_1_1),
    "UL2": ("t5", {"feed_forward_proj": "gated-silu", "d_kv": 11}),
    "ByT5": ("t5", {**T5_1_1, "vocab_size": 384, "num_layers": 6}),
    "madlad400": ("t5", {**T5_1_1, "pad_token_id": 1, "eos_token_id": 2}),
    "mT5": ("mt5", T5_1_1),
    "umT5": ("umt5", {**T5_1_1, "scalable_attention": True}),
    "pile-t5": ("umt5", {**T5_1_1, "eos_token_id": 2, "pad_token_id": 1}),
}


def their_family(name, folder, *, own_head=True):
    """Returns a model of transformers in evaluation mode, and saves it as transformers 5 does."""
    torch.manual_seed(0)
    model_type, fields = FAMILY[name]
    config = AutoConfig.for_model(model_type, **{**SIZES, **fields})
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms, which are 1 in a new model
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if own_head and "tie_word_embeddings" in fields:  # transformers 5 ties every head
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) / 5)
        model.all_tied_weights_keys.pop("lm_head.weight")
    unscale(model)
    model.save_pretrained(folder)
    return model


def unscale(model):
    """Undoes the factor that umT5 has in transformers 5.0.0 to 5.23 by mistake."""
    is_wrong = Version(transformers.__version__) < Version("5.24")
    if is_wrong and model.config.model_type == "umt5":
        scale = model.config.d_model**0.5
        model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * scale,))
    return model


def write_hub_config(name, folder, *, without=None, **changes):
    """Replaces a config.json by one as on the hub, of transformers 4."""
    model_type, fields = FAMILY[name]
    raw = {"model_type": model_type, "transformers_version": "4.57.6", **SIZES, **fields}
    raw.pop(without, None)
    raw |= changes
    (folder / "config.json").write_text(json.dumps(raw))


def family_batch(model, batch=3, length=17, targets=13):
    """Returns a batch with padding: token ids <int64>[B, L], their mask, and labels <int64>[B, T]."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=draw)
    labels = torch.randint(3, model.config.vocab_size, (batch, targets), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    labels[2, 7:] = -100
    ids = ids.masked_fill(mask == 0, model.config.pad_token_id)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
