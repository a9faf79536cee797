"""What models answer: greedy and beam search, ranked choices, several ranks, and the file that
keeps it.
"""
