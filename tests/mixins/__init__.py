"""Transformers' own tests of models, run on ours and on its T5: `python -m tests.mixins --help`."""
