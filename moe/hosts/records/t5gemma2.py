"""T5Gemma 2: Gemma 3 blocks, one attention over decoder and encoder, images in the encoder."""

from typing import Any, ClassVar

from transformers import T5Gemma2Config, T5Gemma2ForConditionalGeneration

from moe.hosts.host import Host, HostStack
from moe.hosts.model import HOSTS, RECORDS, SparseHost
from moe.hosts.settings import SparseHostConfig


class SparseT5Gemma2Config(SparseHostConfig, T5Gemma2Config):
    """A T5Gemma2Config with `sparse_layers`, see HostSettings."""

    model_type = "sparse_t5gemma2"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", *RECORDS]
    sparse_layers: dict[str, Any] | None = None


@HOSTS.register("t5gemma2")
class SparseT5Gemma2(SparseHost, T5Gemma2ForConditionalGeneration):
    """A T5Gemma2ForConditionalGeneration with sparse layers; its vision encoder stays dense.

    Source:
        T5Gemma 2 (arXiv:2512.14856); transformers 5.23.0 `models/t5gemma2`.
    """

    config_class = SparseT5Gemma2Config
    host = Host(
        dense_class=T5Gemma2ForConditionalGeneration,
        encoder=HostStack("model.encoder.text_model", config="encoder.text_config"),
        decoder=HostStack("model.decoder", config="decoder"),
        feed_forward="mlp",
        first=("gate_proj", "up_proj"),
        down="down_proj",
        norm_after="post_feedforward_layernorm",
    )
