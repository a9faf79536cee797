"""Records routing token by token, and replays it."""
