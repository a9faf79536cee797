"""One file for each family of tasks; each adds its tasks to `eval.task.TASKS`, which finds it by itself."""
