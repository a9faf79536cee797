"""The verb `eval` of `stmoe`, which finds it by the entry point of the wheel.

    stmoe eval list
    stmoe eval run --model DIR --tasks NAME[,NAME]
    stmoe eval compare A B

Under torchrun, e.g. `torchrun --standalone --nproc-per-node 4 -m stmoe eval run ... --ep 2`, ranks
share the work.
"""

from stmoe import Verb

EVAL = Verb(
    "evaluate models on tasks, or on your own pairs",
    verbs={
        "list": Verb("list the tasks", "stmoe_eval.commands.tasks"),
        "run": Verb(
            "evaluate models on tasks, or on your own pairs",
            "stmoe_eval.commands.run",
            after_interrupt="The same command continues: answers that it wrote are kept.",
        ),
        "compare": Verb("compare two runs on the same examples", "stmoe_eval.commands.compare"),
    },
)
