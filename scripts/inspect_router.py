"""Explains a model's routers: `stmoe inspect`. See moe/commands/inspect_router.py.

python -m scripts.inspect_router --model runs/demo/pretrain/model --corpus runs/demo/corpus --out report.html
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

from moe.cli import run_main
from moe.commands.inspect_router import main

if __name__ == "__main__":
    run_main(main)
