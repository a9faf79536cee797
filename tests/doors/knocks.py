"""The functions of the library as doors: one for each name in cases/functions.yaml, with `_` in
place of `.`.

A text `@NAME` in an argument stands for what the function `_NAME` here returns.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import moe
from moe import (
    MeshConfig,
    RouterStats,
    SparseConfig,
    SparseFeedForward,
    STMoEConfig,
    STMoEEncoderModel,
    STMoEForConditionalGeneration,
    STMoEModel,
)
from moe.convert.formats import convert_checkpoint
from moe.data.corpus import build_corpus, load_corpus
from moe.data.documents import Document, read_files
from moe.data.pair_files import read_pairs
from moe.data.span_corruption import Noise, corrupted_lengths, tokens_length
from moe.data.tokenizer import load_tokenizer, train_tokenizer
from moe.distributed.mesh import MeshLimits
from moe.sparse.losses import BalanceTotals
from moe.training.recipe import (
    FinetuneRecipe,
    MixtureRecipe,
    OptimRecipe,
    PairsRecipe,
    PretrainRecipe,
    SpanCorruptionRecipe,
    TrainingRecipe,
)
from tests.models.tiny import DENSE, FIELDS, tiny_model

# ---- what stands for @NAME ----


def value_of(text: str) -> Any:
    """Returns what `@NAME` stands for; another text stays."""
    return globals()[f"_{text[1:]}"]() if text.startswith("@") else text


@cache
def _model() -> STMoEForConditionalGeneration:
    return tiny_model(eval_capacity_factor=None)


@cache
def _dense() -> STMoEForConditionalGeneration:
    return tiny_model(**DENSE)


def _adapted() -> Any:
    model = tiny_model()
    return peft.get_peft_model(model, moe.lora_config(model))


def _linear() -> nn.Module:
    return nn.Linear(2, 3)


@cache
def _routers() -> list[Any]:
    layer = SparseFeedForward(_sparse_config())
    return [layer(torch.ones(2, 13, 7))[1]]


def _sparse_config(**fields: Any) -> SparseConfig:
    return SparseConfig(**{"d_model": 7, "d_ff": 11, "num_experts": 5, **fields})


def _sparse_class() -> type:
    return SparseFeedForward


def _router_class() -> type:
    return type("Mine", (moe.Router,), {})


def _tokens() -> Tensor:
    return torch.ones(2, 13, 7)


def _flat() -> Tensor:
    return torch.ones(26, 7)


def _narrow() -> Tensor:
    return torch.ones(2, 13, 5)


def _integer_tokens() -> Tensor:
    return torch.ones(2, 13, 7, dtype=torch.int64)


def _bool_tokens() -> Tensor:
    return torch.ones(2, 13, 7, dtype=torch.bool)


def _complex_tokens() -> Tensor:
    return torch.ones(2, 13, 7, dtype=torch.complex64)


def _nan_tokens() -> Tensor:
    return torch.full((2, 13, 7), torch.nan)


def _inf_tokens() -> Tensor:
    return torch.full((2, 13, 7), torch.inf)


def _no_tokens() -> Tensor:
    return torch.ones(0, 13, 7)


def _array() -> Any:
    return torch.ones(2, 13, 7).numpy()


def _mask() -> Tensor:
    return torch.ones(2, 13, dtype=torch.int64)


def _bool_mask() -> Tensor:
    return torch.ones(2, 13, dtype=torch.bool)


def _float_mask() -> Tensor:
    return torch.ones(2, 13)


def _additive_mask() -> Tensor:
    return torch.zeros(2, 13).masked_fill(torch.arange(13) > 9, -torch.inf)


def _lowest_mask() -> Tensor:
    return torch.zeros(2, 13).masked_fill(torch.arange(13) > 9, torch.finfo(torch.float32).min)


def _half_mask() -> Tensor:
    return torch.full((2, 13), 0.5)


def _negative_mask() -> Tensor:
    return -torch.ones(2, 13, dtype=torch.int64)


def _twos_mask() -> Tensor:
    return 2 * torch.ones(2, 13, dtype=torch.int64)


def _nan_mask() -> Tensor:
    return torch.full((2, 13), torch.nan)


def _wide_mask() -> Tensor:
    return torch.ones(2, 1, 13, 13, dtype=torch.bool)


def _other_mask() -> Tensor:
    return torch.ones(2, 11, dtype=torch.int64)


def _long_mask() -> Tensor:
    return torch.ones(2, 17, dtype=torch.int64)


def _ids() -> Tensor:
    return torch.full((2, 13), 5)


def _int32_ids() -> Tensor:
    return torch.full((2, 13), 5, dtype=torch.int32)


def _large_ids() -> Tensor:
    return torch.full((2, 13), 131)


def _negative_ids() -> Tensor:
    return torch.full((2, 13), -1)


def _ignored_ids() -> Tensor:
    return torch.full((2, 13), -100)


def _float_ids() -> Tensor:
    return torch.full((2, 13), 5.0)


def _bool_ids() -> Tensor:
    return torch.ones(2, 13, dtype=torch.bool)


def _flat_ids() -> Tensor:
    return torch.full((13,), 5)


def _no_ids() -> Tensor:
    return torch.ones(2, 0, dtype=torch.int64)


def _no_rows() -> Tensor:
    return torch.ones(0, 13, dtype=torch.int64)


def _one_row() -> Tensor:
    return torch.full((1, 13), 5)


def _id_list() -> list[list[int]]:
    return [[5] * 13] * 2


def _embeddings() -> Tensor:
    return torch.ones(2, 13, 29)


def _narrow_embeddings() -> Tensor:
    return torch.ones(2, 13, 7)


def _integer_embeddings() -> Tensor:
    return torch.ones(2, 13, 29, dtype=torch.int64)


def _nan_embeddings() -> Tensor:
    return torch.full((2, 13, 29), torch.nan)


def _index() -> Tensor:
    return torch.zeros(2, 13, 2, dtype=torch.int64)


def _large_index() -> Tensor:
    return torch.full((2, 13, 2), 5)


def _wanted() -> Tensor:
    return torch.ones(2, 13, 2, dtype=torch.bool)


def _totals() -> BalanceTotals:
    return BalanceTotals(torch.ones(5), torch.tensor(3.0))


def _no_losses() -> Any:
    return _routers()[0].losses


def _stats() -> Any:
    return RouterStats.sum(router.stats for router in _routers())


# ---- settings ----


def SparseConfig_(**fields: Any) -> Any:
    return _sparse_config(**fields)


def STMoEConfig_(**fields: Any) -> Any:
    return STMoEConfig(**{**FIELDS, **fields})


def STMoEConfig_from_preset(name: Any, **fields: Any) -> Any:
    return STMoEConfig.from_preset(name, **fields)


def MeshConfig_(**fields: Any) -> Any:
    return MeshConfig(**fields)


def check_mesh(
    config: Mapping[str, Any], num_ranks: Any, num_experts: Any, num_heads: Any, d_ff: Any
) -> None:
    moe.distributed.mesh.check_mesh(
        MeshConfig(**config), MeshLimits(num_ranks, (num_experts,), num_heads, d_ff)
    )


def build_mesh(config: Any, device_type: Any) -> Any:
    return moe.build_mesh(MeshConfig(**config) if isinstance(config, dict) else config, device_type)


def PretrainRecipe_(section: str = "", **fields: Any) -> Any:
    sections = {
        "optim": OptimRecipe,
        "training": TrainingRecipe,
        "data": SpanCorruptionRecipe,
        "mesh": MeshConfig,
    }
    if section:
        return PretrainRecipe(**{section: sections[section](**fields)})
    return PretrainRecipe(**fields)


def FinetuneRecipe_(section: str = "", **fields: Any) -> Any:
    sections = {
        "optim": OptimRecipe,
        "training": TrainingRecipe,
        "data": PairsRecipe,
        "mixture": MixtureRecipe,
    }
    if section:
        return FinetuneRecipe(**{section: sections[section](**fields)})
    return FinetuneRecipe(**fields)


def Noise_(inputs_length: Any, density: Any, mean_span_length: Any) -> Any:
    noise = Noise(density, mean_span_length)
    return corrupted_lengths(tokens_length(inputs_length, noise, 100), noise)


# ---- the sparse layer ----


def SparseFeedForward_(config: Any) -> Any:
    return SparseFeedForward(config)


def SparseFeedForward_forward(
    router: str = "token_choice", router_input: str = "hidden", **arguments: Any
) -> Any:
    single = {"num_selected_experts": 1} if router == "hash" else {}
    torch.manual_seed(0)
    return SparseFeedForward(_sparse_config(router=router, router_input=router_input, **single))(
        **arguments
    )[0].shape


def SparseFeedForwardAdapter(layer: Any, x: Any) -> Any:
    return moe.sparse.SparseFeedForwardAdapter(layer)(x)


def collect_routers(module: Any, token_mask: Any = None) -> Any:
    with moe.collect_routers(module, token_mask) as routers:
        module(torch.ones(2, 13, 7))
    return routers


def router_loss(**arguments: Any) -> Any:
    return moe.sparse.router_loss(**arguments)


def assign_slots(**arguments: Any) -> Any:
    return moe.sparse.assign_slots(**arguments)


def ROUTERS_get(name: Any) -> Any:
    return moe.ROUTERS.get(name)


def ROUTERS_add(name: Any, value: Any) -> Any:
    registry = type(moe.ROUTERS)
    routers = object.__new__(registry)
    routers.__dict__.update({**moe.ROUTERS.__dict__, "_entries": dict(moe.ROUTERS._entries)})
    return routers.add(name, value)


def PRESETS_get(name: Any) -> Any:
    return moe.PRESETS.get(name)


# ---- models ----


def STMoEForConditionalGeneration_forward(**arguments: Any) -> Any:
    with torch.no_grad():
        return _model()(**arguments).loss


def STMoEModel_forward(**arguments: Any) -> Any:
    with torch.no_grad():
        return STMoEModel(_model().config).eval()(**arguments)[0].shape


def STMoEEncoderModel_forward(**arguments: Any) -> Any:
    with torch.no_grad():
        return STMoEEncoderModel(_model().config).eval()(**arguments)[0].shape


def generate(**arguments: Any) -> Any:
    return _model().generate(**{"max_new_tokens": 2, **arguments})


def from_pretrained(folder: Any, **options: Any) -> Any:
    return STMoEForConditionalGeneration.from_pretrained(folder, **options)


def AutoModel_from_pretrained(folder: Any, **options: Any) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, **options)


def AutoConfig_from_pretrained(folder: Any, **options: Any) -> Any:
    return AutoConfig.from_pretrained(folder, **options)


def load_model(folder: Any, **options: Any) -> Any:
    return moe.checkpoint.load_model(folder, **options)


def check_model_folder(folder: Any) -> Any:
    return moe.checkpoint.loading.check_model_folder(folder)


def save_pretrained(folder: Any, **options: Any) -> Any:
    return _model().save_pretrained(folder, **options)


def convert(source: Any, folder: Any, **settings: Any) -> Any:
    return convert_checkpoint(source, Path(folder), **settings)


def conversion_report(source: Any, **settings: Any) -> Any:
    return moe.convert.conversion_report(source, **settings)


def model_card(**arguments: Any) -> Any:
    return moe.models.card.model_card(_model().config, **arguments)


def select_parameters(model: Any, subset: Any) -> Any:
    return moe.models.select_parameters(model, subset)


def lora_config(model: Any, **options: Any) -> Any:
    model = tiny_model() if model is _model() else model
    return peft.get_peft_model(model, moe.lora_config(model, **options))


def adapter_memory(model: Any, **options: Any) -> Any:
    model = tiny_model().requires_grad_(False) if model is _model() else model
    return moe.models.adapter_memory(model, **options)


# ---- data and files ----


def load_tokenizer_(folder: str) -> Any:
    return load_tokenizer(Path(folder))


def train_tokenizer_(texts: Any, vocab_size: Any, folder: Any) -> Any:
    return train_tokenizer(texts, vocab_size, folder)


def load_corpus_(folder: Any) -> Any:
    return load_corpus(folder)


def build_corpus_(
    held_out_fraction: Any = 0.5, seed: Any = 0, texts: Any = ("sea", "night")
) -> Any:
    documents = [
        Document(text, f"{number}.txt", "mine", "mine") for number, text in enumerate(texts)
    ]
    return build_corpus(documents, held_out_fraction, seed)


def read_files_(paths: Any) -> Any:
    return read_files(paths)


def read_pairs_(path: Any) -> Any:
    return read_pairs(Path(path))


def whole_file(path: Any) -> None:
    with moe.files.whole_file(Path(path)) as partial:
        partial.write_text("whole")


def locked_folder(folder: Any) -> None:
    with moe.files.locked_folder(Path(folder), f"Another process holds {folder}."):
        pass
