"""Says what the seconds of a run went into: `stmoe goodput`. See moe/commands/goodput.py.

python -m scripts.goodput runs/pretrain
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from moe.cli import run_main
from moe.commands.goodput import main

if __name__ == "__main__":
    run_main(main)
