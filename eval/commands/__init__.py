"""The commands of `python -m eval`, one file each."""
