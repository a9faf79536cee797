"""The table of hosts; see Host for what a record says.

Source:
    transformers 5.23.0; T5Gemma (arXiv:2504.06225), T5Gemma 2 (arXiv:2512.14856).
"""

from typing import Any

from transformers import (
    AutoModelForSpeechSeq2Seq,
    BartForConditionalGeneration,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    PegasusForConditionalGeneration,
    T5Gemma2ForConditionalGeneration,
    T5GemmaForConditionalGeneration,
    WhisperForConditionalGeneration,
)

from moe.hosts.host import Host
from moe.hosts.model import register_host

# The dense NLLB is an M2M100.
register_host(Host(M2M100ForConditionalGeneration))
register_host(Host(MBartForConditionalGeneration))
register_host(Host(BartForConditionalGeneration))
register_host(Host(MarianMTModel))
register_host(Host(PegasusForConditionalGeneration))
register_host(Host(WhisperForConditionalGeneration, auto_class=AutoModelForSpeechSeq2Seq))

# Of T5Gemma 2, the vision encoder stays dense.
_GEMMA: dict[str, Any] = {
    "feed_forward": "mlp",
    "first": ("mlp.gate_proj", "mlp.up_proj"),
    "down": "mlp.down_proj",
    "identities": (),
    "activation": "hidden_activation",
    "dropout": "dropout_rate",
    "norm_after": "post_feedforward_layernorm",
}
register_host(Host(T5GemmaForConditionalGeneration, **_GEMMA))
register_host(Host(T5Gemma2ForConditionalGeneration, "model.encoder.text_model", **_GEMMA))
