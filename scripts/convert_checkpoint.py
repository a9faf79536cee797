"""Converts a checkpoint once and for all: T5, Switch and T5X to ours, ours to T5 and Switch.

python -m scripts.convert_checkpoint --from google/switch-base-8 --to runs/switch-base-8
python -m scripts.convert_checkpoint --from runs/switch-base-8 --to runs/theirs --format switch
python -m scripts.convert_checkpoint --from checkpoint_500100/ --to runs/t5x --set eval_capacity_factor=null
"""

import argparse
import json
from pathlib import Path

import torch

from moe.errors import ConfigError, run_main
from moe.files import whole_folder
from moe.models.convert_checkpoint import conversion_report, convert_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: list[str]) -> None:
    """Converts a checkpoint and says what became of every tensor."""
    parser = argparse.ArgumentParser(prog="python -m scripts.convert_checkpoint", description="Converts a checkpoint.")
    parser.add_argument("--from", dest="source", required=True, help="a folder of T5, Switch, T5X or ours, or hub name")
    parser.add_argument("--to", type=Path, help="the folder to make; without it, only the report is printed")
    parser.add_argument("--format", choices=("ours", "switch", "t5"), default="ours", help="what to write (ours)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights (as they are)")
    parser.add_argument("--max-shard-size", default="5GB", help="of a file (5GB)")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=JSON", help="fields of STMoEConfig that differ")
    options = parser.parse_args(argv)
    settings = dict(_field(text) for text in options.set)

    if options.to is None:
        print(conversion_report(options.source, **settings))
        return
    if options.to.exists():
        raise ConfigError(f"--to {options.to} exists already. Give the name of a new folder, or remove it.")
    with whole_folder(options.to, kind="model") as folder:
        report = convert_checkpoint(
            options.source,
            folder,
            form=options.format,
            dtype=DTYPES.get(options.dtype),
            max_shard_size=options.max_shard_size,
            **settings,
        )
    print(report)
    print(f"The model is in {options.to}.")


def _field(text: str) -> tuple[str, object]:
    """Returns name and value of FIELD=JSON; a value that is no JSON is a text."""
    name, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"--set {text!r} has no value. Write FIELD=VALUE, e.g. expert_capacity=64.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    run_main(main)
