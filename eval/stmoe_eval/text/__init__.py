"""T5's text: from rows to inputs and targets, and from outputs to the values that metrics compare."""
