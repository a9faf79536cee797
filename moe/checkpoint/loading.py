"""Loading a model that must be complete: every weight is the folder's, or the folder is refused."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import GENERATION_CONFIG_NAME

from moe.checkpoint.sharded_weights import stored_tensors, whole_tensors
from moe.checks import shown
from moe.distributed.collectives import gather_or_raise
from moe.distributed.mesh import Mesh
from moe.distributed.shard_slices import ShardSlices, shard_slices
from moe.distributed.sharding import Layout, MeshCoordinate, local_shard
from moe.errors import CheckpointError
from moe.models.card import find_source_model
from moe.models.configuration import STMoEConfig
from moe.models.generation_config import load_generation_config
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.parallelize import shard_model
from moe.models.pretrained import STMoEPreTrainedModel, refuse_not_finite
from moe.models.weight_checksums import check_weights, check_weights_together
from moe.models.weight_files import (
    DTYPES,
    describe_misfits,
    find_weight_files,
    incomplete,
    refuse_integers,
)
from moe.parsing import read_json, to_record


def load_complete(model_class: Any, folder: Path | str, **options: Any) -> Any:
    """Returns the model of a folder, each of whose weights fits.

    `from_pretrained` alone draws weights that the folder lacks at random and leaves out those that
    it does not know,
    with a warning: right for giving a model a new head, wrong for whoever trains on or measures
    what was saved.

    Args:
        model_class: Any class of transformers with `from_pretrained`, an Auto class too.
        folder: A model saved by `save_pretrained`.
        options: Further arguments of `from_pretrained`.

    Raises:
        CheckpointError: When the folder holds no such model, or weights are missing, unexpected or
            of another shape; lists them.
    """
    check_model_folder(folder)
    own = STMoEConfig.read_raw(folder).get("model_type") == STMoEConfig.model_type
    if not own and not issubclass(model_class, STMoEPreTrainedModel):
        check_weights(Path(folder))  # our own classes do so in from_pretrained
    asked = {
        **options,
        "output_loading_info": True,
        "ignore_mismatched_sizes": not own,
    }  # ours refuse other shapes
    try:
        model, info = model_class.from_pretrained(folder, **asked)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"The model in {folder} cannot be loaded: {error}") from error
    misfits = describe_misfits(
        info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"]
    )
    _refuse_incomplete(folder, type(model).__name__, misfits)
    return model


def load_model_on_mesh(
    folder: Path | str,
    mesh: Mesh,
    *,
    config: STMoEConfig | None = None,
    bfloat16: bool = False,
    gather: bool = True,
) -> tuple[STMoEForConditionalGeneration, dict[str, Layout]]:
    """Returns the model of a folder cut over a mesh, and where each parameter lies.

    Equal to `load_complete` and then `shard_model`, but a rank reads and holds nothing beside its
    own shards.

    Args:
        folder: A model saved by `save_pretrained` or `write_model`, which all ranks see.
        mesh: The ranks.
        config: With settings that differ from the folder's; None for the folder's.
        bfloat16: See `shard_model`.
        gather: See `shard_model`.

    Raises:
        CheckpointError: When the folder holds no such model, or weights are missing, unexpected or
            of another shape; lists them, before any memory is taken.
    """
    check_model_folder(folder)
    kind = STMoEConfig.read_raw(folder).get("model_type")
    if kind != STMoEConfig.model_type:
        raise CheckpointError(
            f"{folder} holds a model of type {kind!r}, and ranks read only {STMoEConfig.model_type!r}. Convert it once "
            f"and for all: python -m scripts.convert_checkpoint --from {folder} --to OUT."
        )
    config = config or STMoEConfig.from_pretrained(folder)
    check_weights_together(Path(folder))
    with _open_weights(Path(folder)) as saved:
        with torch.device("meta"):
            model = STMoEForConditionalGeneration(config)
        whole = whole_tensors(config, stored_tensors(model))
        shapes = {name: tuple(piece.get_shape()) for name, piece in saved.items()}
        refuse_integers(
            folder, whole, {name: DTYPES.get(piece.get_dtype()) for name, piece in saved.items()}
        )
        both = [(name, shapes[name], whole[name].shape) for name in shapes.keys() & whole.keys()]
        reshaped = [(name, there, here) for name, there, here in both if there != tuple(here)]
        misfits = describe_misfits(
            whole.keys() - shapes.keys(), shapes.keys() - whole.keys(), reshaped
        )
        _refuse_incomplete(folder, type(model).__name__, misfits)

        torch.nn.Module.to(model, dtype=_float_dtype(config, saved))
        layouts = shard_model(model, mesh, bfloat16=bfloat16, gather=gather)
        device = mesh.device_mesh.device_type
        model.to_empty(
            device=torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
        )
        model.tie_weights()
        place = MeshCoordinate.of(mesh)
        for name, tensor in stored_tensors(model).items():
            box = tuple((0, size) for size in tensor.shape)
            if name in layouts:
                box = shard_slices(layouts[name], mesh.config, place)
            _read(saved[name], box, local_shard(tensor))
    gather_or_raise(lambda: refuse_not_finite(model, folder))
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = load_generation_config(folder, {})
    model.config.name_or_path = str(folder)
    model.source_model = find_source_model(folder)
    return model.eval(), layouts


def check_model_folder(folder: Path | str) -> None:
    """Raises when there is no model in `folder`.

    Raises:
        CheckpointError: When it has no config.json, or that does not say of which type the model
            is.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no model: it has no config.json. Give a folder made by save_pretrained, e.g. the model/ "
            "folder of a run."
        )

    # Without a type every setting would be at its default, and a model of another size would be
    # built first.
    advice = "Copy the whole folder again from where it was saved."
    content = read_json(path, advice=advice, error=CheckpointError, nan=True)
    raw = to_record(dict[str, Any], content, where=str(path), advice=advice, error=CheckpointError)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(
            f"{path}: model_type is {shown(kind)}; expected a text such as 'st_moe'. {advice}"
        )


def _refuse_incomplete(folder: Path | str, kind: str, misfits: str) -> None:
    """Raises a CheckpointError when there are misfits between a folder's weights and its model."""
    if misfits:
        raise CheckpointError(incomplete(folder, kind, misfits))


@contextmanager
def _open_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """Gives the tensors of a folder by name, as things that can be sliced; nothing is read before
    that.

    Raises:
        CheckpointError: When files are missing or torn.
    """
    with ExitStack() as stack:
        try:
            paths = find_weight_files(folder, use_safetensors=True)
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
            saved = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118  no mapping
        except (OSError, ValueError, LookupError, SafetensorError) as error:
            raise CheckpointError(f"The model in {folder} cannot be loaded: {error}") from error
        yield saved


def _float_dtype(config: STMoEConfig, saved: dict[str, Any]) -> torch.dtype:
    """Returns the dtype of a model's floating-point weights: the config's, or that in which they
    are saved.
    """
    if config.dtype is not None:
        return getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    dtypes = (DTYPES.get(piece.get_dtype()) for piece in saved.values())
    return next((dtype for dtype in dtypes if dtype and dtype.is_floating_point), torch.float32)


@torch.no_grad()
def _read(saved: Any, box: ShardSlices, target: Tensor) -> None:
    """Fills <any>[...] with a box of a saved tensor, which may be one with gate above up in place
    of gate and up.
    """
    if len(box) == len(saved.get_shape()):
        target.copy_(saved[tuple(slice(*ends) for ends in box)])
        return
    *outer, (first, last), (start, end), columns = box
    half = saved.get_shape()[-2] // 2
    for number in range(first, last):
        rows = (number * half + start, number * half + end)
        part = saved[tuple(slice(*ends) for ends in (*outer, rows, columns))]
        target.select(-3, number - first).copy_(part)
