"""Studies: grids of training runs over arms and seeds, and what they show: python -m scripts.study."""
