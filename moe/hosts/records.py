"""The table of hosts; see Host for what a record says.

Source:
    transformers 5.23.0; T5Gemma (arXiv:2504.06225), T5Gemma 2 (arXiv:2512.14856).
"""

from typing import Any

from transformers import T5Gemma2ForConditionalGeneration, T5GemmaForConditionalGeneration

from moe.hosts.host import Host
from moe.hosts.model import register_host

_GEMMA: dict[str, Any] = {
    "decoder": "model.decoder",
    "feed_forward": "mlp",
    "first": ("mlp.gate_proj", "mlp.up_proj"),
    "down": "mlp.down_proj",
    "activation": "hidden_activation",
    "dropout": "dropout_rate",
    "norm_after": "post_feedforward_layernorm",
}

register_host(Host(T5GemmaForConditionalGeneration, "model.encoder", **_GEMMA))
# Its vision encoder stays dense.
register_host(Host(T5Gemma2ForConditionalGeneration, "model.encoder.text_model", **_GEMMA))
