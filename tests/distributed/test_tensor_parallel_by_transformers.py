"""Models that transformers shards over ranks as it loads them: they compute what one process does."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from moe import ConfigError, STMoEEncoderModel, STMoEForConditionalGeneration
from moe.distributed.sharding import find_rule
from moe.models.parallelize import sharding_rules
from moe.models.transformers_private import check_distributed_config
from tests.distributed.ranks import run_ranks, whole
from tests.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.skipif(
    find_spec("transformers.distributed.parallel_utils") is None,
    reason="older transformers are refused: they lack a style that the plan has",
)

SIZES = {"num_heads": 4, "d_ff": 22, "num_decoder_layers": 2}
MODELS = {
    "gated": {**SIZES},
    "tied, with biases": {
        **SIZES,
        "feed_forward_proj": "relu",
        "expert_bias": "additive",
        "tie_word_embeddings": True,
        "eval_capacity_factor": None,
    },
}


def compare(rank, num_ranks, folders):
    sharded = DistributedConfig(tp_size=num_ranks)
    names = {}
    for name, folder in folders.items():
        kind = STMoEForConditionalGeneration
        ours = kind.from_pretrained(folder, distributed_config=sharded)
        oracle = kind.from_pretrained(folder)
        batch = tiny_batch()
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}

        # Values, gradients, and tokens with each cache.
        a, b = ours(**batch), oracle(**batch)
        torch.testing.assert_close((a.loss, a.logits), (b.loss, b.logits), rtol=1e-5, atol=1e-5)
        a.loss.backward()
        b.loss.backward()
        gradients = {key: whole(p.grad) for key, p in ours.named_parameters()}
        for key, parameter in oracle.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-6)
        for cache in ("dynamic", "static"):
            generation = {"max_new_tokens": 5, "cache_implementation": cache}
            tokens = [model.generate(**inputs, **generation) for model in (ours, oracle)]
            torch.testing.assert_close(*tokens)

        # The encoder alone, and the whole model saved again.
        encoder = STMoEEncoderModel.from_pretrained(folder, distributed_config=sharded)
        hidden = [m(**inputs).last_hidden_state for m in (encoder, oracle.get_encoder())]
        torch.testing.assert_close(*hidden, rtol=1e-5, atol=1e-5)
        ours.save_pretrained(f"{folder}-again")
        dist.barrier()
        again = kind.from_pretrained(f"{folder}-again").state_dict()
        for key, weight in oracle.state_dict().items():
            assert torch.equal(again[key], weight), key

        sharded_parameters = {
            key: parameter
            for key, parameter in ours.named_parameters()
            if isinstance(parameter, DTensor)
        }
        for parameter in sharded_parameters.values():
            assert 2 * parameter.to_local().numel() == parameter.numel()
        names[name] = list(sharded_parameters)
    return names


@pytest.mark.slow
def test_a_model_that_transformers_shards_over_two_ranks_equals_one_process(tmp_path):
    folders = {}
    for name, fields in MODELS.items():
        folders[name] = str(tmp_path / name)
        tiny_model(**fields).save_pretrained(folders[name])
    for names in run_ranks(compare, 2, tmp_path, folders):
        for name, sharded_names in names.items():
            # What our own rules shard over tp, and nothing else.
            model = tiny_model(**MODELS[name])
            rules = sharding_rules(model.config)
            expected = []
            for parameter, weight in model.named_parameters():
                if find_rule(parameter, weight.shape, rules).tp_dim is not None:
                    expected.append(parameter)
            assert sharded_names == expected


def test_what_does_not_map_to_the_layers_is_refused():
    config = tiny_model(**SIZES).config
    for asked, message in (
        ({"tp_size": 3}, r"The mesh .* does not fit: .*heads"),
        ({"tp_size": 2, "fsdp_size": 2}, "has fsdp_size 2, but only tp_size is supported here"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_distributed_config(config, DistributedConfig(**asked))
