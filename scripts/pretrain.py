r"""Pre-trains a model by span corruption: `stmoe pretrain`. See moe/commands/pretrain.py.

python -m scripts.pretrain --config recipes/st_moe_tiny_pretrain.yaml \
        --corpus runs/corpus --tokenizer runs/tokenizer --out runs/pretrain
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command(one_run=True)

from moe.cli import RESUME, run_main
from moe.commands.pretrain import main

if __name__ == "__main__":
    run_main(main, interrupted=RESUME)
