"""What models answer: greedy and beam search, ranked choices, and the file of predictions."""
