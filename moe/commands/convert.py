"""stmoe convert: converts checkpoints of T5, Switch and T5X to ours, ours to T5 and Switch, and NLLB-MoE to a host; it
rewrites hosts, dequantizes experts, and merges adapters.

stmoe convert --from google/switch-base-8 --to runs/switch-base-8
stmoe convert --from runs/switch-base-8 --to runs/theirs --format switch
stmoe convert --from checkpoint_500100/ --to runs/t5x --set eval_capacity_factor=null
stmoe convert --from runs/lora/best/model --to runs/merged
stmoe convert --from facebook/nllb-moe-54b --to runs/nllb --dtype bfloat16
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from moe.checks import check
from moe.checksums import write_sums
from moe.cli import Parser, file_size, model_name
from moe.convert.formats import conversion_report, convert_checkpoint
from moe.errors import ConfigError, DataError
from moe.files import output_path, whole_folder
from moe.parsing import parse_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe convert", description="Converts a checkpoint.")
    parser.add_argument(
        "--from",
        dest="source",
        type=model_name,
        required=True,
        help="a folder of T5, Switch, T5X, ours, a host or NLLB-MoE, or hub name",
    )
    parser.add_argument("--to", help="the folder to make; without it, only the report is printed")
    parser.add_argument(
        "--format", choices=("ours", "switch", "t5"), default="ours", help="what to write (ours)"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights (as they are)")
    parser.add_argument("--max-shard-size", type=file_size, default="5GB", help="of a file (5GB)")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=JSON",
        help="fields of STMoEConfig that differ, or settings of a host's sparse layers",
    )
    return parser


def main(argv: list[str]) -> None:
    """Converts a checkpoint and reports on every tensor."""
    options = build_parser().parse_args(argv)
    fields = read_fields(options.set)

    # Without a target, only the report is printed.
    if options.to is None:
        print(conversion_report(options.source, **fields))
        return

    target = new_model_folder(options.to, inputs=[options.source])

    # The folder appears when it is complete: weights, tokenizer, config and checksums.
    with whole_folder(target, kind="model") as folder:
        report = convert_checkpoint(
            options.source,
            folder,
            form=options.format,
            dtype=DTYPES.get(options.dtype),
            max_shard_size=options.max_shard_size,
            **fields,
        )
        write_sums(folder)

    print(report)
    print(f"The model is in {target}.")


def new_model_folder(text: str, inputs: Sequence[str | Path | None]) -> Path:
    """Returns the path of --to, where there must be nothing yet.

    Args:
        text: Value of the option.
        inputs: Files and folders of other options; see `output_path`.

    Raises:
        ConfigError: When there is something already.
    """
    target = output_path(text, option="--to", inputs=inputs)
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"--to {target} exists already. Give the name of a new folder, or remove it."
        )
    return target


def read_fields(texts: list[str]) -> dict[str, object]:
    """Returns values by field name of texts FIELD=JSON; a value that is not JSON is a string.

    Raises:
        ConfigError: When one has no value.
    """
    fields: dict[str, object] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        is_field = bool(sign) and name.isidentifier()
        check(is_field, "--set", text, "FIELD=VALUE, e.g. expert_capacity=64")
        try:
            fields[name] = parse_json(value, where=f"--set {name}")
        except DataError:
            fields[name] = value
    return fields
