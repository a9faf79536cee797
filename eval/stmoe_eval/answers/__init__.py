"""Model answers: greedy decoding, beam search, ranked choices, and the file of predictions."""
