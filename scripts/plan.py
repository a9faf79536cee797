"""Says what a run needs on a mesh, without any device: `stmoe plan`. See moe/commands/plan.py.

python -m scripts.plan --config recipes/st_moe_tiny_pretrain.yaml --suggest 8 --memory 16GiB
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from moe.cli import run_main
from moe.commands.plan import main

if __name__ == "__main__":
    run_main(main)
