"""Converts a checkpoint once and for all: `stmoe convert`. See moe/commands/convert.py.

python -m scripts.convert_checkpoint --from google/switch-base-8 --to runs/switch-base-8
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from moe.cli import run_main
from moe.commands.convert import main

if __name__ == "__main__":
    run_main(main)
