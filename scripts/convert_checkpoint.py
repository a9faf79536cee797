"""Converts a checkpoint once and for all: T5, Switch and T5X to ours, ours to T5 and Switch.

python -m scripts.convert_checkpoint --from google/switch-base-8 --to runs/switch-base-8
python -m scripts.convert_checkpoint --from runs/switch-base-8 --to runs/theirs --format switch
python -m scripts.convert_checkpoint --from checkpoint_500100/ --to runs/t5x --set
eval_capacity_factor=null
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

import torch

from moe.checks import shown
from moe.checksums import write_sums
from moe.cli import Parser, file_size, run_main, word
from moe.convert.formats import conversion_report, convert_checkpoint
from moe.errors import ConfigError, DataError
from moe.files import output_path, whole_folder
from moe.parsing import parse_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OTHER_OPTIONS = ("self", "source", "folder", "form", "format", "dtype", "max_shard_size")


def main(argv: list[str]) -> None:
    """Converts a checkpoint and says what became of every tensor."""
    parser = Parser(
        prog="python -m scripts.convert_checkpoint", description="Converts a checkpoint."
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=word,
        required=True,
        help="a folder of T5, Switch, T5X or ours, or hub name",
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
        help="fields of STMoEConfig that differ",
    )
    options = parser.parse_args(argv)
    settings = read_settings(options.set)

    if options.to is None:
        print(conversion_report(options.source, **settings))
        return
    target = output_path(options.to, option="--to", inputs=[options.source])
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"--to {target} exists already. Give the name of a new folder, or remove it."
        )
    with whole_folder(target, kind="model") as folder:
        report = convert_checkpoint(
            options.source,
            folder,
            form=options.format,
            dtype=DTYPES.get(options.dtype),
            max_shard_size=options.max_shard_size,
            **settings,
        )
        write_sums(folder)
    print(report)
    print(f"The model is in {target}.")


def read_settings(texts: list[str]) -> dict[str, object]:
    """Returns values by name of FIELD=JSON; a value that is no JSON is a text.

    Raises:
        ConfigError: When one has no value, is given twice, or is an option of its own.
    """
    settings: dict[str, object] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(
                f"--set {shown(text)} has no value. Write FIELD=VALUE, e.g. expert_capacity=64."
            )
        if not name.isidentifier():
            raise ConfigError(
                f"--set {shown(text)} names no field. Write FIELD=VALUE, e.g. expert_capacity=64."
            )
        if name in settings:
            raise ConfigError(f"--set gives {name} twice. Leave one away.")
        if name in OTHER_OPTIONS:
            raise ConfigError(
                f"--set {shown(text)}: {name} is no field of STMoEConfig. Give it as an option of its own."
            )

        try:
            settings[name] = parse_json(value, where=f"--set {name}")
        except DataError:
            settings[name] = value
    return settings


if __name__ == "__main__":
    run_main(main)
