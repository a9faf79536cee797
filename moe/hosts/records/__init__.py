"""One file for each host."""
