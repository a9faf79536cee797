"""Runs a study: a grid of training runs over arms and seeds, and its results.

python -m scripts.study recipes/studies/names.yaml --jobs 2
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from moe.cli import CONTINUES, run_main
from stmoe_eval.studies.command import main

if __name__ == "__main__":
    run_main(main, interrupted=CONTINUES)
