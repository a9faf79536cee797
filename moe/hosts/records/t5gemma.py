"""T5Gemma: Gemma 2 blocks, and a cross-attention of its own; encoder and decoder may differ in width."""

from typing import Any, ClassVar

from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

from moe.hosts.host import Host, HostStack
from moe.hosts.model import HOSTS, RECORDS, SparseHost
from moe.hosts.settings import SparseHostConfig


class SparseT5GemmaConfig(SparseHostConfig, T5GemmaConfig):
    """A T5GemmaConfig with `sparse_layers`, see HostSettings."""

    model_type = "sparse_t5gemma"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", *RECORDS]
    sparse_layers: dict[str, Any] | None = None


@HOSTS.register("t5gemma")
class SparseT5Gemma(SparseHost, T5GemmaForConditionalGeneration):
    """A T5GemmaForConditionalGeneration with sparse layers.

    Source:
        T5Gemma (arXiv:2504.06225); transformers 5.23.0 `models/t5gemma`.
    """

    config_class = SparseT5GemmaConfig
    host = Host(
        dense_class=T5GemmaForConditionalGeneration,
        encoder=HostStack("model.encoder", config="encoder"),
        decoder=HostStack("model.decoder", config="decoder"),
        feed_forward="mlp",
        first=("gate_proj", "up_proj"),
        down="down_proj",
        norm_after="post_feedforward_layernorm",
    )
