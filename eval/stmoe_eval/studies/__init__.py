"""Studies: grids of training runs over arms and seeds, and their results: python -m scripts.study."""
