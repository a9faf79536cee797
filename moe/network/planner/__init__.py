"""The time of a planned run's collectives on a network, with the best schedule for each."""
