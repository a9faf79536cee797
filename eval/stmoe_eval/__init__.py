"""The transfer suite: evaluates sequence-to-sequence checkpoints. Its command is `stmoe eval`."""
