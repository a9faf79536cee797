"""A host's class with sparse layers: its losses reach `loss`, and its routers' records the output."""

import functools
import inspect
import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.models.m2m_100.modeling_m2m_100 import shift_tokens_right
from transformers.utils.generic import can_return_tuple

from moe.checkpoint.loading import HOST_CLASSES
from moe.convert.formats import open_checkpoint
from moe.convert.host_weights import HOST_FORMATS
from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import refuse_loss_of_a_rank, refuse_to_save
from moe.hosts.blocks import HostFeedForward, prepare_blocks
from moe.hosts.host import Host
from moe.hosts.settings import HostSettings, SparseHostConfig
from moe.models.configuration import STMoEConfig
from moe.models.experts_interface import ExpertsByName
from moe.models.inputs import IGNORED_LABEL
from moe.models.losses import over_layers, refuse_missing_labels, share_of_targets
from moe.models.outputs import RouterRecords
from moe.models.pretrained import DOWNLOAD, DTYPES, StoredWeights, freeze_quantized_experts
from moe.models.transformers_private import load_generation_config
from moe.registry import Registry
from moe.sparse.editing import STACKS, Stack
from moe.sparse.experts import Experts
from moe.sparse.integration import collect_routers
from moe.sparse.layer import RouterOutput
from moe.sparse.router import Router


@dataclass
class SparseHostOutput(Seq2SeqLMOutput):
    """A host's output, and what its routers did.

    Attributes:
        loss: <float32>[] the host's loss and the weighted losses of the routers.
        ce_loss: <float32>[] the host's loss alone.
        load_balance_loss: <float32>[] sum or mean over sparse layers, unweighted.
        router_z_loss: <float32>[] likewise.
        encoder_router_outputs: One RouterOutput for each sparse layer of the encoder; on request.
        decoder_router_outputs: The same of the decoder.
    """

    ce_loss: Tensor | None = None
    load_balance_loss: Tensor | None = None
    router_z_loss: Tensor | None = None
    encoder_router_outputs: RouterRecords | None = None
    decoder_router_outputs: RouterRecords | None = None


RECORDS = list(SparseHostOutput.__annotations__)
"""Fields of the output that a host does not have."""


class SparseHost(ExpertsByName, StoredWeights):
    """Put before a host's class, it makes a class of that host with sparse layers.

    `from_pretrained`, `save_pretrained`, `generate` and everything else are the host's. Its
    configuration has `sparse_layers`, see HostSettings.

    Attributes:
        host: Describes the host.
        settings: Settings of the sparse layers.
        mesh_config: Sizes of the mesh that `shard_host` has sharded it over; None for a whole model.
    """

    host: ClassVar[Host]
    settings: HostSettings
    mesh_config: MeshConfig | None = None
    config_class: Any

    # In a model loaded in float16, routers still compute in float32.
    _keep_in_fp32_modules: ClassVar[Any] = ["router"]

    # transformers' Trainer then gives num_items_in_batch and divides no loss itself.
    accepts_loss_kwargs = True

    def __init__(self, config: PreTrainedConfig) -> None:
        """Makes a host with new experts and routers.

        Raises:
            ConfigError: When the configuration has no settings of sparse layers, or they do not
                fit the host.
        """
        self.settings = HostSettings.from_config(config)
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        model = cast(Any, self)
        sites = self.settings.sites(self.host, model)
        prepare_blocks(model, self.host)
        for block, of_layer in sites:
            self.host.put_layer(block, HostFeedForward(of_layer))
        self.set_experts_implementation(config._experts_implementation)

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the model of a folder or hub name, converted as it is read if it is of a HostFormat.

        Arguments and results are those of transformers.
        """
        download = {name: kwargs[name] for name in DOWNLOAD if name in kwargs}
        folder = source
        if source and STMoEConfig.read_raw(source, **download).get("model_type") in HOST_FORMATS:
            weights = open_checkpoint(source, **download)
            weights.report.refuse_unexplained()
            dtypes = {name: kwargs.pop(name) for name in DTYPES if name in kwargs}
            given = kwargs.pop("config", None)
            options = {"generation_config": load_generation_config(source, download), **kwargs}
            config, kwargs = cls.config_class.from_pretrained(
                source, return_unused_kwargs=True, **options
            )
            kwargs |= {"config": given or config, "state_dict": weights.weights, **dtypes}
            folder = None
        result = cast(Any, super()).from_pretrained(folder, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        is_quantized = model.config.expert_quantization is not None
        freeze_quantized_experts(model, source if is_quantized else None)
        return result

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Saves the model as the host does.

        Raises:
            ConfigError: On a mesh, where `save_model_on_mesh` saves it.
        """
        refuse_to_save(self.mesh_config)
        cast(Any, super()).save_pretrained(*args, **kwargs)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns the decoder's inputs <int64>[B, T] for labels <int64>[B, T], for data collators."""
        host_shift = getattr(super(), "prepare_decoder_input_ids_from_labels", None)
        if host_shift is not None:
            return host_shift(labels)
        config = cast(Any, self).config  # those without it shift by a function
        return shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Re-initializes the weights of one module; transformers keeps those that were loaded."""
        if isinstance(module, Experts | Router):
            module.reset_parameters()
        else:
            cast(Any, super())._init_weights(module)

    @can_return_tuple
    def forward_with_routers(
        self,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        output_router_logits: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the host's output, with the losses of the routers in `loss`.

        Args:
            args: Arguments of the host.
            num_items_in_batch: Targets of the whole batch of which this is a part, as the Trainer
                counts them; the losses of the routers then add up over the parts, too.
            output_router_logits: Whether to return the records of the routers.
            kwargs: Arguments of the host. Positions after the last label of a row are not routed,
                unless there is a `decoder_attention_mask`.

        Raises:
            ConfigError: When the Trainer removed the labels of a training step, so that the
                router losses could not be added.
        """
        host_forward = cast(Any, super()).forward
        names = list(inspect.signature(host_forward).parameters)
        kwargs.update(zip(names, args, strict=False))
        labels = kwargs.get("labels")
        masked = kwargs.get("decoder_attention_mask") is not None
        if labels is not None:
            if num_items_in_batch is None:
                refuse_loss_of_a_rank(self)
            if not masked:
                kwargs["decoder_routing_mask"] = until_last_label(labels)
        elif num_items_in_batch is not None and cast(nn.Module, self).training:
            masked |= not self.settings.decoder_blocks
            refuse_missing_labels(self.settings, decoder_masked=masked)

        # Records of the layers that run; an encoder whose output was given does not.
        records: dict[Stack, list[RouterOutput]] = {}
        with ExitStack() as contexts:
            for name in STACKS if labels is not None or output_router_logits else ():
                if getattr(self.settings, f"{name}_blocks"):
                    stack = self.host.stack(cast(Any, self), name)
                    records[name] = contexts.enter_context(collect_routers(stack))
            output = host_forward(**kwargs, return_dict=True)

        fields: dict[str, Any] = {}
        if labels is not None:
            routers = list(itertools.chain.from_iterable(records.values()))
            fields = self._losses(output.loss, routers, labels, num_items_in_batch)
        if output_router_logits:
            for name, routers in records.items():
                fields[f"{name}_router_outputs"] = RouterRecords(routers) or None
        return SparseHostOutput(**{**output, **fields})

    def _losses(
        self,
        ce_loss: Tensor,
        routers: Sequence[RouterOutput],
        labels: Tensor,
        num_items_in_batch: Tensor | int | None,
    ) -> dict[str, Tensor]:
        """Returns the losses <float32>[] by their names in the output."""
        if num_items_in_batch is None:
            losses = [router.losses for router in routers]
            layer_losses = [(of.load_balance_loss, of.router_z_loss) for of in losses]
        else:
            # A mean over this part's targets becomes their share of the mean over all; without
            # targets it is not a number.
            num_items = torch.as_tensor(num_items_in_batch, device=labels.device).clamp(min=1)
            num_targets = (labels != IGNORED_LABEL).sum()
            ce_loss = torch.where(num_targets > 0, ce_loss, 0.0) * (num_targets / num_items)
            layer_losses = [share_of_targets(router, labels, num_items) for router in routers]

        load_balance, router_z = over_layers(layer_losses, self.settings.rules, like=ce_loss)
        loss = (
            ce_loss
            + self.settings.load_balance_loss_weight * load_balance
            + self.settings.router_z_loss_weight * router_z
        )
        return {
            "loss": loss,
            "ce_loss": ce_loss.detach(),
            "load_balance_loss": load_balance.detach(),
            "router_z_loss": router_z.detach(),
        }


def until_last_label(labels: Tensor) -> Tensor:
    """Returns <bool>[B, T] the positions of labels <int64>[B, T] up to the last target of each row."""
    is_target = (labels != IGNORED_LABEL).int()
    num_left = is_target.flip(-1).cumsum(-1).flip(-1)  # targets from a position on
    return num_left > 0


HOSTS: Registry[type[SparseHost]] = Registry("host", base=SparseHost)
"""The classes with sparse layers, by the `model_type` of the dense host."""


def register_host(record: Host) -> type[SparseHost]:
    """Makes the class of a host with sparse layers, and registers it wherever models are loaded.

    That class, `Sparse<name of the host's class>`, and that of its configuration become attributes
    of the module that calls this. Their `model_type` is `sparse_<that of the host>`.

    Raises:
        ConfigError: When there is already a host of this `model_type`.
    """
    dense_class: Any = record.dense_class
    dense_config: Any = dense_class.config_class
    inference_keys = getattr(dense_config, "keys_to_ignore_at_inference", ())

    class Config(SparseHostConfig, dense_config):
        """The configuration of a host with `sparse_layers`, see HostSettings."""

        model_type = f"sparse_{dense_config.model_type}"
        keys_to_ignore_at_inference: ClassVar[list[str]] = [*inference_keys, *RECORDS]
        sparse_layers: dict[str, Any] | None = None

    class Model(SparseHost, dense_class):
        """A host with sparse layers."""

        config_class = Config
        host = record

        @functools.wraps(dense_class.forward)  # whose signature the Trainer and `generate` read
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.forward_with_routers(*args, **kwargs)

        forward.__doc__ = SparseHost.forward_with_routers.__doc__

    HOSTS.add(dense_config.model_type, Model)

    # As if they were written in the calling module, so that pickle finds them.
    module = sys._getframe(1).f_globals
    for made, dense in ((Config, dense_config), (Model, dense_class)):
        made.__name__ = made.__qualname__ = f"Sparse{dense.__name__}"
        made.__module__ = module["__name__"]
        module[made.__name__] = made

    HOST_CLASSES.update({dense_config.model_type: dense_class, Config.model_type: Model})
    AutoConfig.register(Config.model_type, Config)
    record.auto_class.register(Config, Model)
    return Model
