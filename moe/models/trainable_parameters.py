"""Which parameters fine-tuning trains: the paper's subsets."""

from collections import Counter
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe.checks import check
from moe.errors import ConfigError, did_you_mean
from moe.kernels.quantized_weight import FIXED
from moe.models.parallelize import rule_names
from moe.models.pretrained import STMoEPreTrainedModel

_KIND_OF_RULE = {
    "embedding": "embedding",
    "head": "head",
    "norm": "norms",
    "position bias": "attention",
    "attention in": "attention",
    "attention out": "attention",
    "router": "router",
    "experts in": "experts",
    "experts out": "experts",
    "expert bias": "experts",
    "feed-forward in": "ffn",
    "feed-forward out": "ffn",
    "adapter": "adapters",
}
_ALL = frozenset(_KIND_OF_RULE.values()) - {"adapters"}

SUBSETS = {
    "all": _ALL,
    "non_moe": _ALL - {"router", "experts"},
    "moe": frozenset({"router", "experts"}),
    "new_experts": frozenset({"router", "experts"}),
    "attention": frozenset({"attention"}),
    "ffn": frozenset({"ffn"}),
    "router_frozen": _ALL - {"router"},
    "lora": frozenset({"adapters"}),
}
"""Kinds of parameters that train, by the name of the subset."""

_ROW_HOOKS: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
"""Hooks on parameters of which only the last rows train, by model."""


class Selection(NamedTuple):
    """Number of trainable parameters; printed as a small table.

    Attributes:
        subset: Name of the subset.
        trainable: Parameters that train, by kind.
        total: All parameters, by kind: embedding, head, norms, attention, router, experts, ffn, adapters.
    """

    subset: str
    trainable: dict[str, int]
    total: dict[str, int]

    def __str__(self) -> str:
        num_trainable = sum(self.trainable.values())
        num_total = sum(self.total.values())
        share = f"{num_trainable / num_total:.1%}"
        lines = [f"{self.subset}: {num_trainable:,} of {num_total:,} parameters train ({share})"]

        # One line for each kind, with the numbers aligned.
        width = len(f"{max(self.total.values()):,}")
        for kind, count in self.total.items():
            trainable = self.trainable[kind]
            states = {0: "frozen", count: "trains"}
            state = states.get(trainable, f"{trainable:,} of them train")
            lines.append(f"  {kind:<9} {count:>{width},}  {state}")
        return "\n".join(lines)


def select_parameters(model: STMoEPreTrainedModel, subset: str) -> Selection:
    """Trains one subset of the parameters, freezes the others, and returns their numbers.

    Call it before building the optimizer. The model may be on a mesh. The subsets, and the paper's
    results on SuperGLUE:

    - `all`: every parameter.
    - `non_moe`: everything but routers and experts; about as good as all, with less memory.
    - `moe`: routers and experts; much worse.
    - `attention`: projections and position biases of self-attention and encoder-decoder attention.
    - `ffn`: the dense feed-forward layers, including those next to sparse ones; slightly better
      than all.
    - `new_experts`: the experts of the last prefix in `prefix_experts` and their rows of the
      routers; all other numbers keep their bits without weight decay (not in the paper, and not on
      a mesh).
    - `router_frozen`: everything but routers (not in the paper).
    - `lora`: adapters that `model.add_adapter(lora_config(model))` attached (not in the paper).

    Norms, embedding and head train with `all`, `non_moe` and `router_frozen` only, the norm before
    a sparse layer too.

    Args:
        model: Any model of this library; not a PeftModel around it.
        subset: One of the names above.

    Raises:
        ConfigError: When there is no such subset, it would train no parameters or quantized experts,
            or the model of `new_experts` is on a mesh.

    Source:
        ST-MoE (arXiv:2202.08906) §4.2 and figure 5. Differs: the paper does not say where norms,
        embeddings and position biases belong.
    """
    check_subset(subset)
    if not isinstance(model, STMoEPreTrainedModel):
        raise ConfigError(
            f"select_parameters got a {type(model).__name__}; expected a model of this library. Adapters select the "
            "trainable parameters themselves: pass the model before attaching them."
        )

    # The sharding rules give the kind of every parameter.
    kinds = {name: _KIND_OF_RULE[rule] for name, rule in rule_names(model).items()}
    chosen = SUBSETS[subset]
    present = set(kinds.values())
    if not chosen & present:
        raise ConfigError(
            f"The subset {subset!r} holds {' and '.join(sorted(chosen))}, and this model has "
            "none. Choose another."
        )

    quantization = model.config.expert_quantization
    if quantization is not None and "experts" in chosen:
        fitting = [name for name, trained in SUBSETS.items() if "experts" not in trained]
        raise ConfigError(
            f"The subset {subset!r} trains experts, and they are quantized to {quantization['bits']} bits. Choose "
            f"{' or '.join(fitting)}. {FIXED}"
        )

    num_new = _num_new_experts(model) if subset == "new_experts" else 0

    # Count while freezing. Of stacks and gates with new experts only the last rows train.
    hooks = _ROW_HOOKS.setdefault(model, [])
    while hooks:
        hooks.pop().remove()
    total = Counter[str]()
    trainable = Counter[str]()
    for name, parameter in model.named_parameters():
        kind = kinds[name]
        trains = kind in chosen and not (num_new and "shared_experts." in name)
        parameter.requires_grad_(trains)
        total[kind] += parameter.numel()
        trainable[kind] += parameter[-num_new:].numel() if trains else 0
        if trains and num_new:
            zero = partial(_zero_gradient, len(parameter) - num_new)
            hooks.append(parameter.register_post_accumulate_grad_hook(zero))
    return Selection(subset, dict(trainable), dict(total))


def _num_new_experts(model: STMoEPreTrainedModel) -> int:
    """Returns the number of experts of the last prefix, which are the last of each sparse layer.

    Raises:
        ConfigError: When the model has no experts of a prefix, or is on a mesh.
    """
    mesh = model.mesh_config
    check(mesh is None, "The mesh of the model", mesh, "none: a single process trains new_experts")
    counts = model.config.prefix_counts()
    expected = (
        "experts that train: stmoe upcycle --from MODEL --to LARGER --experts 40 --prefix mk:"
    )
    check(bool(counts), "prefix_experts", model.config.prefix_experts, expected)
    return counts[-1]


def _zero_gradient(num_rows: int, parameter: Tensor) -> None:
    """Sets the gradient <float>[E, ...] of the first rows to zero; with it no optimizer changes them."""
    assert parameter.grad is not None, "it was just accumulated"
    parameter.grad[:num_rows] = 0


def check_subset(subset: str) -> None:
    """Raises when there is no such subset.

    Raises:
        ConfigError: With the closest name and all of them.
    """
    if subset not in SUBSETS:
        raise ConfigError(
            "There is no subset of parameters called "
            f"{subset!r}.{did_you_mean(subset, SUBSETS)} Known: {', '.join(SUBSETS)}."
        )
