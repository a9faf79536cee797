"""One file for each family of tasks; `stmoe_eval.task.TASKS` finds the files by itself.

To add a task:

1. Write a file here, or add to that of its family: `register_task(Task(...))` with a `HubData`
   that names the repository, config, counts and columns (or a `BuiltIn` of
   `source`), and with functions of `text` and `scores.metrics`, or with new ones
   beside the task. Text of T5 goes to those files, with its source; a prompt that nobody published
   says `prompt_source="this library"`, and one that varies another task's prompt has `variant_of`
   and a name with a dot.
2. Unless its rows come with Python, write tests/eval/fixtures/NAME/SPLIT.jsonl for every split:
   three to five rows of your own in the exact schema of the dataset, with all of its columns. No
   text of the dataset goes into the repository.
3. Run `python -m pytest tests/contracts/test_tasks.py`: it
   covers the registry. When examples or scores change later, increase `version`.
"""
